"""What `posttrain explain` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.cli.commands.explain import Explained
    from posttrain.trainer.plan.arithmetic import Range, RunCounts
    from posttrain.trainer.plan.memory import MemoryReport
    from posttrain.trainer.plan.work import Work

LEVELS = {"none": "activations kept", "selective": "selective checkpointing", "full": "full checkpointing"}
ROW_NAMES = {1: "rows", 2: "pairs", 3: "triples"}
"""Samples of a row -> what rows are called."""


def show(found: Explained) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    sections = {
        f"{found.config.method} of {found.model}": counts_lines(found),
        "the loss": found.formula.lines(),
        "passes of an optimizer step": work_lines(found.work, found.shape),
        "memory of one process (estimated)": memory_lines(found.memory),
    }
    for title, lines in sections.items():
        console.rule(title, align="left")
        for line in lines:
            console.print(line, markup=False)
    if found.counts.notes:
        console.rule("to know", align="left")
    for note in found.counts.notes:
        console.print(note, markup=False)


# ---- counts ----------------------------------------------------------------------------------------------------------------


def counts_lines(found: Explained) -> list[str]:
    counts = found.counts
    packed = getattr(found.args, "packing", False)
    rows = "blocks" if packed else "prompts" if counts.rollouts is not None else ROW_NAMES[len(found.side.roles)]
    known = "a stream" if counts.rows_of_dataset is None else f"{counts.rows_of_dataset:,} {rows}"
    lines = [
        f"data             {known}",
        f"optimizer steps  {counts.optimizer_steps:,} ({counts.steps_per_epoch:,} an epoch, {counts.epochs:g} epochs, "
        f"{counts.warmup_steps:,} of warmup)",
        f"processes        {counts.processes}",
        f"logs             {counts.logs:,}",
        f"evaluations      {counts.evaluations:,}" + _evaluation(counts),
        f"checkpoints      {'when best' if counts.checkpoints_kept is None else f'{counts.checkpoints:,}'}"
        + (f", {counts.checkpoints_kept:,} kept" if counts.checkpoints_kept not in (None, counts.checkpoints) else ""),
        "",
    ]
    return lines + step_lines(counts, rows) + rollout_lines(counts) + task_lines(counts)


def _evaluation(counts: RunCounts) -> str:
    if not counts.evaluations or counts.eval_rows is None:
        return ""
    answers = "" if counts.eval_completions is None else f", {counts.eval_completions:,} completions"
    return f" of {counts.eval_rows:,} rows{answers}"


def step_lines(counts: RunCounts, rows: str) -> list[str]:
    online = counts.rollouts is not None
    shown = {
        "samples" if online else rows: "samples" if online else "rows",
        "samples": "samples",
        "tokens (at most)" if online else "tokens": "tokens",
        "trained tokens": "trained",
        "micro-batches": "micro_batches",
        "passes": "passes",
    }
    header = f"{'in a step':<18}{'mean':>12}{'smallest':>12}{'largest':>12}{'whole run':>16}"
    wanted = {
        name: counts.per_step[key] for name, key in shown.items() if key != "trained" or counts.per_step[key].total
    }
    return [header, *(table_line(name, found) for name, found in wanted.items())]


def table_line(name: str, found: Range) -> str:
    return f"{name:<18}{found.mean:>12,.1f}{found.smallest:>12,}{found.largest:>12,}{found.total:>16,}"


def rollout_lines(counts: RunCounts) -> list[str]:
    rollouts = counts.rollouts
    if rollouts is None:
        return []
    least = "at least " if rollouts.is_at_least else ""
    tokens = "not known" if rollouts.prompt_tokens is None else (
        f"{rollouts.prompt_tokens:,} of prompts (once for each completion), at most {rollouts.most_tokens:,} in all"
    )  # fmt: skip
    return [
        "",
        f"generations      {rollouts.generations:,} of {rollouts.prompts_per_generation:,} prompts and "
        f"{rollouts.completions_per_generation:,} completions, for {rollouts.steps_per_generation:g} optimizer steps each",
        f"prompts          {least}{rollouts.prompts:,}",
        f"completions      {least}{rollouts.completions:,}",
        f"tokens           {tokens}",
        f"reward calls     {least}{rollouts.reward_calls:,} of each function",
    ]


def task_lines(counts: RunCounts) -> list[str]:
    return ["", *(
        f"evals            {task.name}: {task.answers:,} answers to {task.prompts:,} prompts, {task.times:,} times; at most "
        f"{task.most_tokens:,} tokens"
        for task in counts.tasks
    )] if counts.tasks else []  # fmt: skip


# ---- work and memory -------------------------------------------------------------------------------------------------------


def work_lines(work: Work, shape: Any) -> list[str]:
    lines = [f"{one.line}, about {one.operations:.2e} operations" for one in work.per_step]
    lines += [f"before training: {one.line}, about {one.operations:.2e} operations" for one in work.before_training]
    lines.append(f"reference: {work.reference}")
    lines.append(
        f"{shape.parameters:,} parameters, {shape.trained:,} trained; about {work.operations_per_step:.2e} operations a step and "
        f"{work.operations:.2e} in the run (estimated)"
    )
    return lines


def gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def memory_lines(report: MemoryReport) -> list[str]:
    how = LEVELS[report.level] + (", parked in host memory" if report.offload else "")
    lines = [f"{report.dtype}, {report.kernels} layers, passes of up to {report.tokens:,} tokens, {how}"]
    for phase in report.phases:
        terms = ", ".join(
            f"{name} {gib(size)}" for name, size in sorted(phase.terms.items(), key=lambda term: -term[1])
        )
        lines.append(f"{phase.name:<12}{gib(phase.peak):>12}  {terms}")
    lines.append(f"The peak is in {report.worst.name}; its largest term is {report.worst.binding}.")
    lines.append(
        "update by level: " + ", ".join(f"{LEVELS[name]} {gib(size)}" for name, size in report.by_level.items())
    )
    return lines + fitting_lines(report)


def fitting_lines(report: MemoryReport) -> list[str]:
    if report.gpu is None:
        return []
    fits = report.worst.peak <= report.room
    verdict = "fits" if fits else "does not fit"
    lines = [
        f"On {report.gpu / 2**30:g} GB it {verdict}: {gib(report.worst.peak)} needed in {report.worst.name}, "
        f"{gib(report.room)} may be used."
    ]
    for name, found in report.fitting.items():
        if found["rows"]:
            lines.append(
                f"  {LEVELS[name]}: passes of up to {found['tokens']:,} tokens ({found['rows']:,} rows of {report.longest:,})"
            )
        else:
            lines.append(f"  {LEVELS[name]}: not even one row of {report.longest:,} tokens")
    return [*lines, report.sentence]
