"""The datasets that a run's options name: one, or a mixture, and what is evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError, nearest

if TYPE_CHECKING:
    from posttrain.cli.arguments import RunConfig
    from posttrain.data.sources import DatasetSource

KEYS = ("path", "name", "split", "columns", "weight", "fraction", "data_files", "data_dir")


def datasets_of(config: RunConfig) -> tuple[Any, Any]:
    """(rows to train on, rows to evaluate on or None). SourceError and UsageError name what is wrong."""
    from posttrain.data.mixtures import load_mixture

    streaming = config.get("dataset_streaming") or config.get("streaming")
    seed = config.get("seed")
    sources = _sources(config, config.get("dataset_train_split"))
    train = load_mixture(sources, mixing=config.get("mixing"), seed=seed, streaming=streaming)
    size = config.get("test_split_size")
    if size is not None:
        return _split(train, size, seed, streaming)
    if config.get("eval_strategy") == "no" and not config.get("do_eval"):
        return train, None
    return train, _evaluation(config, streaming, seed)


def _sources(config: RunConfig, split: str) -> list[DatasetSource]:
    from posttrain.data.sources import DatasetSource

    listed = config.get("datasets")
    if listed:
        sources = [_source(entry, number, split) for number, entry in enumerate(listed, 1)]
        return _with_shares(sources, [entry.get("fraction") for entry in listed])
    name = config.get("dataset_name")
    if not name:
        raise UsageError(
            f"posttrain {config.method} needs rows to train on: --dataset_name with a file, a folder or a Hub id, or `datasets` in "
            "the file of options."
        )
    columns = config.get("dataset_columns") or {}
    return [DatasetSource(name, subset=config.get("dataset_config"), split=split, columns=columns)]


def _source(entry: Any, number: int, split: str) -> DatasetSource:
    from posttrain.data.sources import DatasetSource

    where = f"`datasets`, entry {number}"
    if isinstance(entry, str):
        return DatasetSource(entry, split=split)
    for key in entry:
        if key not in KEYS:
            raise UsageError(f"{where}: there is no key `{key}`.{nearest(key, KEYS)} Keys are {', '.join(KEYS)}.")
    if not isinstance(entry.get("path"), str):
        raise UsageError(f"{where} has no `path`: a file, a folder or a Hub id.")
    columns = entry.get("columns") or {}
    given = {"columns": columns} if isinstance(columns, dict) else {"keep": list(columns)}
    more = {key: entry[key] for key in ("weight", "data_files", "data_dir") if entry.get(key) is not None}
    try:
        return DatasetSource(entry["path"], subset=entry.get("name"), split=entry.get("split", split), **given, **more)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from error


def _with_shares(sources: list[DatasetSource], fractions: list[Any]) -> list[DatasetSource]:
    """TRL's `fraction`: the share of the mixture that a dataset shall have; given for all or for none."""
    if all(fraction is None for fraction in fractions):
        return sources
    for number, fraction in enumerate(fractions, 1):
        if not isinstance(fraction, int | float) or not fraction > 0:
            raise UsageError(
                f"`datasets`, entry {number}: `fraction` is {fraction!r}; where one entry has a share of the mixture, all need one "
                "above 0."
            )
    for source, fraction in zip(sources, fractions):
        source.share = fraction / sum(fractions)
    return sources


def _split(train: Any, size: float, seed: int, streaming: bool) -> tuple[Any, Any]:
    if streaming:
        raise UsageError("`test_split_size`: a stream cannot be split; name a split with `dataset_test_split`.")
    count = round(size * len(train)) if size < 1 else int(size)
    if not 0 < count < len(train):
        raise UsageError(
            f"`test_split_size` is {size}, which is {count} of {len(train)} rows; some must be left on each side."
        )
    parts = train.train_test_split(test_size=count, seed=seed)
    return parts["train"], parts["test"]


def _evaluation(config: RunConfig, streaming: bool, seed: int) -> Any:
    from posttrain.data.mixtures import load_mixture
    from posttrain.data.sources import DatasetSource, load_source

    split, other = config.get("dataset_test_split"), config.get("eval_dataset_name")
    if other:
        columns = config.get("dataset_columns") or {}
        return load_source(DatasetSource(other, split=split, columns=columns), seed=seed, streaming=streaming)
    sources = _sources(config, split)
    if file := next((source.path for source in sources if Path(source.path).is_file()), None):
        raise UsageError(
            f"`eval_strategy` asks for evaluation, and {file} is one file without a split {split!r}. Name the rows with "
            "--eval_dataset_name, or hold some out with --test_split_size 0.1."
        )
    return load_mixture(sources, mixing=config.get("mixing"), seed=seed, streaming=streaming)
