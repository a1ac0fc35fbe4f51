"""Conversations with images: ids equal the processor's, masks equal an oracle written with its offsets, for nine families."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from posttrain.core.sample import Sample
from posttrain.data.images.row_image import RowImage
from posttrain.data.render.renderer import TRAIN_MODES, Conversation, Renderer, RenderError
from posttrain.data.vision.families import vision_family
from posttrain.data.vision.layouts import ImageLayouts
from tests import tiny_vision
from tests.data.test_renderer import trained_texts
from tests.tiny_vision import QWEN, model_alone, needs_torchvision, tiny_processor

FAMILIES = [family for family in tiny_vision.FAMILIES if family != "paligemma"]  # its processor edits the text
MERGES = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("ĊĊ", "ĊĊ"), ("a", "Ġ"), ("a", "b"), ("a", "ĊĊ")]  # Ċ is a line break, Ġ a space
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": {"where": "left"}}}
HEADER, CLOSED = "<|im_start|>", "<|im_end|>"


def template(mark: str) -> str:
    """Parts only, as several families' own; with tools and their calls."""
    return (
        "{% if tools %}{{ '<|im_start|>tools\n' + tools[0].function.name + '<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% for p in m.content %}{{ '" + mark + "' if p.type == 'image' else p.text }}{% endfor %}"
        "{% for c in m.tool_calls or [] %}{{ '\n!' + c.function.name + ' ' + c.function.arguments.where }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


def mark_of(family: str) -> str:
    """What the family's templates write for an image."""
    written = layouts(family).family.written
    return f"<|vision_start|>{written}<|vision_end|>" if family in QWEN else written


@cache
def layouts(family: str) -> ImageLayouts:
    """Of a processor whose tokenizer merges line breaks, so that expansion in token space would be wrong."""
    needs_torchvision(family)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_vision, "tokenizer", partial(tiny_vision.tokenizer, MERGES))
        processor = tiny_processor(family)
    return ImageLayouts(vision_family(family, processor), processor)


@cache
def renderer(family: str, chat_template: str | None = None, **options: Any) -> Renderer:
    text = chat_template or template(mark_of(family))
    return Renderer(layouts(family).processor, text, layouts=layouts(family), **options)


def picture(height: int = 60, width: int = 40, key: bytes = b"k" * 16) -> dict[str, Any]:
    return {"type": "image", "image": RowImage(key, (height, width))}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [words(part) if isinstance(part, str) else part for part in parts]}


def said(*parts: Any, **fields: Any) -> dict[str, Any]:
    return user(*parts) | {"role": "assistant"} | fields


def encode(made: Renderer, chat: Conversation, train: str = "everything") -> Sample:
    (sample,) = made.encode_chats([chat], train)
    if isinstance(sample, RenderError):
        raise sample
    return sample


def images_in(messages: list[dict[str, Any]]) -> list[RowImage]:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return [part["image"] for part in parts if part["type"] == "image"]


def by_the_processor(family: str, text: str, images: list[RowImage]) -> Any:
    """Ids, offsets and replacements, from blank images of the same sizes."""
    shown = [Image.new("RGB", image.size[::-1]) for image in images]
    return layouts(family).processor(
        text=[text],
        images=[shown] if shown else None,
        return_offsets_mapping=True,
        return_text_replacement_offsets=True,
    )


# --------------------------------------------------------------------------------------------------------- the oracle


def segments(chat: Conversation, mark: str) -> Iterator[tuple[str, int, bool]]:
    """What the template writes, piece by piece: text, message, whether it is the turn's own. Images are pieces of one mark."""
    if chat.tools:
        yield f"{HEADER}tools\nlook{CLOSED}\n", -1, False
    for number, message in enumerate(chat.messages):
        joins = number == chat.num_prompt_messages and chat.messages[number - 1]["role"] == "assistant"
        if not joins:
            yield f"{HEADER}{message['role']}\n", number, False
        content = message["content"]
        for part in [words(content)] if isinstance(content, str) else content:
            yield mark if part["type"] == "image" else part["text"], number, True
        for _ in message.get("tool_calls") or []:
            yield "\n!look left", number, True
        following = chat.messages[number + 1 : number + 2]
        if not (number + 1 == chat.num_prompt_messages and message["role"] == following[0]["role"] == "assistant"):
            yield CLOSED, number, True
            yield "\n", number, False


def expected(family: str, chat: Conversation, train: str) -> tuple[list[int], list[bool], list[tuple[int, int]]]:
    """Ids, mask and spans of images, by offsets of the processor's tokens in the text that it expanded itself."""
    written, mark = layouts(family).family.written, mark_of(family)
    text = "".join(part for part, _, _ in segments(chat, mark))
    outcome = by_the_processor(family, text, images_in(chat.messages))
    replacements = [found["replacement"] for found in outcome.get("text_replacement_offsets", [[]])[0]]
    of_character: list[tuple[bool, int]] = []  # trained, number of the image or -1
    image = 0
    for part, number, own in segments(chat, mark):
        is_assistants = own and number >= 0 and chat.messages[number]["role"] == "assistant"
        in_completion = number >= (chat.num_prompt_messages or 0) and number >= 0
        begins = own or number > (chat.num_prompt_messages or 0)  # the header of its first turn is the prompt's
        trained = {
            "everything": True,
            "assistant": is_assistants,
            "completion": in_completion and begins,
            "assistant_in_completion": in_completion and is_assistants,
        }[train]
        trained = trained or (train == "completion" and in_completion and part == "\n")
        before, found, after = part.partition(written)
        of_character += [(trained, -1)] * len(before)
        if found:
            of_character += [(False, image)] * len(replacements[image])
            image += 1
        of_character += [(trained, -1)] * len(after)
    assert image == len(replacements)
    mask, places = [], []
    for start, stop in outcome["offset_mapping"][0]:
        held = of_character[start:stop]
        shown = [number for _, number in held if number >= 0]
        mask.append(any(one for one, _ in held) and not shown)
        places.append(min(shown, default=-1))  # a token of two images belongs to the first
    spans = [(places.index(one), len(places) - places[::-1].index(one)) for one in range(image)]
    return outcome["input_ids"][0], mask, spans


# ------------------------------------------------------------------------------------------------------ any conversation

TEXTS = st.text(alphabet="ab \nÄ<>", min_size=1, max_size=8)
SIZES = st.tuples(st.integers(8, 400), st.integers(8, 400))


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Up to four images anywhere, contents of strings and of parts, tools, and a last turn that continues the prompt's."""
    left = draw(st.integers(0, 4))

    def content(first: bool = False, last: bool = False) -> Any:
        """`first`, `last`: it begins, or ends, with a text."""
        nonlocal left
        if not draw(st.integers(0, 2)):
            return draw(TEXTS)
        parts = [words(draw(TEXTS))] if first else []
        for _ in range(draw(st.integers(0 if parts else 1, 3))):
            if left and draw(st.booleans()):
                left -= 1
                parts.append(picture(*draw(SIZES), key=bytes([left]) * 16))
            else:
                parts.append(words(draw(TEXTS)))
        return [*parts, words(draw(TEXTS))] if last else parts

    messages = [{"role": "system", "content": content()}] if draw(st.booleans()) else []
    tools = [TOOL] if draw(st.booleans()) else None
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": content()})
        if tools and draw(st.booleans()):
            messages.append({"role": "assistant", "content": content(), "tool_calls": [CALL]})
            messages.append({"role": "tool", "content": content()})
        messages.append({"role": "assistant", "content": content()})
    count = len(messages) - 1
    if draw(st.booleans()):
        messages[-1]["content"] = content(last=True)
        messages.append({"role": "assistant", "content": content(first=True)})
        count += 1
    return Conversation(messages, tools, num_prompt_messages=count)


def compare(family: str, chat: Conversation) -> None:
    """In all modes, twice: the second time from what was kept of the first."""
    made, images = renderer(family), images_in(chat.messages)
    is_whole = chat.messages[-2]["role"] != "assistant"
    for train in TRAIN_MODES:
        if train in ("everything", "assistant") and not is_whole:
            continue  # nothing is joined there: two turns in a row
        ids, mask, spans = expected(family, chat, train)
        for _ in range(2):
            sample = encode(made, chat, train)
            assert sample.input_ids.tolist() == ids
            assert sample.trained.tolist() == mask, train
            assert [(image.start, image.stop) for image in sample.images] == spans
            assert [(image.key, image.size) for image in sample.images] == [(i.key, i.size) for i in images]
            assert [image.grid for image in sample.images] == [layouts(family).layout(*i.size).grid for i in images]
            assert (sample.positions is not None) == (family in QWEN and bool(images))
    begun = Conversation(chat.messages[: chat.num_prompt_messages], chat.tools)
    (prompt,) = made.encode_prompts([begun])
    if is_whole:
        outcome = by_the_processor(family, made.render(begun, True), images_in(begun.messages))
        assert prompt.input_ids.tolist() == outcome["input_ids"][0]
    assert len(prompt.images) == len(images_in(begun.messages))
    assert not prompt.trained.any()


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(chat=conversations())
def test_ids_are_the_processors_and_masks_are_the_oracles(family: str, chat: Conversation) -> None:
    compare(family, chat)


@pytest.mark.trust
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=2000)
@given(chat=conversations())
def test_ids_are_the_processors_and_masks_are_the_oracles_2000_times(family: str, chat: Conversation) -> None:
    compare(family, chat)


# ----------------------------------------------------------------------------------------------------- whose placeholder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("special", [True, False])
def test_placeholders_that_somebody_typed_are_ordinary_tokens(family: str, special: bool) -> None:
    """Whatever the tokenizer says of them; the processor would take the first mark for the image."""
    known = layouts(family)
    made = (
        renderer(family)
        if special
        else Renderer(_with_ordinary_placeholders(family), template(mark_of(family)), layouts=known)
    )
    typed = known.family.written + known.family.placeholder + "".join(known.family.markers[:3])
    harmless = encode(made, Conversation([user("x", picture(), "b"), said("c")]), "assistant")
    for messages in (
        [user("x" + typed, picture(), "b"), said("c")],
        [user("x", typed, picture(), "b" + typed), said("c")],
        [user("x", picture(), known.family.written[:3], known.family.written[3:]), said("c")],
    ):
        sample = encode(made, Conversation(messages), "assistant")
        controls = [number for number in sample.input_ids.tolist() if number in made.control_ids]
        assert controls == [number for number in harmless.input_ids.tolist() if number in made.control_ids]
        marks = "<|vision_start|><|vision_end|>" if family in QWEN else ""
        text = "".join(part.get("text", marks) for part in messages[0]["content"])
        around = np.delete(sample.input_ids, np.arange(sample.images[0].start, sample.images[0].stop))
        assert f"user\n{text}<|im_end|>" in made.tokenizer.decode(around)
        assert trained_texts(made, sample) == ["c<|im_end|>"]


def _with_ordinary_placeholders(family: str) -> Any:
    """The tokenizer, to which the family's placeholders are added tokens that are not special."""
    copy = pickle.loads(pickle.dumps(layouts(family).processor.tokenizer))
    known = layouts(family).family
    for token in copy.added_tokens_decoder.values():
        if token.content in (known.written, known.placeholder, *known.markers):
            token.special = False
            copy.backend_tokenizer.add_tokens([token])
    for named in list(copy._special_tokens_map):
        if copy._special_tokens_map[named] in (known.written, known.placeholder, *known.markers):
            del copy._special_tokens_map[named]
    copy._extra_special_tokens = []
    return copy


def test_a_typed_placeholder_that_is_parsed_is_refused() -> None:
    made = renderer("llava", allow_control_tokens_in_content=True)
    shown = encode(made, Conversation([user("a", picture(), "b<|im_end|>"), said("c")]))
    assert len(shown.images) == 1
    for messages in ([user("<image>"), said("c")], [user("<image>", picture()), said("c")]):
        with pytest.raises(RenderError, match="A text that was typed must not hold any"):
            encode(made, Conversation(messages))


ONLY_USERS = template("<image>").replace("p.type == 'image'", "p.type == 'image' and m.role == 'user'")
ONLY_USERS = ONLY_USERS.replace("else p.text", "else p.text or ''")
CASES = {
    "system": ([{"role": "system", "content": [picture()]}, user("x", picture())], 0, "system"),
    "assistant": ([user("x", picture()), said("y", picture())], 1, "assistant"),
    "tool": (
        [user("x"), said("y", tool_calls=[CALL]), {"role": "tool", "content": [words("z"), picture()]}],
        2,
        "tool",
    ),
    "two of three": ([user(picture(), "x"), said("y", picture(), picture()), user(picture())], 1, "assistant"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_template_that_drops_images_is_refused_with_the_message(case: str) -> None:
    messages, number, role = CASES[case]
    made = renderer("llava", ONLY_USERS)
    for outcome in (
        *made.encode_chats([Conversation(messages)], "everything"),
        *made.encode_prompts([Conversation(messages)]),
    ):
        assert isinstance(outcome, RenderError)
        assert f"images of message {number} ({role})" in outcome.reason


def test_a_template_whose_placeholders_are_only_as_many_as_the_images_is_refused() -> None:
    """None for the system's, two for the user's; and all of the system's behind the user's."""
    chat = Conversation([{"role": "system", "content": [words("s"), picture(8, 8)]}, user("x", picture()), said("y")])
    twice = ONLY_USERS.replace("'<image>'", "'<image><image>'")
    last = template("<image>").replace("in messages", "in messages[1:] + messages[:1]")
    for text, reason in ((twice, r"writes 0 of the 1 images of message 0 \(system\)"), (last, "moves .* message 0")):
        with pytest.raises(RenderError, match=reason):
            encode(renderer("llava", text), chat)
    with pytest.raises(RenderError, match="writes 1 placeholders of images for a conversation with 0"):
        encode(renderer("llava", "<image>" + template("<image>")), Conversation([user("<image>"), said("y")]))


def test_a_template_that_writes_the_images_of_a_message_first() -> None:
    hoisted = template("<image>").replace(
        "{% for p in m.content %}",
        "{% for p in m.content if p.type == 'image' %}{{ '<image>' }}{% endfor %}"
        "{% for p in m.content if p.type == 'text' %}",
    )
    made = renderer("llava", hoisted)
    one, two, three = (picture(50 + n, 50, bytes([n]) * 16) for n in range(3))
    for _ in range(2):  # the second from what was kept
        chat = Conversation([user("a<image>", one), said("b", two), user(three, "c"), said("d")])
        sample = encode(made, chat, "assistant")
        assert [image.key[0] for image in sample.images] == [0, 1, 2]
        assert trained_texts(made, sample) == ["b<|im_end|>", "d<|im_end|>"]


# ---------------------------------------------------------------------------------------------------------------- masks


def test_line_breaks_around_a_gemma_image_merge_with_their_neighbours() -> None:
    """Token by token; the placeholder's id replaced by what the processor writes would give other tokens."""
    made = renderer("gemma3")
    spelled = partial(made.tokenizer.encode, add_special_tokens=False)
    one, two = picture(key=b"1" * 16), picture(key=b"2" * 16)
    sample = encode(made, Conversation([user("x"), said("a", one, two, "\nb")]), "assistant")
    tokens = made.tokenizer.convert_ids_to_tokens(sample.input_ids)
    seen = ["<start_of_image>", *["<image_soft_token>"] * 4, "<end_of_image>"]
    turn = ["aĊĊ", *seen, "ĊĊĊĊ", *seen, "ĊĊĊ", "b", "<|im_end|>", "Ċ"]
    assert tokens[-len(turn) :] == turn
    begin = len(tokens) - len(turn)
    first, second = sample.images
    assert (first.start, first.stop, second.start, second.stop) == (begin, begin + 8, begin + 8, begin + 15)
    assert trained_texts(made, sample) == ["b<|im_end|>"]
    in_token_space = [*spelled("a"), *spelled("\n\n"), *made.tokenizer.convert_tokens_to_ids(seen), *spelled("\n\n")]
    assert sample.input_ids[begin : begin + len(in_token_space)].tolist() != in_token_space


@pytest.mark.parametrize("family", FAMILIES)
def test_images_are_trained_where_asked_for_and_the_text_around_them_is(family: str) -> None:
    chat = Conversation([user("a", picture()), said("b", picture(), "c"), user("d")])
    with_images, without = (encode(renderer(family, train_images=on), chat, "assistant") for on in (True, False))
    of_user, of_assistant = (slice(image.start, image.stop) for image in without.images)
    assert with_images.trained[of_assistant].all()
    assert not without.trained[of_assistant].any()
    assert not with_images.trained[of_user].any()
    differs = np.flatnonzero(with_images.trained != without.trained)
    assert set(differs) <= set(range(of_assistant.start, of_assistant.stop))
    marks = "<|vision_start|><|vision_end|>" if family in QWEN else ""  # the template's own, and so the assistant's
    assert "".join(trained_texts(renderer(family), without)) == f"b{marks}c<|im_end|>"


def test_fields_that_arrow_fills_with_nulls_are_no_images() -> None:
    """Templates of the Qwen family ask whether a part has an 'image'."""
    made = renderer("llava", template("<image>").replace("p.type == 'image'", "'image' in p or p.type == 'image'"))
    chat = Conversation([user(words("a") | {"image": None}, picture() | {"text": None}), said("b")])
    sample = encode(made, chat, "assistant")
    assert len(sample.images) == 1
    assert trained_texts(made, sample) == ["b<|im_end|>"]


def test_turns_of_weight_zero_and_prompts_that_end_beside_an_image() -> None:
    made = renderer("qwen2_5_vl")
    messages = [user("a", picture()), said("b", picture()), user(picture(), "c"), said(picture(), "d")]
    sample = encode(made, Conversation(messages, untrained=frozenset([1])), "assistant")
    assert trained_texts(made, sample) == ["<|vision_start|>", "<|vision_end|>d<|im_end|>"]
    behind, before = made.encode_prompts([Conversation(messages[:2]), Conversation(messages)])
    assert "Message 1 of the assistant ends with an image" in behind.reason
    assert made.tokenizer.decode(before.input_ids).endswith("<|image_pad|><|vision_end|>d")
    assert before.positions.shape == (3, len(before))


@pytest.mark.parametrize("family", QWEN)
def test_positions_are_those_of_the_model(family: str) -> None:
    chat = Conversation([user("ab", picture(60, 100), "c", picture(200, 30)), said("d", picture(), "e")])
    sample, known = encode(renderer(family), chat), layouts(family).family
    ids = torch.tensor(sample.input_ids[None].astype(np.int64))
    grids = torch.tensor([image.grid for image in sample.images])
    types = (ids == known.placeholder_id).long()
    positions, _ = model_alone(family).model.get_rope_index(ids, types, image_grid_thw=grids)
    assert sample.positions.tolist() == positions[:, 0].tolist()


# ----------------------------------------------------------------------------------------------------------- plain texts


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_texts_hold_the_familys_own_placeholders(family: str) -> None:
    """Parsed as the processor parses them, with the tokens that the tokenizer adds; all but the images is trained."""
    known, made = layouts(family), renderer(family)
    images = [picture(60, 100)["image"], picture(30, 30)["image"]]
    text = f"ab\n{known.family.written}\n\n{known.family.written}<|im_end|>a"
    (sample,) = made.encode_image_texts([text], [images])
    outcome = by_the_processor(family, text, images)
    assert sample.input_ids.tolist() == outcome["input_ids"][0]
    inside = np.zeros(len(sample), bool)
    for image in sample.images:
        inside[image.start : image.stop] = True
    spans = [found["new_span"] for found in outcome["text_replacement_offsets"][0]]
    held = [any(a < end and b > start for start, end in spans) for a, b in outcome["offset_mapping"][0]]
    assert inside.tolist() == held
    assert np.array_equal(sample.trained, ~inside)
    few, plain = made.encode_image_texts([text, "no image"], [images[:1], []])
    assert "has 2 placeholders of images" in few.reason
    assert plain.trained.all()
    assert plain.images == ()


def test_plain_texts_begin_and_end_as_the_tokenizer_has_it() -> None:
    from tokenizers.processors import TemplateProcessing

    copy = pickle.loads(pickle.dumps(layouts("gemma3").processor))
    bos, eos = ((token, copy.tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<|im_end|>"))
    ends = TemplateProcessing(single="<bos> <bos> $A <|im_end|>", special_tokens=[bos, eos])
    copy.tokenizer.backend_tokenizer.post_processor = ends
    made = Renderer(copy, layouts=ImageLayouts(layouts("gemma3").family, copy))
    (sample,) = made.encode_image_texts(["<start_of_image>"], [[picture()["image"]]])
    assert [(image.start, image.stop) for image in sample.images] == [(2, len(sample) - 1)]
    assert sample.trained.tolist() == [True, True, *[False] * (len(sample) - 3), True]


# --------------------------------------------------------------------------------------------------- refusals, and costs


def test_images_without_layouts_and_parts_without_images_are_refused() -> None:
    blind, chat = (
        Renderer(layouts("llava").processor, template("<image>")),
        Conversation([user("a", picture()), said("b")]),
    )
    for train in TRAIN_MODES:
        (outcome,) = blind.encode_chats([Conversation(chat.messages, num_prompt_messages=1)], train)
        assert "Message 0 has an image, and this model reads texts only" in outcome.reason
    assert "The text has an image" in blind.encode_image_texts(["<image>"], [[picture()["image"]]])[0].reason
    with pytest.raises(RenderError, match="Message 0 has an image part without an image"):
        encode(renderer("llava"), Conversation([user("a", {"type": "image"}), said("b")]))
    with pytest.raises(RenderError, match="Message 0 has a part of type 'video'"):
        encode(renderer("llava"), Conversation([user("a", {"type": "video"}), said("b")]))
    as_text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(RenderError, match="as data"):
        encode(renderer("llava", as_text), Conversation([{"role": "user", "content": "Hi"}]))


def test_a_size_that_the_processor_refuses_is_named() -> None:
    chat = Conversation([user(picture(), picture(8, 4000), "a"), said("b")])
    with pytest.raises(RenderError, match=r"Image 2 of 2, of 8 x 4000 pixels \(height x width\), cannot be used"):
        encode(renderer("qwen2_vl"), chat)


def test_conversations_of_a_shape_are_read_with_marks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Renderer(layouts("gemma3").processor, template("<start_of_image>"), layouts=layouts("gemma3"))
    orders = [lambda n: user(f"a{n}", picture(20 + n, 30)), lambda n: user(picture(20 + n, 30), f"a{n}")]
    chats = [Conversation([order(n), said(f"b{n}")]) for n in range(2) for order in orders]
    first = [encode(made, chat, "assistant") for chat in chats[:2]]
    monkeypatch.setattr(made._provenance, "mark", None)
    for sample, kept in zip(first, chats[2:]):
        later = encode(made, kept, "assistant")
        assert later.images[0].start == sample.images[0].start
        assert trained_texts(made, later) == ["b1<|im_end|>"]


def test_fingerprint_changes_with_what_decides_expansion_and_a_renderer_travels() -> None:
    known = layouts("qwen2_vl")
    made = renderer("qwen2_vl")
    larger = ImageLayouts(known.family, known.processor, {"size": {"shortest_edge": 3136, "longest_edge": 40000}})
    processor = tiny_processor("qwen2_vl", patch_size=16)
    others = [
        Renderer(known.processor, made.chat_template),
        Renderer(known.processor, made.chat_template, layouts=known, train_images=True),
        Renderer(known.processor, made.chat_template, layouts=larger),
        Renderer(processor, made.chat_template, layouts=ImageLayouts(vision_family("qwen2_vl", processor), processor)),
    ]
    assert len({one.fingerprint for one in (made, *others)}) == 5
    chat = Conversation([user("a", picture(300, 200)), said("b")])
    copy = pickle.loads(pickle.dumps(made))
    assert copy.fingerprint == made.fingerprint
    one, other = encode(made, chat), encode(copy, chat)
    assert one.input_ids.tolist() == other.input_ids.tolist()
    assert one.images == other.images
