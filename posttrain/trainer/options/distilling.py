"""Options of methods that learn from a teacher, and of methods that need no reward."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from posttrain.core.options import refused
from posttrain.losses.distributions import STUDENT, Divergence
from posttrain.models.load.teacher import BASE, EMA, LIVE
from posttrain.trainer.options.base import BaseConfig, check_choice, check_range, option
from posttrain.trainer.options.online import OnlineConfig

NO_REWARD = "Nothing is rewarded: the loss compares what is written with nothing but a distribution or itself."
UNPACKED = "Batches are ragged: nothing is padded, so that packing would save nothing."
ONLY_COMPLETIONS = "Completions are trained and prompts are not, no matter which model wrote them."
WHOLE_VOCABULARY = (
    "Distributions over the whole vocabulary are compared, and a server names its likeliest tokens only. For a teacher on a "
    "server: `posttrain server_distillation`, or `posttrain iw_opd` with `use_teacher_server`."
)
NO_REFERENCE = "There is no reference: nothing keeps the model near its beginning."


@dataclass
class NoRewardsConfig:
    """Mixed into the configs of online methods without rewards and without a reference."""

    reward_weights: list[float] | None = refused(None, NO_REWARD)
    reward_on_error: str = refused("mask", NO_REWARD)
    reward_default: float = refused(0.0, NO_REWARD)
    reward_timeout: float | None = refused(60.0, NO_REWARD)
    reward_workers: int | None = refused(None, NO_REWARD)
    reward_retries: int = refused(0, NO_REWARD)
    reward_batching: str = refused("group", NO_REWARD)
    reward_cache: bool = refused(False, NO_REWARD)
    drop_zero_variance: bool = refused(False, NO_REWARD)
    refill_rounds: int = refused(4, NO_REWARD)
    replay_buffer_size: int = refused(0, NO_REWARD)
    sync_ref_model: bool = refused(False, NO_REFERENCE)
    ref_model_mixup_alpha: float = refused(0.6, NO_REFERENCE)
    ref_model_sync_steps: int = refused(512, NO_REFERENCE)

    smallest_group = 1
    has_reference = False


@dataclass
class PromptLengthConfig:
    """Sizes of methods whose prompts are cut and not left out; mixed in."""

    max_prompt_length: int | None = option(
        512, "Longest prompt in tokens; longer ones are cut at their beginning. `max_length`, if set, takes its place."
    )
    max_completion_length: int = option(256, "Most tokens of a completion.")

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_prompt_length == 512:
            self.max_prompt_length = None
        super().__post_init__()


@dataclass
class SelfTaughtConfig(PromptLengthConfig):
    """Sizes of methods whose model learns from what it writes itself; mixed in."""

    learning_rate: float = option(5e-5, "Initial learning rate of AdamW.")
    disable_dropout: bool = option(True, "Set every dropout probability of the model to 0.")


SAMPLED_TOKEN, FULL_LOGITS, TOPK_LOGITS = "sampled_token", "full_logits", "topk_logits"
MODES = (SAMPLED_TOKEN, FULL_LOGITS, TOPK_LOGITS)


@dataclass
class SelfDistillingConfig(SelfTaughtConfig):
    """Options of methods whose model is its own teacher, which is shown more than the student; mixed in."""

    teacher_model_kind: str = option(
        BASE, "Weights of the teacher: 'base' as the run began, 'live' the policy's own, 'ema' averaged over the run."
    )
    teacher_update_rate: float = option(
        0.05, "With 'ema', the share of the policy that the teacher takes on in each update."
    )
    teacher_sync_steps: int = option(1, "With 'ema', optimizer steps between updates of the teacher.")
    distillation_alpha: float = option(
        0.5,
        "Divergence: 0 is KL(teacher, student), 1 is KL(student, teacher), in between the generalised Jensen-Shannon one, which is "
        "not continuous at its ends: at 0.01 its gradient is about a hundredth of that at 0.",
    )
    distillation_mode: str = option(
        TOPK_LOGITS,
        "What is compared: 'full_logits' all tokens of the vocabulary, 'topk_logits' the student's likeliest ones, 'sampled_token' "
        "the written one alone (with `distillation_alpha=1`).",
    )
    distillation_topk: int | None = option(100, "With 'topk_logits', how many of the student's likeliest tokens.")
    distillation_add_tail: bool = option(
        False, "With 'topk_logits', all other tokens count as one more. False: both distributions are renormalised."
    )
    distillation_is_clip: float | None = option(
        2.0,
        "Largest weight of a token, its ratio to the policy that wrote it, where a generation feeds several steps or passes. None: "
        "no weights.",
    )
    use_teacher_server: bool = refused(
        False, "The teacher is the policy, whose weights are here: it is asked in this process."
    )

    lmbda, seq_kd, needs_answers = 1.0, False, False  # the student writes all completions

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("teacher_model_kind", self.teacher_model_kind, (BASE, LIVE, EMA))
        check_choice("distillation_mode", self.distillation_mode, MODES)
        check_range("distillation_alpha", self.distillation_alpha, 0, 1)
        check_range("teacher_update_rate", self.teacher_update_rate, 0, 1, open_low=True)
        check_range("teacher_sync_steps", self.teacher_sync_steps, 1)
        if self.distillation_is_clip is not None:
            check_range("distillation_is_clip", self.distillation_is_clip, 0, open_low=True)
        if self.distillation_mode == TOPK_LOGITS and self.distillation_topk is None:
            raise ValueError("`distillation_mode='topk_logits'` needs `distillation_topk`, a number of tokens.")
        if self.distillation_mode == SAMPLED_TOKEN and self.distillation_alpha != 1:
            raise ValueError(
                f"`distillation_alpha` is {self.distillation_alpha:g}; of the written token alone only KL(student, teacher) can be "
                "estimated: set it to 1, or another `distillation_mode`."
            )
        if self.keep_logits:
            raise ValueError(
                "`keep_logits` is set; logits of student and teacher are compared chunk by chunk, and never kept. Leave it out."
            )
        self.refuse_unread(TOPK_LOGITS, "distillation_mode", ("distillation_topk", "distillation_add_tail"))
        self.refuse_unread(EMA, "teacher_model_kind", ("teacher_update_rate", "teacher_sync_steps"))
        self.divergence()

    def refuse_unread(self, wanted: str, choice: str, names: tuple[str, ...]) -> None:
        """An option that is set and has no effect."""
        ignored = sorted(set(names) & self.set_by_user())
        if ignored and getattr(self, choice) != wanted and getattr(self, ignored[0]):
            raise ValueError(f"`{ignored[0]}` is set, but only `{choice}={wanted!r}` reads it. Leave it out.")

    def divergence(self) -> Divergence:
        """Of modes that compare distributions."""
        if self.distillation_mode != TOPK_LOGITS:
            return Divergence(self.distillation_alpha)
        return Divergence(
            self.distillation_alpha, top_k=self.distillation_topk, top_k_of=STUDENT, tail=self.distillation_add_tail
        )


@dataclass
class RowLengthConfig:
    """Sizes of methods that distil on the rows of a dataset; mixed in."""

    disable_dropout: bool = option(True, "Set every dropout probability of the model to 0.")
    max_length: int | None = option(
        1024,
        "Longest row in tokens, prompt and completion together; what the student writes comes on top. None: no limit.",
    )
    max_prompt_length: int | None = refused(None, "`max_length` limits prompt and completion together.")


@dataclass
class TeacherConfig:
    """Which model teaches; mixed into configs."""

    teacher_model_name_or_path: str | None = option(
        None, "The teacher, where `teacher_model` is not given: a model with the student's tokenizer."
    )
    teacher_model_revision: str | None = option(None, "Branch, tag or commit of the teacher on the Hub.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = option(
        None,
        "Arguments of `from_pretrained` for the teacher, such as its dtype or quantization_config; JSON text is accepted. The "
        "model's own are not handed to it.",
    )

    _VALID_DICT_FIELDS = [*BaseConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    def __post_init__(self) -> None:
        if isinstance(self.teacher_model_init_kwargs, str):
            self.teacher_model_init_kwargs = json.loads(self.teacher_model_init_kwargs)
        super().__post_init__()
        if self.keep_logits:
            raise ValueError(
                "`keep_logits` is set; logits of student and teacher are compared chunk by chunk, and never kept. Leave it out."
            )
        revision, given = self.teacher_model_revision, self.teacher_model_init_kwargs or {}
        if revision is not None and given.get("revision", revision) != revision:
            raise ValueError(
                f"`teacher_model_revision` is {revision!r} and `teacher_model_init_kwargs` has {given['revision']!r}: give one."
            )

    is_served = False  # whether the teacher is on a server, and nothing is loaded here
    shares_tokenizer = True  # whether the teacher must read the student's own tokens

    def teacher_arguments(self) -> dict[str, Any]:
        """Of `from_pretrained`."""
        revision = {} if self.teacher_model_revision is None else {"revision": self.teacher_model_revision}
        return {**(self.teacher_model_init_kwargs or {}), **revision}


@dataclass
class TeacherBesideConfig:
    """Of methods whose teacher must be a model beside the student; mixed in."""

    use_teacher_server: bool = refused(False, WHOLE_VOCABULARY)
    teacher_model_server_url: str | None = refused(None, WHOLE_VOCABULARY)


@dataclass
class DistillingConfig(TeacherConfig, OnlineConfig):
    """Options of methods whose student is compared with a teacher on completions of its own and of others."""

    lmbda: float = option(
        1.0,
        "Share of the prompts whose completion the student writes; the others keep that of the dataset. Decided by a coin for each "
        "prompt, the same whatever the processes.",
    )
    beta: float = option(
        0.5,
        "Divergence: 0 is KL(teacher, student), 1 is KL(student, teacher), in between the generalised Jensen-Shannon one, which is "
        "not continuous at its ends: at 0.01 its gradient is about a hundredth of that at 0.",
    )
    num_generations: int = option(1, "Completions that the student writes of each prompt.")
    seq_kd = False  # whether the teacher writes in the place of the dataset

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("lmbda", self.lmbda, 0, 1)
        check_range("beta", self.beta, 0, 1)
        if self.lmbda < 1 and self.num_generations > 1 and not self.seq_kd:
            raise ValueError(
                f"`num_generations` is {self.num_generations}, and of the prompts that the student does not answer "
                f"(`lmbda`={self.lmbda}) the dataset has one completion each: leave it at 1, or set `lmbda` to 1."
            )

    @property
    def needs_answers(self) -> bool:
        """Whether rows must bring completions."""
        return self.lmbda < 1 and not self.seq_kd


@dataclass
class MixedAuthorsConfig(TeacherBesideConfig, RowLengthConfig, NoRewardsConfig, DistillingConfig):
    """Options of methods whose completions are the student's, the dataset's or the teacher's. TRL's configs of these inherit from
    SFTConfig, and what of it means nothing here is refused."""

    max_completion_length: int = option(128, "Most tokens of a completion that is written.")
    lmbda: float = option(
        0.5,
        "Share of the prompts whose completion the student writes; the others keep that of the dataset, or of the teacher "
        "(`seq_kd`). Decided by a coin for each prompt, the same whatever the processes.",
    )
    seq_kd: bool = option(False, "Completions that the student does not write are the teacher's, not the dataset's.")
    packing: bool = refused(False, UNPACKED)
    packing_strategy: str = refused("bfd", UNPACKED)
    eval_packing: bool | None = refused(None, UNPACKED)
    dataset_text_field: str = refused(
        "text", "A text has no prompt: give rows of prompt and completion, or of messages."
    )
    completion_only_loss: bool | None = refused(None, ONLY_COMPLETIONS)
    assistant_only_loss: bool = refused(False, ONLY_COMPLETIONS)
    loss_type: str = refused("nll", "The loss is the divergence that `beta` names.")
