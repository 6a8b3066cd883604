"""What only a GPU shows: `make gpu`, or its rehearsal on a CPU."""
