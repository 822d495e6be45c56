"""The built-in model: a small Mixture of Experts that really answers the tasks made here."""
