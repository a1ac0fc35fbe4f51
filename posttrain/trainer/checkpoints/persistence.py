"""PersistentTrainer: how a run begins, is resumed, is refused to be resumed, and ends. Saving is in `saving.py`."""

from __future__ import annotations

import json
import logging
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from posttrain.core.faults import fault_point
from posttrain.core.options import resume_wish
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.background_save import CheckpointNotSaved
from posttrain.trainer.checkpoints.run_state import RNG_FILE, RunIdentity, RunState, load_rng, load_sums, run_of
from posttrain.trainer.checkpoints.saving import OPTIMIZER, SCHEDULER, SavingTrainer
from posttrain.trainer.checkpoints.sharding import load_shard_tree, load_shards
from posttrain.trainer.options.base import BaseConfig

logger = logging.getLogger(__name__)


DEFAULT_HANDLERS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""For a second signal where the first would have been ignored, as SIGINT is in a shell's background job."""


RUN_FILE = ".posttrain.run"
"""Which run an output folder belongs to. Written before anything of an earlier run is moved, so that a kill in between is safe."""
EARLIER = "earlier-run-"
LOGS = ("metrics.jsonl", "alerts.jsonl", "skipped_steps.jsonl", "rollouts")


def current_run(output_dir: str | Path) -> str | None:
    """The id of the latest run in a folder; None where no run has left one."""
    try:
        return json.loads((Path(output_dir) / RUN_FILE).read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def set_aside_other_runs(output_dir: str | Path, run_id: str | None, is_new: bool = False) -> None:
    """Move checkpoints of other runs into folders of their own, so that nobody resumes, exports, rotates or shows them as this
    run's. Where the run is new, the logs go with them, and checkpoints that do not say whose they are; such a checkpoint is
    damaged, and a run that resumes reports that."""
    output_dir = Path(output_dir)
    owners = [(path, run_of(path)) for path in files.checkpoints(output_dir)]
    others = [(path, owner) for path, owner in owners if owner != run_id and (owner is not None or is_new)]
    if run_id is None or not others:
        return
    moved = [_moved(path, output_dir / f"{EARLIER}{owner or 'unknown'}") for path, owner in others]  # newest step first
    if is_new:
        for path in filter(Path.exists, (output_dir / name for name in LOGS)):
            _moved(path, moved[0].parent)
    logger.warning(
        f"{output_dir} held {len(others)} checkpoints of an earlier run. They were moved to {moved[0].parent}, "
        f"and resume_from_checkpoint={moved[0]} continues that run."
    )


def _moved(path: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    number = 1
    target = folder / path.name
    while target.exists():  # runs of versions without ids share a folder
        number += 1
        target = folder / f"{number}" / path.name
    target.parent.mkdir(exist_ok=True)
    return path.rename(target)


class PersistentTrainer(SavingTrainer):
    """A trainer with exact, verified checkpoints. Methods derive from BaseTrainer, not from this."""

    stop_signal: int | None = None
    resumed_from: Path | None = None

    def identity(self) -> RunIdentity:
        """What this run is made of; two runs of equal identity take equal steps."""
        raise NotImplementedError

    # ---- train, and how it ends ----------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train. `resume_from_checkpoint=True` takes the newest checkpoint that verifies, or starts afresh with none."""
        with ExitStack() as stack:
            if self.args.should_save:
                files.refuse_unwritable(self.args.output_dir)
                stack.enter_context(files.locked(self.args.output_dir))
                files.recover_or_remove_leftovers(self.args.output_dir)
            stack.enter_context(self._stopping_on_signals())
            stack.enter_context(self._finishing_saves())  # before the folder is given free
            resume = self.resumed_from = self._checkpoint_to_resume(resume_from_checkpoint)
            self.run_state = self._new_state() if resume is None else self._accepted_state(resume)
            self._own_the_folder(is_new=resume is None)
            if resume is not None:
                for callback in self._callbacks_with_files():
                    callback.load_state_files(resume)
            output = super().train(None if resume is None else str(resume), trial, ignore_keys_for_eval)
        if self._unsaved is not None:
            logger.error(f"{self._unsaved} The run has ended without it.")
            raise CheckpointNotSaved(self._unsaved)
        if self.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt("stopped by SIGINT after a checkpoint was saved")
        if self.stop_signal is not None:
            raise SystemExit(128 + self.stop_signal)
        return output

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> Path | None:
        wanted = resume_wish(wanted)
        if not wanted:
            return None
        if wanted is True:
            if self.args.should_save:
                set_aside_other_runs(self.args.output_dir, current_run(self.args.output_dir))
            self.accelerator.wait_for_everyone()  # nobody chooses a checkpoint that is about to be moved
            found = files.newest_good_checkpoint(self.args.output_dir)
            if found is None:
                logger.warning(f"{self.args.output_dir} holds no checkpoint: the run starts from its beginning.")
            return found
        files.verify(wanted)
        return Path(wanted)

    def _accepted_state(self, folder: Path) -> RunState:
        """The state of a checkpoint, if it belongs to this run; else an error that shows what changed."""
        state = RunState.load(folder)
        if not (folder / RNG_FILE.format(rank=0)).with_suffix(".json").exists():
            raise ValueError(
                f"{folder} holds the model only (`save_only_model=True`): load it as the model of a new run instead of resuming."
            )
        changes = state.accept(self.identity(), self.args.resume_allow_changes, folder)
        if changes:
            raise ValueError(
                f"{folder} belongs to a run that differs from this one (then -> now):\n  "
                + "\n  ".join(changes)
                + "\nA resumed run would not be the run that was stopped. Undo the change, name it in `resume_allow_changes`, "
                "start afresh in another `output_dir`, or here with `resume_from_checkpoint=False` (--fresh)."
            )
        return state

    def _new_state(self) -> RunState:
        return RunState(self.identity(), run_id=uuid.uuid4().hex[:12])

    def _own_the_folder(self, is_new: bool) -> None:
        """From here on the output folder is this run's: what earlier runs saved there is moved aside."""
        if self.args.should_save:
            output_dir, run_id = self.args.output_dir, self.run_state.run_id
            marker = Path(output_dir) / RUN_FILE
            with files.spared(f"{marker}, which says whose checkpoints these are,"):
                files.write_json(marker, {"run_id": run_id})
            set_aside_other_runs(output_dir, run_id, is_new)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Trainer asks whether the run is over only after a step: resumed at its end, it would take one step too many."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """A run that is stopped before its last step logs what it has not logged yet, after saving: the checkpoint keeps the sums,
        so that a resumed run logs what one that was never stopped would."""
        super()._maybe_log_save_evaluate(*args, **kwargs)
        is_logged = self._globalstep_last_logged == self.state.global_step
        if self.control.should_training_stop and not is_logged and self.args.logging_strategy == "steps":
            self.control.should_log, self.control.should_evaluate, self.control.should_save = True, False, False
            super()._maybe_log_save_evaluate(*args, **kwargs)

    @contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT: finish the step, save, leave. A second signal leaves at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals can only be handled in the main thread
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

        def stop(number: int, frame: FrameType | None) -> None:
            self.stop_signal = number
            logger.warning(f"{signal.Signals(number).name}: finishing the step and saving; once more to leave at once.")
            for known, handler in before.items():
                signal.signal(known, DEFAULT_HANDLERS[known] if handler is signal.SIG_IGN else handler)

        self.stop_signal = None
        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- resuming ------------------------------------------------------------------------------------------------------

    def restore_run_state(self) -> None:
        """Called when training begins, after Trainer has reset its own sums."""
        if self.resumed_from is None:
            return
        state = self.run_state
        metrics, loss = load_sums(self.resumed_from, self.args.process_index)
        self.metrics.load_state(metrics)
        self._tr_loss = torch.tensor(loss, device=self.args.device, dtype=self._tr_loss.dtype)
        self._total_loss_scalar = state.loss_total
        self._globalstep_last_logged = state.last_logged_step
        self._initial_global_step = (
            0  # the mean loss of the run is over all of its steps, not over those since the resume
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._own_formats:
            return super()._load_optimizer_and_scheduler(checkpoint)
        if self.is_fully_sharded:
            load_shard_tree(self.model, self.optimizer, files.load_tree(self.shards_file(checkpoint)))
        else:
            self._load_whole_optimizer(files.load_tree(Path(checkpoint) / OPTIMIZER))
        self.lr_scheduler.load_state_dict(files.load_tree(Path(checkpoint) / SCHEDULER))
        take_rates_of(self.lr_scheduler)
        return None

    def _load_whole_optimizer(self, tree: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(tree["optimizer"])
        if self.masters is not None:
            with torch.no_grad():
                for (_, master), saved in zip(self.masters.pairs, tree["masters"], strict=True):
                    master.copy_(saved)
            self.masters.publish()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_fully_sharded:
            return  # trained weights come with the optimizer's shards, all others from where the run began
        with self._dtypes_kept():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self.settle_saves(wait=True)
        if self.is_fully_sharded:
            best = files.load_tree(self.shards_file(self.state.best_model_checkpoint))
            return load_shards(self.model, self.optimizer, best)
        with self._dtypes_kept():
            super()._load_best_model()
        if self.masters is not None:
            self.masters.reload()
        return None

    @contextmanager
    def _dtypes_kept(self) -> Iterator[None]:
        """peft's `load_adapter` turns adapters into float32, whatever they were."""
        before = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        yield
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != before[name]:
                parameter.data = parameter.data.to(before[name])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_rng(Path(checkpoint), self.args.process_index)


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


class RunLifecycle(TrainerCallback):
    """Restores sums when training begins, hears of saves, stops training after a signal or too many skipped steps."""

    def __init__(self, trainer: PersistentTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.restore_run_state()
        self.trainer.skipped.begin(state.global_step)
        self.trainer.prepare_to_save()

    def on_pre_optimizer_step(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        fault_point("step.before")

    def on_optimizer_step(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        fault_point("step.after")

    def on_save(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Other callbacks put files of their own into checkpoints; those that are called after this one are asked later."""
        self.trainer.admit_files_of_callbacks()

    def on_step_begin(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.admit_files_of_callbacks()
        self.trainer._just_saved = None

    on_train_end = on_step_begin

    def on_step_end(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.settle_skipped_steps()
        self.trainer.settle_saves()
        control.should_log |= args.logs_at(state.global_step, state)
        if self._anybody_was_signalled(args, state):
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def _anybody_was_signalled(self, args: BaseConfig, state: Any) -> bool:
        signalled = self.trainer.stop_signal is not None
        if args.world_size == 1:
            return signalled
        # Processes must stop at one step. Asking costs a synchronisation, so on a GPU it is done when a log makes one anyway.
        if args.device.type != "cpu" and state.global_step % max(int(state.logging_steps or 1), 1):
            return False
        anybody = self.trainer.any_process(signalled)
        if anybody and not signalled:
            self.trainer.stop_signal = signal.SIGTERM
        return anybody
