"""TRL's data helpers under their names, on the cases that TRL gets wrong and on those that it gets right."""

from __future__ import annotations

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from posttrain.data.rows.reading import split_shared_text, split_shared_turns
from posttrain.data.trl_helpers import (
    extract_prompt,
    get_dataset_column_names,
    is_conversational,
    is_conversational_from_value,
    maybe_convert_to_chatml,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    pack_dataset,
    prepare_multimodal_messages,
    truncate_dataset,
    unpair_preference_dataset,
)

USER, YES, NO = ({"role": r, "content": c} for r, c in (("user", "Well?"), ("assistant", "Yes."), ("assistant", "No.")))


def test_is_conversational_looks_at_every_key():
    assert is_conversational({"prompt": "text", "completion": [YES]})
    assert not is_conversational({"prompt": [], "completion": "text"})
    assert not is_conversational({"text": "x"})
    assert is_conversational_from_value({"conversations": [{"from": "human", "value": "Hi"}]})
    assert not is_conversational_from_value({"conversations": []})


def test_chatml_maps_roles():
    row = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "id": 3}
    assert maybe_convert_to_chatml(row) == {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
        "id": 3,
    }
    assert maybe_convert_to_chatml({"text": "x"}) == {"text": "x"}


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue", "The sky is black", "The sky is"),
        ("The sky is blue", "The sky is", "The sky"),
        ("Q: why? A: yes", "Q: why? A: no", "Q: why? A:"),
        ("Answer:\nyes", "Answer:\nno", "Answer:\n"),
        ("Human: I don't", "Human: I don", "Human: I"),
        ("a  b", "a  c", "a "),
        ("天气很好", "天气很坏", "天气很"),
        ("cafe\u0301 noir", "cafe\u0300 noir", None),
        ("blue", "black", None),
        ("X yes", "Y no", None),
        (" a", " b", None),
    ],
)
def test_prompt_ends_with_a_word(chosen, rejected, prompt):
    parts = split_shared_text(chosen, rejected)
    assert (parts and parts[0]) == prompt
    if parts:
        assert (parts[0] + parts[1], parts[0] + parts[2]) == (chosen, rejected)


@settings(deadline=None)
@given(st.text("ab .'\n", max_size=15), st.text("ab .'\n", max_size=8), st.text("ab .'\n", max_size=8))
def test_extracted_parts_are_the_texts_again(shared, first, second):
    chosen, rejected = shared + first, shared + second
    parts = split_shared_text(chosen, rejected)
    assume(parts is not None)
    assert (parts[0] + parts[1], parts[0] + parts[2]) == (chosen, rejected)
    assert parts[0].strip()
    assert parts[1].strip()
    assert parts[2].strip()


def test_turns_leave_an_answer_to_each_side():
    assert split_shared_turns([USER, YES], [USER, NO]) == ([USER], [YES], [NO])
    assert split_shared_turns([USER, YES], [USER, YES, USER, NO]) == ([USER], [YES], [YES, USER, NO])


def test_extract_prompt_refuses_what_has_none():
    with pytest.raises(ValueError, match="are equal"):
        extract_prompt({"chosen": "a b", "rejected": "a b"})
    with pytest.raises(ValueError, match="must not be empty"):
        extract_prompt({"chosen": "", "rejected": "a b"})
    with pytest.raises(ValueError, match="share no beginning"):
        extract_prompt({"chosen": [YES], "rejected": [NO]})


def test_maybe_extract_prompt_keeps_a_prompt_that_fits():
    row = {"prompt": "P", "chosen": "a", "rejected": "b"}
    assert maybe_extract_prompt(row) is row
    mixed = {"prompt": "Well?", "chosen": [USER, YES], "rejected": [USER, NO]}
    assert maybe_extract_prompt(mixed)["prompt"] == [USER]
    assert maybe_extract_prompt({"text": "x"}) == {"text": "x"}


def test_unpair():
    pairs = Dataset.from_dict({"chosen": ["a b", "a c"], "rejected": ["a x", "a y"], "id": [1, 2]})
    expected = {
        "id": [1, 2, 1, 2],
        "prompt": ["a"] * 4,
        "completion": [" b", " c", " x", " y"],
        "label": [True, True, False, False],
    }
    assert unpair_preference_dataset(pairs).to_dict() == expected
    assert maybe_unpair_preference_dataset(DatasetDict(train=pairs), desc="x")["train"].to_dict() == expected
    assert list(maybe_unpair_preference_dataset(pairs.to_iterable_dataset()))[3] == {
        "id": 2,
        "prompt": "a",
        "completion": " y",
        "label": False,
    }
    unpaired = Dataset.from_dict({"prompt": ["a"]})
    assert maybe_unpair_preference_dataset(unpaired) is unpaired


def test_column_names_of_a_stream():
    stream = Dataset.from_dict({"a": [1], "b": [2]}).to_iterable_dataset().map(lambda row: row)
    assert get_dataset_column_names(stream) == ["a", "b"]


def test_pack_dataset_crosses_batches():
    rows = Dataset.from_dict({"input_ids": [[i] for i in range(2_001)], "labels": [[i] for i in range(2_001)]})
    packed = pack_dataset(rows, 3, "bfd")
    assert len(packed) == 667
    assert packed[0] == {"input_ids": [0, 1, 2], "labels": [0, 1, 2], "seq_lengths": [1, 1, 1]}
    assert pack_dataset(rows, 2_000, "wrapped")["input_ids"][1] == [2_000]
    stream = list(pack_dataset(rows.to_iterable_dataset(), 3, "bfd_split"))
    assert sorted(t for row in stream for t in row["input_ids"]) == list(range(2_001))


def test_pack_dataset_refuses_columns_that_do_not_fit():
    with pytest.raises(ValueError, match="Row 1: 'labels' has 1 entries, 'input_ids' has 2"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1], [2, 3]], "labels": [[1], [2]]}), 4)
    with pytest.raises(ValueError, match="'text' holds something else"):
        pack_dataset(Dataset.from_dict({"input_ids": [[1]], "text": ["x"]}), 4)


def test_truncate_dataset():
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3], [4]], "text": ["a", "b"]})
    expected = {"input_ids": [[1, 2], [4]], "text": ["a", "b"]}
    assert truncate_dataset(rows, 2).to_dict() == expected
    assert list(truncate_dataset(rows.to_iterable_dataset(), 2)) == [
        {"input_ids": i, "text": t} for i, t in zip(*expected.values())
    ]


def test_multimodal_messages():
    messages = [{"role": "user", "content": "Look"}, {"role": "tool", "content": [{"type": "image"}]}, USER]
    prepared = prepare_multimodal_messages(messages, ["A", "B"])
    assert prepared[0]["content"] == [
        {"type": "image", "image": "A"},
        {"type": "image", "image": "B"},
        {"type": "text", "text": "Look"},
    ]
    assert messages[0]["content"] == "Look"
    placed = prepare_multimodal_messages(
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}], ["A"]
    )
    assert placed[0]["content"][1] == {"type": "image", "image": "A"}
    with pytest.raises(ValueError, match="room for 1 image"):
        prepare_multimodal_messages([{"role": "user", "content": [{"type": "image"}]}], ["A", "B"])
    with pytest.raises(ValueError, match="role 'odd'"):
        prepare_multimodal_messages([{"role": "odd", "content": "x"}])
    with pytest.raises(ValueError, match="no user turn"):
        prepare_multimodal_messages([YES], ["A"])
