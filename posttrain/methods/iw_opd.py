"""Importance-weighted on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch, segment_sum
from posttrain.core.options import refused
from posttrain.core.results import LossOutput, TokenScores
from posttrain.losses.distributions import BOTH, STUDENT, TEACHER, Divergence
from posttrain.losses.extrema import highest, lowest
from posttrain.losses.formulas import NORMALISERS, Formula, Totals, filled, number
from posttrain.models.inference import evaluating
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.rollout.collector import Collected
from posttrain.rollout.rollout import OLD_LOGPS, POLICY, TEACHER_LOGPS, Rollout
from posttrain.trainer.distilling_trainer import ON_POLICY, RowsDistillingTrainer
from posttrain.trainer.options.base import check_choice, check_range, option
from posttrain.trainer.options.distilling import DistillingConfig, NoRewardsConfig, RowLengthConfig
from posttrain.trainer.options.served_teacher import SAMPLED, TeacherServerConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.served_distilling_trainer import ServedDistillingTrainer

IW_OPD, JSD = "iw_opd", "jsd"
ARGMAX = "argmax"
OF_OBJECTIVE = {
    IW_OPD: ("iw_opd_gamma", "iw_opd_epsilon"),
    JSD: ("beta", "loss_top_k", "loss_add_tail", "reverse_kl_top_1_mode"),
}
"""Objective -> options that only it reads."""
OF_TEACHER = ("teacher_model_name_or_path", "teacher_model_revision", "teacher_model_init_kwargs")


@dataclass
class IWOPDConfig(TeacherServerConfig, RowLengthConfig, NoRewardsConfig, DistillingConfig):
    """Options of importance-weighted on-policy distillation."""

    max_completion_length: int = option(512, "Most tokens of a completion that the student writes.")
    temperature: float = option(1.0, "Divides the logits in sampling, and those of both models in the loss.")
    top_p: float = option(0.95, "Sample from the smallest set of tokens with this much probability.")
    distillation_objective: str = option(
        IW_OPD,
        "What is learnt: 'iw_opd', the likelihood of each token, weighed by how much likelier the teacher finds it, more at the "
        "beginning; 'jsd', the divergence that `beta` names.",
    )
    iw_opd_gamma: float = option(
        0.5, "Tokens at the beginning weigh up to 1 + this; the weight falls to 1 as the disagreement is used up."
    )
    iw_opd_epsilon: float = option(
        1e-8, "The disagreement of a whole completion is taken to be at least this: a perfect student has none."
    )
    beta: float = option(
        1.0,
        "jsd: 0 is KL(teacher, student), 1 is KL(student, teacher), in between the generalised Jensen-Shannon one, which is not "
        "continuous at its ends: at 0.99 its gradient is about a hundredth of that at 1.",
    )
    loss_top_k: int = option(
        1,
        "jsd: compare this many of the likeliest tokens: the teacher's (`beta` 0), the student's (1), those of both (in between). "
        "0: the whole vocabulary.",
    )
    loss_add_tail: bool = option(True, "jsd with `loss_top_k`: all other tokens count as one more. False: renormalise.")
    reverse_kl_top_1_mode: str = option(
        SAMPLED,
        "jsd with `loss_top_k` 1 and `beta` above 0: the student's token is the one that was written ('sampled'), or its "
        "likeliest one ('argmax').",
    )
    use_teacher_server: bool = option(
        False, "The teacher is on a server (`teacher_model_server_url`), which is asked once for each completion."
    )
    vllm_server_port: int = option(8001, "Port of the server that writes completions; the teacher's is often 8000.")
    vllm_sync_frequency: int = refused(1, "Completions are written with the weights of the step.")
    log_completions_steps: int = refused(100, "Completions are shown with each log: see `logging_steps`.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("distillation_objective", self.distillation_objective, tuple(OF_OBJECTIVE))
        check_choice("reverse_kl_top_1_mode", self.reverse_kl_top_1_mode, (SAMPLED, ARGMAX))
        check_range("iw_opd_gamma", self.iw_opd_gamma, 0)
        check_range("iw_opd_epsilon", self.iw_opd_epsilon, 0, open_low=True)
        check_range("loss_top_k", self.loss_top_k, 0)
        for objective, names in OF_OBJECTIVE.items():
            changed = [name for name in names if getattr(self, name) != getattr(IWOPDConfig, name)]
            if objective != self.distillation_objective and changed:
                raise ValueError(
                    f"`{changed[0]}` is set, but `distillation_objective` {self.distillation_objective!r} does not read it: it "
                    f"belongs to {objective!r}. Leave it out."
                )
        if self.reverse_kl_top_1_mode == ARGMAX and (self.beta == 0 or self.loss_top_k != 1):
            raise ValueError(
                f"`reverse_kl_top_1_mode` is {ARGMAX!r}, which only `loss_top_k` 1 with `beta` above 0 reads; they are "
                f"{self.loss_top_k} and {self.beta}. Leave it out."
            )
        if self.loss_top_k == 1 and not self.loss_add_tail:
            raise ValueError(
                "`loss_top_k` 1 without `loss_add_tail`: one token alone has probability 1 for both models, and the loss is "
                "always 0. Set `loss_add_tail`, or compare more tokens."
            )
        self._check_whose_teacher()

    @property
    def is_served(self) -> bool:
        return self.use_teacher_server

    def _check_whose_teacher(self) -> None:
        """One beside the student, or one on a server."""
        unread = OF_TEACHER if self.is_served else tuple(TeacherServerConfig.__dataclass_fields__)
        if given := [name for name in unread if name in self.set_by_user()]:
            where = "is on a server, which has loaded it" if self.is_served else "is a model beside the student"
            raise ValueError(
                f"`{given[0]}` is set, but with `use_teacher_server={self.is_served}` the teacher {where}, and nothing reads it: "
                f"leave it out, or set `use_teacher_server={not self.is_served}`."
            )
        if self.is_served and not self.teacher_servers():
            raise ValueError(
                "`use_teacher_server` is set, and nothing says where that server is: set `teacher_model_server_url`, or "
                "`teacher_server_urls` for several teachers."
            )

    def divergence(self) -> Divergence:
        """Of the objective jsd."""
        whose = {0: TEACHER, 1: STUDENT}.get(self.beta, BOTH)
        return Divergence(
            self.beta,
            top_k=self.loss_top_k,
            top_k_of=whose,
            tail=self.loss_add_tail and self.loss_top_k > 0,
            realised=self.loss_top_k == 1 and self.beta > 0 and self.reverse_kl_top_1_mode == SAMPLED,
        )


def prefix_weights(gaps: Tensor, counts: Tensor, gamma: float, epsilon: float) -> Tensor:
    """(N,) w_t = 1 + gamma (1 - sum_{s<t} |a_s| / max(sum_s |a_s|, epsilon)), from 1 + gamma down to 1 within a completion.

    `gaps` are a, end to end; `counts` (S,) says how many belong to each completion.
    """
    sizes = gaps.detach().abs().double()  # what precedes is a difference of two sums over the batch
    totals = segment_sum(sizes, counts)
    begun = torch.stack([totals.cumsum(0) - totals, totals.clamp(min=epsilon)], -1)
    offsets, whole = torch.repeat_interleave(begun, counts, 0, output_size=len(gaps)).unbind(-1)
    before = (sizes.cumsum(0) - sizes - offsets).clamp(min=0) / whole
    return (1 + gamma * (1 - before.clamp(max=1))).to(gaps.dtype)


class IWOPDTrainer(ServedDistillingTrainer, RowsDistillingTrainer):
    """IW-OPD (arXiv:2606.22600): what the student wrote, by how much likelier the teacher finds each of its tokens."""

    method, title = "iw_opd", "importance-weighted on-policy distillation"
    paper = Paper(
        "xie2026position", "On the Position Bias of On-Policy Distillation",
        "Xie, Yan and Zhu, Sijie and Wen, Tiansheng and Chen, Bo and Wang, Yifei",
        2026, "2606.22600",
    )  # fmt: skip
    config_class = IWOPDConfig

    @property
    def weighs_tokens(self) -> bool:
        """Whether the objective is IW-OPD's own."""
        return self.args.distillation_objective == IW_OPD

    @property
    def teaches_in_steps(self) -> bool:
        return not self.weighs_tokens

    @property
    def scores_rollouts(self) -> tuple[str, ...]:
        return ("teacher",) if self.weighs_tokens else ()

    @property
    def divergence(self) -> Divergence:
        return self.args.divergence()

    # ---- collection ----------------------------------------------------------------------------------------------------

    @property
    def needs_old_logps(self) -> bool:
        """Where the student has moved since it wrote; otherwise it says now what it said then."""
        return self.weighs_tokens and not self.args.schedule().is_on_policy

    def policy_columns(self, batch: TokenBatch) -> dict[str, Tensor]:
        """Over the words that the teacher has, too: it is compared with."""
        with evaluating(self.model):
            return {OLD_LOGPS: self.score(self.model_wrapped, batch, ()).logps}

    def annotated(self, rollouts: list[Rollout]) -> dict[int, str] | None:
        if self.args.is_served:
            return super().annotated(rollouts)
        if self.weighs_tokens:
            self.write_columns(rollouts, lambda batch: {TEACHER_LOGPS: self.teacher.logps(batch, self.vocabulary)})
        return None

    def _measure(self, collected: Collected, mode: str) -> None:
        """Lengths apart for both authors: completions of the dataset have one, too."""
        table, written = collected.table, ~collected.table.unwritten[collected.table.mine]
        own = torch.tensor([rollout.author == POLICY for rollout in collected.rollouts], dtype=torch.bool)
        for name, chosen in (("on_policy", own & written), ("off_policy", ~own & written)):
            lengths = table.lengths[table.mine[chosen]]
            collected.numbers |= {
                f"completions/{name}_mean_length": lengths,
                f"completions/{name}_min_length": lowest(lengths),
                f"completions/{name}_max_length": highest(lengths),
            }
        collected.numbers["completions/truncated_fraction"] = table.truncated[table.mine[own & written]]
        super()._measure(collected, mode)

    # ---- the step --------------------------------------------------------------------------------------------------------

    def recomputes_logits(self) -> bool:
        return self.weighs_tokens

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        """Log-probs of tokens are all that IW-OPD's own objective needs."""
        if not self.weighs_tokens:
            return super().score(model, batch, stats)
        how = {"temperature": self.scoring_temperature, "vocabulary": self.vocabulary}
        return score_tokens(model, batch, stats, **how, **self.scoring_options())

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        if not self.weighs_tokens:
            return super().loss(batch, policy, reference)
        logps, wrote = policy.logps, policy.logps.detach()
        if OLD_LOGPS in batch.per_token:  # of its own completions; what others wrote, the student reads as it is now
            own = batch.expand(batch.scalars[ON_POLICY]) > 0
            wrote = torch.where(own, batch.per_token[OLD_LOGPS], wrote)
        gaps = batch.per_token.get(TEACHER_LOGPS, wrote) - wrote  # a pass without tokens has none
        weights = prefix_weights(gaps, batch.counts, self.args.iw_opd_gamma, self.args.iw_opd_epsilon)
        advantages = weights * gaps
        values = -advantages * logps
        metrics = {
            "iw_opd/mean_advantage": advantages,
            "iw_opd/mean_abs_advantage": gaps.abs(),
            "iw_opd/mean_weight": weights,
            "iw_opd/min_weight": lowest(weights),
            "iw_opd/max_weight": highest(weights),
        }
        return LossOutput(values, per="token", metrics=metrics | self.losses_by_author(batch, values))

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        made = super().formula(args, totals)
        if args.distillation_objective == JSD:
            return _on_support(made, args)
        heat = number(args.temperature)
        names = (
            ("w", f"1 + {number(args.iw_opd_gamma)} * (1 - sum_(s < t)(|a_s|) / sum_s(|a_s|))"),
            ("a", f"log q - log p_then, without gradient; p and the teacher's q at temperature {heat}"),
            ("p_then", "the student when it wrote the token; of the dataset's completions, the student now"),
        )
        completions = made.names[-1:]
        return Formula(("-w * a * log p",), (filled(NORMALISERS["per_token"], totals),), names + completions)


def _on_support(made: Formula, args: IWOPDConfig) -> Formula:
    """The formula of a divergence with what v runs over."""
    chosen = args.divergence()
    if not chosen.top_k:
        return made
    ours = "the token that was written" if chosen.realised else f"the student's {chosen.top_k} likeliest"
    theirs = f"the teacher's {chosen.top_k} likeliest"
    words = {TEACHER: theirs, STUDENT: ours, BOTH: f"{theirs} and {ours}"}[chosen.top_k_of]
    rest = "all others as one more" if chosen.tail else "renormalised"
    return Formula(made.terms, made.divided_by, (*made.names, ("v", f"{words}; {rest}")))
