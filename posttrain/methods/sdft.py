"""Self-distillation fine-tuning: the model learns what it would say if it were shown more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.core.batch import TokenBatch
from posttrain.core.options import refused
from posttrain.core.results import LossOutput, TokenScores
from posttrain.core.sample import Sample
from posttrain.data.render.byte_decoding import text_decoder
from posttrain.data.render.renderer import Renderer
from posttrain.rollout.engines.protocol import Prompt, SamplingParams
from posttrain.rollout.episodes.episode import Decode, SingleTurn
from posttrain.rollout.episodes.writing import MakeEpisodes
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import Request, Rollout
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.distilling import NO_REFERENCE, NoRewardsConfig, SelfDistillingConfig
from posttrain.trainer.options.online import OnlineConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.self_distilling_trainer import (
    PRIVILEGED,
    SelfDistillingTrainer,
    SelfTaughtTrainer,
    fill,
    shown,
    teacher_sample,
    text_of,
)


@dataclass
class SDFTConfig(SelfDistillingConfig, NoRewardsConfig, OnlineConfig):
    """Options of self-distillation fine-tuning."""

    teacher_prompt_template: str = option(
        "{prompt}\n\n{privileged_context}",
        "What the teacher is shown in the place of the prompt, of a conversation in the place of its last user turn.",
    )
    generate_from_teacher: bool = option(
        False, "Completions are written to the teacher's prompt, by the policy. False: to the student's."
    )
    num_loss_tokens_to_skip: int = option(0, "Tokens at the beginning of each completion that are not trained.")
    beta: float = refused(0.0, NO_REFERENCE)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("num_loss_tokens_to_skip", self.num_loss_tokens_to_skip, 0)
        for place in ("{prompt}", f"{{{PRIVILEGED}}}"):
            if place not in self.teacher_prompt_template:
                raise ValueError(f"`teacher_prompt_template` has no {place}: the teacher would not be shown it.")


def check_context(context: Any, row: int) -> None:
    """Refuse what is neither text nor messages."""
    if not isinstance(context, str | list):
        found = "nothing" if context is None else f"a {type(context).__name__}"
        raise ValueError(f"Row {row} has {found} in the column {PRIVILEGED!r}: give text or messages.")
    contents = [] if isinstance(context, str) else [message.get("content") for message in context]
    if any(part.get("type") != "text" for content in contents if isinstance(content, list) for part in content):
        raise ValueError(
            f"Row {row} has more than texts in the column {PRIVILEGED!r}: the teacher is shown the images of the prompt, and no "
            "others. Describe them, or put them into the prompt."
        )


def teacher_prompt(template: str, prompt: Any, columns: dict[str, Any], row: int) -> Any:
    """The prompt with the context of its row in it."""
    context = columns.get(PRIVILEGED)
    check_context(context, row)
    return shown(prompt, lambda text: fill(template, {"prompt": text, PRIVILEGED: text_of(context)}), row)


class TaughtTurn(SingleTurn):
    """The engine continues the teacher's prompt; the rollout has the student's."""

    def __init__(self, row: PromptRow, request: Request, decode: Any, shown_to_teacher: Sample) -> None:
        super().__init__(row, request, decode)
        self.shown_to_teacher = shown_to_teacher

    def prompt(self) -> Prompt:
        one = self.shown_to_teacher
        return replace(super().prompt(), ids=one.input_ids, images=one.images, positions=one.positions)


@dataclass(frozen=True)
class TaughtTurns:
    """Makes them. It has what it needs and not the trainer: worker processes are sent it."""

    renderer: Renderer
    template: str
    context: int | None  # tokens that the model can read
    decode: Decode

    def __call__(
        self, rows: Sequence[PromptRow], requests: Sequence[Request], params: SamplingParams
    ) -> list[TaughtTurn]:
        room = None if self.context is None else self.context - params.max_tokens
        made: dict[int, Sample] = {}
        for row in rows:
            if row.row not in made:
                prompt = teacher_prompt(self.template, row.prompt, row.columns, row.row)
                made[row.row] = teacher_sample(self.renderer, prompt, row.columns, row.row, room, row.images)
        return [TaughtTurn(row, request, self.decode, made[row.row]) for row, request in zip(rows, requests)]


class SDFTTrainer(SelfTaughtTrainer, SelfDistillingTrainer):
    """SDFT (arXiv:2601.19897): on its own completions the model is compared with itself that has seen a demonstration."""

    method, title = "sdft", "self-distillation fine-tuning"
    paper = Paper(
        "shenfeld2026self", "Self-Distillation Enables Continual Learning",
        'Shenfeld, Idan and Damani, Mehul and H{\\"u}botter, Jonas and Agrawal, Pulkit',
        2026, "2601.19897",
    )  # fmt: skip
    config_class = SDFTConfig

    # ---- what the teacher is shown -----------------------------------------------------------------------------------

    def _prepared(self, dataset: Any, name: str) -> Any:
        columns = getattr(dataset, "column_names", None)
        if columns is not None and PRIVILEGED not in columns:
            raise ValueError(
                f"The dataset {name} has the columns {', '.join(columns)}; {type(self).__name__} needs {PRIVILEGED!r} besides the "
                "prompt, what only the teacher is shown: text or messages."
            )
        contexts = dataset[PRIVILEGED] if columns is not None and hasattr(dataset, "__len__") else ()
        if isinstance(dataset, list):
            contexts = [row.get(PRIVILEGED) for row in dataset]
        for row, context in enumerate(contexts):
            check_context(context, row)
        return super()._prepared(dataset, name)

    def make_episodes(self) -> MakeEpisodes | None:
        if not self.args.generate_from_teacher:
            return None
        decode = text_decoder(self.renderer.tokenizer)
        return TaughtTurns(self.renderer, self.args.teacher_prompt_template, self.room_beside(0), decode)

    def spread(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            if not rollout.masked:
                start, sample = rollout.prompt_length, rollout.sample
                sample.trained[start : start + self.args.num_loss_tokens_to_skip] = False
                template = self.args.teacher_prompt_template
                self.attach_twin(rollout, teacher_prompt(template, rollout.prompt, rollout.columns, sample.row))

    # ---- the step ----------------------------------------------------------------------------------------------------

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        values = self.distillation(batch, policy)
        return LossOutput(values, per="sequence", metrics=self.distillation_metrics(values[: batch.num_samples]))
