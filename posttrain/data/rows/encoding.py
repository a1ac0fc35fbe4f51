"""Normalised rows -> units of Samples, one function per row format. Whole batches, so that tokenisation is batched.

Plain text is tokenised as TRL does: the prompt alone and prompt + completion (+ end-of-sequence text) together, and the
completion begins at the first token that differs, so that a token which straddles the boundary is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.sample import Sample, Unit
from posttrain.data.images.row_image import RowImage
from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Conversation, Renderer
from posttrain.data.rows.checks import Finding

Row = dict[str, Any]
Notes = Counter[str]
Units = list[Unit | Finding]
"""A Finding stands for a row that cannot be rendered; `Notes` counts what a reader should know although it is not an error."""
CUT_STEPS = "steps cut off by max_completion_length: they have no separator left at which they could be judged"
SEPARATOR_INSIDE = "steps with the step separator inside of them: scored as free text, they would be split there"
MERGED_BOUNDARY = "prompts whose last token merges with the answer"
EVERYTHING, ASSISTANT, COMPLETION = "everything", "assistant", "completion"
ASSISTANT_IN_COMPLETION = "assistant_in_completion"


def language_modelling(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """One sample a row: a text, all of it trained, or a conversation, trained whole or on the assistant's turns."""
    if "text" in rows[0]:
        texts = [_ended(row["text"], renderer, options) for row in rows]
        return _singles(_encoded_texts(texts, [row.get("images", []) for row in rows], renderer), "text")
    chats = [_chat(row, row["messages"], options) for row in rows]
    train = ASSISTANT if options.assistant_only_loss else EVERYTHING
    return _singles(_encoded_chats(rows, chats, renderer, train), "messages")


def prompt_only(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """The prompt, ready to be continued; nothing is trained."""
    if _is_plain(rows, "prompt"):
        prompts = _encoded_texts([row["prompt"] for row in rows], [row.get("images", []) for row in rows], renderer)
    else:
        prompts = renderer.encode_prompts([_chat(row, row["prompt"], options) for row in rows])
    return [(_untrained(p),) if isinstance(p, Sample) else _refusal(p, "prompt") for p in prompts]


def prompt_completion(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """Prompt and completion; the completion is trained unless `completion_only_loss=False`."""
    trained = ASSISTANT_IN_COMPLETION if options.assistant_only_loss else COMPLETION
    if options.completion_only_loss is False:
        trained = ASSISTANT if options.assistant_only_loss else EVERYTHING
    return _singles(_answers(rows, "completion", renderer, options, trained, notes), "completion")


def preference(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """(chosen, rejected): the prompt followed by each answer, the answer trained.

    Both answers of plain text begin at the same token: where only one of them merges with the end of the prompt, that end
    belongs to the other answer too.
    """
    chosen = _answers(rows, "chosen", renderer, options, COMPLETION, notes)
    rejected = _answers(rows, "rejected", renderer, options, COMPLETION, notes)
    if _is_plain(rows, "chosen"):
        for pair in zip(chosen, rejected):
            if all(isinstance(side, Sample) for side in pair):
                begin = min(int(side.trained.argmax()) for side in pair)
                for side in pair:
                    side.trained[begin : int(side.trained.argmax())] = True
    return _trained_pairs(rows, chosen, rejected, options)


def triple_preference(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """(chosen, rejected, reference): a pair, and the prompt followed by the gold answer, which is trained."""
    golds = _singles(_answers(rows, "reference", renderer, options, COMPLETION, notes), "reference")
    pairs = preference(rows, renderer, options, notes)
    return [
        next((part for part in (p, g) if isinstance(part, Finding)), None) or (*p, *g) for p, g in zip(pairs, golds)
    ]


def scored_preference(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """(chosen, rejected) as whole sequences; their score is read at the last token, no token is trained."""
    sides = []
    for side in ("chosen", "rejected"):
        if _is_plain(rows, side):
            texts = [_ended((row["prompt"] or "") + row[side], renderer, options) for row in rows]
            encoded = _encoded_texts(texts, [_side_images(row, side, renderer) for row in rows], renderer)
        else:
            chats = [_chat(row, [*row["prompt"], *row[side]], options) for row in rows]
            encoded = renderer.encode_chats(chats, EVERYTHING)
        sides.append([_untrained(s) if isinstance(s, Sample) else s for s in encoded])
    return [_pair(row, c, r, must_train=False) for row, c, r in zip(rows, *sides)]


def unpaired_preference(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """Prompt and completion, with `label` 1 for a wanted completion and 0 for an unwanted one."""
    units = _singles(_answers(rows, "completion", renderer, options, COMPLETION, notes), "completion")
    for row, unit in zip(rows, units):
        if not isinstance(unit, Finding):
            unit[0].scalars["label"] = float(row["label"])
    return units


def stepwise(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """Prompt, then each step followed by the separator. `labels` is about the last token of each separator.

    Steps are tokenised one by one and without special tokens; the beginning-of-sequence token, where the tokenizer has
    one, comes first. `trained` marks the tokens at which a step is judged.
    """
    prompts = _step_prompts(rows, renderer, options)
    separator = renderer.encode_texts([options.step_separator], add_special_tokens=False)[0]
    steps = [step for row in rows for step in row["completions"]]
    encoded = iter(renderer.encode_texts(steps, add_special_tokens=False))
    units: Units = []
    for row, prompt in zip(rows, prompts):
        ids = [np.concatenate([next(encoded), separator]) for _ in row["completions"]]
        if not isinstance(prompt, Sample):
            units.append(_refusal(prompt, "prompt"))
            continue
        labels = np.full(sum(map(len, ids)), -1.0, dtype=np.float32)
        last = np.cumsum([len(step) for step in ids]) - 1
        judged = slice(-1, None) if options.train_on_last_step_only else slice(None)
        labels[last[judged]] = row["labels"][judged]
        completion = np.concatenate(ids)[: options.max_completion_length]
        notes[CUT_STEPS] += int((last >= len(completion)).sum())
        notes[SEPARATOR_INSIDE] += sum(options.step_separator in step for step in row["completions"])
        prompt = _with_bos(prompt, row, renderer)
        kept = np.concatenate([np.full(len(prompt), -1.0, dtype=np.float32), labels[: len(completion)]])
        if (kept < 0).all():
            reason = f"has no step to judge within its first {len(completion)} tokens, which is max_completion_length"
            units.append(Finding("nothing_trained", "completions", reason))
        else:
            units.append((_judged(prompt.append(completion, trained=False), kept),))
    return units


def tokenised_stepwise(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """Rows that bring their token ids, and a label at the last token of each step."""
    units: Units = []
    for row in rows:
        labels = row["labels"].astype(np.float32)
        if options.train_on_last_step_only:
            labels[: np.flatnonzero(labels >= 0)[-1]] = -100
        units.append((_judged(_of_ids(row["input_ids"]), labels),))
    return units


def _judged(sample: Sample, labels: np.ndarray) -> Sample:
    """`labels` is negative where nothing is judged."""
    trained = labels >= 0
    return replace(sample, trained=trained, per_token={"labels": np.where(trained, labels, np.float32(0))})


def tokenised(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """Rows that bring their token ids. A row with `seq_lengths` was packed and comes apart into its documents."""
    units: Units = []
    for row in rows:
        missing = _missing_mask(row, options)
        if missing is not None:
            units.append(missing)
            continue
        trained = row["trained"].copy()
        if row.get("completion_mask") is not None and options.completion_only_loss is not False:
            trained &= row["completion_mask"].astype(bool)
        if row.get("assistant_masks") is not None:
            trained &= row["assistant_masks"].astype(bool)
        lengths = row.get("seq_lengths")
        sample = Sample(row["input_ids"], trained)
        if lengths is not None:
            stops = np.cumsum(lengths)
            unit = tuple(sample.slice(stop - length, stop) for stop, length in zip(stops, lengths) if length)
        elif row.get("attention_mask") is not None:
            seen = np.flatnonzero(row["attention_mask"])
            unit = (sample.slice(seen[0], seen[-1] + 1),)
        else:
            unit = (sample,)
        units.append(unit if any(s.num_trained for s in unit) else _nothing_trained("input_ids"))
    return units


def tokenised_prompt(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    """The prompt's own tokens, ready to be continued; nothing is trained."""
    samples = [Sample(row["input_ids"], np.zeros(len(row["input_ids"]), dtype=bool)) for row in rows]
    seen = [np.flatnonzero(row.get("attention_mask", np.ones(len(sample)))) for row, sample in zip(rows, samples)]
    return [(sample.slice(kept[0], kept[-1] + 1),) for sample, kept in zip(samples, seen)]


def _missing_mask(row: Row, options: PrepareOptions) -> Finding | None:
    """An option that asks for a part of the tokens needs a column that tells the part."""
    for column, name in (("completion_mask", "completion_only_loss"), ("assistant_masks", "assistant_only_loss")):
        if getattr(options, name) and row.get(column) is None and not row["has_labels"]:
            return Finding("missing_mask", column, f"is missing, and {name}=True needs it (or 'labels')")
    return None


def tokenised_preference(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    sides = [[Sample.of_text(row["prompt_ids"], row[f"{side}_ids"]) for row in rows] for side in ("chosen", "rejected")]
    return _trained_pairs(rows, *sides, options)


def tokenised_scored_preference(rows: list[Row], renderer: Renderer, options: PrepareOptions, notes: Notes) -> Units:
    none = np.zeros(0, dtype=np.int32)
    sides = [
        [_untrained(_of_ids(np.concatenate([row.get("prompt_ids", none), row[f"{side}_ids"]]))) for row in rows]
        for side in ("chosen", "rejected")
    ]
    return [_pair(row, c, r, must_train=False) for row, c, r in zip(rows, *sides)]


def _answers(
    rows: list[Row], column: str, renderer: Renderer, options: PrepareOptions, train: str, notes: Notes
) -> Sequence[Sample | Exception]:
    """The prompt of each row followed by its `column`, text or messages."""
    if not _is_plain(rows, column):
        chats = [_chat(row, [*row["prompt"], *row[column]], options, len(row["prompt"])) for row in rows]
        return _encoded_chats(rows, chats, renderer, train)
    images = [_side_images(row, column, renderer) for row in rows]
    shown = [own[: _num_shown(row["prompt"], renderer)] for own, row in zip(images, rows)]
    prompts = _encoded_texts([row["prompt"] for row in rows], shown, renderer)
    wholes = _encoded_texts([row["prompt"] + _ended(row[column], renderer, options) for row in rows], images, renderer)
    return [_answer(prompt, whole, train, notes) for prompt, whole in zip(prompts, wholes)]


def _answer(prompt: Sample | Exception, whole: Sample | Exception, train: str, notes: Notes) -> Sample | Exception:
    """The whole trained from where the prompt ends."""
    for encoded in (prompt, whole):
        if not isinstance(encoded, Sample):
            return encoded
    shared = common_prefix_length(prompt.input_ids, whole.input_ids)
    notes[MERGED_BOUNDARY] += shared < len(prompt)
    start = 0 if train == EVERYTHING else shared
    whole.trained = whole.trained & (np.arange(len(whole)) >= start)
    return whole


def _encoded_texts(texts: list[str], images: list[list[RowImage]], renderer: Renderer) -> Sequence[Sample | Exception]:
    """Plain texts, all of them trained; images stand where the text has the family's own placeholder."""
    if renderer.layouts is None:
        return [_of_ids(ids) for ids in renderer.encode_texts(texts)]
    return renderer.encode_image_texts(texts, images)


def _of_ids(ids: np.ndarray) -> Sample:
    return Sample(ids, np.ones(len(ids), dtype=bool))


def _num_shown(text: str | None, renderer: Renderer) -> int:
    """Images of which a plain text has the place."""
    return (text or "").count(renderer.layouts.family.written) if renderer.layouts is not None else 0


def _side_images(row: Row, side: str, renderer: Renderer) -> list[RowImage]:
    """The images of a prompt and its answer. Those of a pair come in the order prompt, chosen, rejected, where they are as many as
    all three show; else both sides show the same ones, and whether they fit is the renderer's business."""
    images = row.get("images", [])
    counts = [(name, _num_shown(row.get(name), renderer)) for name in ("prompt", "chosen", "rejected", "reference")]
    if not images or side == "completion" or sum(count for _, count in counts) != len(images):
        return images
    before, own = 0, []
    for name, count in counts:
        own += images[before : before + count] if name in ("prompt", side) else []
        before += count
    return own


def _encoded_chats(
    rows: list[Row], chats: list[Conversation], renderer: Renderer, train: str
) -> Sequence[Sample | Exception]:
    """Each chat trained as `train` says; of rows with `trained_roles` only the assistant's turns in that part."""
    only_assistant = {EVERYTHING: ASSISTANT, COMPLETION: ASSISTANT_IN_COMPLETION}.get(train, train)
    modes = [only_assistant if row.get("trained_roles") else train for row in rows]
    results: list[Any] = [None] * len(chats)
    for mode in dict.fromkeys(modes):
        numbers = [number for number, own in enumerate(modes) if own == mode]
        for number, sample in zip(numbers, renderer.encode_chats([chats[number] for number in numbers], mode)):
            results[number] = sample
    return results


def common_prefix_length(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading tokens two sequences share."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _step_prompts(rows: list[Row], renderer: Renderer, options: PrepareOptions) -> Sequence[Sample | Exception]:
    """Texts without special tokens, but for those that stand around images."""
    if not _is_plain(rows, "prompt"):
        return renderer.encode_prompts([_chat(row, row["prompt"], options) for row in rows])
    texts, images = [row["prompt"] for row in rows], [row.get("images", []) for row in rows]
    plain = iter([_of_ids(ids) for ids in renderer.encode_texts(texts, add_special_tokens=False)])
    if not any(images):
        return list(plain)
    shown = renderer.encode_image_texts(texts, images)
    return [one if some else text for one, text, some in zip(shown, plain, images, strict=True)]


def _with_bos(prompt: Sample, row: Row, renderer: Renderer) -> Sample:
    bos = renderer.tokenizer.bos_token_id
    if bos is None or not isinstance(row["prompt"], str) or prompt.input_ids[:1].tolist() == [bos]:
        return prompt  # a chat template, and the text of a prompt with images, bring their own
    return Sample([bos], [False]).append(
        prompt.input_ids, trained=False, images=prompt.images, positions=prompt.positions
    )


def _is_plain(rows: list[Row], column: str) -> bool:
    return isinstance(rows[0][column], str)


def _chat(
    row: Row, messages: list[Row], options: PrepareOptions, num_prompt_messages: int | None = None
) -> Conversation:
    kwargs = {**(options.chat_template_kwargs or {}), **(row.get("chat_template_kwargs") or {})}
    untrained = frozenset(number for number, message in enumerate(messages) if message.get("weight") == 0)
    if untrained:
        messages = [{key: item for key, item in message.items() if key != "weight"} for message in messages]
    tools = row.get("tools") or options.tools
    return Conversation(messages, tools, kwargs or None, num_prompt_messages, untrained)


def _ended(text: str, renderer: Renderer, options: PrepareOptions) -> str:
    """The text with the end-of-sequence text after it, unless it is there already."""
    eos = renderer.tokenizer.eos_token if options.append_eos else None
    return text if not eos or text.endswith(eos) else text + eos


def _untrained(sample: Sample) -> Sample:
    return replace(sample, trained=np.zeros(len(sample), dtype=bool))


def _trained_pairs(
    rows: list[Row],
    chosen: Sequence[Sample | Exception],
    rejected: Sequence[Sample | Exception],
    options: PrepareOptions,
) -> Units:
    units = [_pair(row, c, r, must_train=True) for row, c, r in zip(rows, chosen, rejected)]
    for unit in units if options.train_chosen_prompt else ():
        if not isinstance(unit, Finding):
            for sample in unit:
                sample.per_token["answer"] = sample.trained.astype(np.float32)
            unit[0].trained = np.ones(len(unit[0]), dtype=bool)
            for image in unit[0].images:
                unit[0].trained[image.start : image.stop] = False
    return units


def _pair(row: Row, chosen: Sample | Exception, rejected: Sample | Exception, must_train: bool) -> Unit | Finding:
    for side, sample in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(sample, Sample):
            return _refusal(sample, side)
        if must_train and not sample.num_trained:
            return _nothing_trained(side)
        if "margin" in row:
            sample.scalars["margin"] = row["margin"]
        if f"ref_{side}_logps" in row:
            sample.scalars["ref_logps"] = row[f"ref_{side}_logps"]
    return chosen, rejected


def _singles(samples: Sequence[Sample | Exception], column: str) -> Units:
    return [_checked_unit(sample, column) for sample in samples]


def _checked_unit(sample: Sample | Exception, column: str) -> Unit | Finding:
    if not isinstance(sample, Sample):
        return _refusal(sample, column)
    return (sample,) if sample.num_trained else _nothing_trained(column)


def _nothing_trained(column: str) -> Finding:
    return Finding("nothing_trained", column, "gives no token that could be trained")


def _refusal(error: Exception, column: str) -> Finding:
    return Finding("not_rendered", column, f"cannot be rendered: {error}")
