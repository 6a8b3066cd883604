"""Measurements of any run: read traces, fit costs, explain idle time."""
