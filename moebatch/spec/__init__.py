"""Plain, frozen descriptions of a job, a machine and a model. Neither torch nor transformers."""
