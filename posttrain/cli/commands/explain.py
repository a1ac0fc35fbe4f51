"""`posttrain explain METHOD|CONFIG.yaml [--gpu 80GB] [--option value]`: the arithmetic of a run, before it costs anything."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError, as_usage_error
from posttrain.cli.options.arguments import RunConfig, config_named
from posttrain.cli.options.words import own_options
from posttrain.cli.running.output import no_bars, write_json

if TYPE_CHECKING:
    from posttrain.trainer.plan.arithmetic import Rollouts, RunCounts
    from posttrain.trainer.plan.costs import RunMemory

USAGE = """usage: posttrain explain [METHOD] [CONFIG.yaml] [--gpu 24GB] [--timings RUN] [--json FILE|-] [--option value ...]

Says what `posttrain METHOD` would do with the same options: rows, tokens, passes and optimizer steps (counted, by the code that
will make the batches), the loss with its numbers, the work, and the memory by phase. The data are read; no weights are.
--gpu SIZE   whether it fits a device of that size, and the largest settings that do
--timings RUN  online methods: what rollouts beside training would bring, from the seconds of a short run in that folder
--json FILE  the same as JSON; - is the screen
Exit code 0: explained; 2: the command cannot be done."""
LEVELS = {"none": "activations kept", "selective": "selective checkpointing", "full": "full checkpointing"}
ROW_NAMES = {1: "rows", 2: "pairs", 3: "triples"}
"""Samples of a row -> what rows are called."""
OWN = {"--gpu": "80GB", "--timings": "runs/short", "--json": "explained.json"}


def main(words: list[str]) -> int:
    if not words or any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    own, words = own_options(words, OWN)
    gpu = None if own["--gpu"] is None else gpu_bytes(own["--gpu"])
    found = Explained(config_named(words, "explain"), gpu, own["--timings"])
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

    def __init__(self, config: RunConfig, gpu: int | None = None, timings: str | None = None) -> None:
        """`timings`: folder of a run that says what the parts of this one take."""
        self.config, self.gpu, self.timings, self.beside = config, gpu, timings, None
        no_bars()
        with contextlib.redirect_stdout(io.StringIO()):  # what is said about the data is `posttrain check`'s business
            as_usage_error(self._explain)

    def _explain(self) -> None:
        from posttrain.cli.options.needs import give_agents
        from posttrain.cli.running.assemble import described, side_of
        from posttrain.cli.running.datasets_of import datasets_of
        from posttrain.cli.running.evals_of import evals_of
        from posttrain.cli.running.processes import as_planned, command_of
        from posttrain.trainer.plan.arithmetic import RunCounts, complete

        config = self.config
        command_of(config, [])  # a profile that does not exist
        with as_planned(config):
            self.args, self.model, self.given, self.parts = described(config)
        self.side = side = side_of(config, self.args)
        give_agents(side, self.given, self.args)
        if self.given.get("reward_funcs"):
            side.needs_rewards = True  # also of methods that can do without
        train, evaluation = datasets_of(config)
        train, evaluation = side._prepared(train, "train"), side._prepared_evaluation(evaluation)
        evals = evals_of(config, self.args)
        with as_planned(config):
            complete(side, train, evaluation)
            self.counts = RunCounts(side, evals)
            self.formula = side.formula(self.args, totals_text(self.counts))
            self._explain_model()
        if self.timings is not None:
            self._explain_beside(Path(self.timings).expanduser())
        self._note_what_is_missing()
        self._note_needs()

    def _explain_beside(self, folder: Path) -> None:
        from posttrain.trainer.options.async_rollouts import AsyncConfig
        from posttrain.trainer.plan.beside import Beside, Timings

        if not isinstance(self.args, AsyncConfig):
            raise UsageError(f"--timings: {self.config.method} writes no completions; leave it out.")
        if not folder.is_dir():
            raise UsageError(f"--timings is {folder}, and there is no such folder; it takes that of a run.")
        self.beside = Beside(self.args, Timings.of_run(folder, self.args.pace()))

    def _explain_model(self) -> None:
        """What follows from the model's shape."""
        import torch

        from posttrain.cli.running.named_objects import judging_model
        from posttrain.models.critic import attach_planned
        from posttrain.models.load.model import LoadOptions, innermost_model, model_without_weights
        from posttrain.models.load.saved_model import classifier_task
        from posttrain.models.memory.shape import Shape
        from posttrain.models.scoring.heads import SEQUENCE_REWARD
        from posttrain.trainer.plan.costs import PlannedModel, RunMemory, Work
        from posttrain.trainer.references.setup import kind_of_reference

        side, args, config, adapter = self.side, self.args, self.config, self.parts.get("peft_config")
        # What the run will compute in on a GPU; transformers and accelerate decide by the machine, which is not this one.
        is_full = config.get("bf16") is False or config.get("fp16") or config.get("use_cpu")
        dtype = (args.model_init_kwargs or {}).get("dtype")
        if dtype not in ("bfloat16", "float32", "float16"):
            dtype = "float32" if is_full else "bfloat16"
        shared = {"dtype": getattr(torch, dtype), "trust_remote_code": args.trust_remote_code}
        own = LoadOptions(task=side.task, model_init_kwargs=args.model_init_kwargs or {}, peft_config=adapter, **shared)
        side.model = model_without_weights(self.model, own)
        if named := getattr(args, "value_model_path", None):
            attach_planned(side.model, named, LoadOptions(task=SEQUENCE_REWARD, **shared))
        quantised = next((name for name in ("load_in_4bit", "load_in_8bit") if config.get(name)), None)
        tower = None if side.vision is None else side.vision.tower(innermost_model(side.model))
        self.shape = Shape(side.model, None, quantised, args.fuse_lora, tower)
        judges = []
        if "reward_funcs" in config.table.options:
            judges = [*map(judging_model, config.get("reward_funcs") or ())]
            judges += [name.partition("?")[0] for name in config.get("reward_model_name_or_path") or ()]
        judges = [judge for judge in judges if judge]
        judges = [model_without_weights(judge, LoadOptions(task=classifier_task(judge), **shared)) for judge in judges]
        reference = kind_of_reference(side, adapter is not None)
        run = PlannedModel(side, self.counts, self.shape, reference, judges, self._planned_teacher(shared))
        self.memory = RunMemory(run, self.gpu)
        self.work = Work(run, self.memory.level)

    def _planned_teacher(self, shared: dict[str, Any]) -> Any:
        """The model that teaches, on the meta device; None where there is none."""
        import torch

        from posttrain.models.load.model import LoadOptions, load_tokenizer, model_without_weights
        from posttrain.models.load.teacher import check_tokenizers

        if getattr(self.args, "is_served", False):
            if not self.args.teacher_servers():
                raise UsageError(
                    f"posttrain {self.config.method} needs a teacher's server: --teacher_model_server_url."
                )
            return None
        if hasattr(self.args, "teacher_model_kind"):  # the policy itself
            return self.side.model if getattr(self.args, "distillation_weight", 1) else None
        if not getattr(self.side, "needs_teacher", False):
            return None
        named, arguments = self.args.teacher_model_name_or_path, self.args.teacher_arguments()
        if named is None:
            raise UsageError(f"posttrain {self.config.method} needs a teacher: --teacher_model_name_or_path.")
        theirs = load_tokenizer(named, arguments, self.args.trust_remote_code)
        if self.args.shares_tokenizer:
            check_tokenizers(self.side.renderer.tokenizer, theirs, named)
        own = arguments.get("dtype")
        shared |= {"dtype": getattr(torch, own)} if own in ("bfloat16", "float32", "float16") else {}
        return model_without_weights(named, LoadOptions(model_init_kwargs=arguments, **shared))

    def _note_what_is_missing(self) -> None:
        """From the figures."""
        notes, profile, args = self.counts.notes, self.config.get("accelerate_config"), self.args
        if profile and not self.config.get("num_processes"):
            notes.append("Figures are those of one process: name the others with --num_processes.")
        if getattr(args, "vllm_share", 0) and self.gpu is None:
            share = f"vLLM takes {args.vllm_share:g} of the device's memory besides"
            notes.append(f"{share}: name the device with --gpu to count it.")
        if profile or args.sharding:
            whole = "Memory is that of a process with the whole model"
            notes.append(f"{whole}; {profile or args.sharding} may hold a part of it only.")

    def _note_needs(self) -> None:
        """What would end the run at its start, or at its first rewards."""
        from posttrain.cli.options.needs import RewardColumns, missing_packages, notes_on_servers
        from posttrain.cli.running.processes import processes_of, visible_gpus

        config, args, notes = self.config, self.args, self.counts.notes
        notes += [f"{missing}." for missing in missing_packages(config, args)]
        if getattr(args, "use_vllm", False) and args.vllm_mode == "server":
            gpus = visible_gpus(config.get("gpu_ids"))
            notes += notes_on_servers(args.vllm_addresses(), processes_of(config), gpus)
        columns = getattr(getattr(self.side.train_dataset, "dataset", None), "column_names", None)
        if self.given and columns is not None:  # None: a stream's are not known
            notes += RewardColumns(self.side, self.given).missing(columns)

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
            **({} if self.beside is None else {"beside": self.beside.as_json()}),
        }


def totals_text(counts: RunCounts) -> dict[str, str]:
    """What the loss is divided by, as the run will count it: one number, or from which to which."""

    def words(name: str) -> str:
        found = counts.per_step[name]
        return f"{found.largest:,}" if found.smallest == found.largest else f"{found.smallest:,} to {found.largest:,}"

    tokens = words("trained") if counts.rollouts is None else "the"
    return {"tokens": tokens, "sequences": words("samples"), "units": words("rows"), "batches": words("micro_batches")}


# ---- what is printed -------------------------------------------------------------------------------------------------------


def show(found: Explained) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    sections = {
        f"{found.config.method} of {found.model}": counts_lines(found),
        "the loss": found.formula.lines(),
        "passes of an optimizer step": work_lines(found),
        "memory of one process (estimated)": memory_lines(found.memory),
        "a generation, written beside training (simulated)": [] if found.beside is None else found.beside.lines(),
        "to know": found.counts.notes,
    }
    for title, lines in sections.items():
        if lines:
            console.rule(title, align="left")
        for line in lines:
            console.print(line, markup=False)


def counts_lines(found: Explained) -> list[str]:
    counts = found.counts
    packed, online = getattr(found.args, "packing", False), counts.rollouts is not None
    rows = "blocks" if packed else "prompts" if online else ROW_NAMES[len(found.side.roles)]
    evaluated, kept = "", counts.checkpoints_kept
    if counts.evaluations and counts.eval_rows is not None:
        answers = "" if counts.eval_completions is None else f", {counts.eval_completions:,} completions"
        evaluated = f" of {counts.eval_rows:,} rows{answers}"
    shown = {
        "data": "a stream" if counts.rows_of_dataset is None else f"{counts.rows_of_dataset:,} {rows}",
        "optimizer steps": f"{counts.optimizer_steps:,} ({counts.steps_per_epoch:,} an epoch, {counts.epochs:g} epochs, "
        f"{counts.warmup_steps:,} of warmup)",
        "processes": str(counts.processes),
        "logs": f"{counts.logs:,}",
        "evaluations": f"{counts.evaluations:,}{evaluated}",
        "checkpoints": ("when best" if kept is None else f"{counts.checkpoints:,}")
        + (f", {kept:,} kept" if kept not in (None, counts.checkpoints) else ""),
    }
    images = getattr(getattr(found.side.train_dataset, "report", None), "images", None)
    if images is not None and images.images:
        shown["images"] = "; ".join(images.sentences())
    lines = [*named_lines(shown), "", *step_lines(counts, "samples" if online else rows)]
    lines += ["", *named_lines(rollout_facts(counts.rollouts))] if online else []
    tasks = [
        f"evals            {task.name}: {task.answers:,} answers to {task.prompts:,} prompts, {task.times:,} times; at most "
        f"{task.most_tokens:,} tokens"
        for task in counts.tasks
    ]
    return [*lines, *(["", *tasks] if tasks else [])]


def named_lines(shown: dict[str, str]) -> list[str]:
    return [f"{name:<17}{text}" for name, text in shown.items()]


def step_lines(counts: RunCounts, rows: str) -> list[str]:
    online, figures = counts.rollouts is not None, counts.per_step
    shown = {rows: "rows", "samples": "samples", "tokens (at most)" if online else "tokens": "tokens"}
    if not online and figures["trained"].total:
        shown["trained tokens"] = "trained"
    shown |= {"micro-batches": "micro_batches", "passes": "passes"}
    return [f"{'in a step':<18}{'mean':>12}{'smallest':>12}{'largest':>12}{'whole run':>16}"] + [
        f"{name:<18}{found.mean:>12,.1f}{found.smallest:>12,}{found.largest:>12,}{found.total:>16,}"
        for name, found in ((name, figures[key]) for name, key in shown.items())
    ]


def rollout_facts(rollouts: Rollouts) -> dict[str, str]:
    least = "at least " if rollouts.is_at_least else ""
    tokens = "not known" if rollouts.prompt_tokens is None else (
        f"{rollouts.prompt_tokens:,} of prompts (once for each completion), at most {rollouts.most_tokens:,} in all"
    )  # fmt: skip
    return {
        "generations": f"{rollouts.generations:,} of {rollouts.prompts_per_generation:,} prompts and "
        f"{rollouts.completions_per_generation:,} completions, for {rollouts.steps_per_generation:g} optimizer steps each",
        "prompts": f"{least}{rollouts.prompts:,}",
        "completions": f"{least}{rollouts.completions:,}",
        "tokens": tokens,
        **({"reward calls": f"{least}{rollouts.reward_calls:,} of each function"} if rollouts.reward_calls else {}),
    }


def work_lines(found: Explained) -> list[str]:
    work, shape = found.work, found.shape
    passes = [*work.per_step, *work.before_training]
    lines = [f"{one.line}, about {one.operations:.2e} operations" for one in passes]
    lines[len(work.per_step) :] = [f"before training: {line}" for line in lines[len(work.per_step) :]]
    return [
        *lines,
        f"reference: {work.reference}",
        f"{shape.parameters:,} parameters, {shape.trained:,} trained; about {work.operations_per_step:.2e} operations a step and "
        f"{work.operations:.2e} in the run (estimated)",
    ]


def gib(size: float) -> str:
    return f"{size / 2**30:,.2f} GiB"


def memory_lines(report: RunMemory) -> list[str]:
    how, worst = LEVELS[report.level] + (", parked in host memory" if report.offload else ""), report.worst
    lines = [f"{report.dtype}, {report.kernels} layers, passes of up to {report.tokens:,} tokens, {how}"]
    for phase in report.phases:
        terms = sorted(phase.terms.items(), key=lambda term: -term[1])
        shown = ", ".join(f"{name} {gib(size)}" for name, size in terms)
        lines.append(f"{phase.name:<12}{gib(phase.peak):>12}  {shown}")
    lines.append(f"The peak is in {worst.name}; its largest term is {worst.binding}.")
    levels = ", ".join(f"{LEVELS[name]} {gib(size)}" for name, size in report.by_level.items())
    lines.append(f"update by level: {levels}")
    if report.gpu is None:
        return lines
    verdict = "fits" if worst.peak <= report.room else "does not fit"
    needed = f"{gib(worst.peak)} needed in {worst.name}, {gib(report.room)} may be used"
    lines.append(f"On {report.gpu / 2**30:g} GB it {verdict}: {needed}.")
    for name, fits in report.fitting.items():
        passes = f"passes of up to {fits['tokens']:,} tokens ({fits['rows']:,} rows of {report.longest:,})"
        none = f"not even one row of {report.longest:,} tokens"
        lines.append(f"  {LEVELS[name]}: {passes if fits['rows'] else none}")
    return [*lines, report.sentence or "Nothing is left open: the run uses the settings that are given."]
