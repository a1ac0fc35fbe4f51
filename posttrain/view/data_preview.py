"""What an offline method was trained on, as far as a run folder or its user says where it is.

Three kinds of sources: prepared rows (`prepared_data.json` in the run folder names their token stores: tokens with the mask that
training used), datasets (a local path in a configuration file of the run, or `--data`), and the rows that were left out
(`bad_rows_*.jsonl`). Nothing is fetched: a dataset of the Hub is named, not shown.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.view.errors import NotFound, ViewError
from posttrain.view.run_folder import RunFolder
from posttrain.view.token_text import TokenText, numbered

PREPARED_FILE = "prepared_data.json"
"""{"train": {"store": "folder of a token store"}, ...}"""
RECORD_FILE = "run.json"
"""How the run was started and with which versions, that of the package `datasets` among them; it names no data."""
PATH_NAMES = ("path", "dataset", "dataset_name", "train_dataset", "eval_dataset", "data", "train_file", "datasets")
MAX_ROWS, PAGE_ROWS, MAX_TOKENS, MAX_CHARACTERS = 1000, 20, 4096, 20_000
Json = dict[str, Any]


@dataclass(frozen=True)
class Source:
    name: str
    kind: str  # a key of READERS
    path: Path | None
    note: str = ""

    def as_json(self) -> Json:
        return asdict(self) | {"path": None if self.path is None else str(self.path)}


def sources_of(run: RunFolder, given: list[str]) -> list[Source]:
    """`given` are paths from the command line."""
    found = [Source(Path(path).name, "dataset", Path(path), "named on the command line") for path in given]
    files = run.settings()
    for part, facts in files.get(PREPARED_FILE, {}).items():
        if isinstance(facts, dict) and isinstance(facts.get("store"), str):
            found.append(Source(f"{part}, as trained on", "prepared", Path(facts["store"])))
    for file, settings in files.items():
        found += [] if file == RECORD_FILE else _named_in(settings, file)
    for path in sorted(run.path.glob("bad_rows_*.jsonl")):
        part = path.stem.removeprefix("bad_rows_")
        found.append(Source(f"{part}, rows left out", "left_out", path))
    return list({(source.kind, source.path, source.name): source for source in reversed(found)}.values())[::-1]


def _named_in(settings: Json, file: str) -> list[Source]:
    found = []
    for word in _paths_in(settings):
        path = Path(word).expanduser()
        if path.exists():
            found.append(Source(path.name, "dataset", path, f"named in {file}"))
        else:
            found.append(Source(word, "elsewhere", None, f"named in {file}; not on this machine under that path"))
    return found


def _paths_in(value: Any, is_path: bool = False) -> list[str]:
    if isinstance(value, dict):
        return [w for name, inner in value.items() for w in _paths_in(inner, name in PATH_NAMES)]
    if isinstance(value, list):
        return [word for inner in value for word in _paths_in(inner, is_path)]
    return [value] if is_path and isinstance(value, str) and value else []


def preview(run: RunFolder, given: list[str], number: int, start: int) -> Json:
    """A page of rows of one source."""
    sources = sources_of(run, given)
    if number >= len(sources):
        raise NotFound(f"The run has {len(sources)} sources of data, and none with the number {number}.")
    source = sources[number]
    return source.as_json() | {"page_rows": PAGE_ROWS} | READERS[source.kind](source, start, run.tokenizer())


# ---- the kinds -----------------------------------------------------------------------------------------------------------


def _dataset_rows(source: Source, start: int, tokenizer: TokenText | None) -> Json:
    from posttrain.data.sources.named import SourceError, load_source  # takes a second, and only this needs it

    start = min(start, MAX_ROWS)
    try:
        rows = _undecoded(load_source(str(source.path), streaming=True))
        page = list(itertools.islice(iter(rows), start, start + PAGE_ROWS + 1))
    except (SourceError, ValueError, OSError) as error:
        raise ViewError(f"{source.path} cannot be shown: {error}") from error
    shown = [
        {"row": start + place, "fields": _fields(_with_numbered_images(row))}
        for place, row in enumerate(page[:PAGE_ROWS])
    ]
    return {"rows": shown, "start": start, "total": None, "more": len(page) > PAGE_ROWS and start < MAX_ROWS}


def picture_of_row(run: RunFolder, given: list[str], number: int, row: int, place: int) -> bytes:
    """An image of a row of a dataset, small, by the opener that training uses: no path leads out of the folder of the images."""
    from posttrain.data.images.limits import HEADER, BadImage, ImageLimits
    from posttrain.data.images.opening import open_image
    from posttrain.data.rows.row_images import row_images
    from posttrain.data.sources.named import SourceError, load_source
    from posttrain.rollout.thumbnails import thumbnail

    sources = sources_of(run, given)
    if number >= len(sources) or sources[number].kind != "dataset" or row >= MAX_ROWS + PAGE_ROWS:
        raise NotFound("There is no such row of a dataset.")
    path = sources[number].path
    try:
        rows = _undecoded(load_source(str(path), streaming=True))
        payloads = row_images(next(itertools.islice(iter(rows), row, None), {}))
        if place >= len(payloads):
            raise NotFound(f"Row {row} has {len(payloads)} images.")
        return thumbnail(open_image(payloads[place], ImageLimits(root=_image_root(run, path), check=HEADER)).rgb())
    except (SourceError, BadImage, ValueError, OSError) as error:
        raise ViewError(f"The image cannot be shown: {error}") from error


def _image_root(run: RunFolder, data: Path) -> Path:
    """The run's own, where it is on this machine; else the folder of the data, as on the command line."""
    named = [settings.get("image_root") for settings in run.settings().values()]
    folders = [Path(root) for root in named if isinstance(root, str) and Path(root).is_dir()]
    return folders[0] if folders else data if data.is_dir() else data.parent


def _undecoded(rows: Any) -> Any:
    """A stream whose images stay as they are stored, as training reads them."""
    from posttrain.data.store.building import without_decoding

    undecoded = None if rows.features is None else without_decoding(rows.features)
    return rows if undecoded is None else rows.cast(undecoded)


def _with_numbered_images(row: Json) -> Json:
    """The row with {"type": "image", "number": n} wherever its n-th image stands, in its column and in its conversations."""
    from posttrain.data.images.row_image import RowImage, with_images_as
    from posttrain.data.rows.foreign_formats import parsed_messages
    from posttrain.data.rows.row_images import (
        CHAT_COLUMNS,
        IMAGE_COLUMNS,
        counts_markers,
        with_images_placed,
        with_images_used,
    )

    numbers = itertools.count()
    used = with_images_used(parsed_messages(row), lambda *image: RowImage(next(numbers).to_bytes(16), (0, 0)))
    images = [image for name in IMAGE_COLUMNS for image in used.get(name) or ()]

    def numbered_part(image: RowImage) -> Json:
        return {"type": "image", "number": int.from_bytes(image.key)}

    placed = with_images_placed(used, images, counts_markers([(used, len(images))]), [])
    chats = {name: with_images_as(placed[name], numbered_part) for name in CHAT_COLUMNS if name in placed}
    columns = {name: [*map(numbered_part, used[name])] for name in IMAGE_COLUMNS if used.get(name)}
    return {**placed, **chats, **columns}


def _left_out_rows(source: Source, start: int, tokenizer: TokenText | None) -> Json:
    assert source.path is not None
    with open(source.path, encoding="utf-8", errors="replace") as file:
        lines = list(itertools.islice(file, start, start + PAGE_ROWS + 1))
    rows = []
    for place, line in enumerate(lines[:PAGE_ROWS]):
        try:
            content = json.loads(line)
        except ValueError:
            content = line
        rows.append({"row": start + place, "fields": _fields(content if isinstance(content, dict) else {"": content})})
    return {"rows": rows, "start": start, "total": None, "more": len(lines) > PAGE_ROWS}


def _prepared_rows(source: Source, start: int, tokenizer: TokenText | None) -> Json:
    from posttrain.data.store.token_store import DamagedStoreError, TokenStore

    assert source.path is not None
    try:
        store = TokenStore(source.path, verify=False)
    except DamagedStoreError as error:
        raise ViewError(f"The prepared rows are not there any more: {error}") from error
    rows = []
    for number in range(min(start, store.num_units), min(start + PAGE_ROWS, store.num_units)):
        samples = [_sample(sample, tokenizer) for sample in store.unit(number)]
        rows.append({"row": int(store.rows[number]), "samples": samples})
    return {"rows": rows, "start": start, "total": store.num_units, "more": start + PAGE_ROWS < store.num_units}


def _sample(sample: Any, tokenizer: TokenText | None) -> Json:
    ids = sample.input_ids[:MAX_TOKENS].tolist()
    is_trained = sample.trained & (np.arange(len(sample)) > 0)  # nothing predicts the first token
    return {
        "pieces": tokenizer.pieces(ids) if tokenizer else numbered(ids),
        "ids": ids,
        "trained": [int(flag) for flag in is_trained[:MAX_TOKENS]],
        "tokens": len(sample),
        "trained_tokens": sample.num_trained,
    }


def _missing_source(source: Source, start: int, tokenizer: TokenText | None) -> Json:
    return {"rows": [], "start": 0, "total": 0, "more": False}


READERS: dict[str, Callable[[Source, int, TokenText | None], Json]] = {
    "dataset": _dataset_rows,
    "prepared": _prepared_rows,
    "left_out": _left_out_rows,
    "elsewhere": _missing_source,
}


def _fields(row: Json) -> Json:
    """Values that JSON has; long ones cut, others by the name of their type."""
    return {name: _field(value) for name, value in row.items()}


def _field(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=lambda v: repr(type(v)))
    if len(text) > MAX_CHARACTERS:
        return text[:MAX_CHARACTERS] + f"… ({len(text):,} characters)"
    return value if isinstance(value, str) else json.loads(text, parse_constant=lambda word: None)
