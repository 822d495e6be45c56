"""The pages of the documentation hold: their commands run, their links lead somewhere, their
tables list what there is."""
