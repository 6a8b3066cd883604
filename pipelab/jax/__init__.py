"""Training JAX functions: `stage` and `device` for the worker, `arithmetic` for the reference."""
