"""Callbacks that users may add, under TRL's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from posttrain.models.load.reference import Reference, frozen_copy
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.online.log_completions import LogCompletionsCallback
from posttrain.trainer.report.progress import RichProgressCallback
from posttrain.trainer.step.bema import BEMACallback

__all__ = ["BEMACallback", "LogCompletionsCallback", "RichProgressCallback", "SyncRefModelCallback"]


MOVED_REFERENCE = "moved_reference"


class SyncRefModelCallback(TrainerCallback):
    """TR-DPO (arXiv:2404.09656): every `ref_model_sync_steps` the reference moves a share towards the policy.

    reference = (1 - ref_model_mixup_alpha) * reference + ref_model_mixup_alpha * policy
    """

    def __init__(self, ref_model: Reference | nn.Module, accelerator: Any = None) -> None:
        self.reference = ref_model if isinstance(ref_model, Reference) else frozen_copy(ref_model)
        self.accelerator = accelerator

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            model = kwargs["model"]
            if self.accelerator is not None:
                model = self.accelerator.unwrap_model(model)
            self.reference.sync(model, args.ref_model_mixup_alpha)

    def save_state_files(self, folder: Path) -> None:
        """A reference that has moved is a part of the run's state."""
        files.save_tree(Path(folder) / MOVED_REFERENCE, dict(self.reference.model.named_parameters()))

    def load_state_files(self, folder: Path) -> None:
        saved = files.load_tree(Path(folder) / MOVED_REFERENCE)
        with torch.no_grad():
            for name, parameter in self.reference.model.named_parameters():
                parameter.copy_(saved[name])
