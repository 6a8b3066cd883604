"""V-Min"""
from pipelab.building import repeated
from pipelab.schedule import Schedule


def v_min(devices: int, microbatches: int, batches: int = 1) -> Schedule:
    p, gap = devices, 0 if devices % 3 else 2

    def block(d: int) -> tuple[int, int, int, int]:
        return d, 2 * p - d - 1, 2 * p + gap + d, 4 * p + gap - d - 1

    return repeated("v_min", block, 2 * ((p + 4) // 3), p, microbatches, batches)
