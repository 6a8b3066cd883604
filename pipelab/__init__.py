"""pipelab: one schedule object that is validated, simulated, drawn and run for real."""
