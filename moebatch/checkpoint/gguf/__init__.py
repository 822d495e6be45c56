"""Models in GGUF: headers, and what they stand for."""
