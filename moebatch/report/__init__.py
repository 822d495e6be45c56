"""Progress, summaries, errors and pictures for the user. The rooms below compute every figure."""
