"""A run to be checked, and its data as the replay takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelab.runtime.batches import Trees, counted, cut_batch, slices_of
from pipelab.runtime.options import Options
from pipelab.runtime.orders import Step
from pipelab.runtime.prepare import seed_for
from pipelab.runtime.result import Run
from pipelab.runtime.verdict.replay import Piece
from pipelab.runtime.verdict.rules import Reading
from pipelab.runtime.work import Work


@dataclass
class Trained:
    """A run to be checked, with what it was given.

    steps  [lane][stage][update]: what every update did
    saved  by stage, its state in the checkpoint, if one was written
    unit   in which losses count
    roomy  whether the memory has room for a batch undivided
    """

    work: Work
    data: Sequence[Any]
    result: Run
    steps: Sequence[Sequence[Sequence[Step]]]
    saved: Sequence[Any]
    options: Options
    unit: float
    roomy: bool

    def pieces(self, reading: Reading, trees: Trees) -> list[list[Piece]]:
        """The micro-batches of each update, or of each batch of an evaluation, as the data go."""
        work, table, options = self.work, self.work.table, self.options
        m, per, replicas, n = (
            table.microbatches, table.per_sequence, options.replicas, table.model_stages
        )  # fmt: skip
        # [1] versions count from the beginning of the training, and a short batch has fewer pieces
        before = work.table_offset.updates
        skipped = work.offset.updates - before if table.training else 0
        size = table.per_update if table.training else m
        versions = [
            [v + before for v in of_piece]
            for of_update in reading[skipped:]
            for of_piece in of_update[:size]
        ]
        # [2] cut as in the run: batch by batch, and in a batch replica by replica
        whole = work.whole.microbatches  # also of a batch that has fewer
        again = options.recompute.mask(whole, whole) if table.training else [False] * m
        by_update: list[list[Piece]] = [[] for _ in range(table.total // size)]
        for b in range(table.batches):
            for i, part in enumerate(cut_batch(self.data[b], m // per * replicas, b, trees)):
                replica, place = divmod(i * per, m)
                parts = slices_of(part, table.slices, trees) if table.slices else [part]
                for k, (x, y) in enumerate(parts, b * m + place):
                    # In the training, where a short batch takes as many numbers as any.
                    number = (work.batches[b] * replicas + replica) * whole + k - b * m
                    piece = Piece(
                        x,
                        y,
                        lane=replica * table.copies + table.copy_of[k],
                        number=k,
                        sequence=b * (m // per * replicas) + i,
                        versions=versions[k],
                        seeds=None
                        if options.seed is None
                        else [int(seed_for(options.seed, s, number)) for s in range(n)],
                        again=again[k - b * m],
                        samples=counted((x, y), trees, table.slices),
                    )
                    by_update[k // size].append(piece)
        return by_update
