"""Training JAX functions: `run`, `stage` and `device` for the worker, `trainer` for the check."""
