"""Scripts that `export` copies into a folder as they stand: they need torch, and no pipelab."""
