"""Scripts that `export` copies into a folder unchanged: they need torch, but not pipelab."""
