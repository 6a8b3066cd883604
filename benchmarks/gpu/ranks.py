"""Ranks on GPUs: torchrun --nproc-per-node N -m gpu.ranks NCCL|gloo runs the cases for N."""

from __future__ import annotations

import json
import os
import sys

import torch


def share_gpus(wire: str) -> None:
    """Give this rank one GPU, its `cuda:0`, before it uses any; several may share it.

    NCCL refuses that, unless it takes them for ranks of different hosts. Then it connects them by
    sockets, and all that calls it is run with one GPU as with several. With gloo they go without.
    """
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if count:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local % count)
        if wire == "NCCL":
            os.environ["NCCL_HOSTID"] = str(local // count)


def main(wire: str) -> None:
    """The first rank prints the name of each case and the verdict, as a line of JSON."""
    share_gpus(wire)
    from gpu.cases import CASES

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    for name, case in CASES.items():
        if case.workers == int(os.environ["WORLD_SIZE"]):
            check = case.run(device).check
            if os.environ["RANK"] == "0":
                verdict = f"passed ({check.ratio:.2f})" if check.passed else f"FAILED: {check}"
                print(json.dumps([name, verdict]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
