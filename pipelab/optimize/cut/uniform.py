"""Equal numbers of layers."""


def check_stages(stages: int, layers: int) -> None:
    """ValueError for fewer layers than stages."""
    if not 1 <= stages <= layers:
        raise ValueError(f"{stages} stages for {layers} layers: a stage needs at least one layer")


def uniform(layers: int, stages: int) -> list[int]:
    """The number of layers per stage when divided evenly, earlier stages first.

    >>> uniform(14, 4)
    [4, 4, 3, 3]
    """
    check_stages(stages, layers)
    return [layers // stages + (s < layers % stages) for s in range(stages)]
