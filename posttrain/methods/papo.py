"""Perception-aware policy optimisation: GRPO whose completions must depend on the picture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.core.sample import Sample
from posttrain.data.vision.augmentation import draw_of
from posttrain.data.vision.masking import MASKS, PictureMask
from posttrain.losses.formulas import PERCEPTION_FORMULA, Formula, Totals, filled
from posttrain.losses.perception import LARGEST_PERCEPTION, perception
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rollout.rollout import Rollout
from posttrain.trainer.options.base import check_choice, check_range, option
from posttrain.trainer.options.policy_group import PolicyGroupConfig
from posttrain.trainer.policy_group_trainer import PolicyGroupTrainer
from posttrain.trainer.report.model_card import Paper

SHOWS_IMAGES = "shows_images"
"""What a Sample knows of itself: 1 where its prompt has an image."""
MASKED = "masked_"
"""Begins the names of what is said with masked images."""


@dataclass
class PAPOConfig(PolicyGroupConfig):
    """Options of perception-aware policy optimisation."""

    perception_loss_weight: float = option(
        0.1, "Weight of the divergence between what is said of the picture and of the masked one, which is to be large."
    )
    mask_ratio: float = option(0.3, "Share of a picture that is hidden.")
    mask_type: str = option(
        "random",
        "What is hidden: 'random' dots, 'patch' (squares of a sixteenth of the side), 'grid' (such squares, evenly).",
    )
    der_loss_weight1: float = option(0.03, "Weight of the entropy with the picture, which is to be small.")
    der_loss_weight2: float = option(0.03, "Weight of the entropy with the masked picture, which is to be small.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("mask_type", self.mask_type, tuple(MASKS))
        check_range("mask_ratio", self.mask_ratio, 0, 1, open_low=True)
        for name in ("perception_loss_weight", "der_loss_weight1", "der_loss_weight2"):
            check_range(name, getattr(self, name), 0)
        if not (self.perception_loss_weight or self.der_loss_weight2):
            raise ValueError(
                "`perception_loss_weight` and `der_loss_weight2` are both 0: masked pictures would be looked at for nothing. Use "
                "GRPO, with `entropy_coef` for the entropy."
            )

    def augmentation(self) -> PictureMask:
        """Of the pictures that have a draw, which are those of twins: online methods augment no others."""
        return PictureMask(self.mask_type, self.mask_ratio)


class PAPOTrainer(PolicyGroupTrainer):
    """PAPO (arXiv:2507.06448): GRPO, and a second look at each completion with a masked picture, which must make a difference."""

    method, title = "papo", "perception-aware policy optimisation"
    paper = Paper(
        "wang2025perception", "Perception-Aware Policy Optimization for Multimodal Reasoning",
        "Wang, Zhenhailong and Guo, Xuehang and Stoica, Sofia and others",
        2025, "2507.06448",
    )  # fmt: skip
    config_class = PAPOConfig
    graphs = 2  # of the picture and of the masked one

    def _prepared(self, dataset: Any, name: str) -> Any:
        prepared = super()._prepared(dataset, name)
        if dataset is not None and name == "train" and self.shown_pixels is None:
            raise ValueError(
                "No row of the train dataset has an image, and PAPO compares what is said of a picture with what is said of a "
                "masked one. Use GRPO for texts; images stand in the columns `image` and `images`, or in the messages."
            )
        return prepared

    # ---- the masked pictures -----------------------------------------------------------------------------------------

    def spread(self, rollouts: list[Rollout]) -> None:
        super().spread(rollouts)
        for rollout in rollouts:
            rollout.sample.scalars[SHOWS_IMAGES] = float(bool(rollout.sample.images))
            rollout.sample.twin = self._masked(rollout.sample)

    def _masked(self, sample: Sample) -> Sample:
        """The same tokens after masked pictures. The completions of a prompt have the same masks, and so has a resumed run."""
        seed, group = self.args.seed, sample.group
        images = (replace(image, draw=draw_of(seed, group, sample.row, image.key)) for image in sample.images)
        return replace(sample, images=tuple(images), per_token={}, scalars={}, twin=None)

    # ---- the loss ----------------------------------------------------------------------------------------------------

    @property
    def entropy_has_gradient(self) -> bool:
        return super().entropy_has_gradient or self.args.der_loss_weight1 != 0

    def differentiable_stats(self) -> tuple[str, ...]:
        return ("entropy",)

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        found = super().score(model, batch, tuple(dict.fromkeys((*stats, "entropy"))))
        has_gradient = self.args.der_loss_weight2 != 0 and torch.is_grad_enabled()
        wanted = {"differentiable_stats" if has_gradient else "stats": ("entropy",)}
        twin, heat = batch if batch.twin is None else batch.twin, self.args.temperature
        masked = score_tokens(model, twin, temperature=heat, **wanted, **self.scoring_options())
        seen = {f"{MASKED}logps": masked.logps, f"{MASKED}entropy": masked.stats["entropy"]}
        return replace(found, stats=found.stats | seen)

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        output = super().loss(batch, policy, reference)
        logps = (policy.logps, policy.stats[f"{MASKED}logps"])
        entropies = (policy.stats["entropy"], policy.stats[f"{MASKED}entropy"])
        more = perception(batch, logps, entropies, self._shows_images(batch, policy.logps), self.args)
        output.terms += more.terms
        output.metrics |= more.metrics
        return output

    def _shows_images(self, batch: TokenBatch, like: Tensor) -> Tensor:
        """(N,) 1 where the prompt of a token has an image; a pass without tokens has no such number."""
        if SHOWS_IMAGES not in batch.scalars:
            return torch.zeros_like(like)
        return batch.expand(batch.scalars[SHOWS_IMAGES]).to(like.dtype)

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        made = super().formula(args, totals)
        numbers = {
            name: getattr(args, name) for name in ("perception_loss_weight", "der_loss_weight1", "der_loss_weight2")
        }
        term = filled(PERCEPTION_FORMULA, numbers | {"largest": LARGEST_PERCEPTION})
        names = (
            ("p_m", f"probability where {args.mask_ratio:.0%} of the picture is hidden ({args.mask_type})"),
            ("H, H_m", "entropies of both; of completions without a picture the policy term alone counts"),
        )
        return Formula((*made.terms, term), made.divided_by, (*made.names, *names))
