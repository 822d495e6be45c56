"""A machine in figures, and the profiles that hold them."""
