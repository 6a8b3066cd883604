"""Which schedule, how many stages and replicas, which micro-batch: the best for a machine.

The model's times and bytes come from published formulas or a measured profile; the simulator judges
every plan, under the memory of a device.

Held against what was published (tests/optimize/test_plan.py):

- Zero Bubble's tables 5 and 9: 1F1B to four digits. Its interleaved column is another: their script
  lets a chunk wait for the chunk before it only with the first micro-batch of each round. With that
  dependency for every micro-batch the numbers are those of the simulator.
- Training runs of 2104.04473, 2205.05198, 2201.11990, 2211.05100, 2204.06745, 2407.21783 and
  torchtitan: benchmarks/published.md, row by row; DeepSeek-V3's (2412.19437) beside them.
- Megatron-LM's figure 12, 175B on 96 GPUs, read by eye: plain 84 and 136 TFLOP/s at a batch of 12
  and of 60 where 81 and 136 are drawn; interleaved 110 and 147 with 2 chunks, 129 and 153 with 4,
  where 119 and 147 are drawn. So interleaving gains less with a larger batch, as published.
- GPipe's table 2, Transformer-48 on 2, 4, 8 cores: 1.91, 3.48, 5.91 where 1.8, 3.4, 6.3 were
  measured. Splitting a batch costs nothing here; and the softmax counts, which is worth 1.3 layers
  that no split shares out evenly.

Up to 64 cuts of the layers are all tried. Of more, even ones by time and by size, and those that
`pipelab.optimize.plan.cuts` finds for the memory. How far that is from trying all is said there;
that nothing fits may be wrong by a hair, where chunks share a device or inputs wait in buffers.

Backwards are split only when that is asked for (`SPLIT`, with V schedules among them): I and W
together are taken to be as long as a whole backward, which a model has to be measured for.

Not modelled: stages with replicas of their own (see `pipelab.optimize.cut.replicated`), experts
with unequal loads or at most some nodes for a token, messages that share a card or that tensor and
expert parallelism run beside compute (DualPipe), formats below 16 bits; recomputation of some of a
stage's layers.
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
