"""Callbacks that users may add, under TRL's names."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from posttrain.models.reference import Reference


class SyncRefModelCallback(TrainerCallback):
    """TR-DPO (arXiv:2404.09656): every `ref_model_sync_steps` the reference moves a share towards the policy."""

    def __init__(self, ref_model: Reference, accelerator: Any = None) -> None:
        self.reference = ref_model
        self.accelerator = accelerator

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % args.ref_model_sync_steps == 0:
            model = kwargs["model"]
            if self.accelerator is not None:
                model = self.accelerator.unwrap_model(model)
            self.reference.sync(model, args.ref_model_mixup_alpha)
