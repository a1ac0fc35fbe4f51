"""RunState: all that decides the next step and is not a weight, an optimizer state or a random number.

Saved as `run_state.json` with every checkpoint. It also says what the run *is* (options, data, tokenizer, model), so that a
resume under something else is refused with the difference shown.
"""

from __future__ import annotations

import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.core.processes import of_every_process
from posttrain.core.secrets import published, without_secrets
from posttrain.core.trees import tree_digest
from posttrain.data.store.report import PreparationReport
from posttrain.data.vision.augmentation import described
from posttrain.trainer.checkpoints.checkpoint import load_tree, save_tree, write_json
from posttrain.trainer.options.base import BaseConfig

FILE = "run_state.json"
RNG_FILE = "rng_state_{rank}"
SUMS_FILE = "sums_{rank}.json"
METHOD_FILE = "method_state"
GIVEN = "given:"  # in front of the names of what was given to the trainer beside its options

# fmt: off
FREE_TO_CHANGE = frozenset((
    "output_dir", "logging_dir", "logging_steps", "logging_strategy", "logging_first_step", "run_name", "report_to",
    "disable_tqdm", "log_level", "log_level_replica", "save_steps", "save_strategy", "save_total_limit", "eval_steps",
    "eval_strategy", "eval_on_start", "hub_token", "hub_model_id", "hub_strategy", "hub_private_repo",
    "hub_always_push", "hub_revision", "push_to_hub", "project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
    "dataloader_num_workers", "dataloader_pin_memory", "dataloader_prefetch_factor", "dataloader_persistent_workers",
    "dataset_num_proc", "dataset_cache_dir", "image_root", "resume_from_checkpoint", "resume_allow_changes", "alerts", "verbosity",
    "local_rank",
    "do_eval", "do_train", "do_predict", "skip_memory_metrics", "max_steps", "num_train_epochs", "ddp_timeout",
    "prediction_loss_only", "per_device_eval_batch_size", "load_best_model_at_end", "metric_for_best_model",
    "greater_is_better", "chunk_tokens", "keep_logits", "gradient_checkpointing", "use_liger_kernel", "fuse_lora", "compile_layers",
    "share_prompts", "max_tokens_per_pass", "memory",
    "gradient_checkpointing_kwargs", "activation_offloading", "on_bad_rows", "logging_nan_inf_filter",
    "deepspeed_plugin", "eval_accumulation_steps", "eval_delay", "eval_do_concat_batches", "save_only_model",
    "save_on_each_node", "save_in_background",
))
# fmt: on
"""Options that do not decide what a step computes. `max_steps` and epochs may grow; the learning-rate schedule follows them."""


@dataclass
class RunIdentity:
    """Fingerprints of what a run is made of."""

    method: str
    options: dict[str, Any]
    dataset: str
    tokenizer: str
    model: str
    data: str = ""  # the dataset in words: its name and number of rows

    @classmethod
    def of(
        cls, method: str, args: BaseConfig, rows: Any, tokenizer: str, model: str, parts: dict[str, Any]
    ) -> RunIdentity:
        """`parts`: what else was given to the trainer, such as its adapter and its rewards."""
        options = {
            f.name: _plain(getattr(args, f.name))
            for f in dataclasses.fields(args)
            if f.init and f.name not in FREE_TO_CHANGE and not f.name.startswith("_")
        }
        if "image_augmentation" in options:  # an import path is the same text whatever it leads to
            options["image_augmentation"] = _plain(described(args.image_augmentation))
        options["world_size"] = args.world_size  # each process has random numbers and sums of its own
        options |= {f"{GIVEN}{name}": _plain(value) for name, value in parts.items()}
        report: PreparationReport | None = getattr(rows, "report", None)
        data = "" if report is None else report.name_and_rows()
        # A new token makes no other run.
        return cls(method, without_secrets(options), getattr(rows, "fingerprint", "none"), tokenizer, model, data)

    def differences(self, other: RunIdentity, allowed: list[str]) -> list[str]:
        """Lines "what: then -> now" for everything that changed and is not allowed to."""
        found = {
            "method": f"{other.method} -> {self.method}",
            "dataset": f"{other.data or 'another one'} -> {self.data}"
            + (" (other contents, another order, or prepared differently)" if other.data == self.data else ""),
            "tokenizer": "its vocabulary, special tokens or chat template",
            "model": f"{other.model} -> {self.model}",
        }
        lines = [
            f"{name}: {words}"
            for name, words in found.items()
            if name not in allowed and not _same(getattr(other, name), getattr(self, name))
        ]
        for name in sorted(self.options.keys() | other.options.keys()):
            then, now = other.options.get(name), self.options.get(name)
            if name.startswith(GIVEN) and name not in other.options:
                continue  # a checkpoint from before these were written down
            if name.removeprefix(GIVEN) not in allowed and not _same(then, now):
                lines += _changes(name.removeprefix(GIVEN), then, now)
        return lines


def _changes(name: str, then: Any, now: Any) -> list[str]:
    """Of two mappings only what differs in them."""
    if not (isinstance(then, dict) and isinstance(now, dict)):
        return [f"{name}: {then!r} -> {now!r}"]
    return [
        f"{name}.{key}: {then.get(key)!r} -> {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if not _same(then.get(key), now.get(key))
    ]


def _same(then: Any, now: Any) -> bool:
    """Whether they are one option. A checkpoint that came from the Hub has only digests of local paths."""
    return then == now or published(then) == published(now)


def _plain(value: Any) -> Any:
    """JSON-ready form of an option, stable across processes."""
    if isinstance(value, (set, frozenset)):
        return sorted(_plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value.value if hasattr(value, "value") else value
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    return str(described(value))


@dataclass
class RunState:
    """What a checkpoint remembers beside weights, optimizer and RNG."""

    identity: RunIdentity
    run_id: str = ""  # "": of a version that had none
    # by `resume_allow_changes`, in order
    allowed_changes: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    loss_total: float = 0.0
    last_logged_step: int = 0
    skipped_in_a_row: int = 0
    skipped_total: int = 0
    skipped_since_log: int = 0

    def save(self, folder: Path) -> None:
        write_json(folder / FILE, dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> RunState:
        raw = json.loads((Path(folder) / FILE).read_text(encoding="utf-8"))
        identity = RunIdentity(**raw.pop("identity"))
        identity.options = without_secrets(identity.options)  # a checkpoint of an older version may hold some
        return cls(identity, **raw)

    def accept(self, now: RunIdentity, allowed: list[str], checkpoint: Path) -> list[str]:
        """Take over the identity of the run that resumes, or return what is different and not allowed.

        What was allowed is written down and is the run's own from here on: continuing needs no permission again, going back does.
        """
        refused = now.differences(self.identity, allowed)
        if not refused:
            changes = now.differences(self.identity, [])
            if changes:
                self.allowed_changes.append({"checkpoint": checkpoint.name, "changes": changes})
            self.identity = now
        return refused


def run_of(checkpoint: Path) -> str | None:
    """The id of the run that a checkpoint belongs to; None where that cannot be read."""
    try:
        return json.loads((checkpoint / FILE).read_text(encoding="utf-8")).get("run_id", "")
    except (OSError, ValueError, AttributeError):
        return None


def save_sums(folder: Path, rank: int, metrics: dict[str, Any], loss: float) -> None:
    """What one process has added up and not yet logged: MetricStore.state() and Trainer's running loss."""
    write_json(Path(folder) / SUMS_FILE.format(rank=rank), {"metrics": metrics, "loss": loss})


def load_sums(folder: Path, rank: int, world_size: int) -> list[tuple[dict[str, Any], float]]:
    """Of this process; of none or several where another number of them has saved: each sum is taken over once.

    A logged loss is the mean over the processes, hence its factor.
    """
    saved = len(list(Path(folder).glob(SUMS_FILE.format(rank="*"))))
    paths = [Path(folder) / SUMS_FILE.format(rank=n) for n in range(rank, saved, world_size)]
    found = [json.loads(path.read_text("utf-8")) for path in paths]
    return [(raw["metrics"], raw["loss"] * world_size / saved) for raw in found]


def save_method_state(folder: Path, state: dict[str, Any], rank: int, world_size: int) -> None:
    """`BaseTrainer.method_state`: equal on all processes, so the first one writes it. Collective, where there is a state."""
    if not state:
        return
    digests = of_every_process(tree_digest(state), world_size)
    if others := [place for place, digest in enumerate(digests) if digest != digests[0]]:
        raise RuntimeError(
            f"The state of the method ({', '.join(state)}) of process {others[0]} is not that of process 0. It must follow from "
            "numbers that all processes have, such as sums that were all-reduced."
        )
    if rank == 0:
        save_tree(folder / METHOD_FILE, state)


def load_method_state(folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What was saved; `expected` is the state of a method that begins, which is empty for most."""
    if not expected:
        return {}
    if not (folder / METHOD_FILE).with_suffix(".json").exists():
        raise ValueError(
            f"{folder} has no state of its method ({', '.join(expected)}): a version of posttrain without it wrote this "
            "checkpoint. Start a new run from its model."
        )
    return load_tree(folder / METHOD_FILE)


def save_rng(folder: Path, rank: int) -> None:
    """Python's, numpy's and torch's generators of this process."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "python": list(random.getstate()),
        "numpy": [kind, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    save_tree(folder / RNG_FILE.format(rank=rank), state)


def load_rng(folder: Path, rank: int) -> None:
    """A process that the checkpoint did not have keeps the numbers that it has begun with."""
    if not (Path(folder) / RNG_FILE.format(rank=rank)).with_suffix(".json").exists():
        return
    state = load_tree(Path(folder) / RNG_FILE.format(rank=rank))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
