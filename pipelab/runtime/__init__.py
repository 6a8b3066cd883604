"""Real executors: one worker loop (`worker`) between a transport and the stages of a library.

`run.run` is the way in for a table and `trainer.Trainer` for a training without an end. From the
caller to a tensor and back, who makes what:

    run, Trainer    Options      how to train: the same for all, from here to the stages
        |           Segment      a part of the training from an empty pipeline to an empty one
        v
    Session         Part         what all ranks do next: rows, and the versions that they read
        |           Job          of the library's `Wing`: a row and its stages, for the training
        |           Order        what a rank does next: its actions, with a MicroBatch for each
        v                        forward of its stages
    launcher                     `threads`, `torch.processes`, `torch.ranks`, `jax.distributed`:
        |                        starts the ranks, and takes their orders
        v
    Worker          Outcome      of an order: losses and weights, and its Record: times and bytes
        |
        v
    Session         Run          of all outcomes (`result`), with the verdict of `verdict.judge`

Four numberings meet here. A *table* counts micro-batches and updates from 0; a *segment* of it, cut
out, does so again; the *training* counts through all of them, and so do parts, orders and stages:
an `Offset` is what lies between. Micro-batches of each *replica* are numbered alike; its share of
the data is `microbatches_of`'s business.

`verdict.reference` trains by the papers' rules, in the arithmetic that the wing gives it. Torch's
wing is `torch.wing`; a room above adds its own to `wings.WINGS`, as JAX's does.
"""
