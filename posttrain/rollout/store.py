"""RolloutStore: every rollout is kept, as parquet that any tool of the field reads.

`OUTPUT/rollouts/step=000012/process-0.parquet` holds what process 0 collected for optimizer step 12. Files are written on a thread
under a temporary name and renamed: a file that has its name is complete. The columns are those of ROLLOUT_SCHEMA. Pages have
checksums, which any reader of parquet verifies, and a hidden file beside each has one of all its bytes, which `verify` does.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from posttrain.data.images.row_image import named_by_key
from posttrain.rollout import thumbnails
from posttrain.rollout.rollout import OLD_LOGPS, SAMPLING_LOGPS, Rollout, ToolCall
from posttrain.rollout.thumbnails import Thumbnails

logger = logging.getLogger(__name__)

FOLDER = "rollouts"
REFERENCE_LOGPS = "reference_logps"
STEP_FOLDER = re.compile(r"step=(\d+)")
MAX_WAITING = 4
"""Writes that may wait for the disk; a further one waits with them, or a slow disk would fill the memory."""
MAX_KEPT = 64
"""Collections that are kept in memory while the disk takes none, as when it is full; after that it is an error."""


def _field(name: str, kind: pa.DataType, description: str) -> pa.Field:
    return pa.field(name, kind, metadata={"description": description})


_TOKENS, _LOGPS, _NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float32()), pa.map_(pa.string(), pa.float64())
_TEXTS = pa.map_(pa.string(), pa.string())
_FAILURE = pa.struct([("reward", pa.string()), ("kind", pa.string()), ("message", pa.string())])
_PLACE = [(name, pa.int32()) for name in ("place", "height", "width", "tokens", "start")]
_IMAGE = pa.struct([("key", pa.string()), ("column", pa.string()), *_PLACE])
_CALL = [(name, pa.string()) for name in ("name", "arguments", "result", "error")]
_TOOL_CALL = pa.struct([*_CALL, ("seconds", pa.float64())])

ROLLOUT_SCHEMA = pa.schema(
    [
        _field("step", pa.int32(), "optimizer step it was collected for; stands in the name of the folder"),
        _field("epoch", pa.float64(), "passes over the dataset at that time"),
        _field("row", pa.int64(), "row of the dataset that the prompt came from"),
        _field("group", pa.int64(), "number of the prompt in the run; completions of one prompt share it"),
        _field("sample", pa.int32(), "which of the completions of its prompt"),
        _field(
            "author",
            pa.string(),
            "who wrote it: policy, reference, mixture (of both), teacher or dataset; null: not known",
        ),
        _field("prompt", pa.string(), "the prompt; messages as JSON"),
        _field("completion", pa.string(), "what was written after it; messages as JSON"),
        _field("tools", pa.string(), "schemas of the tools that the prompt was written with, as JSON; null: none"),
        _field("prompt_ids", _TOKENS, "token ids of the prompt, as the model saw them"),
        _field("completion_ids", _TOKENS, "token ids after the prompt: the model's, and those of tools in between"),
        _field("trained", pa.list_(pa.bool_()), "for each completion token: the model wrote it, so it is trained on"),
        _field("sampling_logps", _LOGPS, "for each completion token: its log-prob where it was drawn; NaN: not known"),
        _field(
            "old_logps",
            _LOGPS,
            "for each completion token: its log-prob under the trainer before the update; null where the loss needs none "
            "(one update a generation, no vLLM, no divergence in the reward)",
        ),
        _field(
            "reference_logps", _LOGPS, "for each completion token: its log-prob under the reference, if there is one"
        ),
        _field("advantage", pa.float64(), "what the loss multiplied by; 0: learnt nothing from"),
        _field("rewards", _NUMBERS, "name of a reward function -> its value; null: no opinion, or it failed"),
        _field("reward", pa.float64(), "weighted sum of the rewards; null: none had an opinion"),
        _field(
            "failures", pa.list_(_FAILURE), "rewards that failed: which, how (error, timeout, invalid, crash), message"
        ),
        _field("extras", _TEXTS, "name of a column of `log_extra` -> what a reward said there; texts, others as JSON"),
        _field(
            "images",
            pa.list_(_IMAGE),
            "what was shown, in order: key, the column it stands in (prompt or completion), its place among the images there, its "
            "height and width for the image processor, how many tokens stand for it, and the first of them in the column's ids",
        ),
        _field("tool_calls", pa.list_(_TOOL_CALL), "in order: tool, arguments as JSON, its result or error, seconds"),
        _field("finish_reason", pa.string(), "stop, length or error"),
        _field("error", pa.string(), "why it could not be written, or a teacher not asked about it; null: neither"),
        _field("masked", pa.bool_(), "took no part in the training, nor in the statistics of its group"),
        _field("truncated", pa.bool_(), "ended because its allowance of tokens was used up"),
        _field("policy_version", pa.int64(), "version of the weights that wrote it; -1: the dataset brought it"),
        _field("seconds", _NUMBERS, "name of a phase (such as generate) -> how long it took for this rollout"),
    ],
    metadata={"posttrain.rollouts": "1"},
)
"""The columns. docs/rollouts.md lists the same, and a test compares."""

FILE_SCHEMA = ROLLOUT_SCHEMA.remove(0)
"""What is in a file: `step` is in the name of its folder, where readers of partitioned data look for it."""

TEXT_COLUMNS = [field.name for field in FILE_SCHEMA if pa.types.is_string(field.type)]
"""Columns of which parquet makes a dictionary. Log-probs hardly repeat: looking for repeats would cost more than the rest."""


class DamagedRollouts(ValueError):
    """A file of rollouts whose bytes are not those that were written."""


class RolloutStore:
    """Writes the rollouts of one process. `close` it, or use it in a `with`."""

    def __init__(self, folder: str | Path, process_index: int = 0, keep_pictures: bool = True) -> None:
        """`folder` is the output directory; rollouts go to `rollouts` in it, small pictures of their images to `rollout_images`."""
        self.folder = Path(folder) / FOLDER
        self.thumbnails = Thumbnails(Path(folder) / thumbnails.FOLDER) if keep_pictures else None
        self.process_index = process_index
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-store")
        self._waiting: list[Future[None]] = []
        self._unwritten: list[tuple[int, list[dict[str, Any]]]] = []  # what the disk has not taken; of the thread alone

    def write(self, step: int, records: Sequence[dict[str, Any]], pictures: Mapping[bytes, Any] | None = None) -> None:
        """Keep `records`, dicts with the columns of ROLLOUT_SCHEMA but `step`, and return at once.

        `pictures` are what they show, by key. Nothing of it may be changed afterwards. A column that is missing is null. What a
        full disk does not take is written with the next ones. Raises what went wrong in an earlier write.
        """
        self._raise_failure(wait_for=max(len(self._waiting) - MAX_WAITING + 1, 0))
        self._waiting.append(self._thread.submit(self._write_all, [(step, list(records))], MAX_KEPT))
        if self.thumbnails is not None and pictures:
            self._waiting.append(self._thread.submit(self.thumbnails.add, pictures))

    def _write_all(self, further: list[tuple[int, list[dict[str, Any]]]], most_kept: int) -> None:
        """On the thread. An error of the disk leaves up to `most_kept` collections for later."""
        self._unwritten += further
        while self._unwritten:
            try:
                write_file(self.folder, self._unwritten[0][0], self.process_index, self._unwritten[0][1])
            except OSError as error:
                count, first = len(self._unwritten), self._unwritten[0][0]
                if count > most_kept:
                    message = f"The rollouts of {count} collections, the first is of step {first}, could not be written"
                    raise OSError(error.errno, f"{message} ({error.strerror})", str(self.folder)) from error
                if count == 1:
                    logger.warning(f"{error.strerror}; they are kept in memory until there is room.")
                return
            self._unwritten.pop(0)

    def flush(self) -> None:
        """Wait until everything is on disk, but for what the disk does not take now. Raises what went wrong."""
        self._raise_failure(wait_for=len(self._waiting))

    def close(self) -> None:
        """Flush, and end the thread. Raises an OSError where something could not be written."""
        try:
            self._waiting.append(self._thread.submit(self._write_all, [], 0))
            self.flush()
        finally:
            self._thread.shutdown()
        if self.thumbnails is not None and self.thumbnails.left_out:
            logger.warning(
                f"{len(self.thumbnails.left_out)} images of rollouts have no picture in {self.thumbnails.folder}."
            )

    def forget_after(self, step: int) -> list[int]:
        """Remove the rollouts of later steps, those of all processes, and return their numbers.

        For a run that continues from a checkpoint of `step`: it makes them again. One process does this before any writes.
        """
        self.flush()
        later = [(number, path) for number, path in _step_folders(self.folder) if number > step]
        for _, path in later:
            shutil.rmtree(path)
        for unfinished in self.folder.glob("step=*/.*.unfinished"):
            unfinished.unlink()
        return [number for number, _ in later]

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _raise_failure(self, wait_for: int) -> None:
        for index, write in enumerate(list(self._waiting)):
            if index < wait_for or write.done():
                self._waiting.remove(write)
                write.result()


def write_file(folder: Path, step: int, process_index: int, records: list[dict[str, Any]]) -> None:
    """Write one file of a step. A second write of the same step and process gets a file of its own."""
    target = folder / f"step={step:06d}"
    target.mkdir(parents=True, exist_ok=True)
    name, part = f"process-{process_index}.parquet", 0
    while (target / name).exists():
        part += 1
        name = f"process-{process_index}-{part}.parquet"
    unfinished = target / f".{name}.unfinished"
    options = {"compression": "zstd", "use_dictionary": TEXT_COLUMNS, "write_page_checksum": True}
    try:
        written = io.BytesIO()
        pq.write_table(table_of(records), written, **options)
        with open(unfinished, "wb") as file:
            file.write(written.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        _digest_file(target / name).write_text(xxhash.xxh3_128_hexdigest(written.getbuffer()), encoding="ascii")
        os.replace(unfinished, target / name)
    except OSError as error:
        message = f"The rollouts of step {step} could not be written ({error.strerror or error})"
        raise OSError(error.errno, message, str(target)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _digest_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.xxh3")


def verify(path: Path) -> None:
    """Raise DamagedRollouts where a file is not as it was written. One without a digest, of an earlier version, passes."""
    recorded = _digest_file(path)
    if recorded.exists() and xxhash.xxh3_128_hexdigest(path.read_bytes()) != recorded.read_text(encoding="ascii"):
        raise DamagedRollouts(
            f"{path} was changed after it was written: its checksum is not that of {recorded.name}. Restore it from a copy, or "
            "delete both files."
        )


def table_of(records: Sequence[dict[str, Any]]) -> pa.Table:
    """Records as a table of FILE_SCHEMA."""
    unknown = sorted({name for record in records for name in record} - set(FILE_SCHEMA.names))
    if unknown:
        raise ValueError(f"A rollout has no column {unknown[0]!r}; its columns are {', '.join(FILE_SCHEMA.names)}.")
    columns = [_column([record.get(field.name) for record in records], field.type) for field in FILE_SCHEMA]
    return pa.Table.from_arrays(columns, schema=FILE_SCHEMA)


def read_rollouts(folder: str | Path, steps: Iterable[int] | None = None) -> pa.Table:
    """The rollouts of an output directory, in the order of steps and processes; of some `steps` only, if they are given."""
    wanted = None if steps is None else set(steps)
    tables = []
    for step, path in _step_folders(Path(folder) / FOLDER):
        for file in sorted(path.glob("process-*.parquet"), key=_numbers_in) if wanted is None or step in wanted else []:
            verify(file)
            table = pq.read_table(file, schema=FILE_SCHEMA, partitioning=None, page_checksum_verification=True)
            tables.append(table.add_column(0, ROLLOUT_SCHEMA.field("step"), pa.array([step] * len(table), pa.int32())))
    return pa.concat_tables(tables).cast(ROLLOUT_SCHEMA) if tables else ROLLOUT_SCHEMA.empty_table()


def record_of(rollout: Rollout, epoch: float) -> dict[str, Any]:
    """A rollout as the store keeps it."""
    sample, start = rollout.sample, rollout.prompt_length
    tools = rollout.tools or rollout.columns.get("tools")

    def column(name: str) -> np.ndarray | None:
        return sample.per_token[name][start:] if name in sample.per_token else None

    return {
        "epoch": epoch,
        "row": sample.row,
        "group": rollout.group,
        "sample": rollout.request.sample,
        "author": rollout.author,
        "prompt": _text(rollout.prompt),
        "completion": _text(rollout.completion),
        "tools": _text(tools) if tools else None,
        "prompt_ids": sample.input_ids[:start],
        "completion_ids": rollout.completion_ids,
        "trained": sample.trained[start:],
        "sampling_logps": column(SAMPLING_LOGPS),
        "old_logps": column(OLD_LOGPS),
        "reference_logps": column(REFERENCE_LOGPS),
        "advantage": rollout.advantage,
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "failures": [{"reward": f.reward, "kind": f.kind, "message": f.message} for f in rollout.failures],
        "extras": rollout.extras,
        "images": images_of(rollout),
        "tool_calls": [{**vars(call), "result": _result(call)} for call in rollout.tool_calls],
        "finish_reason": rollout.finish_reason,
        "error": rollout.error,
        "masked": rollout.masked,
        "truncated": rollout.is_truncated,
        "policy_version": sample.policy_version,
        "seconds": rollout.seconds,
    }


def images_of(rollout: Rollout) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {"prompt": [], "completion": []}
    for span in rollout.sample.images:
        is_prompt = span.start < rollout.prompt_length
        column, first = ("prompt", 0) if is_prompt else ("completion", rollout.prompt_length)
        facts = {"key": span.key.hex(), "column": column, "place": len(found[column])}
        size = {"height": span.size[0], "width": span.size[1], "tokens": span.stop - span.start}
        found[column].append(facts | size | {"start": span.start - first})
    return [*found["prompt"], *found["completion"]]


def _result(call: ToolCall) -> str:
    """Its content is one of a message."""
    if isinstance(call.result, str):
        return call.result
    (message,) = named_by_key([{"content": call.result}])
    return json.dumps(message["content"], ensure_ascii=False)


def _text(value: Any) -> str:
    """Messages as JSON, in which images are named by their keys. Other content that JSON has no word for is named, not kept."""
    if isinstance(value, str):
        return value
    return json.dumps(named_by_key(value), ensure_ascii=False, default=lambda thing: repr(type(thing)))


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_list(kind) and not pa.types.is_nested(kind.value_type):
        return _number_lists(values, kind)
    if pa.types.is_map(kind):
        kept = _text if pa.types.is_string(kind.item_type) else lambda value: value
        values = [None if one is None else [(name, kept(item)) for name, item in one.items()] for one in values]
    return pa.array(_storable(values), kind)


def _number_lists(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Lists of numbers from their concatenation and their lengths, rather than number by number."""
    dtype = kind.value_type.to_pandas_dtype()
    arrays = [np.zeros(0, dtype) if value is None else np.asarray(value, dtype) for value in values]
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int32)
    flat = pa.array(np.concatenate([np.zeros(0, dtype), *arrays]), kind.value_type, from_pandas=False)
    absent = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=kind, mask=absent)


def _storable(value: Any) -> Any:
    """NaN is null. Text that models make up may hold half of a character ("\\ud800" in JSON), which no file can: it becomes "?"."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float | np.floating):
        return None if math.isnan(value) else float(value)
    if isinstance(value, dict):
        return {name: _storable(item) for name, item in value.items()}
    return type(value)(map(_storable, value)) if isinstance(value, list | tuple) else value


def _step_folders(folder: Path) -> list[tuple[int, Path]]:
    found = ((STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("step=*"))
    return sorted((int(match[1]), path) for match, path in found if match)


def _numbers_in(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", path.name)]
