"""Which experts tokens choose: gates, routers, and what may change their choice."""
