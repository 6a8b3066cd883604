"""V-Half"""
from pipelab.building import repeated
from pipelab.schedule import Schedule


def v_half(devices: int, microbatches: int, batches: int = 1) -> Schedule:
    p, gap = devices, 0 if devices % 2 else 3

    def block(d: int) -> tuple[int, int, int, int]:
        return 2 * d, 3 * p - d - 2, 3 * p + gap + 2 * d - 1, 6 * p + gap - d - 2

    return repeated("v_half", block, 2 * ((p + 2) // 2), p, microbatches, batches)
