"""The built-in rewards against hand-worked numbers."""

from __future__ import annotations

import math
import pickle
import threading
import time

import numpy as np
import pytest

from posttrain.rewards.builtin import accuracy
from posttrain.rewards.builtin.accuracy import accuracy_reward, after_reasoning, reasoning_accuracy_reward
from posttrain.rewards.builtin.format import answer_format_reward, think_format_reward
from posttrain.rewards.builtin.length import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)
from tests.rewards.faulty import group, judged

ANSWERS = [
    (r"So it is \boxed{42}.", "42", 1.0),
    (r"So it is \boxed{42.0}.", "$42$", 1.0),
    ("$42$", "42", 1.0),
    ("The answer is 42", "42", 1.0),
    ("The answer is 42.", "42", 1.0),
    ("I counted 3 twice, then 4. That makes 42 apples.", "42", 1.0),
    ("It costs $1,234.50", "1234.5", 1.0),
    ("First $x=5$, so the answer is 42", "42", 1.0),
    ("He pays 18 dollars in all.", "She eats 3 and 4. #### 18", 1.0),
    (r"\boxed{7} or maybe 42", "42", 0.0),
    (r"\boxed{7} or maybe 42", "7", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"$\frac{2}{4}$", r"\frac{1}{2}", 1.0),
    (r"\boxed{5 \text{ cm}}", "5", 1.0),
    ("The answer is 41", "42", 0.0),
    ("I do not know", "42", 0.0),
    ("", "42", 0.0),
    ("42", "there is no number in this", None),
]


@pytest.mark.parametrize(("completion", "solution", "reward"), ANSWERS)
def test_accuracy(completion, solution, reward):
    assert accuracy_reward([completion], [solution]) == [reward]
    assert accuracy_reward([[{"role": "assistant", "content": completion}]], [solution]) == [reward]


def test_accuracy_reads_the_last_message():
    turns = [
        {"role": "assistant", "content": "41", "tool_calls": [{}]},
        {"role": "tool", "content": "40"},
        {"role": "assistant", "content": [{"type": "text", "text": "It is 42"}]},
    ]
    assert accuracy_reward([turns], ["42"]) == [1.0]
    assert accuracy_reward([turns[:2]], ["41"]) == [1.0]
    assert accuracy_reward([[]], ["41"]) == [0.0]


def test_accuracy_is_bounded_on_the_main_thread(monkeypatch):
    monkeypatch.setattr(accuracy, "VERIFY_SECONDS", 1)
    started = time.perf_counter()
    assert accuracy_reward([r"\boxed{9^{9^{9^{9}}}}", "42"], ["3", "42"]) == [0.0, 1.0]
    assert time.perf_counter() - started < 60


def test_accuracy_logs_what_it_read():
    logged = {}
    accuracy_reward(["It is 42", "7"], ["42", "nothing"], log_extra=lambda name, values: logged.update({name: values}))
    assert logged["solution"] == ["42", "nothing"]
    assert logged["gold_parsed"] == ["[42]", "[]"]
    assert logged["answer_parsed"] == ["[42]", ""]


def test_accuracy_in_a_worker():
    results, made = judged([accuracy_reward], group("It is 42", "41", "x", solution=["42", "42", "none"]), timeout=30.0)
    assert str(results.values[:, 0].tolist()) == "[1.0, 0.0, nan]"
    assert not results.masked.any()
    assert made.notes == []
    assert results.extras["solution"] == ["42", "42", "none"]


def test_accuracy_off_the_main_thread_is_bounded(monkeypatch):
    """A tower of powers keeps sympy busy for ever; on a thread no signal arrives, so a helper process does the work."""
    monkeypatch.setattr(accuracy, "CALL_SECONDS", 2.0)
    tower = r"\boxed{9^{9^{9^{9}}}}"
    found = []
    thread = threading.Thread(
        target=lambda: found.extend(accuracy_reward(["It is 42", tower, "41"], ["42", "3", "42"])), daemon=True
    )
    thread.start()
    thread.join(120)
    assert found == [1.0, 0.0, 0.0]
    assert accuracy._helper is not None
    accuracy._helper.close()
    monkeypatch.setattr(accuracy, "_helper", None)


def test_reasoning_accuracy():
    completions = ["<think>41</think> It is 42", "<think>42", "<think>42</think> 41", "a</think>41</think>42"]
    assert reasoning_accuracy_reward(completions, ["42"] * 4) == [1.0, 0.0, 0.0, 1.0]
    assert reasoning_accuracy_reward(["41 ANSWER: 42"], ["42"], reasoning_delimiters=["ANSWER:"]) == [1.0]
    assert reasoning_accuracy_reward(["<think>42"], ["nothing"]) == [None]
    assert after_reasoning("a</x>b</y>c", ["</x>", "</y>"]) == "c"


THOUGHTS = [
    ("<think>a</think>b", 1.0, 0.0),
    ("<think>\na\n</think>\nb\n", 1.0, 0.0),
    ("<think></think>", 1.0, 0.0),
    ("a<think>a</think>b", 0.0, 0.0),
    ("<think>a<think>b</think>c", 0.0, 0.0),
    ("<think>a</think><think>b</think>", 0.0, 0.0),
    ("<think>a", 0.0, 0.0),
    ("a</think>b", 0.0, 0.0),
    ("", 0.0, 0.0),
    ("<think>a</think><answer>b</answer>", 1.0, 1.0),
    ("<think>a\n</think>\n\n<answer>\nb</answer>\n", 1.0, 1.0),
    ("<think>a</think>x<answer>b</answer>", 1.0, 0.0),
    ("<think>a</think><answer>b</answer>x", 1.0, 0.0),
    ("<think>a</think><answer>b</answer><answer>c</answer>", 1.0, 0.0),
    ("<think>a</think></think><answer>b</answer>", 1.0, 0.0),
]


@pytest.mark.parametrize(("text", "think", "answer"), THOUGHTS)
def test_format(text, think, answer):
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert think_format_reward([completion]) == [think]
        assert answer_format_reward([completion], prompts=["p"]) == [answer]


def test_cosine():
    reward = get_cosine_scaled_reward(max_len=100)
    completions = ["42", "42", "42", "42", "41", "41", "41", "42"]
    lengths = [0, 50, 100, 200, 0, 50, 100, 25]
    ids = [[0] * n for n in lengths]
    found = reward(completions, solution=["42"] * 8, completion_ids=ids)
    quarter = 0.5 + 0.25 * (1 + math.cos(math.pi / 4))
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.5, -1.0, -0.75, -0.5, quarter])
    assert reward(["42"], solution=["nothing"], completion_ids=[[0]]) == [None]
    other = get_cosine_scaled_reward(10, -4, -2, 3, 7)
    assert other(["42", "41"], solution=["42"] * 2, completion_ids=[[0] * 5] * 2) == pytest.approx([5.0, -3.0])


def test_repetition():
    reward = get_repetition_penalty_reward(ngram_size=2, max_penalty=-2.0)
    ids = [[1, 2, 3], [1, 1, 1, 1], [1, 2, 1, 2], [1], []]
    assert reward(completion_ids=ids) == pytest.approx([0.0, -2 * (1 - 1 / 3), -2 * (1 - 2 / 3), 0.0, 0.0])
    assert get_repetition_penalty_reward()(completion_ids=[[5] * 12]) == pytest.approx([-0.9])
    with pytest.raises(ValueError, match="`max_penalty` is 1"):
        get_repetition_penalty_reward(max_penalty=1)


def test_soft_overlong():
    reward = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    ids = [[0] * n for n in (0, 80, 81, 90, 100, 101, 500)]
    assert reward(completion_ids=ids) == pytest.approx([0, 0, -0.05, -0.5, -1, -1, -1])
    with pytest.raises(ValueError, match=r"`soft_punish_cache` \(200\) is larger"):
        get_soft_overlong_punishment(100, 200)


def test_factories_make_things_that_travel():
    made = [get_cosine_scaled_reward(10), get_repetition_penalty_reward(), get_soft_overlong_punishment(10, 5)]
    names = ["cosine_scaled_reward", "repetition_penalty_reward", "soft_overlong_punishment_reward"]
    assert [reward.__name__ for reward in made] == names
    assert pickle.loads(pickle.dumps(made)) == made
    samples = group("a" * 7, "b" * 8, solution=["1", "1"])
    for sample in samples:
        sample.completion_ids = [1] * len(sample.completion)
    results, reward_set = judged(made, samples, isolation="process", timeout=30.0)
    assert reward_set.names == names
    wrong = [-1 + 0.25 * (1 - math.cos(math.pi * n / 10)) for n in (7, 8)]
    expected = [[wrong[0], -(1 - 1 / 5), -0.4], [wrong[1], -(1 - 1 / 6), -0.6]]
    assert results.values == pytest.approx(np.array(expected))


@pytest.mark.parametrize(
    ("answer", "solution", "wanted"),
    [
        ("The answer is twelve.", "12", 1.0),
        ("twenty-one", "21", 1.0),
        ("After 3 steps I get 9. The answer is forty two.", "42", 1.0),
        (r"With 3 of them: \boxed{\text{seven}}", "7", 1.0),
        ("one million two hundred thousand and five", "1200005", 1.0),
        ("minus three", "-3", 1.0),
        ("12", "twelve", 1.0),
        ("seven", "8", 0.0),
        ("two three", "5", 0.0),  # two numbers are not their sum
        ("We have 5 apples, and this is the right one.", "5", 1.0),  # a pronoun
        ("The answer is 1.5e3.", "1500", 1.0),
        ("1500", "1.5E3", 1.0),
        (r"\boxed{3e-4}", "0.0003", 1.0),
        ("It is 1.5 x 10^3 here", "1500", 1.0),
        ("2.5 × 10^{-3}", "0.0025", 1.0),
        ("1.5e3", "3", 0.0),
    ],
)
def test_numbers_in_words_and_in_scientific_notation(answer, solution, wanted):
    assert accuracy_reward([answer], [solution]) == [wanted]
