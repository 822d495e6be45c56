"""What a task costs on its lane, and a pass: the only cost there is."""
