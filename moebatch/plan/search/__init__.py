"""The search for a policy: candidates, a mixed integer program, and a climb among neighbours."""
