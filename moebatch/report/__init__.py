"""What people see: progress, summaries and errors. Figures come from below; only drawn here."""
