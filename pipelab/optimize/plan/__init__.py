"""Which schedule, how many stages and replicas, which micro-batch: the best for a machine.

The model's times and bytes come from published formulas or a measured profile; the simulator judges
every plan, under the memory of a device.

Compared with what was published (tests/optimize/test_plan.py):

- Zero Bubble's tables 5 and 9: 1F1B to four digits. Its interleaved column differs: in their
  script, a chunk waits for the chunk before it only in the first micro-batch of each round. With
  that dependency in every micro-batch, the numbers equal the simulator's.
- Training runs of 2104.04473, 2205.05198, 2201.11990, 2211.05100, 2204.06745, 2407.21783 and
  torchtitan: benchmarks/published.md, row by row, with DeepSeek-V3's (2412.19437).
- Megatron-LM's figure 12, 175B on 96 GPUs, read by eye: plain 84 and 136 TFLOP/s at a batch of 12
  and of 60, drawn as 81 and 136; interleaved 110 and 147 with 2 chunks, 129 and 153 with 4, drawn
  as 119 and 147. So interleaving gains less with a larger batch, as published.
- GPipe's table 2, Transformer-48 on 2, 4, 8 cores: 1.91, 3.48, 5.91; measured were 1.8, 3.4, 6.3.
  Here splitting a batch is free; and the softmax counts as 1.3 layers, so no cut is even.

If layers can be cut in at most 64 ways, all are tried. If in more, the search tries cuts that are
even by time and by size, and those that `pipelab.optimize.plan.cuts` finds for the memory; that
module says how close this is to trying all. "Nothing fits" may be narrowly wrong if chunks share a
device or inputs wait in buffers.

Backwards are split only on request (`SPLIT`, which includes V schedules): I and W together are
assumed to take as long as a whole backward, which only a measurement can show. Searched tables
(`zb`, `zb_v`) are made for as many micro-batches as fit, up to p.

Not modelled: stages with replicas of their own (see `pipelab.optimize.cut.replicated`), experts
with unequal loads or a limit of nodes per token, messages that share a card, communication of
tensor and expert parallelism that overlaps with compute (DualPipe), formats below 16 bits,
recomputation of only some of a stage's layers.
"""

from pipelab.optimize.plan.answer import Answer, RunnerUp, find_plan
from pipelab.optimize.plan.choices import ASYNCHRONOUS, FLUSH, SPLIT, Problem, TrainingChoice
from pipelab.optimize.plan.estimates import Estimate, estimate, table_for
from pipelab.optimize.plan.machine import MACHINES, Machine
from pipelab.optimize.plan.repeat import makespan
from pipelab.optimize.plan.transformer import KEEP, MODELS, Latent, Transformer

__all__ = [
    "ASYNCHRONOUS",
    "FLUSH",
    "KEEP",
    "MACHINES",
    "MODELS",
    "SPLIT",
    "Answer",
    "Estimate",
    "Latent",
    "Machine",
    "Problem",
    "RunnerUp",
    "TrainingChoice",
    "Transformer",
    "estimate",
    "find_plan",
    "makespan",
    "table_for",
]
plan = find_plan  # its name in a notebook
