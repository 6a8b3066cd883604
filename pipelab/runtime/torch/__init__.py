"""Training torch modules: `stage` and `device` for the worker, `arithmetic` for the reference."""
