"""Real executors: one worker loop (`worker`) between a transport and the stages of a library.

`run.run` is the entry for a table; a `Trainer`, in the room above, for a training without an end.
From the caller to a tensor and back, who makes what:

    run, Trainer    Options      how to train: the same for all, from here to the stages
        |           Work         batches of the training: what all ranks do next, and the versions
        v                        that they read
    Session         Data         the batches of it, read when they are first needed
        |           Job          of the library's `Backend`: a row and its stages, for the training
        |           Order        what a rank does next: the actions of its row, and a MicroBatch
        v                        for each new micro-batch of its stages
    launcher                     `threads`, `torch.processes`, `torch.ranks`, `jax.distributed`:
        |                        starts the ranks, takes their orders, returns their outcomes
        v
    Worker          Message      what it sends another one by a `Transport`: an output, a gradient
        |           Outcome      of an order: losses, weights, and its Record: times and bytes
        |
        |-- Stage   tensors      forward, backward, update; `CountingStage` counts, a library's
        |                        computes (torch: `weights.VersionedStage`, `stage.TorchStage`)
        |-- Device  marks        of time, and its `Ledger`: bytes that forwards keep
        v
    Session         Run          of the work's outcomes (`result`), with its check by
                                 `verdict`. A Trainer asks for one only for batches that are
                                 checked; of the others it reads the outcomes

Three numberings meet here. A *table* counts micro-batches and updates from 0, also one that is cut
out of another. The *training* counts through all of them, as do work, orders and stages: a table's
numbers are moved by an `Offset`. Each replica numbers its own share of micro-batches; the
*data* are numbered batch by batch, and within a batch replica by replica (`microbatches_of`).

`verdict.replay` does the same on one device by the papers' rules, in the backend's arithmetic.
Torch's backend is `torch.backend`; a room above adds its own to `backends.BACKENDS`, as JAX's does,
and parts of devices to `devices.PARTS`.
"""
