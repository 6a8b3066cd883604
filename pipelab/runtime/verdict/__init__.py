"""Whether a run was right: its replay on one device, compared, and the check that says so.

    Trained         the run, with what it was given (`trained`)
        |  Piece    a micro-batch of it, in the order of the data
        v
    replay          of each update, in a `Library`: the run's arithmetic, or float64
        |  Total    its losses, and the sums of its gradients
        v
    _Pass           all arrays of run and replay, two and two (`Compared`), in `verdict`
        |
    adds_up.Batch   the second question: do the micro-batches add up to the batch?
        v
    Check           the answer

`rules` says which versions a paper's update reads. A backend's `Model` makes its arithmetic
(`torch.replay`, `jax.replay`). A *lane* is a copy of the model in a replica; its number is replica
x copies + copy.
"""
