"""BEMA: a bias-corrected moving average of the weights, kept beside the run and saved at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from posttrain.models.load.reference import FrozenCopy, Reference
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.options.base import BaseConfig, check_range
from posttrain.trainer.references.setup import MOVED_REFERENCE, load_moved, save_moved

BEMA_FOLDER = "bema"
STATE_FILE = "bema_state"


class BEMACallback(TrainerCallback):
    """Bias-corrected exponential moving average (arXiv:2508.00180), over the trained parameters, by name.

    With theta_0 the weights after step `update_after` (0: before the first step), every `update_freq` steps from there, t being
    the number of optimizer steps taken:

        beta_t  = max((lag + multiplier * t) ** -ema_power, min_ema_multiplier)
        EMA     = (1 - beta_t) * EMA + beta_t * theta_t                       (EMA starts at theta_0)
        alpha_t = (lag + multiplier * t) ** -bias_power
        BEMA    = alpha_t * (theta_t - theta_0) + EMA

    The averages are float32 (float64 for float64 weights) on `device` of the first process. `<output_dir>/bema` is a model
    (or an adapter) to load like any other.

    With `update_ref_model` the reference of the run takes the averaged weights after step `ref_model_update_after` (where there are
    averages by then) and every `ref_model_update_freq` steps from there. It has to be a model of its own.
    """

    def __init__(
        self,
        update_freq: int = 400,
        ema_power: float = 0.5,
        bias_power: float = 0.2,
        lag: int = 10,
        update_after: int = 0,
        multiplier: float = 1.0,
        min_ema_multiplier: float = 0.0,
        device: str = "cpu",
        update_ref_model: bool = False,
        ref_model_update_freq: int = 400,
        ref_model_update_after: int = 0,
    ) -> None:
        check_range("update_freq", update_freq, 1)
        check_range("ema_power", ema_power, 0)
        check_range("bias_power", bias_power, 0)
        check_range("lag", lag, 1)
        check_range("update_after", update_after, 0)
        check_range("multiplier", multiplier, 0)
        check_range("min_ema_multiplier", min_ema_multiplier, 0, 1)
        check_range("ref_model_update_freq", ref_model_update_freq, 1)
        check_range("ref_model_update_after", ref_model_update_after, 0)
        self.update_freq, self.update_after = update_freq, update_after
        self.ema_power, self.bias_power = ema_power, bias_power
        self.lag, self.multiplier, self.min_ema_multiplier = lag, multiplier, min_ema_multiplier
        self.update_ref_model = update_ref_model
        self.ref_model_update_freq, self.ref_model_update_after = ref_model_update_freq, ref_model_update_after
        self.device = torch.device(device)
        self.start: dict[str, Tensor] = {}  # theta_0
        self.average: dict[str, Tensor] = {}  # EMA
        self.weights: dict[str, Tensor] = {}  # BEMA, as of the latest update
        self.reference: FrozenCopy | None = None  # that follows the averages
        self._has_moved = False
        self._was_loaded = False

    # ---- the formula -------------------------------------------------------------------------------------------------

    def ema_weight(self, step: int) -> float:
        """beta_t: the share of the latest weights."""
        return max((self.lag + self.multiplier * step) ** -self.ema_power, self.min_ema_multiplier)

    def bias_weight(self, step: int) -> float:
        """alpha_t: how far the average is pushed along the way that was gone."""
        return (self.lag + self.multiplier * step) ** -self.bias_power

    @torch.no_grad()
    def begin(self, model: nn.Module) -> None:
        """Take theta_0."""
        self.start = {name: self._kept(parameter, copy=True) for name, parameter in trained_parameters(model)}
        self.average = {name: tensor.clone() for name, tensor in self.start.items()}
        self.weights = {name: tensor.clone() for name, tensor in self.start.items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        beta, alpha = self.ema_weight(step), self.bias_weight(step)
        for name, parameter in trained_parameters(model):
            now = self._kept(parameter)
            average = self.average[name].lerp_(now, beta)
            self.weights[name].copy_(now).sub_(self.start[name]).mul_(alpha).add_(average)

    def _kept(self, parameter: Tensor, copy: bool = False) -> Tensor:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        return parameter.detach().to(self.device, dtype, copy=copy)

    # ---- the run -----------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        if getattr(args, "sharding", None) is not None:
            raise ValueError(
                "BEMACallback averages whole weights; under FSDP and DeepSpeed they are sharded. Leave it out."
            )
        if self.update_ref_model and self.reference is None:
            raise ValueError("`update_ref_model` writes averages into a reference, which this trainer does not have.")
        if self.update_ref_model and getattr(args, "sync_ref_model", False):
            raise ValueError(
                "`sync_ref_model` and BEMACallback(update_ref_model=True) both move the reference: choose one."
            )
        if not state.is_world_process_zero:
            return
        if self.update_after >= state.max_steps:
            raise ValueError(
                f"`update_after` is {self.update_after}, but the run has {state.max_steps} steps: nothing would be averaged."
            )
        if state.global_step > self.update_after:
            self._resume(args.output_dir, state.global_step)
        elif state.global_step == self.update_after:
            self.begin(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        step = state.global_step
        after = step - self.update_after
        if state.is_world_process_zero and after == 0:
            self.begin(model)
        elif state.is_world_process_zero and after > 0 and after % self.update_freq == 0:
            self.update(model, step)
        since = step - self.ref_model_update_after
        is_due = since >= 0 and since % self.ref_model_update_freq == 0
        if self.update_ref_model and step >= self.update_after and is_due:
            self._move_reference(model, getattr(args, "world_size", 1))

    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: nn.Module | None = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not self.weights:
            return
        folder = Path(args.output_dir) / BEMA_FOLDER
        with self.averaged(model) as averaged:
            averaged.save_pretrained(folder)
        if processing_class is not None:
            processing_class.save_pretrained(folder)

    # ---- the reference -----------------------------------------------------------------------------------------------

    def take_reference(self, reference: Reference | None, policy: nn.Module) -> None:
        """Before training: the reference of the run, which is refused where it cannot hold the averages."""
        if not self.update_ref_model or reference is None:
            return
        if not isinstance(reference, FrozenCopy):
            raise ValueError(
                f"`update_ref_model` writes averages into a reference that is a model of its own; here it is {reference}. Pass "
                "`ref_model`, turn `precompute_ref_log_probs` off, or leave `update_ref_model` out."
            )
        known = {name: parameter.shape for name, parameter in reference.model.named_parameters()}
        for name, parameter in trained_parameters(policy):
            if known.get(name) != parameter.shape:
                raise ValueError(
                    f"`update_ref_model` writes averages into the reference, which has no {name} of {tuple(parameter.shape)}: "
                    "with an adapter, or with a reference of another shape, leave it out."
                )
        self.reference = reference

    @torch.no_grad()
    def _move_reference(self, model: nn.Module, world_size: int) -> None:
        """reference = BEMA; the first process has the averages, and gives them to the others."""
        parameters = dict(self.reference.model.named_parameters())
        for name, _ in trained_parameters(model):
            if self.weights:
                parameters[name].copy_(self.weights[name])
            if world_size > 1:
                torch.distributed.broadcast(parameters[name], 0)
        self._has_moved = True

    @contextmanager
    def averaged(self, model: nn.Module) -> Iterator[nn.Module]:
        """The model with the averaged weights in place, as long as the block lasts."""
        model = _unwrapped(model)
        own = {name: parameter.detach().clone() for name, parameter in trained_parameters(model)}
        self._put(model, self.weights)
        try:
            yield model
        finally:
            self._put(model, own)

    @torch.no_grad()
    def _put(self, model: nn.Module, values: dict[str, Tensor]) -> None:
        for name, parameter in trained_parameters(model):
            parameter.copy_(values[name])

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def save_state_files(self, folder: Path) -> None:
        """Write the averages into the folder of a checkpoint."""
        if self.weights:
            tree = {"start": self.start, "average": self.average, "weights": self.weights}
            files.save_tree(Path(folder) / STATE_FILE, tree)
        if self._has_moved:
            save_moved(self.reference, Path(folder))

    def load_state_files(self, folder: Path) -> None:
        """Read them back; a checkpoint from before `update_after` has none, and a reference that has not moved is not in it."""
        if self.reference is not None and (Path(folder) / MOVED_REFERENCE).with_suffix(".json").exists():
            load_moved(self.reference, Path(folder))
            self._has_moved = True
        if not (Path(folder) / STATE_FILE).with_suffix(".json").exists():
            return
        tree = files.load_tree(Path(folder) / STATE_FILE, self.device)
        self.start, self.average, self.weights = tree["start"], tree["average"], tree["weights"]
        self._was_loaded = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Under transformers' own Trainer; ours has called `save_state_files`, and the folder may not be there yet."""
        if isinstance(args, BaseConfig):
            return
        folder = Path(args.output_dir) / f"{files.PREFIX}{state.global_step}"
        is_there = (folder / STATE_FILE).with_suffix(".json").exists()
        if state.is_world_process_zero and folder.is_dir() and not is_there:
            self.save_state_files(folder)

    def _resume(self, output_dir: str, step: int) -> None:
        folder = Path(output_dir) / f"{files.PREFIX}{step}"
        if not self._was_loaded:  # by a caller that knows the checkpoint's folder
            self.load_state_files(folder)
        if not self._was_loaded:
            raise FileNotFoundError(
                f"BEMACallback has no averages for step {step}: {folder} holds no {STATE_FILE}. Its theta_0 is lost, so a resumed "
                "average would not be that of the run. Resume without the callback, or start the run afresh."
            )
        self._was_loaded = False


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile; a PEFT model stays one."""
    model = getattr(model, "_orig_mod", model)
    return getattr(model, "module", model) if not hasattr(model, "config") else model


def trained_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """(name, parameter) of all that is trained; frozen weights, such as those under an adapter, are not averaged."""
    return [(name, parameter) for name, parameter in _unwrapped(model).named_parameters() if parameter.requires_grad]
