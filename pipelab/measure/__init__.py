"""What a run shows, ours or anybody's: traces read, costs fitted, idle time explained."""
