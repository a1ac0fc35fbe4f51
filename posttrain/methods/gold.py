"""GOLD: distillation from a teacher that may have another tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from posttrain.core.batch import TokenBatch
from posttrain.core.results import LossOutput, LossTerm, TokenScores
from posttrain.data.alignment import align
from posttrain.data.render.byte_decoding import bytes_of_tokens
from posttrain.data.render.renderer import Renderer
from posttrain.losses.distributions import BOTH, SORTED_L1, Divergence, mixed_divergence, sorted_l1
from posttrain.losses.formulas import NORMALISERS, Formula, Totals, filled, number
from posttrain.models.load.model import config_of_model, load_processing_class, load_tokenizer
from posttrain.models.load.teacher import Teacher
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.models.scoring.two_heads import DivergencesAlone
from posttrain.rollout.rollout import Rollout
from posttrain.trainer.distilling_trainer import RowsDistillingTrainer, TaughtTrainer, prompt_sample
from posttrain.trainer.options.base import check_range, option
from posttrain.trainer.options.distilling import MixedAuthorsConfig
from posttrain.trainer.report.model_card import Paper
from posttrain.trainer.vision import image_probe

BOUNDARY = "boundary"
"""1 at the first token of each group of the alignment: the two models are compared where it is to be foretold."""
OBSERVED = "observed"


@dataclass
class GOLDConfig(MixedAuthorsConfig):
    """Options of GOLD."""

    learning_rate: float = option(1e-7, "Initial learning rate of AdamW.")
    temperature: float = option(0.9, "Divides the logits in sampling, and without `use_uld_loss` in the loss, too.")
    top_p: float = option(0.95, "Sample from the smallest set of tokens with this much probability.")
    teacher_tokenizer_name_or_path: str | None = option(
        None, "The teacher's tokenizer, with `use_uld_loss`. None: the one beside the teacher."
    )
    use_uld_loss: bool = option(
        False,
        "The teacher has another tokenizer: texts are aligned by bytes, and wherever a token begins on both sides, the sorted "
        "probabilities of the next token are compared (ULD).",
    )
    use_extended_uld: bool = option(True, "Alignment by bytes. Without it tokens would be compared by their number.")
    uld_token_merge_strategy: str = option(
        OBSERVED, "Only 'observed': both distributions where a group of tokens begins; nothing has to be merged."
    )
    uld_use_hybrid_loss: bool = option(
        False, "Words that both vocabularies have are compared one by one (`beta`), the others sorted."
    )
    uld_hybrid_matched_weight: float | None = option(
        None, "Of the words that both have. None: their share of the teacher's vocabulary."
    )
    uld_hybrid_unmatched_weight: float | None = option(None, "Of the other words. None: 1 minus the weight above.")
    uld_crossentropy_weight: float = option(0.0, "Weight of the likelihood of the completion's tokens, beside ULD.")
    uld_distillation_weight: float = option(1.0, "Weight of ULD.")
    uld_student_temperature: float = option(1.0, "Divides the student's logits in ULD.")
    uld_teacher_temperature: float = option(1.0, "Divides the teacher's logits in ULD.")
    uld_skip_student_eos: bool = option(
        True,
        "ULD does not compare where the student's completion ends. False, with the next option: stopping is taught.",
    )
    uld_skip_teacher_eos: bool = option(True, "The same of the teacher; both options must agree.")
    uld_top_k: int = option(
        0, "Compare this many of the largest probabilities of each side, and the sums of the rest. 0: all of them."
    )
    vllm_server_port: int = option(8001, "Port of the server.")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("uld_student_temperature", "uld_teacher_temperature"):
            check_range(name, getattr(self, name), 0, open_low=True)
        for name in ("uld_crossentropy_weight", "uld_distillation_weight", "uld_top_k"):
            check_range(name, getattr(self, name), 0)
        if self.uld_token_merge_strategy != OBSERVED or not self.use_extended_uld:
            raise ValueError(
                "`uld_token_merge_strategy` must be 'observed' and `use_extended_uld` True: distributions are compared where a "
                "token begins on both sides, so that none has to be merged."
            )
        if self.uld_skip_student_eos != self.uld_skip_teacher_eos:
            raise ValueError(
                "`uld_skip_student_eos` and `uld_skip_teacher_eos` differ: the end of a text is compared with an end, so that both "
                "are skipped or neither is."
            )
        weights = (self.uld_hybrid_matched_weight, self.uld_hybrid_unmatched_weight)
        if (None in weights) != (weights == (None, None)):
            raise ValueError("Give both of `uld_hybrid_matched_weight` and `uld_hybrid_unmatched_weight`, or neither.")
        if self.use_uld_loss and self.sharding is not None:
            raise ValueError(
                "`use_uld_loss` reads both heads again in the backward, when FSDP and DeepSpeed have taken them apart: leave it "
                "out, or start one process per GPU without sharding."
            )
        if self.use_uld_loss and self.seq_kd:
            raise ValueError(
                "`seq_kd` with `use_uld_loss`: a teacher with another tokenizer cannot continue the student's prompts. Let the "
                "teacher write the completions beforehand, and give them as the dataset's."
            )

    @property
    def shares_tokenizer(self) -> bool:
        return not self.use_uld_loss


@dataclass(frozen=True, eq=False)
class Hybrid(Divergence):
    """(n, 2): Jensen-Shannon over the words that both have, all others together as one more; sorted L1 of the others."""

    kind: str = SORTED_L1
    ours: Tensor | None = None  # (W,) ids of the student's words that both have
    theirs: Tensor | None = None  # (W,) their ids at the teacher

    def __call__(self, student_logps: Tensor, teacher_logps: Tensor, targets: Tensor | None = None) -> Tensor:
        matched, others = [], []
        for logps, ids in ((student_logps, self.ours), (teacher_logps, self.theirs)):
            ids = ids.to(logps.device)
            others.append(logps.index_fill(-1, ids, -torch.inf))
            # the rest by its own sum: 1 minus the sum of the others would lose its digits where it is small
            matched.append(torch.cat([logps[:, ids], others[-1].logsumexp(-1, keepdim=True)], -1))
        common = mixed_divergence(*matched, Divergence(self.beta).shares)
        return torch.stack([common, sorted_l1(*others, self.top_k, self.tail)], -1)


class GOLDTrainer(RowsDistillingTrainer):
    """GOLD (General Online Logit Distillation): GKD with one tokenizer; with two, ULD (arXiv:2402.12030) on aligned texts."""

    method, title = "gold", "general online logit distillation"
    paper = Paper(
        "boizard2025uld", "Towards Cross-Tokenizer Distillation: the Universal Logit Distillation Loss for LLMs",
        "Boizard, Nicolas and El Haddad, Kevin and Hudelot, C\\'eline and Colombo, Pierre",
        2025, "2402.12030", "Transactions on Machine Learning Research",
    )  # fmt: skip
    config_class = GOLDConfig

    # ---- a teacher with another tokenizer ------------------------------------------------------------------------------

    def prepare_reference(self, ref_model: Any, policy: Any) -> None:
        """With two tokenizers there is nothing to be the same but the bytes of texts."""
        if not self.args.use_uld_loss:
            return super().prepare_reference(ref_model, policy)
        super(TaughtTrainer, self).prepare_reference(ref_model, policy)
        self.teacher = self.make_teacher(policy)
        self._student_bytes, self._teacher_bytes = map(
            bytes_of_tokens, (self.renderer.tokenizer, self.teacher.tokenizer)
        )
        self._compared = self._make_divergence()

    def make_teacher(self, policy: Any) -> Teacher:
        args = self.args
        if not args.use_uld_loss:
            return super().make_teacher(policy)
        tokenizer, named = self.teacher_tokenizer, args.teacher_tokenizer_name_or_path
        source, arguments, seen = self.teacher_source, args.teacher_arguments(), None
        if self.shown_pixels is not None:
            tokenizer, seen = self._show_images(tokenizer, source if named is None else named, arguments)
        elif tokenizer is None and named is not None:
            tokenizer = load_tokenizer(named, None, args.trust_remote_code)
        made = self.reference_setup().teacher(source, arguments, tokenizer, False, seen)
        if seen is None:
            self._teachers_renderer = Renderer(made.tokenizer)
        made.asked.temperature = args.uld_teacher_temperature
        return made

    def _show_images(self, processor: Any, named: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The teacher's tokenizer, and how its model is loaded so that it sees the student's images in tokens of its own."""
        args = self.args
        if processor is None:
            processor = load_processing_class(named, arguments, args.trust_remote_code)
        vision = self.vision.of_teacher(config_of_model(self.teacher_source, arguments), processor, args)
        tokenizer = processor.tokenizer
        self._teachers_renderer = Renderer(processor, layouts=vision.layouts)
        padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self.data_collator.twins = (padding, vision.pixels)
        return tokenizer, {"vision": vision.family, "image_probe": image_probe(vision, self._teachers_renderer)}

    def _make_divergence(self) -> Divergence:
        args = self.args
        how = {"top_k": args.uld_top_k, "top_k_of": BOTH, "tail": args.uld_top_k > 0}
        if not args.uld_use_hybrid_loss:
            return Divergence(kind=SORTED_L1, **how)
        ours, theirs = words_of_both(self._student_bytes, self._teacher_bytes)
        if not ours:
            raise ValueError("`uld_use_hybrid_loss`: the two vocabularies have no word in common.")
        ours.append(self.renderer.tokenizer.eos_token_id)  # an end is an end, however it is spelt
        theirs.append(self.teacher.tokenizer.eos_token_id)
        return Hybrid(args.beta, ours=torch.tensor(ours), theirs=torch.tensor(theirs), **how)

    @property
    def hybrid_weights(self) -> tuple[float, float]:
        """Of the words that both have, and of the others."""
        given = self.args.uld_hybrid_matched_weight, self.args.uld_hybrid_unmatched_weight
        share = len(self._compared.ours) / len(self._teacher_bytes)
        return (share, 1 - share) if None in given else given

    # ---- collection ----------------------------------------------------------------------------------------------------

    def spread(self, rollouts: list[Rollout]) -> None:
        super().spread(rollouts)
        if self.args.use_uld_loss:
            for rollout in rollouts:
                self._attach_teachers_tokens(rollout)

    def _attach_teachers_tokens(self, rollout: Rollout) -> None:
        """The same completion in the teacher's tokens, behind the teacher's own rendering of the prompt, as the sample's twin."""
        sample, start = rollout.sample, rollout.prompt_length
        pieces = [self._student_bytes.get(int(token), b"") for token in sample.input_ids[start:]]
        # without the tokens that end it
        written = max((place for place, piece in enumerate(pieces, 1) if piece), default=0)
        text = b"".join(pieces).decode("utf-8", "replace")
        (ids,) = self._teachers_renderer.encode_texts([text], add_special_tokens=False)
        kwargs = rollout.columns.get("chat_template_kwargs")
        asked = (rollout.prompt, rollout.tools, kwargs, sample.row, sample.images)
        prompt = prompt_sample(self._teachers_renderer, *asked)
        found = align(pieces[:written], [self._teacher_bytes.get(int(token), b"") for token in ids])
        places = found.boundaries
        if written < len(pieces) and not self.args.uld_skip_student_eos and found.is_whole:
            places.append((written, len(ids)))
            ids = np.append(ids, self.teacher.tokenizer.eos_token_id)
        twin = prompt.append(ids, trained=True)
        for side, (one, begin) in enumerate(((sample, start), (twin, len(prompt)))):
            flags = np.zeros(len(one), np.float32)
            flags[[begin + place[side] for place in places]] = 1
            one.per_token[BOUNDARY] = flags
        sample.twin = twin

    # ---- the step --------------------------------------------------------------------------------------------------------

    def score(self, model: nn.Module, batch: TokenBatch, stats: tuple[str, ...]) -> TokenScores:
        """ULD at the boundaries, log-probs at all tokens; `divergences` are of all tokens, 0 between boundaries."""
        if not self.args.use_uld_loss:
            return super().score(model, batch, stats)
        twin = batch.twin
        if twin is None:  # a process without a row takes part with a token that every teacher has
            twin = replace(batch, input_ids=torch.zeros_like(batch.input_ids), per_token={BOUNDARY: batch.targets[:0]})
        ours, theirs = (one.per_token[BOUNDARY] > 0 for one in (batch if batch.twin else twin, twin))
        taught = self.teacher.rows(twin)
        question = DivergencesAlone(
            batch.positions[ours],
            batch.targets[ours],
            temperature=self.args.uld_student_temperature,
            chunk_tokens=self.args.chunk_tokens,
            teacher=replace(taught, hidden=taught.hidden[theirs]),
            divergence=self._compared,
        )
        router_loss = self.loaded.router_loss_weight != 0
        found = score_tokens(model, batch, stats, also=(question,), router_loss=router_loss)
        everywhere = found.divergences.new_zeros(len(batch.targets), *found.divergences.shape[1:])
        return replace(found, divergences=everywhere.index_put((ours.nonzero().squeeze(-1),), found.divergences))

    def loss(self, batch: TokenBatch, policy: TokenScores, reference: TokenScores | None) -> LossOutput:
        """Mean over the boundaries of a completion, then over completions; likelihood by tokens."""
        args = self.args
        if not args.use_uld_loss:
            return super().loss(batch, policy, reference)
        values, metrics = policy.divergences, {}
        if args.uld_use_hybrid_loss:
            parts = [self._mean_of_boundaries(batch, values[:, part]) for part in (0, 1)]
            metrics = {"matched_loss": parts[0], "unmatched_loss": parts[1]}
            mean = sum(weight * part for weight, part in zip(self.hybrid_weights, parts))
        else:
            mean = self._mean_of_boundaries(batch, values)
        terms = [LossTerm(mean, "sequence", args.uld_distillation_weight)]
        if args.uld_crossentropy_weight:
            terms.append(LossTerm(-policy.logps, "token", args.uld_crossentropy_weight))
        return LossOutput(terms, metrics=metrics | self.losses_by_author(batch, mean, "sequence"))

    def _mean_of_boundaries(self, batch: TokenBatch, values: Tensor) -> Tensor:
        flags = batch.per_token.get(BOUNDARY, values[:0])
        return batch.sequence_sum(values) / batch.sequence_sum(flags).clamp(min=1)

    @classmethod
    def formula(cls, args: Any, totals: Totals) -> Formula:
        made = super().formula(args, totals)
        if not args.use_uld_loss:
            return made
        line = "sum_i |sort(p)_i - sort(q)_i|, mean over the places of a completion where a token begins on both sides"
        heats = " and ".join(map(number, (args.uld_student_temperature, args.uld_teacher_temperature)))
        names = (("p, q", f"student and teacher at temperatures {heats}"), *made.names[1:])
        terms = [f"{number(args.uld_distillation_weight)} * {line}"]
        if args.uld_crossentropy_weight:
            terms.append(f"{number(args.uld_crossentropy_weight)} * sum_t -log p(y_t)")
        return Formula(tuple(terms), (filled(NORMALISERS["mean_of_token_means"], totals),), names)


def words_of_both(ours: dict[int, bytes], theirs: dict[int, bytes]) -> tuple[list[int], list[int]]:
    """Ids of the words that two vocabularies share, by their bytes: "Ġthe" of one and "▁the" of another are one word."""
    by_bytes = {piece: number for number, piece in sorted(theirs.items(), reverse=True) if piece}
    mine = {piece: number for number, piece in sorted(ours.items(), reverse=True) if piece}
    shared = [(number, by_bytes[piece]) for piece, number in sorted(mine.items()) if piece in by_bytes]
    return [one for one, _ in shared], [other for _, other in shared]
