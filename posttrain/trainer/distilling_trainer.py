"""DistillingTrainer: a student is compared with a teacher, token by token, on completions of its own and of others.

Who writes is decided by a coin for each prompt. A method adds its options and, where it wants another than the divergence of each
token, its `loss`; where its teacher is another than a model beside the student, its `make_teacher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, TokenScores
from posttrain.core.sample import ImageSpan, Sample
from posttrain.data.images.row_image import RowImage, found_by_key
from posttrain.data.images.streamed_span import as_carried
from posttrain.data.render.conversation import Conversation
from posttrain.data.render.renderer import Renderer, RenderError
from posttrain.data.rows.formats import LAST_TURN, PROMPT_COMPLETION, PROMPT_ONLY, RowFormat
from posttrain.losses.distributions import Divergence
from posttrain.losses.formulas import Formula, Totals, divergence_formula, number
from posttrain.models.load.model import innermost_model
from posttrain.models.load.teacher import Teacher
from posttrain.models.scoring.float32_head import compute_head_in_float32
from posttrain.models.scoring.two_heads import score_divergence
from posttrain.rollout.collector import GroupTable
from posttrain.rollout.engines.noise import noise_base, uniform
from posttrain.rollout.rollout import DATASET, POLICY, TEACHER, Request, Rollout
from posttrain.trainer.construction import refuse_arguments
from posttrain.trainer.online_trainer import OnlineTrainer
from posttrain.trainer.options.distilling import DistillingConfig
from posttrain.trainer.report.model_card import Paper

COIN = 0xC0111  # in the place of a completion's number: no completion has so high a one
ON_POLICY = "on_policy"
"""Scalar of a sample: 1 where the student wrote it."""


def prompt_sample(
    renderer: Renderer, prompt: Any, tools: Any, template_kwargs: Any, row: int, images: Sequence[ImageSpan] = ()
) -> Sample:
    """A prompt, text or messages, as tokens for a teacher that is shown another one than the student, or reads other tokens.

    `images` are those of the student's prompt: the teacher's shows the same.
    """
    known = {span.key: RowImage(span.key, span.size) for span in images}
    if not isinstance(prompt, str):
        (made,) = renderer.encode_prompts([Conversation(found_by_key(prompt, known), tools, template_kwargs)])
    elif images:
        (made,) = renderer.encode_image_texts([prompt], [[known[span.key] for span in images]])
    else:
        made = Sample(ids := renderer.encode_texts([prompt])[0], np.zeros(len(ids)))
    if isinstance(made, RenderError):
        raise ValueError(f"The teacher's prompt of row {row} cannot be rendered: {made}")
    return replace(made, trained=np.zeros(len(made), dtype=bool), images=as_carried(made.images, images), row=row)


def lands_on_policy(seed: int, number: int, lmbda: float) -> bool:
    """The coin of the `number`-th prompt of a run: the same on every process, in every split, after every resume."""
    return uniform(noise_base(seed, number, COIN), 0) < lmbda


class TaughtTrainer(OnlineTrainer):
    """An OnlineTrainer with a teacher; methods mix it in before the trainer that they are otherwise."""

    needs_teacher: ClassVar[bool] = True  # one that is given; else `make_teacher` makes it of something else
    teacher: Teacher | None = None
    teaches_in_steps = True  # whether the teacher reads what is trained in each step
    scores_rollouts: tuple[str, ...] = ()
    """Who besides reads each rollout once, when it is collected: "teacher", "policy"."""

    def __init__(
        self,
        *given: Any,
        teacher_model: Any = None,
        teacher_processing_class: Any = None,
        args: Any = None,
        **named: Any,
    ) -> None:
        """`teacher_model` is a name, a folder or a module; `teacher_processing_class` its tokenizer, where it has none beside it.
        Further arguments are those of the next class."""
        self.teacher_source = (
            getattr(args, "teacher_model_name_or_path", None) if teacher_model is None else teacher_model
        )
        self.teacher_tokenizer = teacher_processing_class
        is_served = getattr(args, "is_served", False)
        if self.teacher_source is not None and is_served:
            raise ValueError(
                f"`teacher_model` is given to {type(self).__name__}, and its options say that the teacher is on a server: give one."
            )
        if self.teacher_source is None and self.needs_teacher and not is_served:
            raise ValueError(
                f"{type(self).__name__} needs a teacher: pass `teacher_model`, or set `teacher_model_name_or_path`."
            )
        super().__init__(*given, args=args, **named)

    def prepare_reference(self, ref_model: Any, policy: Any) -> None:
        super().prepare_reference(ref_model, policy)
        self.teacher = self.make_teacher(policy)
        self.teacher.check(self.renderer.tokenizer)

    def make_teacher(self, policy: Any) -> Teacher:
        """The model that this method learns from; `policy` is what the student was loaded from."""
        made = self.reference_setup().teacher(
            self.teacher_source, self.args.teacher_arguments(), self.teacher_tokenizer
        )
        made.asked.temperature = self.teacher_temperature
        if self.args.cast_lm_head_to_fp32:
            compute_head_in_float32(innermost_model(made.asked.model))
        return made

    @property
    def teacher_name(self) -> str:
        return self.teacher.name

    @property
    def teacher_temperature(self) -> float:
        return self.scoring_temperature

    @property
    def vocabulary(self) -> int | None:
        """Words that both have, where one has more: families pad the sizes of one tokenizer differently."""
        own, theirs = innermost_model(self.model).get_input_embeddings().num_embeddings, self.teacher.words
        return None if theirs in (None, own) else min(own, theirs)

    def identity_parts(self) -> dict[str, Any]:
        return super().identity_parts() | {"teacher": str(self.teacher)}

    def plan_lines(self, max_steps: int) -> dict[str, str]:
        return super().plan_lines(max_steps) | {"teacher": str(self.teacher)}


class DistillingTrainer(TaughtTrainer):
    """See the module's docstring."""

    paper = Paper(
        "agarwal2024onpolicy", "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
        "Agarwal, Rishabh and Vieillard, Nino and Zhou, Yongchao and Stanczyk, Piotr and Ramos, Sabela and others",
        2024, "2306.13649", "International Conference on Learning Representations",
    )  # fmt: skip
    config_class: ClassVar[type[DistillingConfig]] = DistillingConfig
    formats = (PROMPT_COMPLETION, LAST_TURN, PROMPT_ONLY)  # the last where no completion is read
    needs_rewards: ClassVar[bool] = False
    needs_reference = False
    needs_old_logps = False
    evaluates = False  # on the completions of the dataset, where it has such

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: DistillingConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        teacher_processing_class: Any = None,
        **named: Any,
    ) -> None:
        """Further arguments are those of TaughtTrainer and OnlineTrainer, by name."""
        named |= {"teacher_model": teacher_model, "teacher_processing_class": teacher_processing_class, "args": args}
        named |= {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        super().__init__(model, processing_class=processing_class, **named)

    @property
    def divergence(self) -> Divergence:
        return Divergence(self.args.beta)

    # ---- who writes --------------------------------------------------------------------------------------------------

    @classmethod
    def rows_read(cls, args: Any) -> tuple[tuple[RowFormat, ...], tuple[str, ...]]:
        return (cls.formats[:-1] if args.needs_answers else cls.formats), cls.roles

    def author_of(self, request: Request) -> str:
        return DATASET if self.evaluates else self.author_in_training(request)

    def author_in_training(self, request: Request) -> str:
        if lands_on_policy(self.args.seed, request.number, self.args.lmbda):
            return POLICY
        return TEACHER if self.args.seq_kd else DATASET

    def authors(self) -> set[str]:
        student = {POLICY} if self.args.lmbda > 0 or self.args.seq_kd else set()
        return student if self.args.lmbda == 1 else student | {TEACHER if self.args.seq_kd else DATASET}

    def credit(self, table: GroupTable, totals: Tensor) -> Tensor:
        return torch.zeros_like(totals)

    def spread(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            rollout.sample.scalars[ON_POLICY] = float(rollout.author == POLICY)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """On the dataset's own completions; where its rows have none, on the student's."""
        self.evaluates = dataloader.dataset.has_answers
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.evaluates = False

    # ---- the step ----------------------------------------------------------------------------------------------------

    def recomputes_logits(self) -> bool:
        """Nothing is kept of two heads."""
        return False

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        taught = self.teacher.rows(batch if batch.twin is None else batch.twin)
        return score_divergence(
            model,
            batch,
            taught,
            self.divergence,
            stats=stats,
            temperature=self.scoring_temperature,
            vocabulary=self.vocabulary,
            chunk_tokens=self.args.chunk_tokens,
            router_loss=self.loaded.router_loss_weight != 0,
            **self.how_compared(batch),
        )

    def how_compared(self, batch: TokenBatch) -> dict[str, Any]:
        """Further options of `score_divergence`: what is known about the loss before the forward makes it cheaper."""
        return {}

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        return LossOutput(policy.divergences, per="token", metrics=self.losses_by_author(batch, policy.divergences))

    def losses_by_author(self, batch: TokenBatch, values: Tensor, per: str = "token") -> dict[str, Tensor]:
        """(N,) values of tokens, or (S,) of sequences, apart for completions of the student and of others, in training."""
        if ON_POLICY not in batch.scalars or not self.model.training:  # a process may be without a row
            return {}
        own, values = batch.scalars[ON_POLICY], values.detach()
        if per == "token":
            own = batch.expand(own) > 0
        else:
            own, values = own[: batch.num_samples] > 0, values[: batch.num_samples]
        return {
            "on_policy_loss": values.masked_fill(~own, torch.nan),
            "off_policy_loss": values.masked_fill(own, torch.nan),
        }

    # ---- what is said of the run -------------------------------------------------------------------------------------

    def plan_lines(self, max_steps: int) -> dict[str, str]:
        lines, args = super().plan_lines(max_steps), self.args
        wrote = f"{type(self.engine).__name__} with the student's weights"
        others = "the teacher" if args.seq_kd else "the dataset"
        shares = {wrote: args.lmbda, others: 1 - args.lmbda}
        of_prompts = "; ".join(f"{share:.0%} of the prompts: {who}" for who, share in shares.items() if share)
        return lines | {"rollouts": of_prompts}

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        others = "the teacher" if args.seq_kd else "the dataset"
        who = f"the student for a share {number(args.lmbda)} of the prompts, {others} for the others"
        compared = f"student and teacher at temperature {number(cls.compared_at(args))}, over the vocabulary v"
        names = (("p, q", compared), ("completions", who if args.lmbda < 1 else "the student's own"))
        return divergence_formula(args.beta, totals, names)

    @classmethod
    def compared_at(cls, args: Any) -> float:
        """What both logits are divided by."""
        return args.temperature

    @property
    def scoring_temperature(self) -> float:
        return self.compared_at(self.args)


class RowsDistillingTrainer(DistillingTrainer):
    """A DistillingTrainer with the arguments that TRL's GKD, GOLD and IW-OPD share, which are those of its SFTTrainer."""

    def __init__(
        self,
        model: Any = None,
        teacher_model: Any = None,
        args: DistillingConfig | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        formatting_func: Any = None,
        *,
        quantization_config: Any = None,
        teacher_processing_class: Any = None,
        engine: Any = None,
    ) -> None:
        """Arguments in TRL's order."""
        refused = {"data_collator": data_collator, "compute_metrics": compute_metrics}
        refused |= {"formatting_func": formatting_func, "preprocess_logits_for_metrics": preprocess_logits_for_metrics}
        refuse_arguments(type(self).__name__, model, **refused)
        super().__init__(
            model, teacher_model, args, train_dataset, eval_dataset, processing_class, callbacks=callbacks,
            optimizers=optimizers, peft_config=peft_config, quantization_config=quantization_config,
            teacher_processing_class=teacher_processing_class, engine=engine,
        )  # fmt: skip
