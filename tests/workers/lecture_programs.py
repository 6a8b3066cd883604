"""Runs the lectures' programs in one start of ranks, and saves what each rank knows in the end.

torch's ranks meet once, so that the programs share a process group. They compute in float64: what
they differ by from one device is no training's growth of a rounding.

    torchrun ... lecture_programs.py FOLDER PROGRAM ...     writes FOLDER/PROGRAM's name.RANK
"""

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import torch
import torch.distributed as dist

KNOWN = "row", "steps", "m", "depth", "model", "stages", "xs", "ys", "losses", "versions"

if __name__ == "__main__":
    folder, *programs = sys.argv[1:]
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    leave, dist.destroy_process_group = dist.destroy_process_group, dist.barrier
    dist.init_process_group = lambda backend: None
    for program in programs:
        with redirect_stdout(io.StringIO()) as printed:
            found = runpy.run_path(program, run_name="__main__")
        known = {name: found[name] for name in KNOWN if name in found}
        known["printed"] = printed.getvalue()
        torch.save(known, Path(folder, f"{Path(program).stem}.{dist.get_rank()}"))
    leave()
