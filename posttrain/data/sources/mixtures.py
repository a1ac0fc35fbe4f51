"""Several datasets as one: concatenated or interleaved, by weights or by shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import datasets

from posttrain.data.sources.joined_columns import with_all_columns
from posttrain.data.sources.named import AnyDataset, DatasetSource, load_source, take_fraction


def load_mixture(
    sources: Sequence[DatasetSource | str], *, mixing: str = "concatenate", seed: int = 0, streaming: bool = False
) -> AnyDataset:
    """Several sources as one dataset, with the columns of all of them.

    `concatenate`: weight 2 takes every row twice, 0.5 a seeded half of them; the result is shuffled (a stream is not).
    `interleave`: each row is drawn from a source with probability weight / sum of weights, until one is exhausted.
    """
    if mixing not in MIXERS:
        raise ValueError(f"mixing={mixing!r} is none of {', '.join(MIXERS)}.")
    if not sources:
        raise ValueError("A mixture needs at least one source.")
    listed = [DatasetSource(source) if isinstance(source, str) else source for source in sources]
    loaded = [load_source(source, seed=seed, streaming=streaming) for source in listed]
    if any(source.share is not None for source in listed):
        loaded = _cut_to_shares(loaded, listed, streaming)
    if len(loaded) == 1 and listed[0].weight == 1:
        return loaded[0]
    joined = with_all_columns(loaded, [source.path for source in listed])
    return MIXERS[mixing](joined, [source.weight for source in listed], seed)


def _cut_to_shares(parts: list[AnyDataset], sources: list[DatasetSource], streaming: bool) -> list[AnyDataset]:
    """The first rows of each, as many as its share of the largest mixture that all of them can fill."""
    if streaming or any(source.share is None for source in sources):
        what = "streams have no length" if streaming else "all sources need one where one has it"
        raise ValueError(f"Shares of a mixture cannot be taken: {what}.")
    total = min(len(part) / source.share for part, source in zip(parts, sources))
    return [part.select(range(max(1, round(source.share * total)))) for part, source in zip(parts, sources)]


def _concatenate(parts: list[AnyDataset], weights: list[float], seed: int) -> AnyDataset:
    if isinstance(parts[0], datasets.IterableDataset):
        if any(weight != int(weight) for weight in weights):
            raise ValueError("Concatenated streams take whole weights: a stream has no share to take.")
        return datasets.concatenate_datasets([p for part, weight in zip(parts, weights) for p in [part] * int(weight)])
    copies = []
    for part, weight in zip(parts, weights):
        copies += [part] * int(weight)
        if weight != int(weight):
            copies.append(take_fraction(part, weight - int(weight), seed))
    return datasets.concatenate_datasets(copies).shuffle(seed=seed)


def _interleave(parts: list[AnyDataset], weights: list[float], seed: int) -> AnyDataset:
    probabilities = [weight / sum(weights) for weight in weights]
    return datasets.interleave_datasets(parts, probabilities=probabilities, seed=seed)


MIXERS: dict[str, Callable[[list[AnyDataset], list[float], int], AnyDataset]] = {
    "concatenate": _concatenate,
    "interleave": _interleave,
}
