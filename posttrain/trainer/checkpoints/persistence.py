"""RunLifecycle: how a run begins, is resumed, is refused to be resumed, and ends. Saving is in `saving.py`."""

from __future__ import annotations

import json
import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from posttrain.core.faults import fault_point
from posttrain.core.options import resume_request
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.background_save import CheckpointNotSaved
from posttrain.trainer.checkpoints.run_state import RNG_FILE, RunIdentity, RunState, load_sums, run_of
from posttrain.trainer.checkpoints.saving import Checkpoints
from posttrain.trainer.checkpoints.skipped import SkippedSteps
from posttrain.trainer.options.base import BaseConfig
from posttrain.trainer.step.gathering import any_process
from posttrain.trainer.step.metrics import MetricStore

logger = logging.getLogger(__name__)


DEFAULT_HANDLERS = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
"""For a second signal where the first would have been ignored, as SIGINT is in a shell's background job."""


RUN_FILE = ".posttrain.run"
"""Which run an output folder belongs to. Written before anything of an earlier run is moved, so that a kill in between is safe."""
EARLIER = "earlier-run-"
LOGS = ("metrics.jsonl", "alerts.jsonl", "skipped_steps.jsonl", "rollouts", "rollout_images")


def current_run(output_dir: str | Path) -> str | None:
    """The id of the latest run in a folder; None where no run has left one."""
    try:
        return json.loads((Path(output_dir) / RUN_FILE).read_text(encoding="utf-8"))["run_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def set_aside_other_runs(output_dir: str | Path, run_id: str | None, is_new: bool = False) -> None:
    """Move checkpoints of other runs into folders of their own, so that they are not resumed, exported, rotated or shown as
    this run's. Where the run is new, the logs go with them, and checkpoints that do not say whose they are; such a checkpoint is
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


class ResumableRun(Protocol):
    """What is asked of a run when it begins, and what is restored when it is resumed."""

    args: BaseConfig
    metrics: MetricStore
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    reference: Any
    callback_handler: CallbackHandler
    # what Trainer's loop has added up
    _tr_loss: Tensor
    _total_loss_scalar: float
    _globalstep_last_logged: int
    _initial_global_step: int
    # what it does
    identity: Callable[[], RunIdentity]
    load_state_files: Callable[[Path], None]
    settle_skipped_steps: Callable[[], None]


class RunLifecycle(TrainerCallback):
    """Around training: holds the output folder, chooses the checkpoint, stops after a signal. As a callback it restores sums when
    training begins, takes note of saves, and ends a run with too many skipped steps."""

    def __init__(self, run: ResumableRun, checkpoints: Checkpoints, skipped: SkippedSteps) -> None:
        self.run, self.args, self.checkpoints, self.skipped = run, run.args, checkpoints, skipped
        self.stop_signal: int | None = None
        self.resumed_from: Path | None = None
        self.continues = False  # whether a resume was asked for, be there a checkpoint or not

    @contextmanager
    def running(self, wanted: str | bool | None) -> Iterator[str | None]:
        """For as long as training takes; gives the checkpoint to resume from. `wanted` is `train`'s `resume_from_checkpoint`."""
        with ExitStack() as stack:
            if self.args.should_save:
                files.refuse_unwritable(self.args.output_dir)
                stack.enter_context(files.locked(self.args.output_dir))
                files.recover_or_remove_leftovers(self.args.output_dir)
            stack.enter_context(self._stopping_on_signals())
            stack.enter_context(self.checkpoints.finishing())  # before the folder is given free
            resume = self.resumed_from = self._checkpoint_to_resume(wanted)
            new = RunState(self.run.identity(), run_id=uuid.uuid4().hex[:12]) if resume is None else None
            self.checkpoints.run_state = new or self._accepted_state(resume)
            self._claim_folder(is_new=resume is None)
            for callback in self.run.callback_handler.callbacks:
                if hasattr(callback, "take_reference"):  # that which is asked: online methods hold it apart
                    callback.take_reference(getattr(self.run, "live", None) or self.run.reference, self.run.model)
            if resume is not None:
                for callback in self.checkpoints.callbacks_with_files():
                    callback.load_state_files(resume)
            yield None if resume is None else str(resume)
        unsaved = self.checkpoints.unsaved
        if unsaved is not None:
            logger.error(f"{unsaved} The run has ended without it.")
            raise CheckpointNotSaved(unsaved)
        if self.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt("stopped by SIGINT after a checkpoint was saved")
        if self.stop_signal is not None:
            raise SystemExit(128 + self.stop_signal)

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> Path | None:
        wanted = resume_request(wanted)
        self.continues = bool(wanted)
        if not wanted:
            return None
        if wanted is True:
            if self.args.should_save:
                set_aside_other_runs(self.args.output_dir, current_run(self.args.output_dir))
            PartialState().wait_for_everyone()  # a checkpoint that is about to be moved must not be chosen
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
        changes = state.accept(self.run.identity(), self.args.resume_allow_changes, folder)
        if changes:
            raise ValueError(
                f"{folder} belongs to a run that differs from this one (then -> now):\n  "
                + "\n  ".join(changes)
                + "\nA resumed run would not be the run that was stopped. Undo the change, name it in `resume_allow_changes`, "
                "start afresh in another `output_dir`, or here with `resume_from_checkpoint=False` (--fresh)."
            )
        return state

    def _claim_folder(self, is_new: bool) -> None:
        """From here on the output folder is this run's: what earlier runs saved there is moved aside."""
        if self.args.should_save:
            output_dir, run_id = self.args.output_dir, self.checkpoints.run_state.run_id
            marker = Path(output_dir) / RUN_FILE
            with files.best_effort(f"{marker}, which says whose checkpoints these are,"):
                files.write_json(marker, {"run_id": run_id})
            set_aside_other_runs(output_dir, run_id, is_new)

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

    def wants_last_log(self) -> bool:
        """Whether a run that is stopped before its last step has still to log, after saving: the checkpoint keeps the sums, so that
        a resumed run logs what one that was never stopped would. Arms `control` for that."""
        run, control = self.run, self.run.control
        is_logged = run._globalstep_last_logged == run.state.global_step
        if not control.should_training_stop or is_logged or self.args.logging_strategy != "steps":
            return False
        control.should_log, control.should_evaluate, control.should_save = True, False, False
        return True

    # ---- as a callback -----------------------------------------------------------------------------------------------

    def on_train_begin(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        if self.resumed_from is not None:
            self._restore_sums(self.resumed_from)  # Trainer has reset its own
            self.run.load_state_files(self.resumed_from)
        self.skipped.begin(state.global_step)
        self.checkpoints.prepare()

    def _restore_sums(self, folder: Path) -> None:
        run, state = self.run, self.checkpoints.run_state
        saved = load_sums(folder, self.args.process_index, self.args.world_size)
        run.metrics.load_state(*(metrics for metrics, _ in saved))
        run._tr_loss = torch.tensor(sum(loss for _, loss in saved), device=self.args.device, dtype=run._tr_loss.dtype)
        run._total_loss_scalar = state.loss_total
        run._globalstep_last_logged = state.last_logged_step
        run._initial_global_step = 0  # the mean loss of the run is over all of its steps, not since the resume

    def on_pre_optimizer_step(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        fault_point("step.before")

    def on_optimizer_step(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        fault_point("step.after")

    def on_save(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        """Other callbacks put files of their own into checkpoints; those that are called after this one are asked later."""
        self.checkpoints.admit_files_of_callbacks()

    def on_step_begin(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self.checkpoints.admit_files_of_callbacks(is_last=True)

    on_train_end = on_step_begin

    def on_step_end(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.settle_skipped_steps()
        self.checkpoints.settle()
        control.should_log |= args.logs_at(state.global_step, state)
        if self._any_process_signalled(args, state):
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def _any_process_signalled(self, args: BaseConfig, state: Any) -> bool:
        signalled = self.stop_signal is not None
        if args.world_size == 1:
            return signalled
        # Processes must stop at one step. Asking costs a synchronisation, so on a GPU it is done when a log makes one anyway.
        if args.device.type != "cpu" and state.global_step % max(int(state.logging_steps or 1), 1):
            return False
        any_signalled = any_process(signalled, args)
        if any_signalled and not signalled:
            self.stop_signal = signal.SIGTERM
        return any_signalled
