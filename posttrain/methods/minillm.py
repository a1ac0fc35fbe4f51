"""MiniLLM: policy gradients of the divergence from a teacher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.losses.distributions import Divergence
from posttrain.losses.formulas import DIVERGENCE_FORMULAS, NORMALISERS, Formula, Totals, filled, number
from posttrain.models.inference import evaluating
from posttrain.models.scoring.token_scores import Question, score_tokens, targets_within
from posttrain.models.scoring.two_heads import DivergencesAlone, score_divergence
from posttrain.rollout.rollout import ADVANTAGES, OLD_LOGPS, Rollout
from posttrain.trainer.distilling_trainer import TaughtTrainer
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.distilling import TeacherBesideConfig, TeacherConfig
from posttrain.trainer.options.policy_group import PolicyGroupConfig
from posttrain.trainer.policy_group_trainer import PolicyGroupTrainer
from posttrain.trainer.report.model_card import Paper

GAIN = "teacher_gain"
"""What a Sample knows of each token: by how much the teacher finds it likelier than the student that wrote it, in nats."""
REVERSE = Divergence(1.0)
OF_ADVANTAGE = ("gamma", "length_normalization", "long_term_includes_step")
OF_REWARDS = ("drop_zero_variance", "replay_buffer_size", "num_remains_in_group")


@dataclass
class MiniLLMConfig(TeacherBesideConfig, TeacherConfig, PolicyGroupConfig):
    """Options of MiniLLM."""

    disable_dropout: bool = option(True, "Set every dropout probability of the model to 0.")
    rkl_advantage: bool = option(
        True, "Add to the advantage of a token how much likelier the teacher finds what follows than the student does."
    )
    single_step_decomposition: bool = option(
        True, "Add the divergence KL(student, teacher) of each token, over the whole vocabulary, to the loss."
    )
    kd_temperature: float = option(1.0, "Divides the logits of student and teacher where they are compared.")
    gamma: float = option(
        0.0, "Discount of tokens further on in the advantage of a token. 0: only the first that counts."
    )
    length_normalization: bool = option(
        True, "Divide by the sum of the discounts: the advantage is a mean over the tokens that remain."
    )
    long_term_includes_step: bool = option(
        False,
        "With `single_step_decomposition`, which has the step itself exactly, advantages begin with the token after it. True: "
        "with the token itself, which then counts twice, as in TRL.",
    )

    smallest_group = 1

    def __post_init__(self) -> None:
        if self.num_generations == 1:  # nothing to be scaled by
            self.scale_rewards = "none"
        super().__post_init__()
        check_range("kd_temperature", self.kd_temperature, 0, open_low=True)
        check_range("gamma", self.gamma, 0, 1)
        if not (self.rkl_advantage or self.single_step_decomposition):
            raise ValueError(
                "`rkl_advantage` and `single_step_decomposition` are both off: nothing would be learnt from the teacher. Use "
                "GRPO, or turn one of them on."
            )
        changed = [name for name in OF_ADVANTAGE if getattr(self, name) != getattr(MiniLLMConfig, name)]
        if not self.rkl_advantage and changed:
            raise ValueError(f"`{changed[0]}` is set, but without `rkl_advantage` nothing reads it. Leave it out.")
        if self.long_term_includes_step and not self.single_step_decomposition:
            raise ValueError(
                "`long_term_includes_step` is set; without `single_step_decomposition` the step is always included."
            )

    @property
    def starts_after_step(self) -> bool:
        """Whether the advantage of a token is about the tokens behind it alone."""
        return self.single_step_decomposition and not self.long_term_includes_step


def discounted_gains(gains: np.ndarray, gamma: float, normalised: bool, after_step: bool) -> np.ndarray:
    """(n,) sum_{i>=t} gamma^(i-t) R_i of one completion, over sum_{i>=t} gamma^(i-t) where it is `normalised`.

    `after_step`: the number of t is that of t + 1; behind the last token there is nothing.
    """
    sums, lengths = np.zeros(len(gains) + 1), np.zeros(len(gains) + 1)
    for place in range(len(gains) - 1, -1, -1):
        sums[place] = gains[place] + gamma * sums[place + 1]
        lengths[place] = 1 + gamma * lengths[place + 1]
    found = sums / np.maximum(lengths, 1) if normalised else sums
    return found[1:] if after_step else found[:-1]


class MiniLLMTrainer(TaughtTrainer, PolicyGroupTrainer):
    """MiniLLM (arXiv:2306.08543): the reverse divergence from a teacher by policy gradients, beside rewards if there are any."""

    method, title = "minillm", "MiniLLM"
    paper = Paper(
        "gu2024minillm", "MiniLLM: Knowledge Distillation of Large Language Models",
        "Gu, Yuxian and Dong, Li and Wei, Furu and Huang, Minlie",
        2024, "2306.08543", "International Conference on Learning Representations",
    )  # fmt: skip
    config_class = MiniLLMConfig
    needs_rewards = False

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        reward_funcs: Any = None,
        args: MiniLLMConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        peft_config: Any = None,
        rollout_func: Any = None,
        *,
        tools: Any = None,
        environment_factory: Any = None,
        group_filter_func: Any = None,
        **named: Any,
    ) -> None:
        """Arguments in TRL's order; further ones are OnlineTrainer's, by name."""
        super().__init__(
            model, reward_funcs, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset,
            processing_class=processing_class, reward_processing_classes=reward_processing_classes, callbacks=callbacks,
            optimizers=optimizers, peft_config=peft_config, rollout_func=rollout_func, teacher_model=teacher_model,
            tools=tools, environment_factory=environment_factory, group_filter_func=group_filter_func, **named,
        )  # fmt: skip
        needless = [name for name in OF_REWARDS if getattr(self.args, name)]
        if not self.rewards.names and needless:
            raise ValueError(
                f"`{needless[0]}` looks at rewards, and there are none: leave it out, or give `reward_funcs`."
            )

    @property
    def teacher_temperature(self) -> float:
        return self.args.kd_temperature

    @property
    def teaches_in_steps(self) -> bool:
        return self.args.single_step_decomposition

    @property
    def scores_rollouts(self) -> tuple[str, ...]:
        if not self.args.rkl_advantage:
            return ()
        return ("teacher",) if self.knows_old_logps else ("teacher", "policy")

    @property
    def knows_old_logps(self) -> bool:
        """Whether the student's log-probs when it wrote are there already, at the temperature of the comparison."""
        return self.needs_old_logps and self.args.kd_temperature == self.args.temperature

    # ---- advantages --------------------------------------------------------------------------------------------------

    def annotated(self, rollouts: list[Rollout]) -> None:
        super().annotated(rollouts)
        if self.args.rkl_advantage:
            self.write_columns(rollouts, lambda batch: {GAIN: self._gain(batch)})

    def _gain(self, batch: TokenBatch) -> Tensor:
        """(N,) log(q / p) at the temperature of the comparison, over the words that both have, when the student wrote."""
        theirs, heat, words = self.teacher.logps(batch, self.vocabulary), self.args.kd_temperature, self.vocabulary
        if heat == self.args.temperature and words is None and OLD_LOGPS in batch.per_token:
            return theirs - batch.per_token[OLD_LOGPS]
        how = {"temperature": heat, "vocabulary": words, "chunk_tokens": self.args.chunk_tokens}
        with evaluating(self.model):
            return theirs - score_tokens(self.model_wrapped, batch, **how).logps

    def spread(self, rollouts: list[Rollout]) -> None:
        """What the group says of a completion, and what the teacher says of the tokens that remain."""
        super().spread(rollouts)
        args = self.args
        for sample in [rollout.sample for rollout in rollouts if GAIN in rollout.sample.per_token]:
            gains = sample.read_trained(GAIN).astype(np.float64)
            more = discounted_gains(gains, args.gamma, args.length_normalization, args.starts_after_step)
            column = sample.read_trained(ADVANTAGES) + more
            sample.write_trained(ADVANTAGES, column.astype(sample.per_token[ADVANTAGES].dtype))

    # ---- the step ----------------------------------------------------------------------------------------------------

    def recomputes_logits(self) -> bool:
        """Nothing is kept of two heads."""
        return not self.args.single_step_decomposition

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        """One look at the logits where both questions are about the same ones, and nothing else is asked."""
        args = self.args
        is_plain = args.kd_temperature == args.temperature and self.vocabulary is None
        asks_more = args.compares_likeliest or args.top_entropy_quantile < 1 or self.differentiable_stats()
        if not (args.single_step_decomposition and is_plain) or asks_more:
            return super().score(model, batch, stats)
        return score_divergence(
            model,
            batch,
            self.teacher.rows(batch),
            REVERSE,
            stats=stats,
            temperature=args.temperature,
            chunk_tokens=args.chunk_tokens,
            router_loss=self.loaded.router_loss_weight != 0,
            logps_in_loss=True,
        )

    def also_asked(self, batch: TokenBatch) -> tuple[Question, ...]:
        args, words = self.args, self.vocabulary
        if not args.single_step_decomposition:
            return ()
        return (
            DivergencesAlone(
                batch.positions,
                targets_within(batch, words),
                temperature=args.kd_temperature,
                chunk_tokens=args.chunk_tokens,
                vocabulary=words,
                teacher=self.teacher.rows(batch),
                divergence=REVERSE,
            ),
        )

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        output = super().loss(batch, policy, reference)
        if self.args.single_step_decomposition:
            output.terms.append(LossTerm(policy.divergences, "token"))
            output.metrics["minillm/reverse_kl"] = policy.divergences.detach()
        if GAIN in batch.per_token:
            output.metrics["minillm/teacher_gain"] = batch.per_token[GAIN]
        return output

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        made = super().formula(args, totals)
        terms, divided, names = list(made.terms), list(made.divided_by), dict(made.names)
        heat = number(args.kd_temperature)
        if args.rkl_advantage:
            begin = "t + 1" if args.starts_after_step else "t"
            discount = f"{number(args.gamma)}^(i - {'t - 1' if args.starts_after_step else 't'})"
            total = f"sum_(i >= {begin})({discount} * R_i)" if args.gamma else f"R_({begin})"
            mean = f" / sum_(i >= {begin})({discount})" if args.length_normalization and args.gamma else ""
            names["A"] = f"{names['A']} + {total}{mean}"
            names["R"] = f"log(q / p) at temperature {heat} when the token was written, q the teacher's probability"
        if args.single_step_decomposition:
            terms.append(DIVERGENCE_FORMULAS["reverse"])
            divided.append(f"the divergence: {filled(NORMALISERS['per_token'], totals)}")
            names["v"] = f"the vocabulary; p and the teacher's q at temperature {heat}"
        return Formula(tuple(terms), tuple(divided), tuple(names.items()))
