"""MergeModelCallback: the policy of a run merged with another model, at its end or at every checkpoint."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback

from posttrain.exporting.model_merging import MergeConfig, check_alike, saved_tensors, write_merge
from posttrain.models.load.model import innermost_model
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.hub import upload_model_to_hf

logger = logging.getLogger(__name__)

MERGED_FOLDER = "merged"


class MergeModelCallback(TrainerCallback):
    """Merges the policy with another model (`MergeConfig`), from its weights in memory, into `<checkpoint>/merged`.

    At the end of training, or with `merge_at_every_checkpoint` at each checkpoint. A run that keeps no checkpoint of its last step
    has the merge in `<output_dir>/merged`. `push_to_hub` uploads it to a repository of its own, named after the run's and the step.
    """

    opens_checkpoints = True  # their folders have to be there

    def __init__(
        self,
        merge_config: MergeConfig | None = None,
        merge_at_every_checkpoint: bool = False,
        push_to_hub: bool = False,
    ) -> None:
        self.merge_config = MergeConfig() if merge_config is None else merge_config
        self.merge_at_every_checkpoint, self.push_to_hub = merge_at_every_checkpoint, push_to_hub

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        """What could not be merged after hours of training is refused before them."""
        if getattr(args, "sharding", None) is not None:
            raise ValueError(
                "MergeModelCallback merges whole weights; under FSDP and DeepSpeed they are sharded. Leave it out, and merge the "
                "model afterwards with merge_models(MergeConfig(policy_model_path=...), folder)."
            )
        self.merge_config.check()
        if self.push_to_hub and not args.hub_model_id:
            raise ValueError("MergeModelCallback(push_to_hub=True) names its repository after `hub_model_id`: set it.")
        if state.is_world_process_zero:
            target = saved_tensors(self._config_for(model).target_model_path, getattr(args, "trust_remote_code", False))
            check_alike(model, target, "target")

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        if self.merge_at_every_checkpoint:
            self._merge(args, state, model, kwargs.get("processing_class"))

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any) -> None:
        if not self.merge_at_every_checkpoint:
            self._merge(args, state, model, kwargs.get("processing_class"))

    def _config_for(self, model: nn.Module) -> MergeConfig:
        """With the target that is meant: None is the model that the policy was loaded from."""
        if self.merge_config.target_model_path is not None:
            return self.merge_config
        source = getattr(innermost_model(model).config, "_name_or_path", None)
        if not source:
            raise ValueError(
                "`target_model_path` is None, and the model that is trained was not loaded from anywhere: name a target."
            )
        return replace(self.merge_config, target_model_path=source)

    def _merge(self, args: Any, state: Any, model: nn.Module, tokenizer: Any) -> None:
        if not state.is_world_process_zero:
            return
        checkpoint = Path(args.output_dir) / f"{files.PREFIX}{state.global_step}"
        folder = (checkpoint if checkpoint.is_dir() else Path(args.output_dir)) / MERGED_FOLDER
        if folder.exists():
            logger.warning(f"{folder} is there already, and is kept as it is: this step was merged before.")
            return
        with files.best_effort(f"The merge {folder}"):
            write_merge(self._config_for(model), model, tokenizer, folder, getattr(args, "trust_remote_code", False))
        if self.push_to_hub and folder.exists():
            repository = f"{args.hub_model_id}_{files.PREFIX}{state.global_step}_{MERGED_FOLDER}"
            upload_model_to_hf(folder, repository, args.hub_token, args.hub_private_repo)
