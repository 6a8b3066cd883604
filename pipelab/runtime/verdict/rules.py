"""The papers' rules: which weights each update's gradient is taken at, and the order of its sums.

Only `rule_of` looks at the schedule's versions, to choose a rule.
"""

from collections.abc import Sequence
from itertools import product

from pipelab.table.action import Kind, Reads
from pipelab.table.schedule import Schedule

EVALUATION = "evaluation: the stages one after another"
FLUSH = "flush: w(t+1) = w(t) - step(grad f(w(t)))"
STASHING = "weight stashing: w(t+1) = w(t) - step(grad f(w_1(t-n+1), ..., w_n(t)))"
VERTICAL = "vertical sync: w(t+1) = w(t) - step(grad f(w_1(t-n+1), ..., w_n(t-n+1)))"
TABLE = "as its rows say: a forward reads the updates before it in its row"
DOUBLE = "2BW: W(t+1) = W(t) - step(grad f(W(t-1)))"

Reading = Sequence[Sequence[Sequence[int]]]  # [update][micro-batch of its own][stage] -> version


def reading_of(table: Schedule) -> tuple[str, Reading]:
    """The rule that describes the table, and the versions that each micro-batch reads by it."""
    n = table.model_stages
    if not table.training:
        return EVALUATION, [[[0] * n] * table.microbatches] * table.batches
    rule = rule_of(table)
    if rule == TABLE:
        return rule, by_rows(table)
    updates = range(table.updates)
    return rule, [
        [[version_read(rule, t, s, n) for s in range(n)]] * table.per_update for t in updates
    ]


def version_read(rule: str, t: int, stage: int, stages: int) -> int:
    """The weight version that `stage` (from 0) reads for update t, by the rule's formula."""
    n, s = stages, stage + 1  # the papers number stages from 1
    return max(0, {FLUSH: t, STASHING: t - n + s, VERTICAL: t - n + 1, DOUBLE: t - 1}[rule])


def by_rows(table: Schedule) -> Reading:
    """What any table's micro-batches read: the updates before each forward in its row."""
    before, updates = {}, [0] * table.stages
    for row in table.rows:
        for stage, kind, number in row:
            updates[stage] += kind is Kind.U
            if kind is Kind.F:
                before[stage % table.model_stages, number] = updates[stage]
    size, stages = table.per_update, range(table.model_stages)
    return [
        [[before[s, k] for s in stages] for k in range(t * size, (t + 1) * size)]
        for t in range(table.updates)
    ]


def rule_of(schedule: Schedule) -> str:
    """The paper's rule that gives the table's versions; else TABLE, which reads them off the rows.

    ValueError for a table that neither describes.
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
            f"no rule for reads={schedule.reads.name} on this table: run it with check=False"
        )
    return TABLE


def added(table: Schedule) -> list[list[list[int]]]:
    """[update][stage] -> its micro-batches in the order in which their gradients are added up."""
    numbers: list[list[list[int]]] = [[[] for _ in table.placement] for _ in range(table.updates)]
    for row in table.rows:
        for stage, kind, number in row:
            if kind in (Kind.B, Kind.W):
                numbers[number // table.per_update][stage].append(number)
    return numbers
