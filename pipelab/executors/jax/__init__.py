"""Training JAX functions: `run` hands `stage`s on `device`s to the worker, `trainer` checks."""
