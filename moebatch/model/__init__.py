"""What is computed: one decoder for all families. Arithmetic only, never files or threads."""
