"""What a job keeps beside its output: whose it is, in which shards, and what has become of rows."""
