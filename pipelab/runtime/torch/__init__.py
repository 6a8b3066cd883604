"""Training torch modules: `stage` and `device` for the worker, `replay` for the check."""

import os

# Set before a GPU is first used: else its streams share 8 queues, and wait for others' in front.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
