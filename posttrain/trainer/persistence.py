"""PersistentTrainer: everything about saving, resuming, stopping and refusing to resume, as overrides of transformers.Trainer."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from posttrain.trainer import checkpoint as files
from posttrain.trainer.config import BaseConfig
from posttrain.trainer.metrics import MetricStore
from posttrain.trainer.optimizer import FiniteSteps, MasterWeights
from posttrain.trainer.run_state import RNG_FILE, RunIdentity, RunState, load_rng, load_sums, save_rng, save_sums
from posttrain.trainer.skipped import NonFiniteTraining

logger = logging.getLogger(__name__)

OPTIMIZER, SCHEDULER, TRAINER_STATE, OPTIONS = "optimizer", "scheduler", "trainer_state.json", "training_args.json"


class PersistentTrainer(transformers.Trainer):
    """transformers.Trainer with exact, verified checkpoints. Methods derive from BaseTrainer, not from this."""

    args: BaseConfig
    metrics: MetricStore
    masters: MasterWeights | None = None
    finite: FiniteSteps | None = None
    stop_signal: int | None = None
    run_state: RunState
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
                stack.enter_context(files.locked(self.args.output_dir))
                files.remove_leftovers(self.args.output_dir)
            stack.enter_context(self._stopping_on_signals())
            resume = self.resumed_from = self._checkpoint_to_resume(resume_from_checkpoint)
            self.run_state = RunState(self.identity()) if resume is None else self._accepted_state(resume)
            if resume is not None:
                for callback in self._callbacks_with_files():
                    callback.load_state_files(resume)
            output = super().train(None if resume is None else str(resume), trial, ignore_keys_for_eval)
        if self.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt("stopped by SIGINT after a checkpoint was saved")
        if self.stop_signal is not None:
            raise SystemExit(128 + self.stop_signal)
        return output

    def _checkpoint_to_resume(self, wanted: str | bool | None) -> Path | None:
        if not wanted:
            return None
        if wanted is True:
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
        changes = self.identity().differences(state.identity, self.args.resume_allow_changes)
        if changes:
            raise ValueError(
                f"{folder} belongs to a run that differs from this one (then -> now):\n  "
                + "\n  ".join(changes)
                + "\nA resumed run would not be the run that was stopped. Undo the change, name it in `resume_allow_changes`, "
                "or start afresh in another `output_dir`."
            )
        return state

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
                signal.signal(known, handler)

        self.stop_signal = None
        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # ---- saving --------------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write the checkpoint beside its place, verify it by its manifest, rename it. Overrides Trainer's in-place save."""
        self.settle_skipped_steps(wait=True)
        if self.args.should_save and self._refuse_to_save_nonfinite_weights():
            return
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        run_dir = Path(self._get_output_dir(trial=trial))
        staged = files.staging_folder(run_dir, self.state.global_step)
        if self.args.world_size > 1:  # every process writes into the folder of the first
            staged = staged.with_name(f"checkpoint-{self.state.global_step}{files.STAGING}shared")
        final = run_dir / f"checkpoint-{self.state.global_step}"
        self._remember_best(run_dir, final)
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
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            files.publish(staged)
            files.rotate(run_dir, self.args.save_total_limit, [self.state.best_model_checkpoint])
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))

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
        self.state.save_to_json(str(path))

    def _capture_run_state(self) -> RunState:
        state = self.run_state
        state.loss_total = self._total_loss_scalar
        state.last_logged_step = self._globalstep_last_logged
        return state

    def restore_run_state(self) -> None:
        """Called when training begins, after Trainer has reset its own sums."""
        if self.resumed_from is None:
            return
        state = self.run_state
        metrics, loss = load_sums(self.resumed_from, self.args.process_index)
        self.metrics.load_state(metrics, self.args.device)
        self._tr_loss = torch.tensor(loss, device=self.args.device, dtype=self._tr_loss.dtype)
        self._total_loss_scalar = state.loss_total
        self._globalstep_last_logged = state.last_logged_step
        self._initial_global_step = (
            0  # the mean loss of the run is over all of its steps, not over those since the resume
        )

    def _refuse_to_save_nonfinite_weights(self) -> bool:
        bad = [n for n, p in self.model.named_parameters() if p.is_floating_point() and not torch.isfinite(p).all()]
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
            if self.processing_class is not None:
                self.processing_class.save_pretrained(str(folder))
            files.write_json(folder / OPTIONS, self.args.to_dict())

    @property
    def _own_formats(self) -> bool:
        """FSDP and DeepSpeed write sharded states of their own."""
        return not (self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self._own_formats:
            return super()._save_optimizer_and_scheduler(output_dir)
        if not self.args.should_save:
            return None
        tree: dict[str, Any] = {"optimizer": self.optimizer.state_dict()}
        if self.masters is not None:
            tree["masters"] = [master.data for _, master in self.masters.pairs]
        files.save_tree(Path(output_dir) / OPTIMIZER, tree)
        files.save_tree(Path(output_dir) / SCHEDULER, _without_functions(self.lr_scheduler.state_dict()))
        return None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._own_formats:
            return super()._load_optimizer_and_scheduler(checkpoint)
        tree = files.load_tree(Path(checkpoint) / OPTIMIZER)
        self.optimizer.load_state_dict(tree["optimizer"])
        if self.masters is not None:
            with torch.no_grad():
                for (_, master), saved in zip(self.masters.pairs, tree["masters"], strict=True):
                    master.copy_(saved)
            self.masters.publish()
        self.lr_scheduler.load_state_dict(files.load_tree(Path(checkpoint) / SCHEDULER))
        return None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with self._dtypes_kept():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        with self._dtypes_kept():
            super()._load_best_model()
        if self.masters is not None:
            self.masters.reload()

    @contextmanager
    def _dtypes_kept(self) -> Iterator[None]:
        """peft's `load_adapter` turns adapters into float32, whatever they were."""
        before = {name: parameter.dtype for name, parameter in self.model.named_parameters()}
        yield
        for name, parameter in self.model.named_parameters():
            if parameter.dtype != before[name]:
                parameter.data = parameter.data.to(before[name])

    def _save_rng_state(self, output_dir: str) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        save_rng(Path(output_dir), self.args.process_index)
        save_sums(Path(output_dir), self.args.process_index, self.metrics.state(), float(self._tr_loss))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_rng(Path(checkpoint), self.args.process_index)

    def settle_skipped_steps(self, wait: bool = False) -> None:
        """Hear from the device which steps were skipped. Implemented by BaseTrainer."""
        raise NotImplementedError


def _without_functions(state: dict[str, Any]) -> dict[str, Any]:
    """A LambdaLR keeps its functions in its state; they are made anew from the options."""
    return {name: value for name, value in state.items() if not callable(value) and name != "lr_lambdas"} | (
        {"lr_lambdas": [None] * len(state["lr_lambdas"])} if "lr_lambdas" in state else {}
    )


class RunLifecycle(TrainerCallback):
    """Restores sums when training begins, stops it after a signal or too many skipped steps."""

    def __init__(self, trainer: PersistentTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.restore_run_state()

    def on_step_end(self, args: BaseConfig, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.settle_skipped_steps()
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
        flag = torch.tensor(float(signalled), device=args.device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
        if flag.item() and not signalled:
            self.trainer.stop_signal = signal.SIGTERM
        return bool(flag.item())
