"""What this machine achieves, measured through the code that jobs run."""
