"""The one collator: units of Samples -> TokenBatch. Here, and only here, numbers about tokens are shifted by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from posttrain.core.batch import PADDED, RAGGED, TokenBatch
from posttrain.core.sample import Sample, Unit


@dataclass
class Collator:
    """Callable for a DataLoader; `layout` may be changed until the first batch is made."""

    roles: tuple[str, ...]
    pad_token_id: int
    layout: str = RAGGED
    pad_to_multiple_of: int | None = None

    def __call__(self, units: Sequence[Unit]) -> TokenBatch:
        return collate(units, self.roles, self.layout, self.pad_token_id, self.pad_to_multiple_of)


def collate(
    units: Sequence[Unit],
    roles: tuple[str, ...],
    layout: str = RAGGED,
    pad_token_id: int = 0,
    pad_to_multiple_of: int | None = None,
) -> TokenBatch:
    """Lay the samples of all units out for one forward pass.

    Position `t` of a sample predicts its token `t + 1`, so the number that a Sample keeps at a trained token `t` lands in
    the batch at the entry whose position is `t - 1`. A process that got no row sends one token that nobody trains on:
    a (1, 0) batch breaks attention kernels, and a process that skips its forward pass breaks collectives.
    """
    samples = [sample for unit in units for sample in unit] or [_untrained_token(pad_token_id)]
    lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    width, row_starts = _widths(layout, lengths, starts, pad_to_multiple_of)

    trained_at = [np.flatnonzero(sample.trained[1:]) for sample in samples]  # t - 1 for each trained token t
    positions = np.concatenate([at + start for at, start in zip(trained_at, row_starts)])
    targets = np.concatenate([sample.input_ids[1:][at] for sample, at in zip(samples, trained_at)])
    ids = np.full(_shape(layout, len(samples), width), pad_token_id, dtype=np.int64).reshape(-1)
    position_ids = np.zeros_like(ids)
    for sample, start in zip(samples, row_starts):
        ids[start : start + len(sample)] = sample.input_ids
        position_ids[start : start + len(sample)] = np.arange(len(sample))

    shape = _shape(layout, len(samples), width)
    is_padded = layout == PADDED
    return TokenBatch(
        layout=layout,
        input_ids=torch.from_numpy(ids.reshape(shape)),
        position_ids=torch.from_numpy(position_ids.reshape(shape)),
        positions=torch.from_numpy(positions),
        targets=torch.from_numpy(targets.astype(np.int64)),
        counts=torch.tensor([len(at) for at in trained_at], dtype=torch.int64),
        lengths=torch.from_numpy(lengths),
        ends=torch.from_numpy(row_starts + lengths - 1),
        num_units=len(units),
        roles=roles,
        rows=tuple(sample.row for sample in samples),
        cu_segments=None if is_padded else torch.from_numpy(_segment_bounds(starts, width)),
        longest=int(max(lengths.max(), 0 if is_padded else width - starts[-1])),
        attention_mask=torch.from_numpy((np.arange(width) < lengths[:, None]).astype(np.int64)) if is_padded else None,
        per_token=_per_token(samples, trained_at),
        scalars=_scalars(samples),
        media=_media(samples),
        num_tokens=int(lengths.sum()) if units else 0,
        num_trained=len(targets),
    )


def _untrained_token(pad_token_id: int) -> Sample:
    return Sample([pad_token_id], [False])


def _shape(layout: str, num_samples: int, width: int) -> tuple[int, int]:
    return (num_samples, width) if layout == PADDED else (1, width)


def _widths(layout: str, lengths: np.ndarray, starts: np.ndarray, multiple: int | None) -> tuple[int, np.ndarray]:
    """Width of the laid-out rows, and the flat index at which each sample begins."""
    if layout not in (RAGGED, PADDED):
        raise ValueError(f"A batch is laid out {RAGGED!r} or {PADDED!r}, not {layout!r}.")
    width = int(lengths.max() if layout == PADDED else starts[-1])
    if multiple:
        width = -(-width // multiple) * multiple
    return width, np.arange(len(lengths)) * width if layout == PADDED else starts[:-1]


def _segment_bounds(starts: np.ndarray, width: int) -> np.ndarray:
    """Segment starts of the ragged row; filling up to a multiple adds a last segment that nobody attends to."""
    bounds = starts if starts[-1] == width else np.append(starts, width)
    return bounds.astype(np.int32)


def _per_token(samples: list[Sample], trained_at: list[np.ndarray]) -> dict[str, torch.Tensor]:
    names = samples[0].per_token.keys()
    return {
        name: torch.from_numpy(np.concatenate([s.per_token[name][1:][at] for s, at in zip(samples, trained_at)]))
        for name in names
    }


def _scalars(samples: list[Sample]) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor([sample.scalars[name] for sample in samples], dtype=torch.float32)
        for name in samples[0].scalars
    }


def _media(samples: list[Sample]) -> dict[str, Any]:
    """Per-image tensors of all samples, one after the other, as the model's forward wants them."""
    names = dict.fromkeys(name for sample in samples for name in sample.media)
    return {name: torch.cat([s.media[name] for s in samples if name in s.media]) for name in names}
