"""Row formats: what a dataset is taken for and why, and which tokens of each format are trained."""

from __future__ import annotations

import json
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from posttrain.data.options import PrepareOptions
from posttrain.data.render.renderer import Renderer
from posttrain.data.rows import formats
from posttrain.data.rows.formats import FormatError, detect_format
from posttrain.data.rows.label_report import answer_hashes, label_report
from posttrain.data.store.prepare import prepare_dataset
from tests import tiny

SFT = (formats.LANGUAGE_MODELLING, formats.PROMPT_COMPLETION, formats.TOKENISED)
DPO = (formats.PREFERENCE, formats.TOKENISED_PREFERENCE)
REWARD = (formats.SCORED_PREFERENCE, formats.TOKENISED_SCORED_PREFERENCE)
KTO = (formats.UNPAIRED_PREFERENCE,)
PRM = (formats.STEPWISE,)
ONLINE = (formats.PROMPT_ONLY,)
EOS = "<|im_end|>"


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USER, ANSWER, OTHER = turn("user", "Hi"), turn("assistant", "Yes."), turn("assistant", "No.")
PROMPT_TEXT = f"<|im_start|>user\nHi{EOS}\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def renderer():
    return Renderer(tiny.tokenizer())


@pytest.fixture
def prepare(renderer, tmp_path):
    """Rows -> [[(text, trained text), ...] for each unit]."""

    def prepare(rows, accepted, with_renderer=renderer, **options):
        dataset = datasets.Dataset.from_list(rows)
        prepared = prepare_dataset(dataset, accepted, with_renderer, PrepareOptions(cache_dir=tmp_path, **options))
        decode = with_renderer.tokenizer.decode
        return [[(decode(s.input_ids), decode(s.input_ids[s.trained])) for s in unit] for unit in prepared]

    return prepare


# ------------------------------------------------------------------------------------------------------- what is trained


def test_text_ends_on_eos_and_is_trained_whole(prepare):
    assert prepare([{"text": "abc"}, {"text": f"abc{EOS}"}], SFT) == [[(f"abc{EOS}", f"abc{EOS}")]] * 2
    assert prepare([{"text": "abc"}], SFT, append_eos=False) == [[("abc", "abc")]]
    assert prepare([{"body": "abc", "text": "x"}], SFT, dataset_text_field="body") == [[(f"abc{EOS}", f"abc{EOS}")]]


def test_conversation_is_trained_whole_or_on_the_assistant(prepare):
    rows = [{"messages": [USER, ANSWER]}]
    whole = f"{PROMPT_TEXT}Yes.{EOS}\n"
    assert prepare(rows, SFT) == [[(whole, whole)]]
    assert prepare(rows, SFT, assistant_only_loss=True) == [[(whole, f"Yes.{EOS}")]]


@pytest.mark.parametrize("only", [True, False])
def test_turns_of_weight_0_are_context(prepare, only):
    """OpenAI's key: 0 for an answer that is read and not learned."""
    messages = [USER, {**OTHER, "weight": 0}, turn("user", "Sure?"), {**ANSWER, "weight": 1}]
    ((found,),) = prepare([{"messages": messages}], SFT, assistant_only_loss=only)
    asked = f"{EOS}\n<|im_start|>user\nSure?{EOS}\n<|im_start|>assistant\n"
    whole = f"{PROMPT_TEXT}No.{asked}Yes.{EOS}\n"
    assert found == (whole, f"Yes.{EOS}" if only else f"{PROMPT_TEXT}{asked.removeprefix(EOS)}Yes.{EOS}\n")
    answers = [{**OTHER, "weight": 0}, turn("user", "Sure?"), ANSWER]
    ((found,),) = prepare([{"prompt": [USER], "completion": answers}], SFT)
    assert found == (whole, f"{asked.removeprefix(EOS)}Yes.{EOS}\n")


def test_roles_may_be_in_capitals(prepare):
    capitals = [{"messages": [{**USER, "role": "User"}, {**ANSWER, "role": "ASSISTANT "}]}]
    others = [{"conversations": [{"from": "Human", "value": "Hi"}, {"from": "GPT", "value": "Yes."}]}]
    wanted = prepare([{"messages": [USER, ANSWER]}], SFT)
    assert prepare(capitals, SFT) == wanted
    assert prepare(others, SFT) == wanted


def test_messages_may_be_json_text(prepare):
    wanted = prepare([{"messages": [USER, ANSWER]}], SFT)
    assert prepare([{"messages": json.dumps([USER, ANSWER])}], SFT) == wanted
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes."}]
    assert prepare([{"conversations": json.dumps(turns)}], SFT) == wanted
    with pytest.raises(FormatError, match=r"columns of train are 'messages'; this method reads"):
        prepare([{"messages": "Hello!"}], SFT)


def test_completion_is_trained(prepare):
    plain = [{"prompt": "Hi ", "completion": "there"}]
    chat = [{"prompt": [USER], "completion": [ANSWER]}]
    assert prepare(plain, SFT) == [[(f"Hi there{EOS}", f"there{EOS}")]]
    assert prepare(plain, SFT, completion_only_loss=False) == [[(f"Hi there{EOS}", f"Hi there{EOS}")]]
    assert prepare(chat, SFT) == [[(f"{PROMPT_TEXT}Yes.{EOS}\n", f"Yes.{EOS}\n")]]
    assert prepare(chat, SFT, assistant_only_loss=True) == [[(f"{PROMPT_TEXT}Yes.{EOS}\n", f"Yes.{EOS}")]]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": "Hi", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"prompt": [USER], "chosen": ANSWER, "rejected": OTHER},
    ],
    ids=["explicit", "implicit", "plain prompt beside", "prompt repeated", "single messages"],
)
def test_conversational_pairs(row, prepare):
    yes, no = (f"{PROMPT_TEXT}{text}{EOS}\n" for text in ("Yes.", "No."))
    assert prepare([row], DPO) == [[(yes, f"Yes.{EOS}\n"), (no, f"No.{EOS}\n")]]
    assert prepare([row], REWARD) == [[(yes, ""), (no, "")]]


def test_plain_pairs(prepare):
    explicit = [{"prompt": "Well?", "chosen": " Yes.", "rejected": " No."}]
    implicit = [{"chosen": "Well? Yes.", "rejected": "Well? No."}]
    expected = [[(f"Well? Yes.{EOS}", f" Yes.{EOS}"), (f"Well? No.{EOS}", f" No.{EOS}")]]
    assert prepare(explicit, DPO) == prepare(implicit, DPO) == expected
    scored = [[(text, "") for text, _ in expected[0]]]
    assert prepare(explicit, REWARD) == prepare(implicit, REWARD) == scored
    assert prepare([{"chosen": "Yes", "rejected": "No"}], REWARD) == [[(f"Yes{EOS}", ""), (f"No{EOS}", "")]]


def test_numbers_beside_rows(renderer, tmp_path):
    def scalars(rows, accepted):
        prepared = prepare_dataset(rows, accepted, renderer, PrepareOptions(cache_dir=tmp_path))
        return [[sample.scalars for sample in unit] for unit in prepared]

    pair = {"prompt": "Well?", "chosen": " Yes.", "rejected": " No."}
    assert scalars([{**pair, "margin": 2}], REWARD) == [[{"margin": 2.0}] * 2]
    reference = {"ref_chosen_logps": -1.5, "ref_rejected_logps": -2.5}
    assert scalars([{**pair, **reference}], DPO) == [[{"ref_logps": -1.5}, {"ref_logps": -2.5}]]
    unpaired = [{"prompt": "Well?", "completion": " Yes.", "label": i == 0} for i in range(2)]
    assert scalars(unpaired, KTO) == [[{"label": 1.0}], [{"label": 0.0}]]


def test_steps_are_judged_at_the_last_token_of_their_separator(renderer, tmp_path):
    row = {"prompt": "P", "completions": ["ab", "c"], "labels": [True, False]}

    def sample(**options):
        return prepare_dataset([row], PRM, renderer, PrepareOptions(cache_dir=tmp_path, **options))[0][0]

    judged = sample(step_separator="\n\n")
    assert renderer.tokenizer.decode(judged.input_ids) == "Pab\n\nc\n\n"
    assert np.flatnonzero(judged.trained).tolist() == [4, 7]
    assert judged.per_token["labels"][judged.trained].tolist() == [1, 0]
    assert np.flatnonzero(sample(train_on_last_step_only=True).trained).tolist() == [5]
    assert len(sample(max_completion_length=3)) == 4
    chat = prepare_dataset([{**row, "prompt": [USER]}], PRM, renderer, PrepareOptions(cache_dir=tmp_path))[0][0]
    assert renderer.tokenizer.decode(chat.input_ids) == f"{PROMPT_TEXT}ab\nc\n"


def test_prompts_are_ready_to_be_answered(prepare):
    assert prepare([{"prompt": [USER]}], ONLINE) == [[(PROMPT_TEXT, "")]]
    assert prepare([{"prompt": "Hi"}], ONLINE) == [[("Hi", "")]]


@pytest.mark.parametrize(
    ("columns", "trained", "options"),
    [
        ({}, [2, 3, 4, 5], {}),
        ({"labels": [-100, 2, -100, 4, 5]}, [2, 4, 5], {}),
        ({"completion_mask": [0, 0, 1, 1, 1]}, [3, 4, 5], {}),
        ({"completion_mask": [0, 0, 1, 1, 1]}, [2, 3, 4, 5], {"completion_only_loss": False}),
        ({"assistant_masks": [0, 1, 1, 0, 0]}, [2, 3], {}),
        ({"completion_mask": [0, 0, 1, 1, 1], "assistant_masks": [0, 1, 1, 0, 0]}, [3], {}),
        ({"attention_mask": [0, 1, 1, 1, 0]}, [3, 4], {}),
        ({"seq_lengths": [2, 3]}, [2, 4, 5], {}),
    ],
)
def test_rows_that_bring_their_ids(columns, trained, options, renderer, tmp_path):
    rows = [{"input_ids": [1, 2, 3, 4, 5], **columns}]
    unit = prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=tmp_path, **options))[0]
    assert [int(t) for sample in unit for t in sample.input_ids[1:][sample.trained[1:]]] == trained
    assert len(unit) == len(columns.get("seq_lengths", [5]))


def test_pairs_that_bring_their_ids(renderer, tmp_path):
    rows = [{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}]
    options = PrepareOptions(cache_dir=tmp_path)
    chosen, rejected = prepare_dataset(rows, DPO, renderer, options)[0]
    assert (chosen.input_ids.tolist(), chosen.trained.tolist()) == ([1, 2, 3], [False, False, True])
    assert (rejected.input_ids.tolist(), rejected.num_trained) == ([1, 2, 4, 5], 2)
    for names in (("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids")):
        scored = prepare_dataset([dict(zip(names, ([3], [4, 5])))], REWARD, renderer, options)[0]
        assert [(s.input_ids.tolist(), s.num_trained) for s in scored] == [([3], 0), ([4, 5], 0)]


def merging_renderer() -> Renderer:
    """Letters are tokens, and so is "ab": the end of a prompt may merge with the beginning of its answer."""
    vocabulary = {c: i for i, c in enumerate(["a", "b", "c", "Ġ", "ab", "<eos>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Renderer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"))


def test_a_token_across_the_boundary_is_trained(prepare, tmp_path):
    merging = merging_renderer()
    assert prepare([{"prompt": "ca", "completion": "bc"}], SFT, merging) == [[("cabc<eos>", "abc<eos>")]]
    pair = [{"prompt": "ca", "chosen": "bc", "rejected": "c"}]
    expected = [[("cabc<eos>", "abc<eos>"), ("cac<eos>", "ac<eos>")]]
    assert prepare(pair, DPO, merging) == expected, "both answers begin at the same token"
    prepared = prepare_dataset(pair, DPO, merging, PrepareOptions(cache_dir=tmp_path))
    assert "1 prompts whose last token merges with the answer" in prepared.report.summary()


def test_tools_and_template_arguments_reach_the_template(tmp_path):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{{ tools | length if tools else 0 }}/{{ mood }}:"
        "{% for m in messages %}{{ m['role'] }}={{ m['content'] }}{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments.a }}){% endif %};{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 7}'}}
    row = {
        "messages": [USER, turn("assistant", None, tool_calls=[call]), turn("tool", "8"), ANSWER],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
        "chat_template_kwargs": {"mood": "own"},
    }
    plain = {"messages": [USER, ANSWER], "tools": None, "chat_template_kwargs": None}
    options = PrepareOptions(cache_dir=tmp_path, chat_template_kwargs={"mood": "all"})
    prepared = prepare_dataset(datasets.Dataset.from_list([row, plain]), SFT, Renderer(tokenizer), options)
    texts = [tokenizer.decode(unit[0].input_ids) for unit in prepared]
    assert texts == ["1/own:user=Hi;assistant=f(7);tool=8;assistant=Yes.;", "0/all:user=Hi;assistant=Yes.;"]


# ------------------------------------------------------------------------------------------------------------- detection


@pytest.mark.parametrize(
    ("row", "accepted", "sentence"),
    [
        ({"text": "x"}, SFT, "read as plain language modelling because it has the column 'text' and 'text' holds text"),
        (
            {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
            DPO,
            "read as conversational preference because it has the columns 'chosen' and 'rejected' and 'chosen' holds "
            "lists of messages; there is no 'prompt' column, so the prompt is what both sides share",
        ),
        (
            {"chosen": "a b", "rejected": "a c"},
            REWARD,
            "read as plain preference because it has the columns 'chosen' and 'rejected' and 'chosen' holds text; "
            "there is no 'prompt' column, so each side is a whole text",
        ),
        (
            {"conversations": [{"from": "human", "value": "Hi"}]},
            SFT,
            "read as conversational language modelling because it has ShareGPT's columns 'conversations'",
        ),
        ({"input_ids": [1], "text": "x"}, SFT, "read as tokenised because it has the column 'input_ids'"),
        (
            {"prompt": "P", "completion": "C", "text": "x"},
            SFT,
            "read as plain prompt-completion because it has the columns 'prompt' and 'completion' and 'completion' "
            "holds text",
        ),
    ],
)
def test_detection_explains_itself(row, accepted, sentence):
    assert detect_format([row], accepted).explanation == sentence


def test_one_odd_row_does_not_decide():
    rows = [{"messages": None}, {"messages": "odd"}, *[{"messages": [USER, ANSWER]}] * 5]
    assert detect_format(rows, SFT).conversational


def test_unknown_columns_are_refused_with_what_would_do():
    with pytest.raises(
        FormatError, match=r"columns of train are 'question', 'answer'; this method reads .*'chosen' \+"
    ):
        detect_format([{"question": "Q", "answer": "A"}], DPO, name="train")


@pytest.mark.parametrize(
    ("columns", "accepted", "renamed"),
    [
        (("promt", "completion"), SFT, {"promt": "prompt"}),
        (("Question", "answer"), SFT, {"Question": "prompt", "answer": "completion"}),
        (("question", "good", "bad"), DPO, {"question": "prompt", "good": "chosen", "bad": "rejected"}),
        (("prompt", "choosen", "reject"), DPO, {"choosen": "chosen", "reject": "rejected"}),
        (("query",), ONLINE, {"query": "prompt"}),
        (("colour", "size"), SFT, None),
    ],
)
def test_near_misses_are_answered_with_the_line_to_write(columns, accepted, renamed):
    with pytest.raises(FormatError) as error:
        detect_format([dict.fromkeys(columns, "some text")], accepted, name="train")
    if renamed is None:
        assert "Rename the columns, or give a formatting function" in str(error.value)
        return
    line = str(error.value).split("Write --dataset_columns '")[1].split("'")[0]
    assert json.loads(line) == renamed
    assert detect_format([{renamed.get(name, name): "some text" for name in columns}], accepted)


def test_a_single_row_is_checked_and_put_into_its_clean_form():
    def read(row, fmt):
        return detect_format([row], (fmt,)).read(row)[:2]

    call = {"name": "f", "arguments": "{}"}
    row = {
        "messages": [
            turn("user", [{"type": "text", "text": "Hi"}], name=None),
            turn("assistant", None, tool_calls=[call]),
        ]
    }
    clean, found = read(row, formats.LANGUAGE_MODELLING)
    assert found == []
    assert clean["messages"] == [
        USER,
        turn("assistant", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]),
    ]
    _, [finding] = read({"prompt": "P", "chosen": "a", "rejected": "a"}, formats.PREFERENCE)
    assert finding.kind == "equal_pair"
    _, [finding] = read({"text": ""}, formats.LANGUAGE_MODELLING)
    assert finding[:2] == ("blank", "text")
    assert finding.reason.startswith("is empty: ")


def test_options_that_the_data_cannot_honour_are_refused(renderer):
    with pytest.raises(ValueError, match="assistant_only_loss needs conversations; train was read as plain"):
        prepare_dataset([{"text": "x"}], SFT, renderer, PrepareOptions(assistant_only_loss=True))
    with pytest.raises(ValueError, match="completion_only_loss=True needs the columns 'prompt' and 'completion'"):
        prepare_dataset([{"text": "x"}], SFT, renderer, PrepareOptions(completion_only_loss=True))
    pair = {"prompt": "P", "chosen": "a", "rejected": "b"}
    with pytest.raises(ValueError, match="packing puts single samples into blocks"):
        prepare_dataset([pair], DPO, renderer, PrepareOptions(packing="bfd"))


# -------------------------------------------------------------------------------------------------------- public formats

CALLS = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
PUBLIC = {
    "Alpaca": ({"instruction": "Add.", "input": "2 2", "output": "4", "text": None}, SFT),
    "Alpaca without input": ({"instruction": "Greet.", "input": "", "output": "Hello"}, SFT),
    "Dolly": ({"instruction": "Add.", "context": "", "response": "4", "category": "qa"}, SFT),
    "OpenHermes (ShareGPT)": (
        {
            "conversations": [
                {"from": "system", "value": "", "weight": None},
                {"from": "human", "value": "Hi", "weight": None},
                {"from": "gpt", "value": "Hello", "weight": None},
            ],
            "source": "x",
            "system_prompt": None,
        },
        SFT,
    ),
    "Hermes function calling": (
        {
            "conversations": [
                {"from": "system", "value": "You have tools."},
                {"from": "human", "value": "Weather?"},
                {"from": "gpt", "value": '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'},
                {"from": "tool", "value": "<tool_response>sun</tool_response>"},
                {"from": "gpt", "value": "Sun."},
            ],
        },
        SFT,
    ),
    "LLaMA-Factory tools": (
        {
            "conversations": [
                {"from": "human", "value": "Weather?"},
                {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
                {"from": "observation", "value": "sun"},
                {"from": "gpt", "value": "Sun."},
            ],
            "system": "Be brief.",
            "tools": "[]",
        },
        SFT,
    ),
    "OpenAI fine-tuning": (
        {
            "messages": [
                turn("system", "Be brief.", weight=None, tool_calls=None),
                turn("user", "Weather?"),
                turn("assistant", None, tool_calls=CALLS, weight=1),
                turn("tool", "sun", tool_call_id="c1"),
                turn("assistant", "Sun."),
            ],
            "tools": [TOOL],
            "parallel_tool_calls": False,
        },
        SFT,
    ),
    "OpenAI content blocks": (
        {
            "messages": [
                turn(role, [{"type": "text", "text": "Hi", "image_url": None}]) for role in ("user", "assistant")
            ]
        },
        SFT,
    ),
    "No Robots": ({"prompt": "Hi", "prompt_id": "7", "messages": [USER, ANSWER], "category": "Chat"}, SFT),
    "Tulu 3": ({"id": "a", "messages": [turn("system", ""), USER, ANSWER, USER, ANSWER], "source": "x"}, SFT),
    "UltraFeedback binarized": (
        {
            "prompt": "Hi",
            "prompt_id": "7",
            "chosen": [USER, ANSWER],
            "rejected": [USER, OTHER],
            "messages": [USER, ANSWER],
            "score_chosen": 9.0,
            "score_rejected": 4.0,
        },
        DPO,
    ),
    "HH-RLHF": (
        {
            "chosen": "\n\nHuman: Hi there\n\nAssistant: Hello! How are you?",
            "rejected": "\n\nHuman: Hi there\n\nAssistant: Go away.",
        },
        DPO,
    ),
    "Orca DPO pairs": ({"system": "", "prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}, DPO),
    "OpenAI preference": (
        {"input": {"messages": [USER], "tools": []}, "preferred_output": [ANSWER], "non_preferred_output": [OTHER]},
        DPO,
    ),
    "LLaMA-Factory preference": (
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Yes."},
            "rejected": {"from": "gpt", "value": "No."},
        },
        DPO,
    ),
    "UltraFeedback as reward data": ({"chosen": [USER, ANSWER], "rejected": [USER, OTHER], "margin": 1.5}, REWARD),
    "PRM800K": ({"prompt": "2 + 2?", "completions": ["Add.", "4"], "labels": [True, True]}, PRM),
    "DeepMath prompts": ({"prompt": [USER], "solution": "4"}, ONLINE),
    "Wikitext": ({"text": "A line."}, SFT),
}


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("container", ["arrow", "list", "stream"])
def test_public_formats_pass_without_complaint(name, container, renderer, tmp_path):
    row, accepted = PUBLIC[name]
    rows = [row] * 50
    as_arrow = datasets.Dataset.from_list(rows)
    dataset = {"arrow": as_arrow, "list": rows, "stream": as_arrow.to_iterable_dataset()}[container]
    prepared = prepare_dataset(dataset, accepted, renderer, PrepareOptions(cache_dir=tmp_path))
    units = list(prepared)
    assert len(units) == prepared.report.kept == 50
    assert (prepared.report.dropped, prepared.report.warnings) == ({}, [])


def test_kto_data_passes(renderer, tmp_path):
    rows = [{"prompt": [USER], "completion": [ANSWER], "label": i % 2 == 0} for i in range(4)]
    assert len(prepare_dataset(rows, KTO, renderer, PrepareOptions(cache_dir=tmp_path))) == 4


def test_spurious_nones_of_arrow_are_not_complained_about(renderer, tmp_path):
    """Arrow gives every message the keys of all messages, and every argument dict the keys of all calls."""
    first = {
        "messages": [USER, turn("assistant", None, tool_calls=[{"function": {"name": "f", "arguments": {"a": 1}}}])]
    }
    second = {"messages": [USER, turn("assistant", "x", name="bot", thinking="hm")]}
    third = {
        "messages": [USER, turn("assistant", None, tool_calls=[{"function": {"name": "g", "arguments": {"b": "z"}}}])]
    }
    dataset = datasets.Dataset.from_list([first, second, third])
    assert dataset[0]["messages"][0]["tool_calls"] is None
    detection = detect_format(dataset, SFT)
    clean, found, unknown = detection.read(dataset[2])
    assert (found, unknown) == ([], set())
    assert clean["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"b": "z"}
    assert len(prepare_dataset(dataset, SFT, renderer, PrepareOptions(cache_dir=tmp_path))) == 3


def test_alpaca_without_a_template_becomes_text(tmp_path):
    renderer = Renderer(tiny.tokenizer(None))
    row = {"instruction": "Add.", "input": "2 2", "output": "4"}
    prepared = prepare_dataset([row], SFT, renderer, PrepareOptions(cache_dir=tmp_path))
    decode = renderer.tokenizer.decode
    sample = prepared[0][0]
    assert decode(sample.input_ids[sample.trained]) == f"4{EOS}"
    assert decode(sample.input_ids[~sample.trained]) == "### Instruction:\nAdd.\n\n### Input:\n2 2\n\n### Response:\n"


# --------------------------------------------------------------------------------------------------------- label report


def test_label_report_of_pairs():
    """Pairs (A>B), (A>B) again, (B>A) turned round, (C>D): one repeats, three contradict; lengths 3-1, 3-1, 1-3, 2-2."""
    pairs = [("p", "aaa", "b"), ("p", "aaa", "b"), ("p", "b", "aaa"), ("p", "cc", "dd")]
    hashes = np.array([answer_hashes(dict(zip(("prompt", "chosen", "rejected"), p))) for p in pairs], dtype=np.uint64)
    report = label_report(hashes, np.array([[len(c), len(r)] for _, c, r in pairs]))
    assert (report.total, report.duplicates, report.flipped) == (4, 1, 3)
    assert report.chosen_longer == pytest.approx(2 / 3)
    assert report.length_difference == pytest.approx((2 + 2 - 2 + 0) / 4)


def test_label_report_warns_of_length_and_of_repeated_prompts(renderer, tmp_path):
    rows = [{"prompt": f"Q{i}", "chosen": f"Q{i} " + "long " * 5, "rejected": " no"} for i in range(400)]
    summary = prepare_dataset(rows, DPO, renderer, PrepareOptions(cache_dir=tmp_path)).report.summary()
    assert "the preferred answer is the longer one in 100% of pairs" in summary
    assert "400 answers begin with their own prompt" in summary


def test_label_report_of_single_answers(renderer, tmp_path):
    rows = [{"prompt": "Q", "completion": " A", "label": i < 1} for i in range(4)]
    labels = prepare_dataset(rows, KTO, renderer, PrepareOptions(cache_dir=tmp_path)).report.labels
    assert (labels.kind, labels.flipped, labels.duplicates, labels.wanted_share) == ("labels", 4, 2, 0.25)


def test_control_tokens_in_plain_text_are_counted(renderer, tmp_path):
    rows = [{"text": "plain"}, {"text": f"a{EOS}b{EOS}"}, {"text": "<|im_start|>"}]
    report = prepare_dataset(rows, SFT, renderer, PrepareOptions(cache_dir=tmp_path)).report
    assert report.control_token_rows == 2
    assert "Control tokens inside plain text: 2 rows" in report.summary()
