"""How weights are stored: one file for each format, none of which loads torch by itself."""
