"""What stands between the library and a person: colours, units, a progress bar, Ctrl-C."""
