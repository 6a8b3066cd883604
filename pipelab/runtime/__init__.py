"""Real executors: one worker loop (`worker`) between a transport and the stages of a library.

`run.run` is the way in for a table and `trainer.Trainer` for a training without an end; both tell a
`session.Session` what to do next. A library's own part is `torch.wing` or `jax.wing`, which makes a
`worker.Job` for each device; a launcher (`threads`, `torch.processes`, `torch.ranks`,
`jax.distributed`) starts them, and takes their orders. What the workers recorded is a `result`, and
`verdict.judge` compares it with a `verdict.reference` that follows the papers' rules, in the wing's
arithmetic. The two wings mirror each other.
"""
