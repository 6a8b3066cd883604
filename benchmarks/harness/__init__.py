"""Training by other libraries' pipelines, one process a rank, behind a call like `pipelab.run`."""
