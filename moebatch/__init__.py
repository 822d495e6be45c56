"""moebatch: offline batch inference for Mixture-of-Experts models larger than memory."""

__version__ = "0.1.0"
