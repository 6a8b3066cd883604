"""Which weight versions a table reads, and how long each is kept. `U t` makes version t + 1."""

from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from pipelab.action import Kind, Reads
from pipelab.table import Table


class VersionLife(NamedTuple):
    """A weight version of a stage: made by the action at flat index `born` (-1: at the start),
    needed up to the action at `last`."""

    stage: int
    version: int
    born: int
    last: int


def latest_versions(table: Table) -> np.ndarray:
    """[stage, microbatch]: how many updates its row has made on the stage before this forward."""
    _, stage, kind, microbatch = table.columns
    order = np.argsort(stage, kind="stable")  # stage by stage, each in the order of its row
    update = kind == Kind.U
    made = np.empty(len(stage), np.int64)
    made[order] = np.cumsum(update[order])  # by this stage, and by all stages before it
    of_stage = np.bincount(stage[update], minlength=table.stages)
    before = np.cumsum(of_stage) - of_stage
    latest = np.zeros((table.stages, table.total), np.int64)
    forward = kind == Kind.F
    s = stage[forward]
    latest[s, microbatch[forward]] = made[forward] - before[s]
    return latest


def read_versions(table: Table) -> np.ndarray:
    """[stage, microbatch]: the weight version that its forward and backward read."""
    if table.versions_read is not None:
        return np.array(table.versions_read)
    latest = latest_versions(table)
    if table.reads is Reads.LATEST:
        return latest
    batch = np.arange(table.total) // table.microbatches
    of_all = latest[0] if table.reads is Reads.FIRST else np.maximum(batch - 1, 0)
    return np.tile(of_all, (table.stages, 1))


def is_asynchronous(table: Table) -> bool:
    """Whether a forward reads weights that miss an update of an earlier batch: no flush."""
    group = np.arange(table.total) // table.per_update
    late = read_versions(table) != group
    return table.per_update < table.microbatches or bool(late.any())


def version_lives(table: Table) -> list[VersionLife]:
    """From when to when each weight version is kept: until its last reader, or until it is
    replaced, whichever is later."""
    at, versions = table.position, read_versions(table)
    last_use = at[[Kind.F, Kind.B, Kind.I, Kind.W]].max(axis=0)  # of a version by a micro-batch
    oldest = min(0, int(versions.min()))
    newest = table.updates if table.training else 0
    lives = []
    for s, d in enumerate(table.placement):
        readers = np.full(newest - oldest + 1, -1)
        np.maximum.at(readers, np.minimum(versions[s], newest) - oldest, last_use[s])
        for version, reader in enumerate(readers.tolist(), oldest):
            born = int(at[Kind.U, s, version - 1]) if version > 0 else -1
            if version == newest:
                replaced = table.bounds[d + 1] - 1  # never: kept to the end of its row
            else:
                replaced = int(at[Kind.U, s, version]) if version >= 0 else -1
            lives.append(VersionLife(s, version, born, max(reader, replaced)))
    return lives


def kept_versions(table: Table) -> list[int]:
    """Per device, the most weight versions of one stage that are kept at one time."""
    changes: list[list[tuple[int, int]]] = [[] for _ in table.placement]
    for life in version_lives(table):
        # At equal indices -1 sorts before 1: a version made by U takes the place of one that ends
        # there (an update in place).
        changes[life.stage] += [(life.born, 1), (max(life.last, life.born), -1)]
    most = [0] * table.devices
    for d, of_stage in zip(table.placement, changes, strict=True):
        most[d] = max(most[d], *accumulate(change for _, change in sorted(of_stage)))
    return most


def peak_in_flight(table: Table) -> list[int]:
    """Per device, the most micro-batches (chunk activations) held for a backward at one time."""
    kind = table.columns.kind
    change = (kind == Kind.F).astype(int) - np.isin(kind, (Kind.B, Kind.W))
    return [int(np.cumsum(change[a:b]).max(initial=0)) for a, b in pairwise(table.bounds)]
