"""Whether a run was right: its replay on one device, compared, and the check that says so."""
