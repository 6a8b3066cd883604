"""Other people's pipelines on the same stages and batches, to compare with: one file each."""
