"""`posttrain explain METHOD|CONFIG.yaml [--gpu 80GB] [--option value]`: the arithmetic of a run, before it costs anything."""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator
from typing import Any

from posttrain.cli.errors import UsageError
from posttrain.cli.options.arguments import RunConfig, config_named
from posttrain.cli.options.words import own_options
from posttrain.cli.running.output import no_bars, write_json

USAGE = """usage: posttrain explain [METHOD] [CONFIG.yaml] [--gpu 24GB] [--json FILE|-] [--option value ...]

Says what `posttrain METHOD` would do with the same options: rows, tokens, passes and optimizer steps (counted, by the code that
will make the batches), the loss with its numbers, the work, and the memory by phase. The data are read; no weights are.
--gpu SIZE   whether it fits a device of that size, and the largest settings that do
--json FILE  the same as JSON; - is the screen
Exit code 0: explained; 2: the command cannot be done."""
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
        from posttrain.cli.commands.explain_text import show

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
        from posttrain.cli.commands.launch import command_of
        from posttrain.cli.options.needs import give_agents
        from posttrain.cli.running.assemble import config_of, model_name, parts_of, rewards_of, told
        from posttrain.cli.running.evals_of import evals_of
        from posttrain.methods.table import METHODS
        from posttrain.trainer.plan.arithmetic import complete, count_run

        self.config, self.gpu = config, gpu
        self.processes = processes_of(config)
        method = METHODS[config.method]
        as_planned = functools.partial(as_processes, method.config_class, self.processes)
        with _quiet():
            with as_planned():
                self.args = told(lambda: config_of(config))
            self.model = model_name(config)
            command_of(config, [])  # a profile that does not exist
            self.given = rewards_of(config)
            self.parts = told(lambda: parts_of(config))
            named = config.get("tokenizer_name_or_path") or self.model
            self.side = told(lambda: method.trainer_class.without_model(named, self.args))
            told(lambda: give_agents(self.side, self.given, self.args))
            train, evaluation = told(self._datasets)
            evals = told(lambda: evals_of(config, self.args))
            with as_planned():
                told(lambda: complete(self.side, train, evaluation))
                self.counts = told(lambda: count_run(self.side, evals))
                self._explain_model(told)
            self._note_needs(train)

    def _explain_model(self, told: Any) -> None:
        """The formula, and what follows from the model's shape."""
        from posttrain.trainer.plan.memory import Demands, explain_memory, meta_model, reward_model_bytes, shape_of
        from posttrain.trainer.plan.work import COPY, PRECOMPUTED, explain_work, reference_of

        side, counts = self.side, self.counts
        self.formula = side.formula(self.args, totals_in_words(counts))
        dtype = self._dtype()
        quantised = next((name for name in ("load_in_4bit", "load_in_8bit") if self.config.get(name)), None)
        self.shape = told(
            lambda: shape_of(meta_model(side, self.model, self.parts, dtype), quantised, side.args.fuse_lora)
        )
        side.engine.is_foreign = getattr(self.args, "use_vllm", False)
        side.replay = True if getattr(self.args, "replay_buffer_size", 0) else None
        reference = reference_of(side, self.parts)
        scores = counts.rollouts is not None and (side.needs_old_logps or side.needs_reference)
        size, has_copy = self.shape.weight_bytes, self.parts.get("peft_config") is None
        judges = self.config.get("reward_model_name_or_path") if counts.rollouts is not None else None
        demands = Demands(
            reward_models=sum(told(lambda name=name: reward_model_bytes(side, name, dtype)) for name in judges or ()),
            reference=size if reference == COPY else 0.0,
            loaded_reference=size if reference == PRECOMPUTED and has_copy else 0.0,
            scores=scores,
        )
        self.memory = explain_memory(side, self.shape, counts, demands, self.gpu)
        self.work = explain_work(side, self.shape, counts, self.parts, self.memory.level)
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
        from posttrain.cli.commands.launch import visible_gpus
        from posttrain.cli.options.needs import RewardColumns, missing_packages, notes_on_servers

        self.counts.notes += [f"{told}." for told in missing_packages(self.config, self.args)]
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
    from posttrain.cli.commands.launch import visible_gpus

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
