"""Attention of all kinds, on any device: what tokens see, projections, and what comes between."""
