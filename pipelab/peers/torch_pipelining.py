"""torch.distributed.pipelining, torch's own pipeline runtime: names for its actions in a trace."""

from collections.abc import Callable
from typing import Any

from torch.profiler import record_function

from pipelab.table.action import Action, Kind

# What a stage of torch's is called for.
KINDS = {
    "forward_one_chunk": Kind.F,
    "backward_one_chunk": Kind.B,
    "backward_weight_one_chunk": Kind.W,
}


def annotate(*stages: Any) -> None:
    """Name the actions of a rank's stages for torch.profiler, as torch's runtime does: PP:0F0.

    For a run of your own, so that `from_trace` can read its profile: Schedule1F1B names no actions,
    and ScheduleGPipe names neither stages nor waits. If a schedule already names its actions, the
    names are the same; `from_trace` takes these, which exclude the waits.
    """

    def named(s: int, kind: Kind, method: Callable) -> Callable:
        def call(k: int, *arguments: Any, **more: Any) -> Any:
            whole = kind is not Kind.B or more.get("full_backward", True)
            with record_function(f"PP:{Action(s, kind if whole else Kind.I, k)}"):
                return method(k, *arguments, **more)

        return call

    for part in stages:
        for name, kind in KINDS.items():
            setattr(part, name, named(part.stage_index, kind, getattr(part, name)))
