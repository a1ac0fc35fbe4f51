"""Checkpoints: how the state of a run becomes a checkpoint, and a checkpoint the state of a run."""

from __future__ import annotations

import dataclasses
import errno
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState

from posttrain.models.load.adapters import TEACHER_ADAPTER, quantization_of
from posttrain.models.load.model import innermost_model
from posttrain.models.load.saved_model import QUANTIZATION
from posttrain.models.sharding import local_part
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.background_save import (
    CheckpointWriter,
    SaveRequest,
    failure_sentence,
    fits_host_memory,
    state_bytes,
    write_checkpoint,
)
from posttrain.trainer.checkpoints.run_state import RNG_FILE, RunState, save_rng, save_sums
from posttrain.trainer.checkpoints.sharding import (
    load_shard_tree,
    load_shards,
    part_of_tree,
    shard_tree,
    shards_of_a_copy,
    whole_tree,
)
from posttrain.trainer.checkpoints.skipped import NonFiniteTraining
from posttrain.trainer.checkpoints.snapshot import Snapshot, capturing, is_capturing, write_content
from posttrain.trainer.options.base import DEEPSPEED, FSDP, BaseConfig
from posttrain.trainer.step.gathering import any_process
from posttrain.trainer.step.metrics import MetricStore
from posttrain.trainer.step.optimizer import StepGuard

logger = logging.getLogger(__name__)

OPTIMIZER, SCHEDULER, TRAINER_STATE, OPTIONS = "optimizer", "scheduler", "trainer_state.json", "training_args.json"
SHARDS = "optimizer_{rank}"


class SavedRun(Protocol):
    """What a checkpoint is made of, as it is when it is saved or loaded. A trainer has all of it."""

    args: BaseConfig
    model: nn.Module
    processing_class: Any
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer
    lr_scheduler: Any
    guard: StepGuard
    metrics: MetricStore
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    hp_search_backend: Any
    # what Trainer's loop has added up
    _tr_loss: Tensor
    _total_loss_scalar: float
    _globalstep_last_logged: int
    # what it does
    store_flos: Callable[[], None]
    settle_skipped_steps: Callable[..., None]
    save_model: Callable[..., None]
    save_state_files: Callable[[Path], None]
    _save_scaler: Callable[[str], None]
    _save_optimizer_and_scheduler: Callable[[str], None]


class Checkpoints:
    """Checkpoints that are whole or absent, and are written while training continues."""

    run_state: RunState

    def __init__(self, run: SavedRun) -> None:
        self.run, self.args = run, run.args
        self.writer: CheckpointWriter | None = None
        self.unsaved: str | None = None  # why the latest save failed
        self._just_saved: Path | None = None  # the checkpoint whose `on_save` callbacks are being called
        self._background = False
        self._tokenizer_files: dict[str, bytes] | None = None

    # ---- in the background -------------------------------------------------------------------------------------------

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """However training ends, a save in flight comes to its end first (unless a second signal interrupts the wait)."""
        if self.writer is not None:
            self.writer.join()
        self.writer = CheckpointWriter(self.args.device)
        self.unsaved = None
        try:
            yield
        finally:
            self.settle(wait=True)
            self.writer.close()
            self._background = False

    def prepare(self) -> None:
        """Called when training begins: what can be done ahead of the first save is done now."""
        wanted = state_bytes(self.run.model, self.args.optim, self.args.save_only_model)
        self._background = self._may_save_in_background(wanted)
        if self._background:
            self._tokenizer_files = _saved_files(self.run.processing_class)
            self.writer.reserve_ahead(wanted)

    def _may_save_in_background(self, wanted: int) -> bool:
        """One process and our own formats only: a sharded state is gathered by all processes together, at one time."""
        args = self.args
        alone = self._is_alone and self.run.hp_search_backend is None
        if not (args.save_in_background and alone and args.device.type in ("cpu", "cuda")):
            return False
        if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
            return False
        if not fits_host_memory(wanted):
            logger.warning(
                f"Checkpoints are not saved in the background: a copy of the state takes {wanted:,} bytes of memory, more "
                "than half of what is free."
            )
            return False
        return True

    def settle(self, wait: bool = False) -> None:
        """Take note of what became of a background save. A full disk does not end training; other errors are raised here."""
        if self.writer is None:
            return
        if wait:
            self.writer.wait()
        outcome = self.writer.outcome()
        if outcome is None:
            return
        request, error = outcome
        if error is None:
            self.unsaved = None
        elif isinstance(error, OSError):
            self._save_failed(request, error)
        else:
            raise error

    def report_unwritten(self, what: str) -> None:
        """Something of the run that the disk did not take to the end: `train` ends with it, or with the checkpoint it lacks."""
        self.unsaved = self.unsaved or what

    def _save_failed(self, request: SaveRequest, error: OSError) -> None:
        self.unsaved = failure_sentence(request.step, request.final, request.snapshot.nbytes, error)
        logger.warning(
            f"{self.unsaved} Training continues; earlier checkpoints are untouched, and the next save will be tried."
        )
        if self.run.state.best_model_checkpoint == str(request.final) and not request.final.exists():
            self.run.state.best_model_checkpoint = request.best_before

    # ---- a checkpoint ------------------------------------------------------------------------------------------------

    def save(self, run_dir: Path) -> Path | None:
        """Put the state aside (or write it at once), verify it by its manifest, rename it. Returns the folder, once it exists."""
        self.settle(wait=True)  # one save at a time
        self.run.settle_skipped_steps(wait=True)
        if self._refuse_to_save_nonfinite_weights():
            return None
        if self.run.hp_search_backend is None:
            self.run.store_flos()
        step = self.run.state.global_step
        before = self.run.state.best_model_checkpoint
        final = run_dir / f"{files.PREFIX}{step}"
        self._remember_best(run_dir, final)
        keep, best = self.args.save_total_limit, self.run.state.best_model_checkpoint
        request = SaveRequest(step, Snapshot(files.staging_folder(run_dir, step)), run_dir, keep, [best], before)
        if self._is_alone:
            self._save_alone(request)
        else:
            request.snapshot.folder = final.with_name(f"{final.name}{files.STAGING}shared")
            self._save_together(request)
        if self.args.push_to_hub or self._readers_of_checkpoints():
            self.settle(wait=True)
        saved = final if final.exists() else None
        self._just_saved = saved if self.args.should_save else None
        return saved

    def _save_alone(self, request: SaveRequest) -> None:
        """The save of a single process. With `save_in_background` only copies are made here; a thread does the rest."""
        staged = request.snapshot.folder
        request.snapshot.arena = self.writer.arena_for_next() if self._background else None
        self._background = request.snapshot.arena is not None
        try:
            with capturing(request.snapshot):
                self._write_state(staged)
            if not self._background:
                write_checkpoint(request)
                self.unsaved = None
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            self._save_failed(request, error)
        else:
            if self._background:
                self.writer.submit(request)

    def _save_together(self, request: SaveRequest) -> None:
        """Several processes, FSDP, DeepSpeed: each writes its part into one folder, at once, then the first publishes it."""
        staged = request.snapshot.folder
        failure: OSError | None = None
        try:
            self._write_state(staged)
        except OSError as error:
            failure = error
        failed = any_process(failure is not None, self.args)
        if self.args.should_save:
            if failed:
                shutil.rmtree(staged, ignore_errors=True)
            else:
                try:
                    write_checkpoint(request)
                except OSError as error:
                    failure = error
        if any_process(failure is not None, self.args):
            self._save_failed(request, failure or OSError(errno.EIO, "another process could not write its part"))
        else:
            self.unsaved = None

    # ---- its parts ---------------------------------------------------------------------------------------------------

    def _write_state(self, staged: Path) -> None:
        """Every file of a checkpoint, but for the manifest."""
        for callback in self.callbacks_with_files():
            if hasattr(callback, "gather"):
                callback.gather()
        staged.mkdir(parents=True, exist_ok=True)
        self.run.save_model(str(staged), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer(staged)
            self.run._save_scaler(str(staged))
            save_rng(staged, self.args.process_index)
            save_sums(staged, self.args.process_index, self.run.metrics.state(), float(self.run._tr_loss))
            self.run.save_state_files(staged)
        if self.args.should_save:
            self.run_state.loss_total = self.run._total_loss_scalar
            self.run_state.last_logged_step = self.run._globalstep_last_logged
            self.run_state.save(staged)
            self._save_trainer_state(staged / TRAINER_STATE)
            for callback in self.callbacks_with_files():
                callback.save_state_files(staged)

    def admit_files_of_callbacks(self, is_last: bool = False) -> None:
        """What a callback's `on_save` has added to the checkpoint just saved belongs to it; an error of the disk is reported."""
        if self._just_saved is not None and self._readers_of_checkpoints():
            with files.best_effort(f"The manifest of {self._just_saved} with what callbacks have added"):
                files.admit_added(self._just_saved)
        if is_last:  # all callbacks have been called
            self._just_saved = None

    def _readers_of_checkpoints(self) -> list[str]:
        """Callbacks whose `on_save` may open the finished folder, which is then waited for. Ours say so."""
        return [
            type(callback).__name__
            for callback in self.run.callback_handler.callbacks
            if type(callback).on_save is not TrainerCallback.on_save and _opens_checkpoints(callback)
        ]

    def callbacks_with_files(self) -> list[Any]:
        """Callbacks whose tensors belong into checkpoints, such as BEMACallback."""
        return [c for c in self.run.callback_handler.callbacks if hasattr(c, "save_state_files")]

    def _remember_best(self, run_dir: Path, final: Path) -> None:
        if self.run.state.best_global_step:
            best = run_dir / f"checkpoint-{self.run.state.best_global_step}"
            if best.exists() or best == final:
                self.run.state.best_model_checkpoint = str(best)

    def _save_trainer_state(self, path: Path) -> None:
        for callback in [*self.run.callback_handler.callbacks, self.run.control]:
            if isinstance(callback, ExportableState):
                self.run.state.stateful_callbacks[type(callback).__name__] = callback.state()
        files.write_json(path, dataclasses.asdict(self.run.state))

    def _refuse_to_save_nonfinite_weights(self) -> bool:
        bad = nonfinite_weights(self.run.model, self.run.args)
        if not bad:
            return False
        found = (
            f"No checkpoint is saved at step {self.run.state.global_step}: {len(bad)} tensors hold NaN or infinity, the first is "
            f"{bad[0]}. The last good checkpoint stays as it is."
        )
        if not self.run_state.skipped_in_a_row:
            # No gradient shows it (an embedding row that no token uses, say): the run would continue and never save again.
            raise NonFiniteTraining(
                found + " The steps taken since were finite, so the model came with it: check its weights."
            )
        logger.error(found)
        return True

    def save_model_files(self, folder: Path, state_dict: dict[str, Tensor] | None) -> None:
        """Weights, tokenizer and options; options as JSON instead of Trainer's pickle."""
        folder.mkdir(parents=True, exist_ok=True)
        model = self.run.accelerator.unwrap_model(self.run.model, keep_torch_compile=False)
        # A teacher that averages the policy's adapter is a part of the run's state, and not of what was trained.
        own = [name for name in getattr(model, "peft_config", ()) if name != TEACHER_ADAPTER]
        model.save_pretrained(str(folder), state_dict=state_dict, **({"selected_adapters": own} if own else {}))
        if self.args.should_save:
            self._save_tokenizer(folder)
            files.write_json(folder / OPTIONS, self.args.to_dict())
            quantised = quantization_of(model) if own else None
            if quantised is not None:  # the adapter is for these numbers, and for no others
                files.write_json(folder / QUANTIZATION, quantised)

    def _save_tokenizer(self, folder: Path) -> None:
        if self._tokenizer_files is not None and is_capturing():
            for name, content in self._tokenizer_files.items():
                write_content(folder / name, content)
        elif self.run.processing_class is not None:
            self.run.processing_class.save_pretrained(str(folder))

    @property
    def _is_alone(self) -> bool:
        """One process that has all of the state."""
        return self.args.world_size == 1 and self.args.sharding is None

    def _save_optimizer(self, folder: Path) -> None:
        run, args = self.run, self.args
        if args.sharding == DEEPSPEED:  # it writes states of its own
            run._save_optimizer_and_scheduler(str(folder))
            return
        if args.sharding == FSDP:
            files.save_tree(self._shards_file(folder), shard_tree(run.optimizer))
        elif args.should_save:
            tree: dict[str, Any] = {"optimizer": run.optimizer.state_dict()}
            if run.guard.masters is not None:
                tree["masters"] = run.guard.masters.saved()
            files.save_tree(folder / OPTIMIZER, tree)
        if args.should_save:
            files.save_tree(folder / SCHEDULER, _without_functions(run.lr_scheduler.state_dict()))

    def _shards_file(self, folder: Path) -> Path:
        """Where this process keeps its shards of trained weights and of the optimizer's state."""
        return folder / SHARDS.format(rank=self.args.process_index)

    # ---- loading -----------------------------------------------------------------------------------------------------

    def load_optimizer(self, folder: Path) -> None:
        """Of the optimizer and its schedule, in our own formats; under FSDP the trained weights, too."""
        run = self.run
        if self.args.sharding == FSDP:
            load_shard_tree(run.model, run.optimizer, self._saved_shard(folder))
        else:
            tree = self._saved_whole(folder)
            run.optimizer.load_state_dict(tree["optimizer"])
            if run.guard.masters is not None:
                run.guard.masters.load(tree["masters"])
        run.lr_scheduler.load_state_dict(files.load_tree(folder / SCHEDULER))
        take_rates_of(run.lr_scheduler)

    def _saved_shard(self, folder: Path) -> dict[str, Any]:
        """This process's state: its own file, or its part of what another number of processes, or one without shards, has saved."""
        shards = shards_of_a_copy(self.run.optimizer)
        processes = len(list(folder.glob(RNG_FILE.format(rank="*") + ".json")))
        if processes == self.args.world_size and not is_whole(folder):
            tree = files.load_tree(self._shards_file(folder))
            if tree.get("shards", processes) == shards:
                return tree
        return part_of_tree(self._saved_whole(folder), self.run.optimizer)

    def _saved_whole(self, folder: Path) -> dict[str, Any]:
        """The state as one process without shards would have saved it; from shards, where there are such."""
        if is_whole(folder):
            return files.load_tree(folder / OPTIMIZER)
        first = files.load_tree(folder / SHARDS.format(rank=0))
        processes = len(list(folder.glob(SHARDS.format(rank="*") + ".json")))
        others = [
            files.load_tree(folder / SHARDS.format(rank=rank)) for rank in range(1, first.get("shards", processes))
        ]
        return whole_tree([first, *others], self.run.optimizer)

    def load_weights(self, load: Callable[[], None], folder: Path) -> None:
        """Of `folder`, by `load`, which is Trainer's. peft's `load_adapter` turns adapters into float32: they stay as they were."""
        before = {name: parameter.dtype for name, parameter in self.run.model.named_parameters()}
        load()
        if self.args.sharding is None:
            load_renamed(innermost_model(self.run.model), folder)
        for name, parameter in self.run.model.named_parameters():
            if parameter.dtype != before[name]:
                parameter.data = parameter.data.to(before[name])

    def load_best(self, load: Callable[[], None]) -> None:
        """The weights of the best checkpoint, by `load` where they are whole."""
        run = self.run
        self.settle(wait=True)
        if self.args.sharding == FSDP:
            load_shards(run.model, run.optimizer, self._saved_shard(Path(run.state.best_model_checkpoint)))
            return
        self.load_weights(load, Path(run.state.best_model_checkpoint))
        if run.guard.masters is not None:
            run.guard.masters.reload()


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint was written by processes that each had the whole state."""
    return (folder / OPTIMIZER).with_suffix(".json").exists()


def load_renamed(innermost: Any, folder: Path) -> None:
    """Load a checkpoint whose tensors are not named as the model's own: transformers renames those of many models that see, and of
    experts, when it saves them. Trainer's `load_state_dict` leaves such tensors out with no more than a warning."""
    written: set[str] = set()
    for file in folder.glob("model*.safetensors"):
        with safe_open(file, "pt") as tensors:
            written |= {*tensors.keys()}
    if not written <= innermost.state_dict().keys():
        loaded = type(innermost).from_pretrained(folder, dtype=innermost.dtype)
        innermost.load_state_dict(loaded.state_dict())


def nonfinite_weights(model: nn.Module, args: BaseConfig) -> list[str]:
    """Names of the tensors that hold NaN or infinity. To be called by all processes."""
    # Asking about the whole of a sharded parameter would be a collective for each.
    named = [(name, local_part(p.detach())) for name, p in model.named_parameters() if p.is_floating_point()]
    finite = torch.stack([torch.isfinite(p).all().to(args.device) for _, p in named])
    if not any_process(not finite.all(), args):  # the one time that the host asks
        return []
    return [name for (name, _), fine in zip(named, finite.tolist()) if not fine] or ["on another process"]


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    """A LambdaLR keeps its functions in its state; they are made anew from the options."""
    kept = {name: value for name, value in state.items() if not callable(value) and name != "lr_lambdas"}
    return kept | {"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else kept


def _saved_files(tokenizer: Any) -> dict[str, bytes]:
    """The files of a tokenizer. Making them takes a while for a large vocabulary, and they do not change during a run."""
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _opens_checkpoints(callback: Any) -> bool:
    """Whether its `on_save` may: of ours one that says so, of others all that are not known to do nothing in it."""
    if type(callback).__module__.startswith("posttrain."):
        return getattr(callback, "opens_checkpoints", False)
    return not _ignores_checkpoints(callback)


def _ignores_checkpoints(callback: Any) -> bool:
    """Trackers of transformers that have an `on_save` and do nothing in it (unless they are set to upload checkpoints)."""
    uploads = getattr(getattr(callback, "_log_model", None), "value", None) == "checkpoint"
    return type(callback).__name__ in ("TrackioCallback", "SwanLabCallback", "WandbCallback") and not uploads


def take_rates_of(scheduler: Any) -> None:
    """The next step's learning rates as the schedule of this run has them.

    Those in the checkpoint are equal, unless `max_steps` has grown: then they are the 0 at the end of the schedule before.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate's wrapper
    if not isinstance(scheduler, LambdaLR):
        return
    rates = [base * factor(scheduler.last_epoch) for base, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
    scheduler._last_lr = rates
