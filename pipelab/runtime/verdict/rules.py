"""The papers' rules: which weights each update's gradient is taken at.

`rule_of` alone looks at the versions that the schedule has, to choose a rule.
"""

from itertools import product

from pipelab.table.action import Reads
from pipelab.table.schedule import Schedule

EVALUATION = "evaluation: the stages one after another"
FLUSH = "flush: w(t+1) = w(t) - step(grad f(w(t)))"
STASHING = "weight stashing: w(t+1) = w(t) - step(grad f(w_1(t-n+1), ..., w_n(t)))"
VERTICAL = "vertical sync: w(t+1) = w(t) - step(grad f(w_1(t-n+1), ..., w_n(t-n+1)))"
TABLE = "as its rows say: a forward reads the updates before it in its row"
DOUBLE = "2BW: W(t+1) = W(t) - step(grad f(W(t-1)))"

Reading = list[list[list[int]]]  # [update][piece of its data][stage] -> version


def reading_of(table: Schedule, replicas: int) -> tuple[str, Reading]:
    """The rule that describes the table, and the versions that each piece of data reads by it."""
    if not table.training:
        first = [0] * table.stages
        return EVALUATION, [[first] * table.microbatches] * table.batches
    rule = rule_of(table)
    if rule == TABLE:
        return rule, by_rows(table)
    n, pieces = table.stages, table.per_update * replicas
    updates = range(table.updates)
    return rule, [[[version_read(rule, t, s, n) for s in range(n)]] * pieces for t in updates]


def version_read(rule: str, t: int, stage: int, stages: int) -> int:
    """The weight version that `stage` (from 0) reads for update t, by the rule's formula."""
    n, s = stages, stage + 1  # the papers number stages from 1
    return max(0, {FLUSH: t, STASHING: t - n + s, VERTICAL: t - n + 1, DOUBLE: t - 1}[rule])


def by_rows(table: Schedule) -> Reading:
    """What any table's micro-batches read: the updates before each forward in its row."""
    # Walk each row; a stage is in one row, so that counting its updates there is enough.
    before = {}
    updates_made = [0] * table.stages
    for row in table.rows:
        for stage, kind, number in row:
            updates_made[stage] += kind.name == "U"
            if kind.name == "F":
                before[stage, number] = updates_made[stage]
    # Micro-batches of an update: all have equally many.
    size = (1 + max(number for _, number in before)) // table.updates
    return [
        [[before[s, k] for s in range(table.stages)] for k in range(t * size, (t + 1) * size)]
        for t in range(table.updates)
    ]


def rule_of(schedule: Schedule) -> str:
    """The paper's rule whose versions are the table's; else the rule that reads them off the rows.

    ValueError for a table that reads by a rule which neither describes.
    """
    n, size = schedule.stages, schedule.per_update
    if not schedule.asynchronous:
        # Updates within a batch have no formula in the papers, even where each has a flush.
        return FLUSH if size == schedule.microbatches else TABLE
    if size in (1, schedule.microbatches):
        meant = {Reads.LATEST: STASHING, Reads.FIRST: VERTICAL, Reads.PREVIOUS: DOUBLE}
        for rule in (meant[schedule.reads], STASHING, VERTICAL, DOUBLE):  # short tables fit several
            if all(
                schedule.versions[s, k] == version_read(rule, k // size, s, n)
                for s, k in product(range(n), range(schedule.total))
            ):
                return rule
    if schedule.reads is not Reads.LATEST:
        raise ValueError(
            f"no reference for reads={schedule.reads.name} on this table: run it with check=False"
        )
    return TABLE
