"""How many images a dataset has, and what the files that it names look like, before any of them is opened.

A table with paths stays the same when a file behind one of them is changed, so those files are part of what a store is found by.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from posttrain.data.images.limits import ImageLimits
from posttrain.data.images.payloads import SCHEME
from posttrain.data.rows.row_images import CHAT_COLUMNS, IMAGE_COLUMNS, row_images
from posttrain.data.store.building import RowSource

READ_AS_ROWS = re.compile(r"(content|value|messages): (large_)?list|json|^(large_)?string$")
"""Types of conversations that may hold images: parts in messages, or text that is the JSON of some."""


def survey_images(source: RowSource, limits: ImageLimits) -> tuple[int, str]:
    """(number of images, digest of place, size and time of change of every file that rows name)"""
    count, digest = 0, xxhash.xxh3_128()
    for number, paths in _images(source):
        count += number
        for path in paths:
            digest.update(_state(os.path.join(limits.root or ".", path)).encode(errors="surrogateescape"))
    return count, digest.hexdigest()


def _state(path: str) -> str:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # its row will be refused, or is a URL
        return f"{path}\0"
    return f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0"


def _images(source: RowSource) -> Iterator[tuple[int, list[str]]]:
    """(images, paths among them) of some rows at a time."""
    if not source.is_arrow or source.is_transformed:
        yield from _of_rows(source)
        return
    types = {field.name: field.type for field in source.dataset.features.arrow_schema}
    chats = {name for name in CHAT_COLUMNS if name in types and READ_AS_ROWS.search(str(types[name]))}
    tables = {name for name in IMAGE_COLUMNS if name in types and _payload_type(types[name]) is not None}
    for column in sorted(tables):
        for table in RowSource(source.dataset, {column}).tables():
            yield from map(_of_array, table.column(column).chunks)
    others = chats | ({*IMAGE_COLUMNS} & types.keys() - tables)
    if others:
        yield from _of_rows(RowSource(source.dataset, others))


def _of_rows(source: RowSource) -> Iterator[tuple[int, list[str]]]:
    for _, rows in source.batches(0, len(source)):
        payloads = [payload for row in rows if isinstance(row, dict) for payload in row_images(row)]
        yield len(payloads), [path for path in map(_path, payloads) if path is not None]


def _path(payload: Any) -> str | None:
    if isinstance(payload, Mapping):
        payload = payload.get("path") if payload.get("bytes") is None else None
    is_path = isinstance(payload, str | os.PathLike) and not (isinstance(payload, str) and _is_url(payload))
    return os.fsdecode(payload) if is_path else None


def _is_url(text: str) -> bool:
    return text[:5].lower() == "data:" or SCHEME.match(text) is not None


def _payload_type(column: pa.DataType) -> pa.DataType | None:
    """The type of a column's images where tables can be asked about them: texts, or structs of bytes and path."""
    item = column.value_type if pa.types.is_list(column) or pa.types.is_large_list(column) else column
    if pa.types.is_string(item) or pa.types.is_large_string(item):
        return item
    is_image = pa.types.is_struct(item) and {item.field(i).name for i in range(item.num_fields)} == {"bytes", "path"}
    return item if is_image else None


def _of_array(values: pa.Array) -> tuple[int, list[str]]:
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        values = pc.list_flatten(values)
    values = values.drop_null()
    paths = values
    if pa.types.is_struct(values.type):
        paths = pc.struct_field(values, "path").filter(pc.is_null(pc.struct_field(values, "bytes")))
    return len(values), [path for path in paths.to_pylist() if path is not None and not _is_url(path)]
