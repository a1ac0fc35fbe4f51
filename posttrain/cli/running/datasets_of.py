"""The datasets that a run's options name: one, or a mixture, and what is evaluated."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from posttrain.cli.errors import UsageError, nearest

if TYPE_CHECKING:
    from posttrain.cli.options.arguments import RunConfig
    from posttrain.data.sources.named import DatasetSource

logger = logging.getLogger(__name__)

KEYS = ("path", "name", "split", "columns", "weight", "fraction", "data_files", "data_dir")
TEXTS = ("name", "split", "data_dir")


def datasets_of(config: RunConfig) -> tuple[Any, Any]:
    """(rows to train on, rows to evaluate on or None). SourceError and UsageError name what is wrong."""
    from posttrain.data.sources.mixtures import load_mixture

    _refuse_idle_evaluation(config)
    streaming = config.get("dataset_streaming") or config.get("streaming")
    seed = config.get("seed")
    sources = _sources(config, config.get("dataset_train_split"))
    train = load_mixture(sources, mixing=config.get("mixing"), seed=seed, streaming=streaming)
    size = config.get("test_split_size")
    if size is not None:
        return _split(train, size, seed, streaming)
    other = config.get("eval_dataset_name")
    if other or config.get("eval_strategy") != "no" or config.get("do_eval"):
        return train, _evaluation(config, other, streaming, seed)
    return train, None


def image_root(config: RunConfig) -> str | None:
    """Where paths of images may lead that rows name, unless options say so: into the folder of the data."""
    names = [entry if isinstance(entry, str) else entry.get("path") for entry in config.get("datasets") or ()]
    names = [name for name in names or [config.get("dataset_name")] if name]
    local = [name for name in names if os.path.exists(os.path.expanduser(name))]
    return os.path.commonpath([folder_of(name) for name in local or names]) if names else None


def folder_of(data: str) -> str:
    """A file from elsewhere must not open any file of this machine. What a dataset of the Hub names lies in the cache of
    downloads, if anywhere."""
    import datasets

    path = os.path.abspath(os.path.expanduser(data))
    if not os.path.exists(path):
        return os.fspath(datasets.config.HF_DATASETS_CACHE)
    return path if os.path.isdir(path) else os.path.dirname(path)


def _refuse_idle_evaluation(config: RunConfig) -> None:
    """Rows to evaluate on, in a run that never evaluates, are a mistake: they would not be read.

    `do_eval` alone evaluates nothing, here as in transformers. One case is only warned of: `test_split_size` beside `datasets`,
    which TRL takes in silence with `eval_strategy: "no"` too (it holds the rows out). Its files have to go on training, and on the
    same rows; `eval_dataset_name`, and `test_split_size` beside `dataset_name`, TRL does not have or does not read.
    """
    given = [name for name in ("eval_dataset_name", "test_split_size") if config.get(name) is not None]
    if len(given) == 2:
        raise UsageError(
            "`eval_dataset_name` and `test_split_size` both name rows to evaluate on; leave one of them out."
        )
    if not given or config.get("eval_strategy") != "no" or config.get("eval_on_start"):
        return
    asked = f"{config.where(given[0])} is {config.get(given[0])!r}, and the run never evaluates"
    if given[0] == "test_split_size" and config.get("datasets"):
        if os.environ.get("RANK", "0") == "0":
            logger.warning(
                f"{asked}: these rows are held out for nothing. Set `eval_strategy: steps`, or leave it out."
            )
        return
    raise UsageError(f"{asked}: set `eval_strategy: steps` (or epoch), or leave it out.")


def _sources(config: RunConfig, split: str) -> list[DatasetSource]:
    from posttrain.data.sources.named import DatasetSource

    listed = config.get("datasets")
    if listed:
        sources = [_source(entry, number, split) for number, entry in enumerate(listed, 1)]
        fractions = [None if isinstance(entry, str) else entry.get("fraction") for entry in listed]
        return _with_shares(sources, fractions)
    name = config.get("dataset_name")
    if not name:
        raise UsageError(
            f"posttrain {config.method} needs rows to train on: --dataset_name with a file, a folder or a Hub id, or `datasets` in "
            "the file of options."
        )
    columns = config.get("dataset_columns") or {}
    return [DatasetSource(name, subset=config.get("dataset_config"), split=split, columns=columns)]


def _source(entry: Any, number: int, split: str) -> DatasetSource:
    from posttrain.data.sources.named import DatasetSource

    where = f"`datasets`, entry {number}"
    if isinstance(entry, str):
        return DatasetSource(entry, split=split)
    for key in entry:
        if key not in KEYS:
            raise UsageError(f"{where}: there is no key `{key}`.{nearest(key, KEYS)} Keys are {', '.join(KEYS)}.")
    if not isinstance(entry.get("path"), str):
        raise UsageError(f"{where} has no `path`: a file, a folder or a Hub id.")
    for key in TEXTS:
        if not isinstance(entry.get(key), str | None):
            raise UsageError(f"{where}: `{key}` is {entry[key]!r}; it takes text.")
    given = _columns(entry.get("columns") or {}, where)
    more = {key: entry[key] for key in ("weight", "data_files", "data_dir") if entry.get(key) is not None}
    try:
        return DatasetSource(
            entry["path"], subset=entry.get("name"), split=entry.get("split") or split, **given, **more
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where}: {error}") from error


def _columns(columns: Any, where: str) -> dict[str, Any]:
    """Ours are a mapping of names, TRL's are a list of columns to keep."""
    if isinstance(columns, dict) and all(isinstance(name, str) for pair in columns.items() for name in pair):
        return {"columns": columns}
    if isinstance(columns, list) and all(isinstance(name, str) for name in columns):
        return {"keep": columns}
    raise UsageError(
        f"{where}: `columns` is {columns!r}; it takes a list of columns to keep, such as [messages], or a mapping from their names "
        "to the method's, such as {question: prompt}."
    )


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


def _evaluation(config: RunConfig, other: str | None, streaming: bool, seed: int) -> Any:
    from posttrain.data.sources.mixtures import load_mixture
    from posttrain.data.sources.named import DatasetSource, has_splits, load_source

    split = config.get("dataset_test_split")
    if other:
        columns = config.get("dataset_columns") or {}
        return load_source(DatasetSource(other, split=split, columns=columns), seed=seed, streaming=streaming)
    sources = _sources(config, split)
    remedy = "Name the rows with --eval_dataset_name, or hold some out with --test_split_size 0.1."
    named = [entry for entry in config.get("datasets") or () if not isinstance(entry, str) and entry.get("split")]
    if named:
        raise UsageError(
            f"`eval_strategy` asks for evaluation, and {named[0]['path']} of `datasets` names the split {named[0]['split']!r}, "
            f"which is trained on. {remedy}"
        )
    if whole := next((source.path for source in sources if not has_splits(source.path)), None):
        what = "one file" if os.path.isfile(whole) else "a folder" if os.path.isdir(whole) else "a pattern of files"
        raise UsageError(
            f"`eval_strategy` asks for evaluation, and {whole} is {what} without a split {split!r}. {remedy}"
        )
    return load_mixture(sources, mixing=config.get("mixing"), seed=seed, streaming=streaming)
