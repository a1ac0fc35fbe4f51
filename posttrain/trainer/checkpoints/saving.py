"""SavingTrainer: how the state of a run becomes a checkpoint, as overrides of transformers.Trainer."""

from __future__ import annotations

import dataclasses
import errno
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

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
from posttrain.trainer.checkpoints.run_state import RunState, save_rng, save_sums
from posttrain.trainer.checkpoints.sharding import ShardingTrainer, shard_tree
from posttrain.trainer.checkpoints.snapshot import Snapshot, capturing, is_capturing, write_content
from posttrain.trainer.options.base import BaseConfig
from posttrain.trainer.step.metrics import MetricStore
from posttrain.trainer.step.optimizer import FiniteSteps, MasterWeights
from posttrain.trainer.step.skipped import NonFiniteTraining, SkippedSteps

logger = logging.getLogger(__name__)

OPTIMIZER, SCHEDULER, TRAINER_STATE, OPTIONS = "optimizer", "scheduler", "trainer_state.json", "training_args.json"
SHARDS = "optimizer_{rank}"


class SavingTrainer(ShardingTrainer):
    """transformers.Trainer whose checkpoints are whole or absent, and are written while training goes on."""

    args: BaseConfig
    metrics: MetricStore
    masters: MasterWeights | None = None
    finite: FiniteSteps | None = None
    run_state: RunState
    skipped: SkippedSteps
    saver: CheckpointWriter | None = None
    _background = False
    _tokenizer_files: dict[str, bytes] | None = None
    _unsaved: str | None = None  # why the latest save failed
    _just_saved: Path | None = None  # the checkpoint whose `on_save` callbacks are being called

    # ---- in the background -------------------------------------------------------------------------------------------

    @contextmanager
    def _finishing_saves(self) -> Iterator[None]:
        """However training ends, a save in flight comes to its end first (unless a second signal interrupts the wait)."""
        if self.saver is not None:
            self.saver.join()
        self.saver = CheckpointWriter(self.args.device)
        self._unsaved = None
        try:
            yield
        finally:
            self.settle_saves(wait=True)
            self.saver.close()
            self._background = False

    def prepare_to_save(self) -> None:
        """Called when training begins: what can be done ahead of the first save is done now."""
        wanted = state_bytes(self.model, self.masters, self.args.save_only_model)
        self._background = self._may_save_in_background(wanted)
        if self._background:
            self._tokenizer_files = _saved_files(self.processing_class)
            self.saver.reserve_ahead(wanted)

    def _may_save_in_background(self, wanted: int) -> bool:
        """One process and our own formats only: a sharded state is gathered by all processes together, at one time."""
        args = self.args
        alone = self._is_alone and self.hp_search_backend is None
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

    def settle_saves(self, wait: bool = False) -> None:
        """Hear what became of a background save. A full disk does not end training; other errors are raised here."""
        if self.saver is None:
            return
        if wait:
            self.saver.wait()
        outcome = self.saver.outcome()
        if outcome is None:
            return
        request, error = outcome
        if error is None:
            self._unsaved = None
        elif isinstance(error, OSError):
            self._save_failed(request, error)
        else:
            raise error

    def tell_unwritten(self, what: str) -> None:
        """Something of the run that the disk did not take to the end: `train` ends with it, or with the checkpoint it lacks."""
        self._unsaved = self._unsaved or what

    def _save_failed(self, request: SaveRequest, error: OSError) -> None:
        self._unsaved = failure_sentence(request.step, request.final, request.snapshot.nbytes, error)
        logger.warning(
            f"{self._unsaved} Training continues; earlier checkpoints are untouched, and the next save will be tried."
        )
        if self.state.best_model_checkpoint == str(request.final) and not request.final.exists():
            self.state.best_model_checkpoint = request.best_before

    # ---- a checkpoint ------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Put the state aside (or write it at once), verify it by its manifest, rename it. Overrides Trainer's in-place save."""
        self.settle_saves(wait=True)  # one save at a time
        self.settle_skipped_steps(wait=True)
        if self._refuse_to_save_nonfinite_weights():
            return
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        if self._is_alone:
            self._save_alone(run_dir)
        else:
            self._save_together(run_dir)
        if self.args.push_to_hub or self._readers_of_checkpoints():
            self.settle_saves(wait=True)
        final = run_dir / f"{files.PREFIX}{self.state.global_step}"
        self._just_saved = final if self.args.should_save and final.exists() else None
        if self.args.push_to_hub and final.exists():
            self._push_from_checkpoint(str(final))

    def _save_alone(self, run_dir: Path) -> None:
        """The save of a single process. With `save_in_background` only copies are made here; a thread does the rest."""
        staged = files.staging_folder(run_dir, self.state.global_step)
        before = self.state.best_model_checkpoint
        self._remember_best(run_dir, files.final_name(staged))
        arena = self.saver.arena_for_next() if self._background else None
        self._background = arena is not None
        snapshot = Snapshot(staged, arena)
        keep, best = self.args.save_total_limit, self.state.best_model_checkpoint
        request = SaveRequest(self.state.global_step, snapshot, run_dir, keep, [best], before)
        try:
            with capturing(snapshot):
                self._write_state(staged)
            if not self._background:
                write_checkpoint(request)
                self._unsaved = None
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            self._save_failed(request, error)
        else:
            if self._background:
                self.saver.submit(request)

    def _save_together(self, run_dir: Path) -> None:
        """Several processes, FSDP, DeepSpeed: each writes its part into one folder, at once, then the first publishes it."""
        staged = run_dir / f"{files.PREFIX}{self.state.global_step}{files.STAGING}shared"
        before = self.state.best_model_checkpoint
        self._remember_best(run_dir, files.final_name(staged))
        keep, best = self.args.save_total_limit, self.state.best_model_checkpoint
        request = SaveRequest(self.state.global_step, Snapshot(staged), run_dir, keep, [best], before)
        failure: OSError | None = None
        try:
            self._write_state(staged)
        except OSError as error:
            failure = error
        failed = self.any_process(failure is not None)
        if self.args.should_save:
            if failed:
                shutil.rmtree(staged, ignore_errors=True)
            else:
                try:
                    write_checkpoint(request)
                except OSError as error:
                    failure = error
        if self.any_process(failure is not None):
            self._save_failed(request, failure or OSError(errno.EIO, "another process could not write its part"))
        else:
            self._unsaved = None

    def any_process(self, here: bool) -> bool:
        """Whether something is true of any process. Collective."""
        if self.args.world_size == 1:
            return here
        flag = torch.tensor(float(here), device=self.args.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    # ---- its parts ---------------------------------------------------------------------------------------------------

    def _write_state(self, staged: Path) -> None:
        """Every file of a checkpoint, but for the manifest."""
        staged.mkdir(parents=True, exist_ok=True)
        self.save_model(str(staged), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(staged))
            self._save_scaler(str(staged))
            self._save_rng_state(str(staged))
        if self.args.should_save:
            self._capture_run_state().save(staged)
            self._save_trainer_state(staged / TRAINER_STATE)
            for callback in self._callbacks_with_files():
                callback.save_state_files(staged)

    def admit_files_of_callbacks(self) -> None:
        """What a callback's `on_save` has added to the checkpoint just saved belongs to it; an error of the disk is told."""
        if self._just_saved is not None and self._readers_of_checkpoints():
            with files.spared(f"The manifest of {self._just_saved} with what callbacks have added"):
                files.admit_added(self._just_saved)

    def _readers_of_checkpoints(self) -> list[str]:
        """Callbacks whose `on_save` may open the finished folder, which is then waited for. Ours do not."""
        return [
            type(callback).__name__
            for callback in self.callback_handler.callbacks
            if type(callback).on_save is not TrainerCallback.on_save
            and not type(callback).__module__.startswith("posttrain.")
            and not _ignores_checkpoints(callback)
        ]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.settle_saves(wait=True)  # the best checkpoint is loaded, and callbacks see the end of the run
        return super()._finalize_training(*args, **kwargs)

    def _callbacks_with_files(self) -> list[Any]:
        """Callbacks whose tensors belong into checkpoints, such as BEMACallback."""
        return [c for c in self.callback_handler.callbacks if hasattr(c, "save_state_files")]

    def _remember_best(self, run_dir: Path, final: Path) -> None:
        if self.state.best_global_step:
            best = run_dir / f"checkpoint-{self.state.best_global_step}"
            if best.exists() or best == final:
                self.state.best_model_checkpoint = str(best)

    def _save_trainer_state(self, path: Path) -> None:
        for callback in [*self.callback_handler.callbacks, self.control]:
            if isinstance(callback, ExportableState):
                self.state.stateful_callbacks[type(callback).__name__] = callback.state()
        files.write_json(path, dataclasses.asdict(self.state))

    def _capture_run_state(self) -> RunState:
        state = self.run_state
        state.loss_total = self._total_loss_scalar
        state.last_logged_step = self._globalstep_last_logged
        return state

    def nonfinite_weights(self) -> list[str]:
        """Names of the tensors that hold NaN or infinity. To be called by all processes."""
        # Asking about the whole of a sharded parameter would be a collective for each.
        parameters = self.model.named_parameters()
        named = [(name, local_part(p.detach())) for name, p in parameters if p.is_floating_point()]
        finite = torch.stack([torch.isfinite(p).all().to(self.args.device) for _, p in named])
        if not self.any_process(not finite.all()):  # the one time that the host asks
            return []
        return [name for (name, _), fine in zip(named, finite.tolist()) if not fine] or ["on another process"]

    def _refuse_to_save_nonfinite_weights(self) -> bool:
        bad = self.nonfinite_weights()
        if not bad:
            return False
        found = (
            f"No checkpoint is saved at step {self.state.global_step}: {len(bad)} tensors hold NaN or infinity, the first is "
            f"{bad[0]}. The last good checkpoint stays as it is."
        )
        if not self.run_state.skipped_in_a_row:
            # No gradient shows it (an embedding row that no token uses, say): the run would go on and never save again.
            raise NonFiniteTraining(
                found + " The steps taken since were finite, so the model came with it: check its weights."
            )
        logger.error(found)
        return True

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Weights, tokenizer and options; options as JSON instead of Trainer's pickle."""
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model.save_pretrained(str(folder), state_dict=state_dict)
        if self.args.should_save:
            self._save_tokenizer(folder)
            files.write_json(folder / OPTIONS, self.args.to_dict())

    def _save_tokenizer(self, folder: Path) -> None:
        if self._tokenizer_files is not None and is_capturing():
            for name, content in self._tokenizer_files.items():
                write_content(folder / name, content)
        elif self.processing_class is not None:
            self.processing_class.save_pretrained(str(folder))

    @property
    def _is_alone(self) -> bool:
        """One process that has all of the state."""
        return self.args.world_size == 1 and self.args.sharding is None

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._own_formats:
            return super()._save_optimizer_and_scheduler(output_dir)
        if self.is_fully_sharded:
            files.save_tree(self.shards_file(output_dir), shard_tree(self.optimizer))
        elif self.args.should_save:
            tree: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
            if self.masters is not None:
                tree["masters"] = [master.data for _, master in self.masters.pairs]
            files.save_tree(Path(output_dir) / OPTIMIZER, tree)
        if self.args.should_save:
            files.save_tree(Path(output_dir) / SCHEDULER, _without_functions(self.lr_scheduler.state_dict()))
        return None

    def shards_file(self, folder: str | Path) -> Path:
        """Where this process keeps its shards of trained weights and of the optimizer's state."""
        return Path(folder) / SHARDS.format(rank=self.args.process_index)

    def _save_rng_state(self, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_rng(Path(output_dir), self.args.process_index)
        save_sums(Path(output_dir), self.args.process_index, self.metrics.state(), float(self._tr_loss))

    def settle_skipped_steps(self, wait: bool = False) -> None:
        """Hear from the device which steps were skipped. Implemented by BaseTrainer."""
        raise NotImplementedError


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    """A LambdaLR keeps its functions in its state; they are made anew from the options."""
    return {name: value for name, value in state.items() if not callable(value) and name != "lr_lambdas"} | (
        {"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else {}
    )


def _saved_files(tokenizer: Any) -> dict[str, bytes]:
    """The files of a tokenizer. Making them takes a while for a large vocabulary, and they do not change during a run."""
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _ignores_checkpoints(callback: Any) -> bool:
    """Trackers of transformers that have an `on_save` and do nothing in it (unless they were told to upload checkpoints)."""
    uploads = getattr(getattr(callback, "_log_model", None), "value", None) == "checkpoint"
    return type(callback).__name__ in ("TrackioCallback", "SwanLabCallback", "WandbCallback") and not uploads
