"""A training without an end: `trainer.Trainer` orders what `runtime` does, batch after batch."""
