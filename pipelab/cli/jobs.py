"""A plan as the lines that start it, as a paragraph on a runner-up, and beside its faults."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

from pipelab.optimize.faults import Faults, cost_of_faults
from pipelab.optimize.plan import ASYNCHRONOUS, KEEP, Answer, Plan, Transformer, table_for

TITAN_KEEP = dict(zip(KEEP, ("none", "selective", "full"), strict=True))
OF_A_CHOICE = (
    *("schedule", "tensor", "context", "pipeline", "replicas", "virtual"),
    *("microbatch", "microbatches", "recompute", "keep", "longest"),
)


def start_lines(answer: Answer) -> list[str]:
    """Commands that start the best plan: here on a small GPT-2 in the same stages, and by
    torchtitan."""
    plan, choice = answer.best, answer.best.choice
    p, r, balance = choice.pipeline, choice.replicas, ",".join(map(str, choice.balance))
    # Schedules in a V have their own number of chunks.
    virtual = f" --virtual {choice.virtual}" if choice.schedule == "interleaved" else ""
    longest = f" --longest {choice.longest}" if choice.longest > 1 else ""
    table = f"{choice.schedule} --devices {p} --microbatches {choice.microbatches}"
    table += virtual + longest
    again = f" --recompute {choice.recompute.value}" if choice.recompute.value != "never" else ""
    job = f"run {table} --model gpt2 --balance {balance}{again}"
    job += f" --replicas {r}" if r > 1 else ""
    # As many ranks on each node; `--` since torchrun would read --virtual as one of its own.
    node = max(n for n in range(1, answer.problem.machine.node + 1) if p * r % n == 0)
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
    ):
        lines += _titan(plan, table)
    return lines


def _list(counts: Sequence[int]) -> str:
    """The list as Python has it; of equal counts [1] * 128."""
    alike = len({*counts}) == 1 < len(counts)
    return f"[{counts[0]}] * {len(counts)}" if alike else str([*counts])


def _titan(plan: Plan, table: str) -> list[str]:
    """The hand-over's table and options; and the options that a table does not have."""
    choice = plan.choice
    names = [layer.name for layer in plan.problem.profile().layers]
    bounds = pairwise([0, *accumulate(choice.balance)])
    layers = ",".join(str(names[a:b].count("layer")) for a, b in bounds)
    zero = plan.problem.zero
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
    if plan.problem.expert > 1:
        options["parallelism.expert_parallel_degree"] = plan.problem.expert
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    return [
        f"pipelab export {table} --for torchtitan --layers {layers} --samples "
        f"{choice.microbatch} --out hand-over",
        f"torchrun ... -m torchtitan.train ... $(cat hand-over/options.txt) {words}",
    ]


def explained(answer: Answer, row: int) -> str:
    """Why a runner-up, counted from 1, loses: a paragraph."""
    if not 1 <= row <= len(answer.runners_up):
        raise ValueError(f"--explain {row}: there are runners-up 1 to {len(answer.runners_up)}")
    runner, best, limit = answer.runners_up[row - 1], answer.best, answer.problem.machine.memory
    other = runner.plan
    pairs = {n: (getattr(best.choice, n), getattr(other.choice, n)) for n in OF_A_CHOICE}
    changed = [
        f"{name} {getattr(b, 'value', b)} instead of {getattr(a, 'value', a)}"
        for name, (a, b) in pairs.items()
        if a != b
    ]
    text = f"Runner-up {row} has {', '.join(changed) or 'another cut of the layers'}. "
    sizes = f"{other.memory / 1e9:.4g} GB where the best needs {best.memory / 1e9:.4g}"
    if other.memory > limit:
        return text + (
            f"It would take {other.step:.4g} s where the best takes {best.step:.4g}, but a device "
            f"has {limit / 1e9:.4g} GB: it needs {sizes}."
        )
    gains = {name: other.parts[name] - best.parts[name] for name in best.parts}
    least = 1e-9 * best.step  # below it is rounding
    lost = sorted((name for name in gains if gains[name] > least), key=lambda name: -gains[name])
    won = sorted((name for name in gains if gains[name] < -least), key=lambda name: gains[name])
    text += f"It takes {other.step:.4g} s where the best takes {best.step:.4g}: "
    text += f"it loses {', '.join(f'{gains[n]:.3g} s by {n}' for n in lost) or 'nothing'}"
    text += f" and wins {', '.join(f'{-gains[n]:.3g} s by {n}' for n in won) or 'nothing'}. "
    return f"{text}It needs {sizes}."


def faults_of(plan: Plan, faults: Faults) -> dict[str, list[float]]:
    """By cause: the share that it adds to the step."""
    costs = plan.problem.costs(plan.choice)
    table = table_for(plan.choice, costs)
    return cost_of_faults(table, costs, faults, replicas=plan.choice.replicas)


def faults_text(answer: Answer, faults: Faults) -> str:
    """What faults add to the step: of the best plan, and of the best with every other schedule."""
    plans = {answer.best.choice.schedule: answer.best}
    plans |= {x.plan.choice.schedule: x.plan for x in answer.runners_up if x.decision == "schedule"}
    lines = ["faults add to the step (median, least to most of 5; a/a: the same jitter anew):"]
    for name, plan in plans.items():
        if name in ASYNCHRONOUS:
            continue
        added = faults_of(plan, faults)
        parts = [
            f"{cause} {median(of):.1%} ({min(of):.1%} to {max(of):.1%})"
            for cause, of in added.items()
        ]
        lines.append(f"  {name}: {', '.join(parts)}")
    return "\n".join(lines)
