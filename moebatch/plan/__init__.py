"""From shape, workload and machine to a policy. No torch, so that an answer takes no time."""
