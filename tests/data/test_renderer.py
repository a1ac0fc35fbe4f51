"""Rendering is apply_chat_template's to the byte; the mask is the hand-checked one of golden/trained_spans.json.

The golden file holds, for each template and each shape, the trained texts of the conversation or the reason why it is
refused. Every entry was read by a person: the contract is the file, not what the code happens to give.
"""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.core.sample import Sample
from posttrain.data.render.renderer import TRAIN_MODES, Conversation, Renderer, RenderError
from posttrain.data.render.template_checks import probe_template
from posttrain.data.render.templates import use_chat_format
from tests.data.chat_cases import GOLDEN, LONG, SHAPES, SYSTEM, TEMPLATES, said, template_text, user
from tests.data.tiny_tokenizers import KINDS, kind, tokenizer_for

GOLDEN_SPANS = json.loads(GOLDEN.read_text(encoding="utf-8"))


def renderer_of(template: str) -> Renderer:
    return Renderer(tokenizer_for(template_text(template)))


def chat_renderer(name: str, chat_format: str = "chatml") -> Renderer:
    tokenizer = KINDS[name]()
    use_chat_format(tokenizer, chat_format)
    return Renderer(tokenizer)


def trained_texts(renderer: Renderer, sample: Sample) -> list[str]:
    """The texts of the runs of trained tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.trained, [False]]).astype(int)))
    runs = [sample.input_ids[start:stop] for start, stop in zip(edges[::2], edges[1::2])]
    return [renderer.tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def own_ids(renderer: Renderer, chat: Conversation, **kwargs) -> list[int]:
    return renderer.tokenizer.apply_chat_template(
        chat.messages, tools=chat.tools, tokenize=True, return_dict=False, **(chat.template_kwargs or {}), **kwargs
    )


def encode(renderer: Renderer, chat: Conversation, train: str = "assistant") -> Sample:
    (sample,) = renderer.encode_chats([chat], train)
    if isinstance(sample, RenderError):
        raise sample
    return sample


def test_the_golden_set_is_as_large_as_promised():
    assert set(GOLDEN_SPANS) == set(TEMPLATES)
    assert all(set(spans) == set(SHAPES) for spans in GOLDEN_SPANS.values())
    assert len(TEMPLATES) >= 12
    assert len(SHAPES) >= 12


@pytest.mark.parametrize("template", TEMPLATES)
def test_rendering_equals_apply_chat_template(template: str):
    renderer = renderer_of(template)
    compared = 0
    for name, chat in SHAPES.items():
        for prompt in (False, True):
            try:
                text = renderer.tokenizer.apply_chat_template(
                    chat.messages, tools=chat.tools, add_generation_prompt=prompt, tokenize=False
                )
            except Exception:  # the template refuses the conversation; so must we, unless arguments as text help
                if "tool" not in name:
                    with pytest.raises(RenderError, match="refuses this conversation"):
                        renderer.render(chat, prompt)
                continue
            assert renderer.render(chat, prompt) == text
            (sample,) = renderer.encode_chats([chat], "everything")
            if not prompt and isinstance(sample, Sample):
                assert sample.input_ids.tolist() == own_ids(renderer, chat)
                assert sample.trained.all()
                compared += 1
    assert compared >= 8


@pytest.mark.parametrize("template", TEMPLATES)
def test_mask_equals_the_golden_set(template: str):
    renderer = renderer_of(template)
    for name, sample in zip(SHAPES, renderer.encode_chats(list(SHAPES.values()), "assistant")):
        expected = GOLDEN_SPANS[template][name]
        if isinstance(sample, RenderError):
            assert {"refused": sample.reason} == expected, name
        else:
            assert [text.replace(LONG, "{LONG}") for text in trained_texts(renderer, sample)] == expected, name


@pytest.mark.parametrize("template", TEMPLATES)
def test_facts_kept_from_one_chat_do_not_change_the_next(template: str):
    """The same chats in another order, twice, give the same masks: skeletons and other kept facts are only shortcuts."""
    renderer, chats = renderer_of(template), list(SHAPES.values())
    forward = renderer.encode_chats(chats, "assistant")
    backward = renderer_of(template).encode_chats(chats[::-1] + chats, "assistant")
    for first, second, third in zip(forward, backward[len(chats) :], backward[: len(chats)][::-1]):
        if isinstance(first, RenderError):
            assert first.reason == second.reason == third.reason
        else:
            assert np.array_equal(first.trained, second.trained)
            assert np.array_equal(first.trained, third.trained)


@pytest.mark.parametrize("template", TEMPLATES)
def test_completion_is_what_follows_the_prompt(template: str):
    """Where the prompt's ids begin the ids of the whole, the trained tokens are exactly the rest."""
    renderer = renderer_of(template)
    chat = Conversation([user("One?"), said("First."), user("Two?"), said("Second.")], num_prompt_messages=3)
    sample = encode(renderer, chat, "completion")
    (prompt,) = renderer.encode_prompts([Conversation(chat.messages[:3])])
    assert prompt.input_ids.tolist() == own_ids(renderer, Conversation(chat.messages[:3]), add_generation_prompt=True)
    if sample.input_ids[: len(prompt)].tolist() == prompt.input_ids.tolist():
        assert np.array_equal(sample.trained, np.arange(len(sample)) >= len(prompt))
    (last_turn,) = trained_texts(renderer, encode(renderer, chat, "assistant_in_completion"))
    assert last_turn == GOLDEN_SPANS[template]["two turns"][1]
    assert trained_texts(renderer, sample)[0].startswith(last_turn)


def test_completion_that_continues_the_prompts_last_message():
    renderer = renderer_of("built-in chatml")
    messages = [user("Count."), said("One, two,"), said(" three.")]
    chat = Conversation(messages, num_prompt_messages=2)
    assert trained_texts(renderer, encode(renderer, chat, "completion")) == [" three.<|im_end|>\n"]
    assert trained_texts(renderer, encode(renderer, chat, "assistant_in_completion")) == [" three.<|im_end|>"]
    (prompt,) = renderer.encode_prompts([Conversation(messages[:2])])
    assert (
        renderer.tokenizer.decode(prompt.input_ids)
        == "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\nOne, two,"
    )
    whole = encode(renderer, Conversation([messages[0], said("One, two, three.")]), "everything")
    assert encode(renderer, chat, "completion").input_ids.tolist() == whole.input_ids.tolist()


def test_a_kept_skeleton_does_not_hide_a_continuation():
    """A chat of the same shape without a continued message was read before."""
    renderer = renderer_of("built-in chatml")
    plain = Conversation([user("Count."), said("One.")], num_prompt_messages=1)
    continued = Conversation([user("Count."), said("One, two,"), said(" three.")], num_prompt_messages=2)
    for chat, expected in ((plain, "One."), (continued, " three."), (plain, "One."), (continued, " three.")):
        for train in ("completion", "assistant_in_completion"):
            (text,) = trained_texts(renderer, encode(renderer, chat, train))
            assert text.rstrip("\n") == f"{expected}<|im_end|>"


def test_a_generation_prompt_that_goes_on_into_the_text():
    """Where the prompt opens the thought and the text does so too, the opening is the prompt's, in any order of rows."""
    template = template_text("smollm2").replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    plain = Conversation([user("Hi"), said("Hello.")])
    thinks = Conversation([user("Hi"), said("<think>\nHm.\n</think>\n\nHello.")])
    for order in ((plain, thinks), (thinks, plain)):
        renderer = Renderer(tokenizer_for(template))
        texts = {id(chat): trained_texts(renderer, encode(renderer, chat)) for chat in order}
        assert texts[id(plain)] == ["Hello.<|im_end|>"]
        assert texts[id(thinks)] == ["Hm.\n</think>\n\nHello.<|im_end|>"]


def test_prompt_that_continues_equals_transformers():
    renderer = renderer_of("built-in llama3")
    messages = [user("Count."), said("One, two,")]
    (prompt,) = renderer.encode_prompts([Conversation(messages)])
    assert not prompt.trained.any()
    assert prompt.input_ids.tolist() == own_ids(renderer, Conversation(messages), continue_final_message=True)


@pytest.mark.parametrize("count", [None, 4, 2])
def test_completion_needs_a_prompt_that_the_assistant_answers(count: int | None):
    chat = Conversation([user("a"), said("b"), user("c"), said("d")], num_prompt_messages=count)
    (error,) = renderer_of("built-in chatml").encode_chats([chat], "completion")
    assert isinstance(error, RenderError)


def test_context_turns_of_a_completion_may_be_rewritten():
    """Qwen 3 drops reasoning of earlier turns: harmless in the prompt, refused in what is trained."""
    renderer = renderer_of("qwen3")
    messages = SHAPES["reasoning in an earlier turn"].messages
    sample = encode(renderer, Conversation(messages, num_prompt_messages=3), "completion")
    assert trained_texts(renderer, sample) == ["<think>\nThree and three make six.\n</think>\n\n6<|im_end|>\n"]
    with pytest.raises(RenderError, match="drops the reasoning 'Two and two make four"):
        encode(renderer, Conversation(messages), "assistant")


def test_template_arguments_decide_where_a_turn_begins():
    """With enable_thinking=False the empty thought is part of Qwen 3's generation prompt, and so is not trained."""
    renderer = renderer_of("qwen3")
    messages = [user("Hi"), said("Hello.")]
    plain, without = Conversation(messages), Conversation(messages, template_kwargs={"enable_thinking": False})
    assert trained_texts(renderer, encode(renderer, plain)) == ["<think>\n\n</think>\n\nHello.<|im_end|>"]
    assert trained_texts(renderer, encode(renderer, without)) == ["Hello.<|im_end|>"]


def test_tests_on_the_text_of_a_message_do_not_disturb_the_marks():
    """Qwen 3 asks whether a user's text starts with <tool_response>; GLM whether it ends with /nothink."""
    response = user("<tool_response>\n22\n</tool_response>")
    chat = Conversation([user("Weather?"), said("Calling."), response, said("Warm.")])
    assert trained_texts(renderer_of("qwen3"), encode(renderer_of("qwen3"), chat)) == [
        "Calling.<|im_end|>",
        "<think>\n\n</think>\n\nWarm.<|im_end|>",
    ]
    glm = renderer_of("glm4moe")
    chat = Conversation([user("Hi /nothink"), said("Hello.")], template_kwargs={"enable_thinking": False})
    assert trained_texts(glm, encode(glm, chat)) == ["\nHello."]


def test_arguments_that_would_be_encoded_twice_are_refused():
    text = '{"place": "Paris"}'
    call = {"type": "function", "function": {"name": "get_weather", "arguments": text}}
    chat = Conversation([user("Weather?"), said("", tool_calls=[call])])
    with pytest.raises(RenderError, match="rewrites the tool call arguments"):
        encode(renderer_of("qwen2_5"), chat)
    assert text in trained_texts(renderer_of("qwen3"), encode(renderer_of("qwen3"), chat))[0]


def test_ascii_escapes_of_arguments():
    """A template may write arguments with tojson(ensure_ascii=True): marks and text then come through as escapes."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson(ensure_ascii=True) }}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(tokenizer_for(template))
    call = {"type": "function", "function": {"name": "find", "arguments": {"word": 'Zürich 🙂 "x"\n'}}}
    (text,) = trained_texts(renderer, encode(renderer, Conversation([user("Find."), said("", tool_calls=[call])])))
    assert text == 'find{"word": "Z\\u00fcrich \\ud83d\\ude42 \\"x\\"\\n"}<|im_end|>'


REWRITING = {
    "upper": ("{{ m.content | upper }}", "rewrites the content|differently when its texts are marked"),
    "truncate": ("{{ m.content[:4] }}", "rewrites|drops"),
    "replace": ("{{ m.content | replace('o', '0') }}", "rewrites the content"),
    "twice": ("{{ m.content }}{{ m.content }}", "repeats"),
    "drop": ("{{ '' if m.role == 'assistant' else m.content }}", "drops the content"),
    "reverse": ("{{ m.content | reverse }}", "rewrites|drops"),
    "length": ("{{ m.content }}{{ m.content | length }}", "differently"),
}


@pytest.mark.parametrize("name", REWRITING)
def test_a_template_that_rewrites_what_was_said_is_refused_with_the_rendered_text(name: str):
    expression, reason = REWRITING[name]
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n" + expression + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    renderer = Renderer(tokenizer_for(template))
    (error,) = renderer.encode_chats([Conversation([user("Hallo you"), said("Foo bar o")])], "assistant")
    assert isinstance(error, RenderError)
    assert error.rendered == renderer.render(Conversation([user("Hallo you"), said("Foo bar o")]))
    assert error.rendered in str(error)
    with pytest.raises(RenderError, match=reason):
        raise error


def test_upper_case_where_it_changes_nothing_is_accepted():
    template = template_text("smollm2").replace("message['content']", "message['content'].upper()")
    renderer = Renderer(tokenizer_for(template))
    assert trained_texts(renderer, encode(renderer, Conversation([user("a"), said("OK")]))) == ["OK<|im_end|>"]


def test_one_bad_chat_does_not_stop_the_others():
    renderer = renderer_of("gemma")
    good = Conversation([user("Hi"), said("Hello.")])
    bad = [
        Conversation([SYSTEM, *good.messages]),
        Conversation([]),
        Conversation([{"content": "no role"}]),
        Conversation(["not a message"]),
        Conversation([user("half a character: \ud83d"), said("x")]),
    ]
    endless = Renderer(tokenizer_for("{% for i in range(10 ** 9) %}x{% endfor %}"))
    assert "Range too big" in endless.encode_chats([good], "everything")[0].reason
    for train in ("everything", "assistant"):
        results = renderer.encode_chats([good, *bad, good], train)
        assert isinstance(results[0], Sample)
        assert isinstance(results[-1], Sample)
        assert all(isinstance(result, RenderError) for result in results[1:-1])


def test_without_a_template_and_with_an_unknown_mode():
    tokenizer = KINDS["byte_level"]()
    renderer = Renderer(tokenizer)
    assert not renderer.has_template
    (error,) = renderer.encode_chats([Conversation([user("Hi")])], "everything")
    assert "no chat template" in error.reason
    with pytest.raises(ValueError, match="train='all'; it must be one of 'everything', 'assistant'"):
        renderer.encode_chats([], "all")
    assert set(TRAIN_MODES) == {"everything", "assistant", "completion", "assistant_in_completion"}


@pytest.mark.parametrize("name", KINDS)
def test_mask_on_every_kind_of_tokenizer(name: str):
    """The trained ids are those of the assistant's words and the end of turn, whatever the tokenizer does to spaces."""
    renderer = chat_renderer(name)
    chat = Conversation(
        [user("How is the weather in Paris?"), said("It is sunny, 🙂  user."), user("Ok"), said("fine")]
    )
    sample = encode(renderer, chat)
    assert sample.input_ids.tolist() == own_ids(renderer, chat)
    decode = renderer.tokenizer.decode
    texts = trained_texts(renderer, sample)
    squeezed = ["".join(text.split()) for text in texts]
    assert squeezed == [
        "Itissunny,🙂user.<|im_end|>".lower() if name == "word_piece" else "Itissunny,🙂user.<|im_end|>",
        "fine<|im_end|>",
    ]
    assert "Paris" not in decode(sample.input_ids[sample.trained])


def test_a_space_with_trimmed_offsets_is_masked_like_any_other():
    renderer = chat_renderer("byte_level", "vicuna")
    assert renderer.tokenizer("x ", add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][-1] == (
        2,
        2,
    )
    chat = Conversation([user("Hi"), said(" 2  x ")])
    assert trained_texts(renderer, encode(renderer, chat)) == ["  2  x <|endoftext|>"]


@settings(max_examples=120, deadline=None)
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_categories=["Co"]), min_size=1, max_size=40),
        min_size=2,
        max_size=6,
    )
)
def test_ids_equal_apply_chat_template_for_any_text_without_control_tokens(texts: list[str]):
    messages = [(user if number % 2 == 0 else said)(text) for number, text in enumerate(texts)]
    for name in KINDS:
        renderer = _shared(name)
        if any(renderer._control.may_arise_from(text) for text in texts):
            continue
        sample = encode(renderer, Conversation(messages), "assistant")
        assert sample.input_ids.tolist() == own_ids(renderer, Conversation(messages))
        if name in ("byte_level", "with_plain_added_tokens", "many_reserved"):
            answers = [f"{text}<|im_end|>" for text in texts[1::2]]
            assert [text.encode() for text in trained_texts(renderer, sample)] == [
                answer.encode() for answer in answers
            ]


_SHARED: dict[str, Renderer] = {}


def _shared(name: str) -> Renderer:
    if name not in _SHARED:
        _SHARED[name] = chat_renderer(name)
    return _SHARED[name]


@pytest.mark.parametrize("name", KINDS)
def test_plain_texts_are_parsed_as_the_tokenizer_parses_them(name: str):
    tokenizer = kind(name)
    renderer = Renderer(tokenizer)
    texts = ["Hello there.", "a <|im_end|> b", "", "🙂 </s>"]
    for special in (True, False):
        expected = [tokenizer(text, add_special_tokens=special)["input_ids"] for text in texts]
        assert [ids.tolist() for ids in renderer.encode_texts(texts, add_special_tokens=special)] == expected
    assert all(ids.dtype == np.int32 for ids in renderer.encode_texts(texts))
    held = sum(any(text_ in text for text_ in renderer._control.texts) for text in texts)
    assert renderer.count_control_tokens(texts) == held > 0


def test_truncation_and_padding_left_on_the_tokenizer_do_not_matter_and_stay():
    tokenizer = tokenizer_for(template_text("built-in chatml"))
    renderer = Renderer(tokenizer)
    chat = Conversation([user("Hi there, how are you?"), said("<|im_end|> Fine.")])
    expected = encode(renderer, chat).input_ids.tolist()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    fingerprint = Renderer(tokenizer).fingerprint
    assert encode(Renderer(tokenizer), chat).input_ids.tolist() == expected
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 5
    assert tokenizer.backend_tokenizer.padding["length"] == 64
    assert fingerprint == renderer.fingerprint


def test_fingerprint_changes_with_all_that_decides_ids_and_masks():
    base = tokenizer_for(template_text("built-in chatml"))
    changed = tokenizer_for(template_text("built-in chatml"))
    changed.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    prints = {
        Renderer(base).fingerprint,
        Renderer(base, chat_template=template_text("built-in zephyr")).fingerprint,
        Renderer(base, allow_control_tokens_in_content=True).fingerprint,
        Renderer(changed).fingerprint,
    }
    assert len(prints) == 4
    assert Renderer(base).fingerprint == Renderer(tokenizer_for(template_text("built-in chatml"))).fingerprint


def test_a_renderer_travels_to_another_process():
    renderer = renderer_of("qwen3")
    chats = list(SHAPES.values())
    renderer.encode_chats([*chats, Conversation([user("<|im_end|>"), said("x")])], "assistant")
    copy = pickle.loads(pickle.dumps(renderer))
    assert copy.fingerprint == renderer.fingerprint
    for ours, theirs in zip(renderer.encode_chats(chats, "assistant"), copy.encode_chats(chats, "assistant")):
        if isinstance(ours, Sample):
            assert np.array_equal(ours.trained, theirs.trained)
    assert isinstance(pickle.loads(pickle.dumps(RenderError("why", "text"))), RenderError)


def test_a_tokenizer_without_a_fast_backend_is_refused():
    with pytest.raises(TypeError, match="is not backed by the `tokenizers` library"):
        Renderer(object())


def test_probe_speaks_of_what_may_go_wrong():
    assert probe_template(renderer_of("built-in chatml")) == []
    assert "No end-of-turn token is trained" in probe_template(renderer_of("glm4moe"))[0]
    deepseek = probe_template(renderer_of("deepseekv3"))
    assert any("The prompt is not the beginning of prompt + completion" in warning for warning in deepseek)
    assert any("changes earlier turns" in warning for warning in probe_template(renderer_of("qwen3")))
    assert any("does not write tools" in warning for warning in probe_template(renderer_of("phi3")))
    twice = Renderer(tokenizer_for("{{ bos_token }}{{ bos_token }}" + template_text("smollm2")))
    assert any("writes '<s>' twice" in warning for warning in probe_template(twice))
    no_prompt = Renderer(tokenizer_for(template_text("smollm2").split("{% if add_generation_prompt %}")[0]))
    assert "is trained to write '<|im_start|>assistant\\n' itself" in probe_template(no_prompt)[0]
    broken = Renderer(tokenizer_for("{{ raise_exception('never') }}"))
    assert probe_template(broken) == [
        "The chat template refuses a plain question and answer: The chat template refuses this conversation: never"
    ]
