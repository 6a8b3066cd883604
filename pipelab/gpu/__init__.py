"""Devices that the runtime does not know: parts of a GPU."""
