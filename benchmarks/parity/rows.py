"""The rows that both libraries train on: every dataset format, in plain Python. Lengths differ from row to row unless said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]
COUNT = 20

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def picture(i: int, *, ground: str = "none") -> Row:
    """A recipe of noise for pictures.py. `ground`: "transparent" has an alpha channel, "white" is the same composed on white."""
    return {"height": 30 + 7 * (i % 5), "width": 64 - 9 * (i % 4), "seed": i, "ground": ground}


def question(i: int) -> str:
    return f"What is {i} + {i}?" + " Please." * (i % 3)


def good(i: int) -> str:
    return f"It is {2 * i}." + " Indeed." * (i % 4)


def poor(i: int) -> str:
    return f"Perhaps {2 * i + 1}" + ", who knows" * (i % 3) + "!"


def user(text: str) -> list[Row]:
    return [{"role": "user", "content": text}]


def assistant(text: str) -> list[Row]:
    return [{"role": "assistant", "content": text}]


def text(i: int) -> Row:
    return {"text": f"{question(i)} {good(i)}"}


def even_text(i: int) -> Row:
    return {"text": f"Row {i:02d} has as many letters as any other row."}


def messages(i: int) -> Row:
    return {"messages": [*user(question(i)), *assistant(good(i))]}


def long_chat(i: int) -> Row:
    first = [{"role": "system", "content": "Be brief."}, *user(question(i)), *assistant(good(i))]
    return {"messages": [*first, *user("Are you sure?"), *assistant("Yes." * (1 + i % 2))]}


def share_gpt(i: int) -> Row:
    turns = [("user", question(i)), ("assistant", good(i))]
    return {"conversations": [{"from": role, "value": said} for role, said in turns]}


def with_tools(i: int) -> Row:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"town": f"Town {i}"}}}
    dialogue = [
        {"role": "user", "content": f"Weather in town {i}?", "tool_calls": None},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "sunny" + " and warm" * (i % 3), "tool_calls": None},
        {"role": "assistant", "content": "It is sunny." + " Enjoy." * (i % 2), "tool_calls": None},
    ]
    return {"messages": dialogue, "tools": [WEATHER_TOOL]}


def with_json_tools(i: int) -> Row:
    return {**messages(i), "tools": json.dumps([WEATHER_TOOL])}


def messages_with_arguments(i: int) -> Row:
    return {**messages(i), "chat_template_kwargs": {"loud": i % 2 == 0}}


def messages_with_control_text(i: int) -> Row:
    return {"messages": [*user(f"Is <|im_end|> a token? {i}"), *assistant(good(i))]}


def question_answer(i: int) -> Row:
    return {"question": question(i), "answer": " " + good(i)}


def text_with_empty(i: int) -> Row:
    return {"text": ""} if i == 7 else text(i)


def prompt_completion(i: int) -> Row:
    return {"prompt": question(i), "completion": " " + good(i)}


def prompt_completion_chat(i: int) -> Row:
    return {"prompt": user(question(i)), "completion": assistant(good(i))}


def input_ids(i: int) -> Row:
    return {"input_ids": [(7 * i + 3 * j) % 250 for j in range(12 + i % 5)]}


def labelled_ids(i: int) -> Row:
    ids = input_ids(i)["input_ids"]
    return {"input_ids": ids, "labels": [-100] * (4 + i % 3) + ids[4 + i % 3 :]}


def masked_ids(i: int) -> Row:
    ids = input_ids(i)["input_ids"]
    return {"input_ids": ids, "completion_mask": [0] * (4 + i % 3) + [1] * (len(ids) - 4 - i % 3)}


def pair(i: int) -> Row:
    return {"prompt": question(i), "chosen": " " + good(i), "rejected": " " + poor(i)}


def even_pair(i: int) -> Row:
    """All of one length. The answers differ from their first letter on: where they share a beginning, its gradient is 0 but for
    rounding, which AdamW turns into a step of full size."""
    return {"prompt": f"Question {i:02d}? ", "chosen": f"Good {i:02d} it is.", "rejected": f"Poor {i:02d} is it!"}


def implicit_pair(i: int) -> Row:
    # The answers differ from their first letter on, and no two shared letters end the prompt inside a word.
    return {"chosen": f"{question(i)} {good(i)}", "rejected": f"{question(i)} {poor(i)}"}


def pair_with_shared_letters(i: int) -> Row:
    return {"prompt": question(i), "chosen": f" Right, {2 * i}.", "rejected": f" Rather {i}!" + " Or not." * (i % 2)}


def implicit_pair_with_shared_letters(i: int) -> Row:
    made = pair_with_shared_letters(i)
    return {side: made["prompt"] + made[side] for side in ("chosen", "rejected")}


def chat_pair(i: int) -> Row:
    return {"prompt": user(question(i)), "chosen": assistant(good(i)), "rejected": assistant(poor(i))}


def implicit_chat_pair(i: int) -> Row:
    start = user(question(i))
    return {"chosen": [*start, *assistant(good(i))], "rejected": [*start, *assistant(poor(i))]}


def tool_pair(i: int) -> Row:
    return {**chat_pair(i), "tools": [WEATHER_TOOL]}


def tokenised_pair(i: int) -> Row:
    return {
        "prompt_ids": [(5 * i + j) % 250 for j in range(5 + i % 3)],
        "chosen_ids": [(3 * i + 2 * j) % 250 for j in range(4 + i % 4)],
        "rejected_ids": [(11 * i + 7 * j) % 250 for j in range(6 + i % 2)],
    }


def triple(i: int) -> Row:
    return {**pair(i), "reference": f" {good(i)} {i}"}


def rated(i: int) -> Row:
    wanted = i % 3 != 1
    return {"prompt": question(i), "completion": f" {good(i) if wanted else poor(i)}", "label": wanted}


def stepwise(i: int) -> Row:
    steps = [f"Take {i}.", f"Add {i}." + " Slowly." * (i % 2), f"It is {2 * i + (i % 3 == 0)}."]
    labels = [True, i % 2 == 0, i % 3 != 0]
    return {"prompt": question(i), "completions": steps[: 2 + i % 2], "labels": labels[: 2 + i % 2]}


def pair_with_equal_answers(i: int) -> Row:
    made = pair(i)
    return {**made, "chosen": "", "rejected": ""} if i == 7 else made


def margin_pair(i: int) -> Row:
    return {**implicit_chat_pair(i), "margin": 0.25 * (i % 4)}


def prompt_only(i: int) -> Row:
    return {"prompt": question(i), "answer": float(i % 6)}


def privileged(i: int) -> Row:
    return {**prompt_only(i), "privileged_context": good(i) if i % 3 else poor(i)}


def tokenised_reward_pair(i: int) -> Row:
    made = tokenised_pair(i)
    return {side: made["prompt_ids"] + made[side] for side in ("chosen_ids", "rejected_ids")}


def shown_messages(i: int) -> Row:
    return {"images": [picture(i)], **messages(i)}


def two_shown(i: int) -> Row:
    content = [{"type": "image", "text": None}, {"type": "text", "text": question(i)}, {"type": "image", "text": None}]
    said = [{"type": "text", "text": good(i)}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": said}]
    return {"images": [picture(i), picture(i + 50)], "messages": turns}


def sometimes_shown(i: int) -> Row:
    """No micro-batch of two rows, in any order of ours, is sure to have an image."""
    return shown_messages(i) if i % 3 != 1 else {"images": [], **messages(i)}


def long_shown(i: int) -> Row:
    """Longer than 1024 tokens, the default of `max_length`."""
    return {"images": [picture(i)], "messages": [*user(question(i) + " so" * 340), *assistant(good(i))]}


def shown_late(i: int) -> Row:
    """In every third row 90 tokens do not reach the end of the image."""
    before = " Look:" * (14 if i % 3 == 0 else 1)
    content = [{"type": "text", "text": before}, {"type": "image", "text": None}, {"type": "text", "text": "?"}]
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": good(i)}]},
    ]
    return {"images": [picture(i)], "messages": turns}


def shown_transparent(i: int) -> Row:
    return {"images": [picture(i, ground="transparent")], **messages(i)}


def shown_on_white(i: int) -> Row:
    return {"images": [picture(i, ground="white")], **messages(i)}


def shown_prompt_completion(i: int) -> Row:
    return {"images": [picture(i)], **prompt_completion_chat(i)}


def shown_pair(i: int) -> Row:
    return {"images": [picture(i)], **chat_pair(i)}


def shown_prompt(i: int) -> Row:
    return {"images": [picture(i)], "prompt": user(question(i))}


ROWS: dict[str, Callable[[int], Row]] = {
    function.__name__: function
    for function in (
        text,
        even_text,
        messages,
        long_chat,
        share_gpt,
        with_tools,
        with_json_tools,
        messages_with_arguments,
        messages_with_control_text,
        question_answer,
        text_with_empty,
        prompt_completion,
        prompt_completion_chat,
        input_ids,
        labelled_ids,
        masked_ids,
        pair,
        even_pair,
        implicit_pair,
        pair_with_shared_letters,
        implicit_pair_with_shared_letters,
        chat_pair,
        implicit_chat_pair,
        tool_pair,
        tokenised_pair,
        triple,
        rated,
        stepwise,
        pair_with_equal_answers,
        margin_pair,
        tokenised_reward_pair,
        prompt_only,
        privileged,
        shown_messages,
        shown_prompt,
        two_shown,
        sometimes_shown,
        long_shown,
        shown_late,
        shown_transparent,
        shown_on_white,
        shown_prompt_completion,
        shown_pair,
    )
}
"""Name of a kind of row -> row number -> row."""


def rows(name: str, count: int = COUNT, start: int = 0) -> list[Row]:
    return [ROWS[name](i) for i in range(start, start + count)]
