"""`posttrain explain METHOD|CONFIG.yaml [--gpu 80GB] [--option value]`: the arithmetic of a run, before it costs anything."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError, or_usage_error
from posttrain.cli.options.arguments import RunConfig, config_named
from posttrain.cli.options.words import own_options
from posttrain.cli.running.output import no_bars, write_json

if TYPE_CHECKING:
    from posttrain.trainer.plan.arithmetic import Range, RunCounts
    from posttrain.trainer.plan.memory import MemoryReport
    from posttrain.trainer.plan.work import Work

USAGE = """usage: posttrain explain [METHOD] [CONFIG.yaml] [--gpu 24GB] [--json FILE|-] [--option value ...]

Says what `posttrain METHOD` would do with the same options: rows, tokens, passes and optimizer steps (counted, by the code that
will make the batches), the loss with its numbers, the work, and the memory by phase. The data are read; no weights are.
--gpu SIZE   whether it fits a device of that size, and the largest settings that do
--json FILE  the same as JSON; - is the screen
Exit code 0: explained; 2: the command cannot be done."""
LEVELS = {"none": "activations kept", "selective": "selective checkpointing", "full": "full checkpointing"}
ROW_NAMES = {1: "rows", 2: "pairs", 3: "triples"}
"""Samples of a row -> what rows are called."""
OWN = {"--gpu": "80GB", "--json": "explained.json"}


def main(words: list[str]) -> int:
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    own, words = own_options(words, OWN)
    gpu = None if own["--gpu"] is None else gpu_bytes(own["--gpu"])
    found = Explained(config_named(words, "explain"), gpu)
    if own["--json"]:
        write_json(own["--json"], found.as_json())
    if own["--json"] != "-":
        show(found)
    return 0


def gpu_bytes(text: str) -> int:
    """24GB, 80 GiB or 24: what is printed on a device, in units of 2^30 bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:g|gb|gib)?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise UsageError(f"--gpu is {text!r}; it takes the memory of a device, such as 24GB or 80GB.")
    return int(float(match[1]) * 2**30)


class Explained:
    """A run's options, data and model shape, and what follows from them."""

    def __init__(self, config: RunConfig, gpu: int | None = None) -> None:
        from posttrain.cli.options.needs import give_agents
        from posttrain.cli.running.assemble import config_of, parts_of, rewards_of
        from posttrain.cli.running.evals_of import evals_of
        from posttrain.cli.running.loaded_model import model_name
        from posttrain.cli.running.processes import command_of
        from posttrain.methods.table import METHODS
        from posttrain.trainer.plan.arithmetic import complete, count_run

        self.config, self.gpu = config, gpu
        self.processes = processes_of(config)
        method = METHODS[config.method]
        as_planned = functools.partial(as_processes, method.config_class, self.processes)
        with _quiet():
            with as_planned():
                self.args = or_usage_error(lambda: config_of(config))
            self.model = model_name(config)
            command_of(config, [])  # a profile that does not exist
            self.given = rewards_of(config)
            self.parts = or_usage_error(lambda: parts_of(config))
            named = config.get("tokenizer_name_or_path") or self.model
            self.side = or_usage_error(lambda: method.trainer_class.without_model(named, self.args))
            or_usage_error(lambda: give_agents(self.side, self.given, self.args))
            train, evaluation = or_usage_error(self._datasets)
            evals = or_usage_error(lambda: evals_of(config, self.args))
            with as_planned():
                or_usage_error(lambda: complete(self.side, train, evaluation))
                self.counts = or_usage_error(lambda: count_run(self.side, evals))
                self._explain_model()
            self._note_needs(train)

    def _explain_model(self) -> None:
        """The formula, and what follows from the model's shape."""
        from posttrain.models.load.model import SEQUENCE_REWARD, LoadOptions, model_without_weights
        from posttrain.models.memory.shape import shape_of
        from posttrain.trainer.plan.memory import Demands, explain_memory
        from posttrain.trainer.plan.work import COPY, PRECOMPUTED, explain_work, reference_of

        side, counts, args, adapter = self.side, self.counts, self.args, self.parts.get("peft_config")
        self.formula = side.formula(args, totals_in_words(counts))
        shared = {"dtype": self._dtype(), "trust_remote_code": args.trust_remote_code}
        own = LoadOptions(task=side.task, model_init_kwargs=args.model_init_kwargs or {}, peft_config=adapter, **shared)
        side.model = or_usage_error(lambda: model_without_weights(self.model, own))
        quantised = next((name for name in ("load_in_4bit", "load_in_8bit") if self.config.get(name)), None)
        self.shape = shape_of(side.model, None, quantised, args.fuse_lora)
        reference, size = reference_of(side, self.parts), self.shape.weight_bytes
        online = counts.rollouts is not None
        judges = self.config.get("reward_model_name_or_path") or () if online else ()
        options = LoadOptions(task=SEQUENCE_REWARD, **shared)
        loaded = [or_usage_error(lambda name=name: model_without_weights(name, options)) for name in judges]
        demands = Demands(
            reward_models=float(sum(parameter.nbytes for judge in loaded for parameter in judge.parameters())),
            reference=size if reference == COPY else 0.0,
            loaded_reference=size if reference == PRECOMPUTED and adapter is None else 0.0,
            scores=online and (side.needs_old_logps or side.needs_reference),
        )
        self.memory = explain_memory(side, self.shape, counts, demands, self.gpu)
        self.work = explain_work(side, self.shape, counts, reference, self.memory.level)
        profile = self.config.get("accelerate_config")
        if profile and not self.config.get("num_processes"):
            counts.notes.append("Figures are those of one process: name the others with --num_processes.")
        if getattr(self.args, "vllm_share", 0) and self.gpu is None:
            counts.notes.append(
                f"vLLM takes {self.args.vllm_share:g} of the device's memory besides: name the device with --gpu to count it."
            )
        if profile or self.args.sharding:
            counts.notes.append(
                f"Memory is that of a process with the whole model; {profile or self.args.sharding} may hold a part of it only."
            )

    def _note_needs(self, train: Any) -> None:
        """What would end the run at its start, or at its first rewards."""
        from posttrain.cli.options.needs import RewardColumns, missing_packages, notes_on_servers
        from posttrain.cli.running.processes import visible_gpus

        self.counts.notes += [f"{missing}." for missing in missing_packages(self.config, self.args)]
        if getattr(self.args, "use_vllm", False) and self.args.vllm_mode == "server":
            self.counts.notes += notes_on_servers(
                self.args.vllm_addresses(), self.processes, visible_gpus(self.config.get("gpu_ids"))
            )
        columns = getattr(getattr(train, "dataset", None), "column_names", None)  # None: a stream's are not known
        if self.given and columns is not None:
            self.counts.notes += RewardColumns(self.side, self.given).missing(columns)

    def _dtype(self) -> Any:
        """What the run will compute in on a GPU; transformers and accelerate decide by the machine, which is not this one."""
        import torch

        named = (self.args.model_init_kwargs or {}).get("dtype")
        if named in ("bfloat16", "float32", "float16"):
            return getattr(torch, named)
        wanted = self.config.get("bf16")
        is_full = wanted is False or self.config.get("fp16") or self.config.get("use_cpu")
        return torch.float32 if is_full else torch.bfloat16

    def _datasets(self) -> tuple[Any, Any]:
        """As the trainer prepares them; what it says about them is `posttrain check`'s business."""
        from posttrain.cli.running.datasets_of import datasets_of

        train, evaluation = datasets_of(self.config)
        return self.side._prepared(train, "train"), self.side._prepared_evaluation(evaluation)

    def as_json(self) -> dict[str, Any]:
        return {
            "method": self.config.method,
            "model": self.model,
            "counts": self.counts.as_json(),
            "loss": self.formula.lines(),
            "parameters": self.shape.parameters,
            "trained_parameters": self.shape.trained,
            "work": self.work.as_json(),
            "memory": self.memory.as_json(),
        }


def processes_of(config: RunConfig) -> int:
    """Of the run: those named, or one for each GPU that `posttrain METHOD` would find here."""
    from posttrain.cli.running.processes import visible_gpus

    named = config.get("num_processes")
    if named or config.get("accelerate_config") or config.get("use_cpu"):
        return named or 1
    return max(visible_gpus(config.get("gpu_ids")), 1)


def totals_in_words(counts: Any) -> dict[str, str]:
    """What the loss is divided by, as the run will count it: one number, or from which to which."""

    def words(name: str) -> str:
        found = counts.per_step[name]
        return f"{found.largest:,}" if found.smallest == found.largest else f"{found.smallest:,} to {found.largest:,}"

    tokens = words("trained") if counts.rollouts is None else "the"
    return {"tokens": tokens, "sequences": words("samples"), "units": words("rows"), "batches": words("micro_batches")}


@contextlib.contextmanager
def as_processes(config_class: type, count: int) -> Iterator[None]:
    """Inside, configs belong to a run of `count` processes, though there is this one only."""
    if count == 1:
        yield
        return
    own = config_class.__dict__.get("world_size")
    config_class.world_size = property(lambda args: count)
    try:
        yield
    finally:
        if own is None:
            del config_class.world_size
        else:
            config_class.world_size = own


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    no_bars()
    with contextlib.redirect_stdout(io.StringIO()):
        yield


# ---- what is printed -------------------------------------------------------------------------------------------------------


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
    if online or not counts.per_step["trained"].total:
        del shown["trained tokens"]
    return [header, *(table_line(name, counts.per_step[key]) for name, key in shown.items())]


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
