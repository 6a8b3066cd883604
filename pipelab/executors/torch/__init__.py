"""Training torch modules: `run` hands `stage`s on `device`s to the worker; `trainer` is the reference."""
