"""TRL's public helpers for data and chats, under their names.

Differences: every key of an example is looked at (not one of them), empty values do not crash, role names of ShareGPT are
mapped, and a prompt is taken from two answers only at the end of a word or a turn, never so that an answer becomes empty.
Nothing depends on recognising a chat template by its exact text: masks come from provenance, so there are no edited "training"
templates; responses are parsed with a syntax learned from the template, so there are no response schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict

from posttrain.data.packing import MERGING_STRATEGIES, Packing, packing_strategy
from posttrain.data.render import template_checks
from posttrain.data.render.conversation import Conversation, RenderError, is_assistant, join_completion
from posttrain.data.render.marks import common_prefix
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows.foreign_formats import (
    MESSAGE_COLUMNS,
    MESSAGES,
    SHAREGPT,
    Row,
    from_value_messages,
    value_kind,
)
from posttrain.data.rows.reading import split_shared_text, split_shared_turns

AnyDataset = Dataset | IterableDataset | DatasetDict | IterableDatasetDict


def is_conversational(example: Row) -> bool:
    """Whether a column that may hold a conversation holds one (messages with `role`)."""
    return any(value_kind(example[key]) == MESSAGES for key in MESSAGE_COLUMNS if key in example)


def is_conversational_from_value(example: Row) -> bool:
    """Whether `conversations` holds messages in ShareGPT's form, {"from": ..., "value": ...}."""
    return value_kind(example.get("conversations")) == SHAREGPT


def maybe_convert_to_chatml(example: Row) -> Row:
    """ShareGPT messages as {"role", "content"}, `human` and `gpt` as `user` and `assistant`, under `messages`."""
    converted = {
        key: from_value_messages(value) if value_kind(value) == SHAREGPT else value for key, value in example.items()
    }
    if "conversations" in converted:
        converted["messages"] = converted.pop("conversations")
    return converted


# ------------------------------------------------------------------------------------------------------ implicit prompts


def extract_prompt(example: Row) -> Row:
    """The example with `prompt`, `chosen` and `rejected`, the prompt being what both sides share."""
    chosen, rejected = example["chosen"], example["rejected"]
    if not chosen or not rejected or chosen == rejected:
        what = "are equal" if chosen == rejected else "must not be empty"
        raise ValueError(f"'chosen' and 'rejected' {what}: no prompt can be separated from the answers.")
    split = split_shared_turns if isinstance(chosen, list) else split_shared_text
    parts = split(chosen, rejected)
    if parts is None or not parts[0]:
        raise ValueError(f"'chosen' and 'rejected' share no beginning that could be their prompt: {chosen!r:.80}.")
    return {**example, **dict(zip(("prompt", "chosen", "rejected"), parts))}


def maybe_extract_prompt(example: Row) -> Row:
    """`extract_prompt` where a preference example has no prompt, or a plain one beside conversations."""
    if "chosen" not in example or "rejected" not in example:
        return example
    prompt_is_chat = value_kind(example.get("prompt")) == MESSAGES
    if example.get("prompt") is not None and prompt_is_chat == (value_kind(example["chosen"]) == MESSAGES):
        return example
    return extract_prompt(example)


# ----------------------------------------------------------------------------------------------- pairs to single answers


def unpair_preference_dataset(dataset: AnyDataset, num_proc: int | None = None, **map_kwargs: Any) -> AnyDataset:
    """Pairs -> `prompt`, `completion`, `label`: of every batch, the chosen answers first, then the rejected ones.

    Other columns are repeated. Where there is no prompt it is taken from what both answers share.
    """
    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        splits = {split: unpair_preference_dataset(part, num_proc, **map_kwargs) for split, part in dataset.items()}
        return type(dataset)(splits)
    if num_proc is not None and isinstance(dataset, Dataset):
        map_kwargs["num_proc"] = num_proc
    if isinstance(dataset, IterableDataset):
        map_kwargs.pop("desc", None)  # a stream has no progress bar
    return dataset.map(_unpair, batched=True, remove_columns=["chosen", "rejected"], **map_kwargs)


def _unpair(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    rows = [maybe_extract_prompt(dict(zip(batch, values))) for values in zip(*batch.values())]
    kept = [column for column in rows[0] if column not in ("chosen", "rejected")] if rows else []
    unpaired = {column: [row[column] for row in rows] * 2 for column in kept}
    unpaired["completion"] = [row["chosen"] for row in rows] + [row["rejected"] for row in rows]
    unpaired["label"] = [True] * len(rows) + [False] * len(rows)
    return unpaired


def maybe_unpair_preference_dataset(
    dataset: AnyDataset, num_proc: int | None = None, desc: str | None = None
) -> AnyDataset:
    """`unpair_preference_dataset` where the dataset holds pairs; the dataset itself otherwise."""
    one = next(iter(dataset.values())) if isinstance(dataset, (DatasetDict, IterableDatasetDict)) else dataset
    columns = get_dataset_column_names(one)
    if not {"chosen", "rejected"} <= set(columns):
        return dataset
    return unpair_preference_dataset(dataset, num_proc, desc=desc)


def get_dataset_column_names(dataset: Dataset | IterableDataset) -> list[str]:
    """The names of the columns; a stream that does not know them is asked for its first row."""
    if dataset.column_names is not None:
        return list(dataset.column_names)
    return list(next(iter(dataset), {}))


# -------------------------------------------------------------------------------------------------- packing and cutting


def pack_dataset(
    dataset: AnyDataset, seq_length: int, strategy: str = "bfd", map_kwargs: dict[str, Any] | None = None
) -> AnyDataset:
    """Rows of equally long lists -> rows of at most `seq_length` tokens; `bfd` kinds add `seq_lengths`.

    The whole dataset is packed at once (a stream: a batch of rows at a time), so that blocks cross no batch boundary.
    """
    pack = packing_strategy(strategy)

    def pack_table(table: pa.Table) -> pa.Table:
        return _pack_table(table, pack, seq_length, adds_lengths=strategy not in MERGING_STRATEGIES)

    return _map_tables(dataset, pack_table, {"batch_size": -1, **(map_kwargs or {})})


def truncate_dataset(dataset: AnyDataset, max_length: int, map_kwargs: dict[str, Any] | None = None) -> AnyDataset:
    """The first `max_length` entries of every list column; other columns as they are."""

    def truncate(table: pa.Table) -> pa.Table:
        columns = [
            pc.list_slice(column, 0, max_length) if _is_list(column.type) else column for column in table.columns
        ]
        return pa.Table.from_arrays(columns, names=table.column_names)

    return _map_tables(dataset, truncate, map_kwargs or {})


def _map_tables(dataset: AnyDataset, change: Callable[[pa.Table], pa.Table], map_kwargs: dict[str, Any]) -> AnyDataset:
    if isinstance(dataset, (DatasetDict, IterableDatasetDict)):
        return type(dataset)({split: _map_tables(part, change, map_kwargs) for split, part in dataset.items()})
    if isinstance(dataset, Dataset):
        return dataset.with_format("arrow").map(change, batched=True, **map_kwargs).with_format(None)

    def change_batch(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return change(pa.table(batch)).to_pydict()

    map_kwargs = {key: value for key, value in map_kwargs.items() if key not in ("desc", "num_proc")}
    if map_kwargs.get("batch_size") == -1:  # a stream has no end to wait for
        map_kwargs["batch_size"] = 1000
    columns = get_dataset_column_names(dataset)
    return dataset.map(change_batch, batched=True, remove_columns=columns, **map_kwargs)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _pack_table(table: pa.Table, pack: Callable[[Any, int], Packing], seq_length: int, adds_lengths: bool) -> pa.Table:
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    odd = [name for name, column in columns.items() if not _is_list(column.type)]
    if odd:
        raise ValueError(f"Packing needs lists in every column; {', '.join(map(repr, odd))} holds something else.")
    lengths = {name: pc.fill_null(pc.list_value_length(column), 0).to_numpy() for name, column in columns.items()}
    first, *others = lengths
    for name in others:
        if not np.array_equal(lengths[name], lengths[first]):
            row = int(np.flatnonzero(lengths[name] != lengths[first])[0])
            raise ValueError(
                f"Row {row}: {name!r} has {lengths[name][row]} entries, {first!r} has {lengths[first][row]}."
            )
    packing = pack(lengths[first], seq_length)
    sample_starts = np.cumsum(lengths[first]) - lengths[first]
    sizes = packing.pieces[:, 2] - packing.pieces[:, 1]
    begins = sample_starts[packing.pieces[:, 0]] + packing.pieces[:, 1]
    taken = np.repeat(begins - (np.cumsum(sizes) - sizes), sizes) + np.arange(sizes.sum())
    stops = np.concatenate([[0], np.cumsum(sizes)])[packing.offsets]
    packed = {
        name: pa.LargeListArray.from_arrays(pa.array(stops), column.flatten().take(pa.array(taken)))
        for name, column in columns.items()
    }
    if adds_lengths:
        packed["seq_lengths"] = pa.LargeListArray.from_arrays(pa.array(packing.offsets), pa.array(sizes))
    narrow = {n: a.cast(pa.list_(a.type.value_type)) for n, a in packed.items()}
    return pa.table(narrow)


# ---------------------------------------------------------------------------------------------------- messages and images


def prepare_multimodal_messages(messages: list[Row], images: list[Any] | None = None) -> list[Row]:
    """Text content as typed blocks, images placed before the text of the first user turn; the input is not changed.

    Where blocks of type `image` are there already, the images are put into them in order; their number must agree.
    """
    known = ("system", "developer", "user", "assistant", "tool")
    for message in messages:
        if message.get("role") not in known:
            raise ValueError(f"The role {message.get('role')!r} is unknown; roles are {', '.join(known)}.")
    prepared = [{**message, "content": _blocks(message.get("content"))} for message in messages]
    if images is None:
        return prepared
    places = [
        block
        for message in prepared
        if message["role"] != "tool"
        for block in message["content"] or ()
        if block.get("type") == "image"
    ]
    if not places:
        first = next((message for message in prepared if message["role"] == "user"), None)
        if first is None and images:
            raise ValueError(f"There is no user turn to put the {len(images)} image(s) into.")
        places = [{"type": "image"} for _ in images]
        if first is not None:
            first["content"] = [*places, *(first["content"] or ())]
    if len(places) != len(images):
        raise ValueError(f"The messages have room for {len(places)} image(s); {len(images)} were given.")
    for block, image in zip(places, images):
        block["image"] = image
    return prepared


def _blocks(content: Any) -> list[Row] | None:
    if content is None:  # an answer that only calls tools
        return None
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [dict(block) for block in content]


# ----------------------------------------------------------------------------------------------------- chat templates

COMPLETION_COLUMNS = ("completion", "chosen", "rejected")
KNOWN_COLUMNS = (
    {"messages"},
    {"prompt"},
    {"prompt", "completion"},
    {"prompt", "completion", "label"},
    {"prompt", "chosen", "rejected"},
    {"chosen", "rejected"},
)
PROMPT_ENDINGS = ("user", "tool", "function", "ipython")

_renderers: WeakKeyDictionary[Any, tuple[Any, Renderer]] = WeakKeyDictionary()


def _renderer_of(processing_class: Any) -> Renderer:
    """One renderer per tokenizer, made anew when its template or its tokens have changed."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    state = (tokenizer.chat_template, len(tokenizer), tuple(tokenizer.special_tokens_map.items()))
    kept = _renderers.get(tokenizer)
    if kept is None or kept[0] != state:
        kept = _renderers[tokenizer] = (state, Renderer(tokenizer))
    return kept[1]


def apply_chat_template(
    example: dict[str, Any], tokenizer: Any, tools: list[Any] | None = None, **template_kwargs: Any
) -> dict[str, str]:
    """A conversational example as plain text columns; `messages` becomes `text`, `label` is kept.

    A prompt ends with the generation prompt, or, where its last message is the assistant's, with that message, which the
    completion continues. The prompt's text is cut to what all of its completions share, so prompt + completion is exactly
    the rendered whole.
    """
    columns = {key for key in example if key in {"messages", "prompt", "label", *COMPLETION_COLUMNS}}
    if columns not in KNOWN_COLUMNS:
        sets = "; ".join(", ".join(sorted(known)) for known in KNOWN_COLUMNS)
        raise KeyError(
            f"The example has the columns {sorted(columns)}; apply_chat_template takes one of these sets: {sets}."
        )
    renderer = _renderer_of(tokenizer)
    base = Conversation([], tools, {**template_kwargs, **(example.get("chat_template_kwargs") or {})} or None)
    if "messages" in columns:
        return {"text": renderer.render(replace(base, messages=example["messages"]))}
    if "prompt" not in columns:
        return {key: renderer.render(replace(base, messages=example[key])) for key in ("chosen", "rejected")}
    prompt: list[Row] = example["prompt"]
    last_role = prompt[-1].get("role") if prompt else None
    if last_role not in (*PROMPT_ENDINGS, "assistant"):
        raise ValueError(
            f"A prompt ends with a message of the user, of a tool or of the assistant, not of {last_role!r}."
        )
    prompt_text = renderer.render_prompt(replace(base, messages=prompt))
    wholes = {
        key: _render_whole(renderer, replace(base, messages=[*prompt, *example[key]], num_prompt_messages=len(prompt)))
        for key in COMPLETION_COLUMNS
        if key in columns
    }
    prompt_text = common_prefix(prompt_text, *wholes.values())
    texts = {"prompt": prompt_text, **{key: whole[len(prompt_text) :] for key, whole in wholes.items()}}
    return texts | ({"label": example["label"]} if "label" in columns else {})


def _render_whole(renderer: Renderer, chat: Conversation) -> str:
    if is_assistant(chat.messages[chat.num_prompt_messages - 1]):
        chat = join_completion(chat)[0]
    return renderer.render(chat)


def maybe_apply_chat_template(
    example: dict[str, Any], tokenizer: Any, tools: list[Any] | None = None, **template_kwargs: Any
) -> dict[str, Any]:
    """`apply_chat_template` for conversational examples; others are handed back as they are."""
    for key in ("messages", "prompt", *COMPLETION_COLUMNS):
        value = example.get(key)
        if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
            return apply_chat_template(example, tokenizer, tools, **template_kwargs)
    return example


def supports_tool_calling(processing_class: Any) -> bool:
    """Whether signatures of tools, calls and results all reach the rendered text."""
    renderer = _renderer_of(processing_class)
    return template_checks.shows_tools(renderer) and template_checks.tool_dialogue(renderer) is not None


def get_training_chat_template(processing_class: Any) -> None:
    """None: the template can be trained with as it is. Raises where no safe mask can be had from it.

    TRL returns an edited copy for the templates it knows. There are no such copies here, as masks come from provenance.
    """
    chat = Conversation([template_checks.USER, template_checks.ANSWER])
    (sample,) = _renderer_of(processing_class).encode_chats([chat], train="assistant")
    if isinstance(sample, RenderError):
        raise ValueError(f"No mask of what the assistant says can be had from this chat template. {sample}")


def has_generation_markers(processing_class: Any) -> bool:
    """Whether the template (of a tokenizer, or given as text) marks what the assistant says. Our masks do not need it."""
    template = processing_class if isinstance(processing_class, str) else processing_class.get_chat_template()
    return template_checks.has_generation_markers(template)


def is_chat_template_prefix_preserving(processing_class: Any) -> bool:
    """Whether what has been rendered stays as it is when turns are added."""
    return template_checks.is_prefix_preserving(_renderer_of(processing_class))


def is_chat_template_stop_token_trained(processing_class: Any) -> bool:
    """Whether the last trained token of an assistant turn is one of the tokenizer's added tokens."""
    return template_checks.trained_stop_token(_renderer_of(processing_class)) is not None


def add_response_schema(processing_class: Any) -> Any:
    """The tokenizer unchanged, after a check that tool calls of its template can be parsed; raises if they cannot.

    TRL attaches a schema here for the templates it knows. `parse_response` learns the syntax from the template and needs
    none, so all that is left to do is to find out early that there is something to learn.
    """
    if not _renderer_of(processing_class).response_parser.knows_tool_calls:
        raise ValueError(
            "The chat template writes no tool calls, or in a way that cannot be read back, so none can be parsed."
        )
    return processing_class


def parse_response(
    tokenizer: Any, ids: Any, prefix: Any = None, tools: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    """Token ids of an assistant turn -> message {role, content, reasoning_content?, tool_calls?}.

    `prefix` (ids or text) is the end of the prompt, for templates whose generation prompt opens the reasoning. With `tools`
    (JSON schemas), arguments get the types the schemas ask for. A turn with malformed calls becomes plain content.
    """
    renderer = _renderer_of(tokenizer)
    decode = renderer.tokenizer.decode
    before = prefix if isinstance(prefix, str) else decode(prefix) if prefix is not None else ""
    functions = [tool.get("function", tool) for tool in tools or []]
    schemas = {function["name"]: function.get("parameters", {}).get("properties", {}) for function in functions}
    message = renderer.response_parser.parse(decode(ids, skip_special_tokens=False), before, schemas)
    for call in message.get("tool_calls", ()):
        function = call["function"]
        wanted = schemas.get(function["name"], {})
        function["arguments"] = {
            key: _typed(value, wanted.get(key, {}).get("type")) for key, value in function["arguments"].items()
        }
    return message


JSON_TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip


def _typed(value: Any, wanted: Any) -> Any:
    """`value` as the type of a JSON schema, where it can be read as one; else as it is."""
    if wanted == "string" and not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if wanted in JSON_TYPES and isinstance(value, str):
        try:
            parsed = json.loads(value)
        except ValueError:
            return value
        return parsed if isinstance(parsed, JSON_TYPES[wanted]) else value
    return value
