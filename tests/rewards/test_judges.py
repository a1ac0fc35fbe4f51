"""Judges: answers, orders, ties, failures; and as rewards of groups. The servers are real ones on localhost."""

from __future__ import annotations

import math
import socket
import threading

import numpy as np
import pytest

from posttrain.rewards.chat_judge import TEMPLATE, AnswerReader
from posttrain.rewards.judges import (
    AllTrueJudge,
    BaseBinaryJudge,
    BaseJudge,
    BasePairwiseJudge,
    BaseRankJudge,
    ChatJudge,
    HfPairwiseJudge,
    JudgeError,
    OpenAIPairwiseJudge,
    PairRMJudge,
    RewardModelJudge,
    judge_reward,
    named_judge,
)
from posttrain.rewards.judging import is_swapped, plain_lines
from posttrain.rewards.reward_set import Judged, RewardError, RewardOptions, RewardSet
from tests import tiny
from tests.rewards.chat_server import DROP, HANG, ChatServer, late, longer, said

KEY = "a-key-nobody-may-see-77"
SOON = {"retries": 0, "backoff": 0.0}


def group(prompt, *completions):
    return [Judged(prompt, completion, [1]) for completion in completions]


def judged_by(judge, *groups, **options):
    with RewardSet(judge, options=RewardOptions(**options)) as rewards, rewards.open() as judging:
        for one in groups:
            judging.add(one)
        return judging.finish()


class Shorter(BasePairwiseJudge):
    """As somebody writes one for TRL; it fails where a prompt says so."""

    def judge(self, prompts, completions, shuffle_order=True):
        return [-1 if "fail" in p else int(len(b) < len(a)) for p, (a, b) in zip(prompts, completions)]


class ByLength(BaseRankJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        return [
            [0, 0] if "fail" in p else sorted(range(len(c)), key=lambda i: len(c[i]))
            for p, c in zip(prompts, completions)
        ]


class Has(BaseBinaryJudge):
    def __init__(self, letter):
        self.letter = letter

    def judge(self, prompts, completions, gold_completions=None, shuffle_order=True):
        return [-1 if self.letter == "?" else int(self.letter in text) for text in completions]


# ---- what a chat judge says --------------------------------------------------------------------------------------------


def test_the_longer_answer_wins_whichever_is_shown_first():
    pairs = [[f"{'x' * n}", f"{'y' * (9 - n)}"] for n in range(1, 9)] * 4
    prompts = [f"prompt {number}" for number in range(len(pairs))]
    with ChatServer(longer) as server:
        judge = ChatJudge(server.url, "m")
        wanted = [int(len(second) > len(first)) for first, second in pairs]
        assert judge.judge(prompts, pairs) == wanted
        shown_first = {asked.prompt: asked.shown[0] for asked in server.asked}
        swapped = [shown_first[prompt] == pair[1] for prompt, pair in zip(prompts, pairs)]
        assert 8 <= sum(swapped) <= 24  # of 32; a fair coin is outside once in 500 seeds, and this one does not change
        assert judge.judge(prompts, pairs, shuffle_order=False) == wanted
        assert all(asked.shown == tuple(pairs[prompts.index(asked.prompt)]) for asked in server.asked[len(pairs) :])
    assert server.asked[0].body.keys() == {"model", "messages", "max_tokens", "temperature"}


def test_swaps_are_a_function_of_seed_prompt_and_pair():
    coins = [is_swapped(seed, f"p{n}", "a", "b") for seed in (0, 1) for n in range(200)]
    assert coins == [is_swapped(seed, f"p{n}", "a", "b") for seed in (0, 1) for n in range(200)]
    assert 75 <= sum(coins[:200]) <= 125
    assert coins[:200] != coins[200:]
    assert is_swapped(0, "p", "ab", "c") != is_swapped(0, "p", "a", "bc") or is_swapped(
        0, "q", "ab", "c"
    ) != is_swapped(0, "q", "a", "bc")


def test_a_judge_that_always_takes_the_first_gives_ties_in_both_orders():
    with ChatServer(lambda asked: said("0")) as server:
        judge = ChatJudge(server.url, "m", orders="both")
        assert judge.judge(["p", "q"], [["a", "b"], ["c", "d"]]) == [0.5, 0.5]
        assert len(server.asked) == judge.requests == 4
        assert {asked.shown for asked in server.asked} == {("a", "b"), ("b", "a"), ("c", "d"), ("d", "c")}
        biased = ChatJudge(server.url, "m").judge([f"p{n}" for n in range(64)], [["a", "b"]] * 64)
        assert 16 <= sum(biased) <= 48  # asked once, its bias is spread over both


def test_two_equal_completions_are_a_tie_and_nobody_is_asked():
    with ChatServer(longer) as server:
        assert ChatJudge(server.url, "m").judge(["p"], [["same", "same"]]) == [0.5]
        assert server.asked == []


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ("0", 0), ("1", 1), (" 1", 1), ("1.", 1), ("**1**", 1), ("Model 1", 1), ("Assistant 0 is better.", 0), ("`0`\n", 0),
        ("1\n\nThe answer of 0 is wrong.", 1), ("**0** because 1 is wrong", 0), ("<think>0? or 1?</think>\n1", 1),
        ("Tie", 0.5), ("It is a draw.", 0.5),
        ("", -1), ("2", -1), ("10", -1), ("-1", -1), ("1.5", -1), ("both 0 and 1", -1), ("neither", -1), ("0 or 1", -1),
        ("Model 1 is worse than model 0", -1), ("<think>1", -1),
    ],
)  # fmt: skip
def test_answers_are_read_tolerantly_and_garbage_is_a_failure(reply, wanted):
    with ChatServer(lambda asked: said(reply)) as server:
        judge = ChatJudge(server.url, "m", **SOON)
        assert judge.judge(["p"], [["a", "b"]], shuffle_order=False) == [wanted]


def test_other_labels():
    reader = AnswerReader(("A", "B"))
    assert [reader.decision(said(text)) for text in ("A", " b", "**B**")] == [1.0, 0.0, 0.0]


def log_probs(*pairs):
    top = [{"token": token, "logprob": math.log(p)} for token, p in pairs]
    return {"logprobs": {"content": [{**top[0], "top_logprobs": top}]}}


def test_probabilities_come_from_the_labels_log_probs_and_swap_back():
    def behave(asked):
        chance = 0.75 if asked.shown[0] == "good" else 0.25
        return said("0", **log_probs(("0", chance * 0.8), ("1", (1 - chance) * 0.8), ("Hm", 0.2)))

    with ChatServer(behave) as server:
        judge = ChatJudge(server.url, "m")
        prompts = [f"p{n}" for n in range(8)]
        assert judge.judge(prompts, [["good", "bad"]] * 8, return_scores=True) == pytest.approx([0.75] * 8)
        assert {asked.shown[0] for asked in server.asked} == {"good", "bad"}
        cold = judge.judge(prompts, [["bad", "good"]] * 8, return_scores=True, temperature=0.5)
        assert cold == pytest.approx([1 / (1 + 9)] * 8)
        assert server.asked[0].body["top_logprobs"] == 5
        assert judge_reward(ChatJudge(server.url, "m", soft=True))(["p"] * 2, ["bad", "good"]) == pytest.approx(
            [0.25, 0.75]
        )


def test_a_server_without_log_probs_gives_no_probabilities():
    with ChatServer(longer) as server:
        judge = ChatJudge(server.url, "m")
        (verdict,) = judge.verdicts(["p"], [["a", "b"]], soft=True)
        assert math.isnan(judge.judge(["p"], [["a", "b"]], return_scores=True)[0])
    assert "no log-probs of '0' and '1'" in verdict.reason


def test_conversations_are_plain_lines():
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    assert plain_lines(chat) == "System: Be brief.\nUser: Hi"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    assert plain_lines([call]) == 'Assistant: (calls {"name": "add", "arguments": {"a": 1}})'
    with ChatServer(longer) as server:
        said_by = [[{"role": "assistant", "content": text}] for text in ("ab", "a {brace}")]
        assert ChatJudge(server.url, "m").judge([chat], [said_by], shuffle_order=False) == [1]
        assert (server.asked[0].prompt, server.asked[0].shown[1]) == (plain_lines(chat), "Assistant: a {brace}")


# ---- what goes wrong ---------------------------------------------------------------------------------------------------

FAULTS = {
    "refuses": ((500, {"error": {"message": "out of memory"}}), "error", "status 500: out of memory"),
    "is missing": ((404, {"error": "no model m"}), "error", "status 404: no model m"),
    "drops": (DROP, "error", "the connection ended before the answer did"),
    "hangs": (HANG, "timeout", "no answer came within 0.3 s"),
    "lies": (said("I like both."), "invalid", "replied 'I like both.'"),
    "no chat": ({"object": "list"}, "invalid", "not that of a chat model"),
    "no JSON": ("<html>", "invalid", "not JSON"),
    "no HTTP": (b"\x00\xff garbage\r\n\r\n", "invalid", "not HTTP"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("orders", ["one", "both"])
def test_every_fault_is_a_failure_with_its_reason_and_never_a_winner(fault, orders):
    reply, kind, reason = FAULTS[fault]
    with ChatServer(lambda asked: reply if "bad" in asked.prompt else longer(asked)) as server:
        judge = ChatJudge(server.url, "m", orders=orders, timeout=0.3 if reply is HANG else 60.0, **SOON)
        prompts, pairs = [f"bad {n}" for n in range(4)], [["a", "bb"]] * 4  # some are swapped, some are not
        assert judge.judge(prompts, pairs) == [-1] * 4
        (failed,) = judge.verdicts(prompts[:1], pairs[:1])
        assert (failed.kind, reason in failed.reason) == (kind, True), failed.reason
        patient = ChatJudge(server.url, "m", orders=orders, **SOON)
        assert patient.judge(["good"], [["a", "bb"]]) == [1]


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        judge = ChatJudge(f"http://127.0.0.1:{taken.getsockname()[1]}/v1", "m", **SOON)
        (failed,) = judge.verdicts(["p"], [["a", "b"]])
    assert failed.winner == -1
    assert "no connection" in failed.reason


@pytest.mark.parametrize("fault", [(429, {"error": "slow down"}), (503, {}), DROP, HANG])
def test_what_may_pass_is_tried_again_and_is_counted_once(fault):
    def behave(asked):
        return fault if asked.number < 2 else longer(asked)

    with ChatServer(behave) as server:
        judge = ChatJudge(server.url, "m", timeout=2.0 if fault is HANG else 60.0, backoff=0.01, max_requests=1)
        assert judge.judge(["p"], [["a", "bb"]]) == [1]
        assert len(server.asked) == 3
        assert judge.requests == 1


def test_a_late_answer_is_a_failure_and_is_not_taken_for_that_of_the_next_question():
    def behave(asked):
        return late(5.0, lambda _: said("0"))(asked) if asked.prompt == "late" else said("1")

    with ChatServer(behave) as server:
        judge = ChatJudge(server.url, "m", concurrency=1, timeout=3.0, **SOON)
        judged = judge.judge(["on time", "late", "next"], [["a", "b"]] * 3, shuffle_order=False)
        assert judged == [1, -1, 1]


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_a_refusal_that_will_not_pass_is_not_tried_again(status):
    with ChatServer(lambda asked: (status, {"error": "no"})) as server:
        assert ChatJudge(server.url, "m", retries=5).judge(["p"], [["a", "bb"]]) == [-1]
        assert len(server.asked) == 1


def test_a_call_ends_at_its_deadline_with_what_it_has():
    def behave(asked):
        return HANG if "slow" in asked.prompt else longer(asked)

    with ChatServer(behave) as server:
        judge = ChatJudge(server.url, "m", concurrency=1, deadline=4.0, retries=9, backoff=0.0)
        found = judge.verdicts(["quick", "slow", "never asked"], [["a", "bb"]] * 3)
        assert [verdict.winner for verdict in found] == [1, -1, -1]
        assert [verdict.kind for verdict in found[1:]] == ["timeout", "timeout"]
        assert "the 4 s of the call were over" in found[2].reason


def test_no_more_requests_at_once_than_allowed_over_all_calls():
    with ChatServer(late(0.05)) as server:
        judge = ChatJudge(server.url, "m", concurrency=3)
        answers = {}
        calls = [
            threading.Thread(
                target=lambda n=n: answers.update({n: judge.judge([f"{n}"] * 4, [["a", "bb"]] * 4)}), daemon=True
            )
            for n in range(4)
        ]
        for call in calls:
            call.start()
        for call in calls:
            call.join(120)
        assert answers == {n: [1] * 4 for n in range(4)}
        assert 1 < server.most_at_once <= 3


def test_more_than_max_requests_is_a_sentence_before_anything_is_sent():
    with ChatServer(longer) as server:
        judge = ChatJudge(server.url, "m", max_requests=3)
        judge.judge(["p"] * 2, [["a", "bb"]] * 2)
        with pytest.raises(JudgeError, match="has sent 2 requests and 2 more are wanted, but `max_requests` is 3"):
            judge.judge(["p"] * 2, [["a", "bb"]] * 2)
        assert len(server.asked) == 2


def test_the_key_is_sent_and_shown_nowhere(monkeypatch):
    with ChatServer(lambda asked: (401, {"error": f"wrong key {asked.headers.get('Authorization')}"})) as server:
        judge = ChatJudge(server.url, "m", api_key=KEY)
        (failed,) = judge.verdicts(["p"], [["a", "b"]])
        assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"
        assert KEY not in failed.reason + repr(judge)
        assert "status 401: wrong key" in failed.reason
        monkeypatch.setenv("JUDGE_KEY", KEY)
        ChatJudge(server.url, "m", api_key_env="JUDGE_KEY").judge(["p"], [["a", "b"]])
        assert server.asked[1].headers["Authorization"] == f"Bearer {KEY}"
        ChatJudge(server.url, "m").judge(["p"], [["a", "b"]])
        assert "Authorization" not in server.asked[2].headers


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: ChatJudge("ftp://x", "m"), "not the address of a server"),
        (lambda: ChatJudge("http://x/v1", ""), "`model` is ''; it must be the name"),
        (lambda: ChatJudge("http://x/v1", "m", "Which? {prompt} {response0}"), r"lacks \{response1\}"),
        (lambda: ChatJudge("http://x/v1", "m", "{a} {prompt}"), r"cannot be filled in \(KeyError: 'a'\): write"),
        (lambda: ChatJudge("http://x/v1", "m", orders="all"), "`orders` is 'all'; it must be 'one' or 'both'"),
        (lambda: ChatJudge("http://x/v1", "m", timeout=0), "`timeout` is 0; it must be a number of seconds above 0"),
        (lambda: ChatJudge("http://x/v1", "m", api_key_env="NOT_THERE_X"), "variable NOT_THERE_X, .* is not set"),
        (lambda: HfPairwiseJudge("http://x"), "takes the id of a model; for an endpoint take ChatJudge"),
        (PairRMJudge, "llm-blender.*RewardModelJudge"),
        (lambda: AllTrueJudge([]), "at least one binary judge"),
        (lambda: AllTrueJudge([Shorter()]), "combines binary judges; Shorter is not one"),
        (lambda: ChatJudge("http://x/v1", "m").judge(["p"], [["a"]]), "compares two completions; prompt 0 has 1"),
        (lambda: ChatJudge("http://x/v1", "m").judge(["p"], []), "1 prompts and 0 pairs"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(made, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        made()


def test_the_presets_of_trl(monkeypatch):
    with ChatServer(longer) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(ValueError, match="OPENAI_API_KEY"):
            OpenAIPairwiseJudge()
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        judge = OpenAIPairwiseJudge("gpt-x", TEMPLATE.replace("Two assistants", "Two models"), 2)
        assert judge.judge(["p"], [["a", "bb"]]) == [1]
        assert (server.asked[0].body["model"], judge.max_requests) == ("gpt-x", 2)
        assert server.asked[0].body["messages"][0]["content"].startswith("Two models, 0 and 1")
        assert server.asked[0].headers["Authorization"] == f"Bearer {KEY}"
    hosted = HfPairwiseJudge("org/model", "hf_token")
    assert (hosted.base_url, hosted.model) == ("https://router.huggingface.co/v1", "org/model")


# ---- as rewards --------------------------------------------------------------------------------------------------------


def test_binary_judges_and_all_true():
    both = AllTrueJudge([Has("a"), Has("b")])
    assert both.judge(["p"] * 3, ["ab", "a", "c"]) == [1, 0, 0]
    assert AllTrueJudge([Has("a"), Has("?")]).judge(["p"] * 2, ["ab", "c"]) == [-1, -1]
    assert judge_reward(both)(["p"] * 3, ["ab", "a", "c"]) == [1.0, 0.0, 0.0]
    assert judged_by(both, group("p", "ab"), group("q", "a")).values.tolist() == [[1.0], [0.0]]


def test_pairs_round_robin_and_ranks_as_rewards():
    reward = judge_reward(Shorter())
    assert reward(["p", "p", "q", "q"], ["a", "bb", "ccc", "d"]) == [1.0, 0.0, 0.0, 1.0]
    assert reward(["p"] * 4, ["a", "bb", "ccc", "dddd"]) == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert judge_reward(ByLength())(["p"] * 4 + ["fail"] * 2, ["bb", "a", "ccc", "dddd", "x", "y"]) == [
        pytest.approx(2 / 3), 1.0, pytest.approx(1 / 3), 0.0, None, None,
    ]  # fmt: skip
    assert reward(["fail", "fail", "alone"], ["a", "b", "c"]) == [None, None, None]
    with pytest.raises(TypeError, match="neither a rank judge nor a pairwise or a binary one"):
        judge_reward(type("Odd", (BaseJudge,), {"judge": lambda self: []})())


def test_a_failed_comparison_leaves_the_others_their_share():
    with ChatServer(lambda asked: (400, {}) if {"a", "bb"} == {*asked.shown} else longer(asked)) as server:
        reward = judge_reward(ChatJudge(server.url, "m"))
        assert reward(["p"] * 3, ["a", "bb", "ccc"]) == [0.0, 0.0, 1.0]  # a against bb is not known; both lose to ccc


def test_a_judge_of_trl_runs_in_a_worker_by_whole_groups_and_its_failures_are_masked_and_counted():
    groups = [group("p", "a", "bb"), group("fail", "a", "bb"), group("p", "cc", "b", "ddd")]  # equal prompts stay apart
    groups += [group(f"p{n}", "a", "bb") for n in range(3)]
    with RewardSet(Shorter()) as rewards:
        assert rewards.notes == []  # it travels: it does not stay in this process
    results = judged_by(Shorter(), *groups)
    assert results.values[:7, 0].tolist() == [1, 0, pytest.approx(math.nan, nan_ok=True)] + [
        pytest.approx(math.nan, nan_ok=True),
        0.5,
        1,
        0,
    ]
    assert results.masked.tolist() == [False] * 2 + [True] * 2 + [False] * 9
    assert {str(failure) for failure in results.failures} == {
        f"Reward Shorter, sample {n} (error): the judge answered -1, which is a failure of its own." for n in (2, 3)
    }


class Raises(BasePairwiseJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        if "raise" in prompts[0]:
            raise RuntimeError("no judgement today")
        return [0] * len(prompts)


def test_a_judge_that_raises_fails_its_group_which_is_never_split():
    groups = [group("raise", "a", "bb", "c"), *[group(f"p{n}", "a", "bb") for n in range(3)]]
    results = judged_by(Raises(), *groups)
    assert results.masked.tolist() == [True] * 3 + [False] * 6
    assert all("RuntimeError: no judgement today" in failure.message for failure in results.failures)


class Hangs(BasePairwiseJudge):
    def judge(self, prompts, completions, shuffle_order=True):
        if "hang" in prompts[0]:
            threading.Event().wait(600)
        return [0] * len(prompts)


def test_a_judge_of_trl_that_hangs_is_ended_with_its_group():
    results = judged_by(Hangs(), group("hang", "a", "bb"), *[group(f"p{n}", "a", "bb") for n in range(3)], timeout=3.0)
    assert results.masked.tolist() == [True] * 2 + [False] * 6
    assert [str(failure) for failure in results.failures] == [
        f"Reward Hangs, sample {n} (timeout): it ran longer than 3 s." for n in (0, 1)
    ]


def test_a_chat_judge_masks_what_a_faulty_server_does_to_it_and_says_why():
    faults = {name: reply for name, (reply, _, _) in FAULTS.items()}
    with ChatServer(lambda asked: faults.get(asked.prompt) or longer(asked)) as server:
        judge = ChatJudge(server.url, "m", timeout=3.0, **SOON)
        groups = [group(name, "a", "bb") for name in faults] + [group(f"p{n}", "a", "bb") for n in range(9)]
        results = judged_by(judge, *groups)
    values = results.values[:, 0]
    assert np.isnan(values[:16]).all()
    assert values[16:].tolist() == [0.0, 1.0] * 9
    assert results.failure_counts() == {"error": 6, "timeout": 2, "invalid": 8}
    reasons = {failure.sample: failure.message for failure in results.failures}
    assert "out of memory" in reasons[0]
    assert "no answer came within 3 s" in reasons[7]
    assert results.metrics["rewards/ChatJudge/ties"] == [0.0] * 9


def test_the_time_limit_of_rewards_is_the_deadline_of_each_group_and_not_of_those_that_wait():
    """Six groups of one request each, one at a time, together take longer than one may."""
    with ChatServer(lambda asked: HANG if "slow" in asked.prompt else late(0.7)(asked)) as server:
        judge = ChatJudge(server.url, "m", concurrency=1, timeout=60.0, retries=0)
        groups = [group("slow", "a", "bb"), *[group(f"p{n}", "a", "bb") for n in range(6)]]
        results = judged_by(judge, *groups, timeout=3.0)
    assert results.masked.tolist() == [True] * 2 + [False] * 12
    assert {failure.kind for failure in results.failures} == {"timeout"}


def test_a_run_ends_with_a_sentence_where_most_groups_fail():
    with ChatServer(longer) as server:
        judge = ChatJudge(server.url, "m", max_requests=1)
        with pytest.raises(RewardError, match=r"failed for 6 of the 8 samples.*\n.*`max_requests` is 1"):
            judged_by(judge, *[group(f"p{n}", "a", "bb") for n in range(4)])


def test_a_completion_that_is_left_alone_cannot_be_compared():
    results = judged_by(Shorter(), group("p", "a"))
    assert results.masked.tolist() == [True]
    assert "only completion of its prompt" in results.failures[0].message


@pytest.mark.parametrize(
    ("rewards", "options", "sentence"),
    [
        ([Shorter(), len], {}, "A judge is the only reward of a run, and there are 2 rewards"),
        (["judge:m@http://127.0.0.1/v1", Shorter()], {}, "A judge is the only reward"),
        (
            Shorter(),
            {"reward_batching": "sample"},
            "Shorter compares the completions of a prompt, and `reward_batching` is 'sample'",
        ),
        (Shorter(), {"reward_batching": "all"}, "`reward_batching` is 'all'"),
        (Shorter(), {"cache": True}, "leave `reward_cache` off"),
    ],
)
def test_what_a_judge_cannot_be_combined_with(rewards, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        RewardSet(rewards, options=RewardOptions(**options))


# ---- by a reward model, and by name ------------------------------------------------------------------------------------


def test_a_reward_model_judges_by_the_difference_of_rewards():
    from posttrain.rewards.reward_model import ModelReward

    reward = ModelReward(tiny.reward_model(seed=3), tiny.tokenizer())
    texts = ["one two", "three", "four five six"]
    samples = reward.samples_of([Judged("p ", text, []) for text in texts])
    a, b, c = reward.score(samples)
    judge = RewardModelJudge(reward)
    wins = lambda x, y: 1 / (1 + math.exp(y - x))  # noqa: E731
    pairs = [texts[:2], texts[1:], [texts[0], texts[0]]]
    scores = judge.judge(["p "] * 3, pairs, return_scores=True)
    assert scores == pytest.approx([wins(a, b), wins(b, c), 0.5])
    assert judge.judge(["p "] * 3, pairs) == [int(a < b), int(b < c), 0.5]
    results = judged_by(judge, group("p ", *texts), group("p ", *texts[:2]))
    wanted = [
        (wins(a, b) + wins(a, c)) / 2,
        (wins(b, a) + wins(b, c)) / 2,
        (wins(c, a) + wins(c, b)) / 2,
        wins(a, b),
        wins(b, a),
    ]
    assert results.values[:, 0].tolist() == pytest.approx(wanted)


def test_judges_have_names():
    judge = named_judge("judge:org/model@http://127.0.0.1:8000/v1?orders=both&soft=1&max_requests=7&timeout=2.5")
    assert (judge.model, judge.base_url, judge.orders, judge.soft) == (
        "org/model",
        "http://127.0.0.1:8000/v1",
        "both",
        True,
    )
    assert (judge.max_requests, judge.timeout) == (7, 2.5)
    assert named_judge("judge:runs/reward") == "runs/reward"
    for name, sentence in (
        ("judge:m@http://x/v1?api_key=1", "unknown option 'api_key'; it must be one of orders"),
        ("judge:m@http://x/v1?soft=yes", "`soft` cannot be 'yes'"),
        ("judge:runs/reward?soft=1", "unknown option 'soft'; a judge by a reward model has none"),
        ("judge:m@nowhere://x", "not the address of a server"),
        ("judge:m@http://x/v1?prompt_file=/not/there", "not/there"),
    ):
        with pytest.raises(ValueError, match=sentence):
            named_judge(name)
