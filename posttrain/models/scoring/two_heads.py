"""The divergence of a student from a teacher over the whole vocabulary, from the hidden states of both, a chunk at a time.

Of the teacher's pass only its hidden states at the trained tokens are kept (`teacher_rows`). Both heads turn a chunk of rows into
logits, which are compared and thrown away: never more than one chunk of the two exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import TokenScores
from posttrain.losses.distributions import SORTED_L1, Divergence
from posttrain.models.scoring.float32_head import head_input
from posttrain.models.scoring.fused_divergence import Taught, token_divergences
from posttrain.models.scoring.fused_head import can_fuse
from posttrain.models.scoring.token_scores import (
    TOKEN_STATS,
    LanguageHead,
    Measure,
    Question,
    RowsQuestion,
    TokenQuestion,
    ask,
    default_chunk_tokens,
    targets_within,
)
from posttrain.models.sharding import keep_gathered


@dataclass(frozen=True)
class TeacherRows:
    """What is kept of a teacher's pass, and what reads it."""

    hidden: Tensor  # (N, H of the teacher), detached, in the teacher's dtype
    model: nn.Module  # whose language head reads them: its soft-cap, logit scale and adapters are its own
    temperature: float = 1.0


def teacher_rows(model: nn.Module, batch: TokenBatch, temperature: float = 1.0) -> TeacherRows:
    """Run the teacher's body over a batch. `model` is its causal LM, in evaluation mode."""
    with torch.no_grad():
        return TeacherRows(ask(model, batch, RowsQuestion(batch.positions)).rows, model, temperature)


def score_divergence(
    model: nn.Module,
    batch: TokenBatch,
    teacher: TeacherRows,
    divergence: Divergence,
    *,
    stats: tuple[str, ...] = (),
    temperature: float = 1.0,
    vocabulary: int | None = None,
    chunk_tokens: int | None = None,
    also: tuple[Question, ...] = (),
    router_loss: bool = False,
    weights: Tensor | None = None,
    logps_in_loss: bool = False,
) -> TokenScores:
    """How far is the student from the teacher at each trained token? `model` may be wrapped in anything.

    `divergences` (N,) are differentiable by the student only; log-probs and `stats` are as `score_tokens` gives them, at
    `temperature`; the teacher's is its own. `vocabulary`: words beyond it are left out of both distributions, as sizes of one
    tokenizer are padded differently. `weights`: (N,) what each divergence is multiplied by in the loss, up to a factor that all
    share; None: all alike. `logps_in_loss`: the loss has a gradient for `logps` too. Both are about speed alone: a loss that
    is something else has its exact gradient, too, from logits that are computed again.
    """
    measures = {name: Measure(TOKEN_STATS[name]) for name in stats}
    question = DivergenceQuestion(
        batch.positions,
        targets_within(batch, vocabulary),
        measures,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        vocabulary=vocabulary,
        teacher=teacher,
        divergence=divergence,
        weights=weights,
        logps_in_loss=logps_in_loss,
    )
    return ask(model, batch, question, *also, router_loss=router_loss)


@dataclass(frozen=True)
class DivergenceQuestion(TokenQuestion):
    """A TokenQuestion whose answer has `divergences` too."""

    teacher: TeacherRows | None = None
    divergence: Divergence = Divergence()
    weights: Tensor | None = None
    logps_in_loss: bool = False

    def _scores(self, model: nn.Module, hidden: Tensor, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        head = LanguageHead.of(model, self.temperature, call, self.vocabulary)
        theirs = self._teachers_head(head, call)
        self._check(hidden, head, theirs)
        ours_in, theirs_in = head_input(hidden, head.module), head_input(self.teacher.hidden, theirs.module)
        fused = self.divergence.is_whole and can_fuse(head) and can_fuse(theirs)
        item = max(ours_in.element_size(), theirs_in.element_size()) if fused else 4
        chunk = self.chunk_tokens or _chunk_of_two(hidden.device, head.vocabulary + theirs.vocabulary, item)
        if fused:
            return token_divergences(
                ours_in,
                head,
                Taught.of(theirs_in, theirs),
                self.divergence.shares,
                self.targets,
                chunk,
                {name: measure.function for name, measure in self.measures.items()},
                self.weights,
                gradient_in_forward=not self.logps_in_loss,
            )
        compared = Measure(partial(_compared, theirs, self.divergence), (self.teacher.hidden,), differentiable=True)
        measures = {**self.measures, "divergences": compared}
        plain = TokenQuestion(
            self.positions, self.targets, measures, self.temperature, chunk, vocabulary=self.vocabulary
        )
        return plain._scores(model, hidden, call)

    def _teachers_head(self, student: LanguageHead, call: Callable[[Tensor], Tensor]) -> LanguageHead:
        """The policy may be its own teacher; its head is gathered already."""
        own = self.teacher.model.get_output_embeddings()
        if own is not student.module:
            call = keep_gathered(own, self.teacher.model)
        return LanguageHead.of(self.teacher.model, self.teacher.temperature, call, self.vocabulary)

    def _check(self, hidden: Tensor, ours: LanguageHead, theirs: LanguageHead) -> None:
        if len(self.teacher.hidden) != len(hidden):
            raise ValueError(
                f"The teacher has hidden states of {len(self.teacher.hidden)} tokens and the student of {len(hidden)}: they are "
                "compared token by token, so both must have been asked about the same ones."
            )
        if any(hasattr(parameter, "ds_id") for parameter in theirs.module.parameters()):
            raise ValueError("The teacher's head is split by DeepSpeed ZeRO-3; load the teacher whole, or use FSDP2.")
        if self.vocabulary is None:
            if ours.vocabulary != theirs.vocabulary and self.divergence.kind != SORTED_L1:
                raise ValueError(
                    f"The student has {ours.vocabulary} words and the teacher {theirs.vocabulary}. Where both have one tokenizer "
                    "and their sizes are padded differently, `vocabulary` names how many words to compare; otherwise use GOLD."
                )
            return
        for name, one in (("student", ours), ("teacher", theirs)):
            size = getattr(one.module, "out_features", self.vocabulary)
            if size < self.vocabulary:
                raise ValueError(f"vocabulary is {self.vocabulary}, and the {name}'s head has {size} words.")


class DivergencesAlone(DivergenceQuestion):
    """Asked beside another question, which has the log-probs: of other tokens, or at another temperature."""

    def answer(self, model: nn.Module, rows: Tensor) -> dict[str, Tensor]:
        return {"divergences": super().answer(model, rows)["divergences"]}


def _chunk_of_two(device: torch.device, words: int, item: int) -> int:
    """Two chunks of logits, `words` a row together, take the memory that one has otherwise."""
    return max(default_chunk_tokens(device, words // 2, item) // 2, 1)


def _compared(
    theirs: LanguageHead, divergence: Divergence, logits: Tensor, log_z: Tensor, targets: Tensor, taught: Tensor
) -> Tensor:
    """A Measure of the student's logits; `taught` are hidden states of the teacher."""
    with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
        wanted = theirs(head_input(taught, theirs.module))
        wanted = normalised(wanted.to(torch.promote_types(wanted.dtype, logits.dtype)))
    return divergence(normalised(logits), wanted, targets)


def normalised(logits: Tensor) -> Tensor:
    """Log-probs. A CPU's log_softmax adds up in one run, which is less exact over a large vocabulary."""
    return logits - logits.logsumexp(-1, keepdim=True)
