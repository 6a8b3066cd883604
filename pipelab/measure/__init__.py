"""Measurements of a run, ours or anybody's: traces read, costs fitted, idle time explained."""
