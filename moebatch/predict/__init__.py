"""Which experts next: what gates have chosen so far, and what later ones will probably choose."""
