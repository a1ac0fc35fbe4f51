"""GRPO's relatives under TRL's names: its own options with other defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from posttrain.methods.grpo import GRPOConfig, GRPOTrainer
from posttrain.rollout.group_filter import GroupScores
from posttrain.trainer.options.base import option


@dataclass
class OwnLossConfig(GRPOConfig):
    """Options of a relative that has one loss."""

    def __post_init__(self) -> None:
        own = type(self).__dataclass_fields__["loss_type"].default
        if self.loss_type != own:
            raise ValueError(
                f"`loss_type` is {self.loss_type!r}, and {type(self).__name__} is for {own}: leave it out, or use GRPOConfig."
            )
        super().__post_init__()


@dataclass
class GFPOConfig(GRPOConfig):
    """Options of group filtered policy optimisation (arXiv:2508.09726): GRPO's."""


class GFPOTrainer(GRPOTrainer):
    """Group filtered policy optimisation: GRPO on the completions of a group that `group_filter_func` scores highest."""

    title = "group filtered policy optimisation"
    config_class = GFPOConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        group_filter_func: GroupScores | None = None,
        *given: Any,
        **named: Any,
    ) -> None:
        """As GRPOTrainer's, with TRL's place for the filter."""
        data = (train_dataset, eval_dataset, processing_class, reward_processing_classes)
        super().__init__(model, reward_funcs, args, *data, *given, group_filter_func=group_filter_func, **named)


@dataclass
class DPPOConfig(OwnLossConfig):
    """Options of divergence proximal policy optimisation (arXiv:2602.04879): GRPO's with the loss dppo."""

    loss_type: str = option("dppo", "The loss.")


class DPPOTrainer(GRPOTrainer):
    """Divergence proximal policy optimisation: tokens that would leave the neighbourhood of the sampler are masked."""

    title = "divergence proximal policy optimisation"
    config_class = DPPOConfig


@dataclass
class GMPOConfig(OwnLossConfig):
    """Options of geometric-mean policy optimisation (arXiv:2507.20673): GRPO's with the loss gmpo."""

    loss_type: str = option("gmpo", "The loss.")
    epsilon: float | None = option(0.4, "The log-ratio is clipped at -epsilon.")


class GMPOTrainer(GRPOTrainer):
    """Geometric-mean policy optimisation."""

    title = "geometric-mean policy optimisation"
    config_class = GMPOConfig


@dataclass
class GRPOWithReplayBufferConfig(GRPOConfig):
    """Options of GRPO with remembered groups in the place of those that teach nothing."""

    replay_buffer_size: int = option(64, "Groups that are remembered. 0: none.")


class GRPOWithReplayBufferTrainer(GRPOTrainer):
    """GRPO with a replay buffer."""

    config_class = GRPOWithReplayBufferConfig
