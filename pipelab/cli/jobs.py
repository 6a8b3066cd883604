"""A plan's best choice: the commands that start it."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipelab.optimize.plan import ASYNCHRONOUS, KEEP, Answer, Estimate, Transformer
from pipelab.optimize.plan.choice_costs import lengths_of
from pipelab.schedules import takes

TITAN_KEEP = dict(zip(KEEP, ("none", "selective", "full"), strict=True))


def start_lines(answer: Answer) -> list[str]:
    """Commands that start the best plan: here with a small GPT-2, and in torchtitan."""
    best, choice = answer.best, answer.best.choice
    p, r, balance = choice.pipeline, choice.replicas, ",".join(map(str, choice.balance))
    # Schedules in a V have their own number of chunks.
    virtual = f" --virtual {choice.virtual}" if takes(choice.schedule, "virtual") else ""
    name = choice.schedule + (f",longest={choice.longest}" if choice.longest > 1 else "")
    if choice.slices > 1:
        name += f",slices={','.join(f'{1000 * x:.0f}' for x in lengths_of(best.problem, choice))}"
    name += ",overlap=yes" if best.problem.pairs and choice.schedule == "dualpipe_v" else ""
    table = f"{name} --devices {p} --microbatches {choice.microbatches}{virtual}"
    table += f" --memory {choice.room:g}" if choice.room else ""
    again = f" --recompute {choice.recompute.value}" if choice.recompute.value != "never" else ""
    job = f"run {table} --model gpt2 --balance {balance}{again}"
    job += f" --replicas {r}" if r > 1 else ""
    # As many ranks on each node; `--` since torchrun would read --virtual as one of its own.
    most = min(answer.problem.machine.node, p * r)
    node = max(n for n in range(1, most + 1) if p * r % n == 0)
    meet = "--rdzv-backend c10d --rdzv-endpoint NODE0:29500 --rdzv-id job"
    nodes = f" --nnodes {p * r // node} {meet}" if p * r > node else ""
    lines = [
        f"stages = pipelab.models.split(layers, {_list(choice.balance)})",
        f"pipelab {job}",
        f"torchrun{nodes} --nproc-per-node {node} -m -- pipelab {job}",
    ]
    if (
        isinstance(answer.problem.model, Transformer)
        and p > 1
        and choice.schedule not in ASYNCHRONOUS
        and choice.slices == 1  # of which torch's tables know nothing
    ):
        lines += _titan(best, table)
    return lines


def _list(counts: Sequence[int]) -> str:
    """The list as Python has it; of equal counts [1] * 128."""
    alike = len({*counts}) == 1 < len(counts)
    return f"[{counts[0]}] * {len(counts)}" if alike else str([*counts])


def _titan(best: Estimate, table: str) -> list[str]:
    """The hand-over's table and options; and the options that a table does not have."""
    choice = best.choice
    names = [layer.name for layer in best.problem.profile().layers]
    bounds = pairwise([0, *accumulate(choice.balance)])
    layers = ",".join(str(names[a:b].count("layer")) for a, b in bounds)
    zero = best.problem.zero
    shard = choice.replicas if zero else 1
    again = "full" if choice.recompute.value != "never" else TITAN_KEEP[choice.keep]
    options = {
        "parallelism.tensor_parallel_degree": choice.tensor,
        "parallelism.context_parallel_degree": choice.context,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.data_parallel_replicate_degree": choice.replicas // shard,
        "activation_checkpoint.mode": again,
    }
    if zero == 1:  # weights stay gathered
        options["parallelism.fsdp_reshard_after_forward"] = "never"
    if best.problem.expert > 1:
        options["parallelism.expert_parallel_degree"] = best.problem.expert
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    return [
        f"pipelab export {table} --for torchtitan --layers {layers} --samples "
        f"{choice.microbatch} --out hand-over",
        f"torchrun ... -m torchtitan.train ... $(cat hand-over/options.txt) {words}",
    ]
