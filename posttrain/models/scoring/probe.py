"""Can this model run ragged batches, and share prefixes? Short segments are run in two layouts, and the answers compared.

With images the other side of the comparison is transformers' own forward of each sample alone, with the family's own arguments and
positions. Equality cannot tell that a model is blind, so two controls do: another image, and swapped images, must change answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from posttrain.core.batch import PADDED, RAGGED, SHARED, RowPart, SharedPrefixes, TokenBatch
from posttrain.core.processes import of_every_process
from posttrain.core.sample import Sample, Unit
from posttrain.models.attention.mixers import why_wrong_with_carried
from posttrain.models.attention.ragged import can_be_replaced, caps_scores, is_ragged, ragged_name, soft_caps_run
from posttrain.models.inference import body_of, evaluating
from posttrain.models.scoring.heads import CAUSAL_LM, SEQUENCE_REWARD, TOKEN_LABELS, LabelsQuestion, score_sequences
from posttrain.models.scoring.token_scores import ask, router_loss, score_tokens
from posttrain.models.sharding import gathered_as_called
from posttrain.models.vision.features import family_of
from posttrain.models.vision.tower import set_text_attention

PROBE_LENGTHS = (5, 11)
COMMON = 2  # tokens with which both segments begin
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
PICKED_TOKENS = {
    "chunked_attention", "indexed_attention", "minimax_m3_sparse", "compressed_sparse_attention",
    "heavily_compressed_attention",
}  # fmt: skip
"""Layers that attend to some tokens of a long row, by a mask or by indices. A short row, and so a probe, does not show it."""
OF_A_CHANGE = 0.1
"""Share of it that another image must change: one kernel twice, so that a blind model's answers are the same to the last bit."""
LEAK = 0.05
"""What other tokens may change in the next segment, as a share of what they change in their own. One kernel and one shape twice:
nothing moves where segments are apart, but for the last bits of experts, whose products have other sizes when tokens choose
otherwise. The tolerance of 16 bits would let attention or a recurrence read on unseen."""


def ordinary_tokens(innermost: nn.Module, count: int, seed: int = 0) -> torch.Tensor:
    """Some tokens out of the middle of the vocabulary.

    Control tokens stand at its ends, and many were never trained: after five of SmolLM2, float32 rounding alone moves log-probs by
    0.03, after five words by 5e-5.
    """
    size = innermost.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(size // 10, 1), max(9 * size // 10, 2), (count,), generator=generator)


@dataclass(frozen=True)
class ImageProbe:
    """Samples with short answers that are trained, and how to lay them out: made by the trainer, with its renderer and collator."""

    one: Sample  # shows one image
    two: Sample  # shows two, of different sizes, with text between
    none: Sample
    other: Sample  # `one` with another image of the same size
    swapped: Sample  # `two` with its images in the other order
    sibling: Sample  # `two` with another answer
    collate: Callable[[Sequence[Unit], str], TokenBatch]  # (units, layout), each distinct image encoded once

    def units(self, layout: str) -> list[Unit]:
        two = [(self.two, self.sibling)] if layout == SHARED else [(self.two,)]
        return [(self.one,), *two, (self.none,)]


def why_not_ragged(
    model: nn.Module, innermost: nn.Module, task: str, image_probe: ImageProbe | None = None, on_gpu: bool = False
) -> str | None:
    """None when ragged attention is in place and gives the padded answers; else the reason, and nothing is changed.

    `on_gpu`: it will be trained there, wherever its weights are now.
    """
    before = innermost.config._attn_implementation
    if is_ragged(before):
        return None
    on_gpu = on_gpu or next(innermost.parameters()).is_cuda
    if not can_be_replaced(innermost, on_gpu):
        return f"{type(innermost).__name__} has no SDPA attention to build on"
    picking = PICKED_TOKENS.intersection(getattr(innermost.config.get_text_config(), "layer_types", None) or ())
    if picking:
        return (
            f"layers of {type(innermost).__name__} attend to some tokens of a long row ({', '.join(sorted(picking))})"
        )
    family = family_of(innermost)
    if family is not None and family.is_found and image_probe is not None:
        return f"models of type {family.model_type!r} are in no table of families, but follow transformers' conventions"
    if caps_scores(innermost) and on_gpu and not soft_caps_run(innermost, torch.device("cuda")):
        return (
            f"the scores of {type(innermost).__name__} have a soft-cap, which torch's kernel for ragged rows does not "
            "know; FlashAttention 4 does (`pip install 'posttrain[flash4]'`)"
        )
    if family is not None and family.images_see_themselves_whole and on_gpu:
        return f"images of {family.model_type} see themselves whole, for which there is no ragged kernel on a GPU yet"
    reason = _why_not_apart_in_all_layers(model, innermost, task)
    if reason is None and image_probe is not None:
        reason = _why_images_apart(model, innermost, task, image_probe, RAGGED, before)
    if reason is None:
        return None
    set_text_attention(innermost, before)
    return f"{reason}, so it reads its mask" if "answers differently" in reason else reason


def _why_not_apart_in_all_layers(model: nn.Module, innermost: nn.Module, task: str) -> str | None:
    """None when two segments are kept apart, by attention as it is or with bounds passed on to every layer; else the reason."""
    before = innermost.config._attn_implementation

    def why_apart() -> str | None:
        set_text_attention(innermost, before)
        layouts = (PADDED, RAGGED)
        return _why_apart(model, innermost, task, layouts, "two ragged segments", "on ragged segments")

    return why_wrong_with_carried(innermost, why_apart)


def why_not_shared(
    model: nn.Module, innermost: nn.Module, task: str, image_probe: ImageProbe | None = None
) -> str | None:
    """None when a model that runs ragged batches gives the same answers where two samples share their beginning."""
    reason = _why_apart(model, innermost, task, (RAGGED, SHARED), "a shared prefix", "where a prefix is shared")
    if reason is None and image_probe is not None:
        reason = _why_images_apart(model, innermost, task, image_probe, SHARED, "sdpa")
    return reason


def why_not_in_parts(
    model: nn.Module, innermost: nn.Module, part: tuple[int, int], is_sharded: bool = False
) -> str | None:
    """None when processes that share a row give the answers of one that has all of it; else the reason. Collective.

    A layer that mixes tokens elsewhere than in attention (a convolution, a recurrence) would see the tokens of its process alone.
    """
    name, size, heads = type(innermost).__name__, part[1], innermost.config.get_text_config().num_attention_heads
    if heads % size:
        return f"{name} has {heads} attention heads, which {size} processes cannot have equally many of"
    with _asked_calmly(model):
        asked = _asked(innermost, CAUSAL_LM)
        batch = _probe_batch(asked, RAGGED)
        whole = score_tokens(model, batch.to(next(model.parameters()).device)).logps
        parts = score_tokens(model, _in_parts(batch, *part).to(whole.device)).logps
    if is_sharded and any(other != whole.tolist() for other in of_every_process(whole.tolist(), dist.get_world_size())):
        return None  # the first process alone has read the weights: the others' answers say nothing
    difference = _difference(whole, parts, innermost)
    return (
        None if difference is None else f"{name} answers differently where processes share a row (by {difference:.2g})"
    )


def _in_parts(batch: TokenBatch, rank: int, size: int) -> TokenBatch:
    """A ragged batch, filled up to a multiple of `size` by a segment that no other attends to, and the part of one process."""
    width = batch.input_ids.shape[1]
    missing = -width % size
    filled = {name: nn.functional.pad(getattr(batch, name), (0, missing)) for name in ("input_ids", "position_ids")}
    if missing:
        filled["cu_segments"] = torch.cat([batch.cu_segments, batch.cu_segments[-1:] + missing])
    batch = replace(batch, **filled)
    return replace(batch, part=RowPart.of(batch, rank, size))


def why_images_fail(model: nn.Module, innermost: nn.Module, task: str, image_probe: ImageProbe) -> str | None:
    """None when a model sees its images, and padded batches give the answers of its own forward; else the sentence about it."""
    before, name = innermost.config._attn_implementation, type(innermost).__name__
    controls = (("another image", "one", "other"), ("swapping two images", "two", "swapped"))
    with _asked_calmly(model):
        for change, shown, changed in controls:
            ones = (getattr(image_probe, which) for which in (shown, changed))
            one, other = (_alone(model, innermost, task, image_probe, sample) for sample in ones)
            if (one - other).abs().max().item() <= OF_A_CHANGE * _tolerance(one, innermost):
                return f"{name} does not see its images: {change} changes none of its answers"
    return _why_images_apart(model, innermost, task, image_probe, PADDED, before)


def why_not_its_own_labels(innermost: nn.Module) -> str | None:
    """None when a token classifier's own forward says what its head says of the hidden states; else the sentence about it.

    Some have more between the two. Trained without that, they would answer otherwise once they are saved and loaded.
    """
    with _asked_calmly(innermost):
        batch = _probe_batch(_asked(innermost, TOKEN_LABELS), PADDED).to(next(innermost.parameters()).device)
        ours = ask(innermost, batch, LabelsQuestion("labels", batch.positions)).labels
        own = innermost(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        difference = _difference(own.flatten(0, 1)[batch.positions].to(ours.dtype), ours, innermost)
    name = type(innermost).__name__
    return None if difference is None else f"{name} has more than one linear layer over its hidden states"


def why_no_router_loss(innermost: nn.Module, task: str) -> str | None:
    """None when a mixture of experts has a load-balancing loss, and ours is that of transformers' own forward; else the reason."""
    name = type(innermost).__name__
    try:
        with _asked_calmly(innermost):
            ids = ordinary_tokens(innermost, max(PROBE_LENGTHS))[None].to(next(innermost.parameters()).device)
            given = {"input_ids": ids, "output_router_logits": True, "use_cache": False}
            own = innermost(**given).aux_loss if task == CAUSAL_LM else None
            if own is None and task == CAUSAL_LM:
                return f"transformers computes none for {name}"
            ours = router_loss(innermost, body_of(innermost)(**given).router_logits, None)
    except Exception as error:  # an architecture may fail in any way of its own; the sentence carries it
        return f"{name} could not be asked for it ({type(error).__name__}: {error})"
    difference = None if own is None else _difference(own.float()[None], ours.float()[None], innermost)
    return None if difference is None else f"ours differs from that of {name} by {difference:.2g}"


def why_not_its_own_logits(innermost: nn.Module) -> str | None:
    """None when the log-probs of a padded batch are those of transformers' own forward of each row; else the reason.

    A family may do more to its hidden states, or to its logits, than `LanguageHead` knows: it would be trained on other logits
    than it has, and nothing else would show it.
    """
    name = type(innermost).__name__
    try:
        with _asked_calmly(innermost):
            asked = _asked(innermost, CAUSAL_LM)
            ours = _answers(innermost, asked, CAUSAL_LM, PADDED)
    except Exception as error:  # an architecture may fail in any way of its own; the sentence carries it
        return f"asked about two short rows, it ends with {type(error).__name__}: {error}"
    difference = _difference(torch.cat(asked.own).to(ours), ours, innermost)
    if difference is None or math.isnan(difference):  # of weights that are not finite nothing can be said
        return None
    more = f"{name} does more to its hidden states or logits than is known here"
    return f"its log-probs would be wrong by {difference:.2g}, since {more}"


def _why_apart(
    model: nn.Module, innermost: nn.Module, task: str, layouts: tuple[str, str], what: str, where: str
) -> str | None:
    """None when the answers in two layouts are the same; else what is wrong with the second. Ragged attention is put in place."""
    name = type(innermost).__name__
    try:
        with _asked_calmly(model):
            asked = _asked(innermost, task)
            one = _answers(model, asked, task, layouts[0])
            if layouts[0] == PADDED:
                set_text_attention(innermost, ragged_name(innermost))
            other = _answers(model, asked, task, layouts[1])
            moved = _answers(model, _with_another_end(asked, innermost), task, layouts[1])
    except Exception as error:  # an architecture may fail in any way of its own; the sentence carries it
        return f"{name} could not run {what} ({type(error).__name__}: {error})"
    difference = _difference(one, other, innermost)
    if difference is not None:
        return f"{name} answers differently {where} (by {difference:.2g})"
    own, next_one = (part.abs().mean().item() for part in _by_segment(moved - other, asked, task))
    if next_one > LEAK * own:
        return f"{name} answers differently {where} (other tokens in one change the next by {next_one:.2g})"
    return None


@contextmanager
def _asked_calmly(model: nn.Module) -> Iterator[None]:
    """Without dropout and without a graph."""
    with evaluating(model), torch.no_grad(), gathered_as_called(model):
        yield


def _why_images_apart(
    model: nn.Module, innermost: nn.Module, task: str, images: ImageProbe, layout: str, own_attention: str
) -> str | None:
    """None when a batch in this layout gives the answers that its samples get alone, with the attention `own_attention`."""
    name, ours = type(innermost).__name__, innermost.config._attn_implementation
    units = images.units(layout)
    try:
        with _asked_calmly(model):
            set_text_attention(innermost, own_attention)
            alone = [_alone(model, innermost, task, images, sample) for unit in units for sample in unit]
            set_text_attention(innermost, ours)
            batch = images.collate(units, layout).to(next(model.parameters()).device)
            if task == CAUSAL_LM:  # of what the model itself would say; see `_asked`
                best = torch.cat(alone).max(-1)
                one, batch = best.values, replace(batch, targets=best.indices)
            else:
                one = torch.cat(alone)
            other = _answers_of(model, batch, task)
    except Exception as error:  # an architecture may fail in any way of its own; the sentence carries it
        set_text_attention(innermost, ours)
        return f"{name} could not run images in {layout} batches ({type(error).__name__}: {error})"
    difference = _difference(one, other, innermost)
    if difference is None:
        return None
    return f"{name} answers differently about images in {layout} batches (by {difference:.2g})"


def _alone(model: nn.Module, innermost: nn.Module, task: str, images: ImageProbe, sample: Sample) -> torch.Tensor:
    """What is said of one sample alone: (trained tokens, vocabulary) log-probs by transformers' own forward; answers of other heads
    than the language model's, which transformers reads at other places, by ours."""
    batch = images.collate([(sample,)], PADDED).to(next(innermost.parameters()).device)
    if task != CAUSAL_LM:
        return _answers_of(model, batch, task)
    logits = innermost(**_own_arguments(innermost, batch), use_cache=False).logits.flatten(0, 1)[batch.positions]
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def _own_arguments(innermost: nn.Module, batch: TokenBatch) -> dict[str, Any]:
    """What the family's processor would hand over with one sample; positions are left to the model."""
    family = family_of(innermost)
    kwargs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    is_image = (batch.input_ids == family.placeholder_id).long()
    if family.three_axis_positions:
        kwargs["mm_token_type_ids"] = is_image
    elif family.prefix_sees_itself_whole:
        places = torch.arange(batch.input_ids.shape[1], device=batch.device)
        kwargs[family.token_types_key] = (places > batch.positions.min()).long()[None]
    elif family.token_types_key is not None:
        kwargs[family.token_types_key] = is_image
    return kwargs | ({} if batch.images is None else batch.images.encoder)


def _difference(one: torch.Tensor, other: torch.Tensor, innermost: nn.Module) -> float | None:
    """How far two answers are apart, or None where that is rounding.

    In 16 bits on average: single words of a 135M model that was run rightly were seen 0.17 apart, while a model that reads its
    mask, or does not see the prefix, is wrong everywhere.
    """
    tolerance = _tolerance(one, innermost)
    apart = (one - other).abs()
    difference = (apart.mean() if tolerance >= TOLERANCE[torch.float16] else apart.max()).item()
    return None if difference <= tolerance else difference


def _tolerance(answers: torch.Tensor, innermost: nn.Module) -> float:
    return max(TOLERANCE.get(dtype, 1e-3) for dtype in (answers.dtype, next(innermost.parameters()).dtype))


@dataclass(frozen=True)
class _Asked:
    """Two segments that begin alike, and the words whose log-probs are compared, one for each token but the first `COMMON`."""

    tokens: list[torch.Tensor]
    targets: list[torch.Tensor]
    # their log-probs by transformers' own forward of each segment alone
    own: list[torch.Tensor] = field(default_factory=list)


def _asked(innermost: nn.Module, task: str) -> _Asked:
    """Targets are what the model itself would say: rounding moves the log-prob of an improbable word by far more."""
    tokens = [ordinary_tokens(innermost, n, seed) for seed, n in enumerate(PROBE_LENGTHS)]
    tokens[1][:COMMON] = tokens[0][:COMMON]
    if task != CAUSAL_LM:
        return _Asked(tokens, [part[COMMON:] for part in tokens])
    device = next(innermost.parameters()).device
    logits = [innermost(input_ids=part[None].to(device), use_cache=False).logits[0] for part in tokens]
    kept = [part[COMMON - 1 : -1].to(torch.promote_types(part.dtype, torch.float32)) for part in logits]
    said = [part.log_softmax(-1).max(-1) for part in kept]
    return _Asked(tokens, [best.indices.cpu() for best in said], [best.values for best in said])


def _with_another_end(asked: _Asked, innermost: nn.Module) -> _Asked:
    """The first segment ends otherwise; what is asked of it stays the same."""
    changed = asked.tokens[0].clone()
    changed[COMMON:] = ordinary_tokens(innermost, len(changed) - COMMON, seed=len(asked.tokens))
    return replace(asked, tokens=[changed, *asked.tokens[1:]])


def _by_segment(answers: torch.Tensor, asked: _Asked, task: str) -> tuple[torch.Tensor, torch.Tensor]:
    first = 1 if task == SEQUENCE_REWARD else len(asked.targets[0])
    return answers[:first], answers[first:]


def _answers(model: nn.Module, asked: _Asked, task: str, layout: str) -> torch.Tensor:
    return _answers_of(model, _probe_batch(asked, layout).to(next(model.parameters()).device), task)


def _answers_of(model: nn.Module, batch: TokenBatch, task: str) -> torch.Tensor:
    if task == SEQUENCE_REWARD:
        return score_sequences(model, batch).rewards
    if task == CAUSAL_LM:
        return score_tokens(model, batch).logps
    return ask(model, batch, LabelsQuestion("labels", batch.positions)).labels


def _probe_batch(asked: _Asked, layout: str) -> TokenBatch:
    """Made by hand: `models` does not import `data`."""
    tokens = asked.tokens
    mask = bounds = prefixes = None
    if layout == PADDED:
        ids = nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        mask = (torch.arange(max(PROBE_LENGTHS)) < torch.tensor(PROBE_LENGTHS)[:, None]).long()
        places = [row * ids.shape[1] + torch.arange(n) for row, n in enumerate(PROBE_LENGTHS)]
        segments = list(PROBE_LENGTHS)
    elif layout == RAGGED:
        ids = torch.cat(tokens)[None]
        places = [torch.arange(PROBE_LENGTHS[0]), PROBE_LENGTHS[0] + torch.arange(PROBE_LENGTHS[1])]
        segments = list(PROBE_LENGTHS)
    else:
        rests = [n - COMMON for n in PROBE_LENGTHS]
        ids = torch.cat([tokens[0][:COMMON], *(part[COMMON:] for part in tokens)])[None]
        starts = (COMMON, COMMON + rests[0])
        places = [torch.cat([torch.arange(COMMON), start + torch.arange(n)]) for start, n in zip(starts, rests)]
        segments = [COMMON, *rests]
        edges = [torch.tensor([0, size], dtype=torch.int32) for size in (COMMON, sum(rests))]
        prefixes = SharedPrefixes(*edges, COMMON, COMMON, ids.shape[1], COMMON, sum(rests))
    if layout != PADDED:
        bounds = torch.tensor(np.cumsum([0, *segments]), dtype=torch.int32)
    position_ids = torch.zeros_like(ids)
    for place in places:
        position_ids.view(-1)[place] = torch.arange(len(place))
    lengths = torch.tensor(PROBE_LENGTHS)
    return TokenBatch(
        layout, ids, position_ids, torch.cat([place[COMMON - 1 : -1] for place in places]),
        torch.cat(asked.targets), lengths - COMMON, lengths,
        torch.stack([place[-1] for place in places]), 2, ("text",), (0, 1), bounds, max(segments), prefixes, mask,
        num_tokens=sum(PROBE_LENGTHS), num_trained=sum(PROBE_LENGTHS) - 2 * COMMON,
    )  # fmt: skip
