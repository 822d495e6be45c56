"""What stands in files of users: reading it, checking it, and saying what is wrong where."""
