"""Decisions: layers cut into stages, actions put in order, all of it for one machine."""
