"""Decisions for a machine: how to cut layers into stages, and how to order actions."""
