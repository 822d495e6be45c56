"""Families of models: which arithmetic each is composed of."""
