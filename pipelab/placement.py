"""Placements of stages on devices: stage -> device."""


def loop_placement(devices: int, virtual: int = 1) -> tuple[int, ...]:
    """Around the devices, `virtual` stages each: stage s is on device s mod p.

    >>> loop_placement(3, virtual=2)
    (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(devices)) * virtual


def v_placement(devices: int) -> tuple[int, ...]:
    """To the last device and back, two stages each: device 0 has the first stage and the last.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(devices), *reversed(range(devices)))
