"""Training JAX functions: `stage` and `device` for the worker, `replay` for the check."""
