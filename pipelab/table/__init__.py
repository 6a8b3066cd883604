"""A schedule: a table of actions, one row per device, and what can be said of it alone."""
