"""How far a run is, and how long the rest takes."""
