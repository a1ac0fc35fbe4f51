"""Which files of a folder are a split, told by the words in their names, as the Hub does."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.data.sources.text_files import SourceError, suffix_of

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Split -> the words that name it; the Hub's own list."""
SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
NO_ROWS = ("readme", "license", "notice", "requirements", "config", "dataset_info", "dataset_infos", "dataset_dict")
"""Files that a dataset's folder has beside its rows, by their names without suffixes."""


def files_of_split(folder: Path, split: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The data files of a folder that belong to a split; all of them where no name tells one.

    A file's own name decides; where it tells nothing, the nearest folder that does. Once any file tells its split, all have
    to: rows of one that does not would be lost, or put where they do not belong.
    """
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and _is_data(file, folder, suffixes)]
    if not files:
        raise SourceError(f"The folder {folder} holds no file of type {', '.join(suffixes)}.")
    splits = {file: _splits_of(file.relative_to(folder), split) for file in files}
    if not any(splits.values()):
        return files
    for file, named in splits.items():
        if len(named) != 1:
            raise SourceError(_not_one_split(file, named, folder))
    chosen = [file for file in files if SPLIT_OF.get(split.lower(), split) in splits[file]]
    if not chosen:
        present = [name for name in WORDS if [name] in splits.values()]
        raise SourceError(f"{folder} has files for the splits {', '.join(map(repr, present))}, none for {split!r}.")
    return chosen


def tells_splits(folder: Path, suffixes: tuple[str, ...]) -> bool:
    """Whether any data file of the folder names its split."""
    files = [file for file in folder.rglob("*") if file.is_file() and _is_data(file, folder, suffixes)]
    return any(_splits_of(file.relative_to(folder), "train") for file in files)


def _is_data(file: Path, folder: Path, suffixes: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return suffix_of(file) in suffixes and not hidden and file.name.split(".")[0].lower() not in NO_ROWS


def _splits_of(relative: Path, wanted: str) -> list[str]:
    """The splits that the file's name tells, or else its nearest folder's: `wanted` by its whole name, others by words."""
    own_name = None if wanted.lower() in SPLIT_OF else re.compile(f"(?<![a-z]){re.escape(wanted.lower())}(?![a-z])")
    for part in reversed(relative.parts):
        name = part.lower()
        if own_name is not None and own_name.search(name):
            return [wanted]
        if named := [SPLIT_OF[word] for word in re.findall("[a-z]+", name) if word in SPLIT_OF]:
            return list(dict.fromkeys(named))
    return []


def _not_one_split(file: Path, named: list[str], folder: Path) -> str:
    if named:
        return f"{file} names the splits {' and '.join(map(repr, named))}: rename it, or name the files one by one."
    return (
        f"{file} belongs to no split, and other files of {folder} do. Rename it (train-{file.name} for one), move it "
        "elsewhere, or name the files one by one in `datasets`."
    )
