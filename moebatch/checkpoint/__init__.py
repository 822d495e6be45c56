"""What is read of a model folder: headers, tensors, checksums; no weight is loaded here."""
