"""SelfDistillingTrainer: the model is its own teacher, which sees more than the student before the same completion.

A method says what the teacher is shown (`teacher_prompt`), and its `loss`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import Metrics, TokenScores
from posttrain.core.sample import Sample
from posttrain.data.rows.formats import PROMPT_ONLY
from posttrain.losses.distributions import Divergence, sampled_divergence
from posttrain.losses.formulas import (
    DIVERGENCE_FORMULAS,
    NORMALISERS,
    Formula,
    Totals,
    divergence_formula,
    filled,
    number,
)
from posttrain.losses.importance import capped_ratios
from posttrain.models.inference import context_length
from posttrain.models.load.model import innermost_model
from posttrain.models.load.teacher import BASE, EMA, LIVE, Teacher
from posttrain.models.scoring.float32_head import compute_head_in_float32
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rollout.rollout import OLD_LOGPS, Rollout
from posttrain.trainer.distilling_trainer import DistillingTrainer, prompt_ids
from posttrain.trainer.options.distilling import SAMPLED_TOKEN, TOPK_LOGITS, SelfDistillingConfig
from posttrain.trainer.references.setup import MoveTeacherCallback

PRIVILEGED = "privileged_context"
"""Column with what only the teacher is shown: text or messages."""
KINDS = {
    BASE: "the model as the run began",
    LIVE: "the model itself, without a gradient",
    EMA: "its average over the run",
}
DISTILLATION_LOSS = "distillation_loss"


def fill(template: str, values: dict[str, str]) -> str:
    """The template with texts in its places; braces in the texts, and places that are not known, stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda place: values.get(place[1], place[0]), template)


def shown(prompt: Any, change: Callable[[str], str], row: int) -> Any:
    """The prompt with another text: of a conversation, in its last user turn."""
    if isinstance(prompt, str):
        return change(prompt)
    for place in reversed(range(len(prompt))):
        content = prompt[place].get("content")
        if prompt[place].get("role") == "user" and isinstance(content, str):
            return [*prompt[:place], {**prompt[place], "content": change(content)}, *prompt[place + 1 :]]
    raise ValueError(
        f"The prompt of row {row} has no user turn with a text, into which the teacher's context could be written. Leave the row "
        "out, or give it one."
    )


def text_of(said: Any) -> str:
    """Of messages, what they say; "" where there is nothing."""
    if isinstance(said, str) or said is None:
        return said or ""
    return "\n".join(str(message.get("content") or "") for message in said)


class SelfDistillingTrainer(DistillingTrainer):
    """See the module's docstring."""

    config_class: ClassVar[type[SelfDistillingConfig]] = SelfDistillingConfig
    formats = (PROMPT_ONLY,)
    needs_teacher: ClassVar[bool] = False  # one that is given
    reads_images: ClassVar[bool] = False  # its teacher's prompts are texts
    columns_read: ClassVar[tuple[str, ...]] = (PRIVILEGED,)  # besides the prompt

    # ---- the teacher -------------------------------------------------------------------------------------------------

    def make_teacher(self, policy: Any) -> Teacher:
        kind = self.args.teacher_model_kind
        made = self.reference_setup().self_teacher(kind, policy, self.live)
        made.asked.temperature = self.scoring_temperature
        if self.args.cast_lm_head_to_fp32:
            compute_head_in_float32(innermost_model(made.asked.model))
        if kind == EMA:
            self.add_callback(MoveTeacherCallback(made.asked, self.accelerator))
        return made

    @property
    def divergence(self) -> Divergence:
        return self.args.divergence()

    @property
    def needs_old_logps(self) -> bool:
        return self.args.distillation_is_clip is not None and not self.args.schedule().is_on_policy

    # ---- what the teacher is shown -----------------------------------------------------------------------------------

    def teacher_ids(
        self, prompt: Any, columns: dict[str, Any], row: int, room: int | None, tools: Any = None
    ) -> np.ndarray:
        """The teacher's prompt as tokens; the last `room` of them (at least one) where it is longer."""
        ids = prompt_ids(self.renderer, prompt, tools, columns.get("chat_template_kwargs"), row)
        return ids if room is None else ids[-max(room, 1) :]

    def room_beside(self, completion: int) -> int | None:
        """Tokens that the model can read before a completion of so many."""
        longest = context_length(innermost_model(self.model), None)
        return None if longest is None else longest - completion

    def attach_twin(self, rollout: Rollout, prompt: Any, room: int | None = None) -> None:
        """The same completion behind the teacher's prompt, cut on its left where both are too long, as the sample's twin."""
        sample, start = rollout.sample, rollout.prompt_length
        if sample.images:
            raise ValueError(f"Row {sample.row} has images; {type(self).__name__} shows its teacher texts only.")
        limits = [one for one in (room, self.room_beside(len(sample) - start)) if one is not None]
        ids = self.teacher_ids(prompt, rollout.columns, sample.row, min(limits, default=None), rollout.tools)
        twin = Sample(
            np.concatenate([ids, sample.input_ids[start:]]),
            np.concatenate([np.zeros(len(ids), dtype=bool), sample.trained[start:]]),
            row=sample.row,
            group=sample.group,
        )
        if twin.num_trained != sample.num_trained:
            raise ValueError(
                f"Row {sample.row}: {twin.num_trained} tokens of the completion can be compared behind the teacher's prompt, and "
                f"{sample.num_trained} behind the student's. Both prompts must have at least one token."
            )
        sample.twin = twin

    # ---- the step ----------------------------------------------------------------------------------------------------

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        if self.args.distillation_mode != SAMPLED_TOKEN:
            return super().score(model, batch, stats)
        wanted = self.teacher.logps(batch if batch.twin is None else batch.twin)
        found = score_tokens(model, batch, stats, temperature=self.scoring_temperature, **self.scoring_options())
        return replace(found, divergences=sampled_divergence(found.logps, wanted))

    def how_compared(self, batch: TokenBatch) -> dict[str, Any]:
        """A token counts by the share that it has in its completion."""
        return {"weights": batch.expand(1.0 / batch.counts.clamp(min=1))}

    def distillation(self, batch: TokenBatch, policy: TokenScores) -> Tensor:
        """(S,) mean over the tokens of each completion."""
        values, cap = policy.divergences, self.args.distillation_is_clip
        if cap is not None and OLD_LOGPS in batch.per_token:
            values = values * capped_ratios(policy.logps, batch.per_token[OLD_LOGPS], cap)
        return batch.sequence_mean(values)

    def distillation_metrics(self, values: Tensor) -> Metrics:
        """Under both of TRL's names."""
        return {f"{group}/{DISTILLATION_LOSS}": values.detach() for group in ("self_distillation", self.method)}

    # ---- what is said of the run -------------------------------------------------------------------------------------

    def plan_lines(self, max_steps: int) -> dict[str, str]:
        return super(DistillingTrainer, self).plan_lines(max_steps) | {"teacher": str(self.teacher)}

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        names = (
            ("p, q", f"student and teacher at temperature {number(args.temperature)}, over the vocabulary v"),
            ("teacher", f"{KINDS[args.teacher_model_kind]}, which is shown more"),
        )
        if args.distillation_mode == TOPK_LOGITS:
            rest = "all others as one more" if args.distillation_add_tail else "renormalised"
            names += (("v", f"the student's {args.distillation_topk} likeliest tokens, {rest}"),)
        divided = (filled(NORMALISERS["mean_of_token_means"], totals),)
        if args.distillation_mode == SAMPLED_TOKEN:
            names = (("p, q", f"probability of the written token under {names[0][1].partition(',')[0]}"), names[1])
            return Formula((DIVERGENCE_FORMULAS["sampled"],), divided, names)
        return replace(divergence_formula(args.distillation_alpha, totals, names), divided_by=divided)
