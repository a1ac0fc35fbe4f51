"""SelfDistillingTrainer: the model is its own teacher, which sees more than the student before the same completion.

A method says what the teacher is shown (`attach_twin`), and its `loss`.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import Metrics, TokenScores
from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.render.renderer import Renderer
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
from posttrain.trainer.distilling_trainer import DistillingTrainer, prompt_sample
from posttrain.trainer.online_trainer import OnlineTrainer
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
        if prompt[place].get("role") == "user" and isinstance(content, str | list):
            return [*prompt[:place], {**prompt[place], "content": _changed(content, change)}, *prompt[place + 1 :]]
    raise ValueError(
        f"The prompt of row {row} has no user turn with a text, into which the teacher's context could be written. Leave the row "
        "out, or give it one."
    )


def _changed(content: Any, change: Callable[[str], str]) -> Any:
    """The content with another text; images stay where they stand in it."""
    if isinstance(content, str):
        return change(content)
    mark, others = uuid.uuid4().hex, [part for part in content if part.get("type") != "text"]
    text = "".join(part["text"] if part.get("type") == "text" else mark for part in content)
    first, *rest = change(text).split(mark)
    parts = [{"type": "text", "text": first}]
    for piece, other in zip(rest, itertools.cycle(others)):  # a template may write the prompt twice
        parts += [other, {"type": "text", "text": piece}]
    return [part for part in parts if part.get("text") != ""]


def text_of(said: Any) -> str:
    """Of messages, what they say; "" where there is nothing."""
    if isinstance(said, str) or said is None:
        return said or ""
    return "\n".join(_content_text(message.get("content")) for message in said)


def _content_text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    return str(content or "")


class TeacherPromptTooLong(ValueError):
    """The teacher's prompt has images, and no room for all of them."""


def teacher_sample(
    renderer: Renderer,
    prompt: Any,
    columns: dict[str, Any],
    row: int,
    room: int | None,
    images: Sequence[ImageSpan] = (),
    tools: Any = None,
) -> Sample:
    """The teacher's prompt as tokens, with the `images` of the student's; the last `room` tokens (at least one) where it is
    longer. An image is never cut off: the teacher would see less than the student."""
    made = prompt_sample(renderer, prompt, tools, columns.get("chat_template_kwargs"), row, images)
    cut = 0 if room is None else max(len(made) - max(room, 1), 0)
    if made.images and made.images[0].start < cut:
        raise TeacherPromptTooLong(
            f"The teacher's prompt of row {row} has {len(made)} tokens with its images, and there is room for {room}: an image "
            "would be cut off. Shorten what the teacher is shown, or the images (`image_max_pixels`)."
        )
    return made.slice(cut, len(made))


class SelfTaughtTrainer(OnlineTrainer):
    """A method that is given neither rewards nor a teacher. Mixed in before the trainer that it is otherwise."""

    def __init__(
        self,
        model: Any,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        *,
        quantization_config: Any = None,
        engine: Any = None,
    ) -> None:
        """Arguments in TRL's order."""
        super().__init__(
            model, None, args, train_dataset, eval_dataset, processing_class, callbacks=callbacks, optimizers=optimizers,
            quantization_config=quantization_config, peft_config=peft_config, engine=engine,
        )  # fmt: skip


class SelfDistillingTrainer(DistillingTrainer):
    """See the module's docstring."""

    config_class: ClassVar[type[SelfDistillingConfig]] = SelfDistillingConfig
    formats = (PROMPT_ONLY,)
    needs_teacher: ClassVar[bool] = False  # one that is given
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

    def room_beside(self, completion: int) -> int | None:
        """Tokens that the model can read before a completion of so many."""
        longest = context_length(innermost_model(self.model), None)
        return None if longest is None else longest - completion

    def attach_twin(self, rollout: Rollout, prompt: Any, room: int | None = None) -> None:
        """The same completion behind the teacher's prompt, cut on its left where both are too long, as the sample's twin."""
        sample, start = rollout.sample, rollout.prompt_length
        limits = [one for one in (room, self.room_beside(len(sample) - start)) if one is not None]
        how = (min(limits, default=None), sample.images, rollout.tools)
        shown_to_teacher = teacher_sample(self.renderer, prompt, rollout.columns, sample.row, *how)
        twin = replace(shown_to_teacher, group=sample.group).append(sample.input_ids[start:], trained=False)
        twin.trained = np.concatenate([twin.trained[: len(twin) - len(sample) + start], sample.trained[start:]])
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
