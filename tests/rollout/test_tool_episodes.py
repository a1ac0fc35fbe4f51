"""Episodes with tools: the ids that were sampled are the ids that are trained, whatever models and tools do."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict

import numpy as np
import pytest

from posttrain.data.render.conversation import Conversation
from posttrain.data.render.renderer import Renderer
from posttrain.data.render.templates import BUILT_IN_FORMATS, use_chat_format
from posttrain.data.render.turn_suffix import ToolResult, TurnSuffix
from posttrain.rollout.engines.protocol import Completion, SamplingParams
from posttrain.rollout.episodes.environment import Environments
from posttrain.rollout.episodes.episode import run_episodes
from posttrain.rollout.episodes.tool_episode import EpisodeRules, ToolEpisode
from posttrain.rollout.episodes.tool_results import UnexpectedImage
from posttrain.rollout.episodes.tools import Toolbox
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import POLICY_LOGPS, SAMPLING_LOGPS, Request
from tests import tiny
from tests.rollout.fuzzed_turns import HANGING, STOP, TOKENIZER, TOOLS, call, turn
from tests.rollout.scripted_engine import ScriptedEngine

RENDERER = Renderer(TOKENIZER)
START = TOKENIZER.convert_tokens_to_ids("<|im_start|>")
QUESTION = [{"role": "user", "content": "Hi"}]
PROMPT_IDS = RENDERER.encode_prompts([Conversation(QUESTION)])[0].input_ids


def said(text: str) -> list[int]:
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], STOP]


def rules(tools=TOOLS, max_completion=3000, timeout=5.0, max_result=300, parallel=False, **more):
    box = Toolbox(tools, timeout=timeout, max_result=max_result, parallel=parallel)
    return EpisodeRules(RENDERER, TurnSuffix(RENDERER, box.schemas), box, frozenset([STOP]), max_completion, **more)


def play(script, made, count=1, per_advance=16, lend=None, columns=None):
    """The rollouts of `count` episodes, and the engine."""
    engine = ScriptedEngine(script, per_advance=per_advance, shuffle=3)
    row = PromptRow(PROMPT_IDS, QUESTION, columns or {}, 0)
    episodes = [ToolEpisode(row, Request(0, number // 4, number % 4), made, lend) for number in range(count)]
    found = [None] * count
    params = SamplingParams(max_tokens=made.max_completion, stop_ids=(STOP,), seed=1)
    run_episodes(engine, episodes, params, lambda index, rollout: found.__setitem__(index, rollout))
    return found, engine


def in_order(*turns):
    """The turns of every episode, told apart by the tokens that it has sampled."""
    starts = np.cumsum([0, *map(len, turns)]).tolist()
    return lambda prompt: turns[starts.index(prompt.first_token)]


# ---- the bar: a thousand bad days ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.trust)])
def test_fuzzed_episodes_train_what_was_sampled(count):
    sampled: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    prompts: dict[tuple[int, int], list[np.ndarray]] = defaultdict(list)
    made = rules(max_completion=2500, timeout=1.0, max_rounds=6)

    def speak(prompt):
        key = (prompt.key, prompt.sample)
        assert prompt.first_token == sum(map(len, sampled[key]))
        ids = turn(np.random.default_rng([prompt.key, prompt.sample, len(sampled[key])]))
        ids = ids[: ids.index(STOP) + 1] if STOP in ids else ids
        sampled[key].append(ids[: prompt.max_tokens])
        prompts[key].append(prompt.ids)
        return ids

    HANGING.clear()
    try:
        rollouts, _ = play(speak, made, count=count, per_advance=64)
    finally:
        HANGING.set()
    errors = Counter()
    for rollout in rollouts:
        key, sample = (rollout.request.number, rollout.request.sample), rollout.sample
        assert sample.input_ids[sample.trained].tolist() == [token for ids in sampled[key] for token in ids]
        assert sample.input_ids[: rollout.prompt_length].tolist() == PROMPT_IDS.tolist()
        assert not sample.trained[: rollout.prompt_length].any()
        assert len(rollout.completion_ids) <= 2500
        for seen, ids in zip(prompts[key], sampled[key]):  # each turn was written after exactly what is trained on
            assert sample.input_ids[: len(seen) + len(ids)].tolist() == [*seen.tolist(), *ids]
        for name in (SAMPLING_LOGPS, POLICY_LOGPS):
            assert np.all(sample.per_token[name][~sample.trained] == 0)
            assert np.all(sample.per_token[name][sample.trained] < 0)
        foreign = sample.input_ids[rollout.prompt_length :][~sample.trained[rollout.prompt_length :]]
        between = len(sampled[key]) - 1  # a suffix opens two turns and closes one, whatever the results say
        assert (np.sum(foreign == START), np.sum(foreign == STOP)) == (2 * between, between)
        assert not rollout.masked
        assert rollout.completion[0]["role"] == "assistant"
        errors.update((call.error or "fine")[:12] for call in rollout.tool_calls)
    assert max(map(len, sampled.values())) > 5
    assert sum(errors.values()) > 1.5 * count
    for kind in ("fine", "OSError: dis", "It took long", "There is no ", "This call ca", "Wrong argume"):
        assert errors[kind] > count / 100, (kind, errors)
    assert any("[cut: 10,000,000" in call.result for rollout in rollouts for call in rollout.tool_calls)


# ---- one by one --------------------------------------------------------------------------------------------------------------


def test_messages_and_calls_of_an_episode():
    turns = [said(call("weather", {"place": "Rome"})), said("Warm.")]
    (rollout,), engine = play(in_order(*turns), rules())
    assert [m["role"] for m in rollout.completion] == ["assistant", "tool", "assistant"]
    assert rollout.completion[1] == {"role": "tool", "name": "weather", "content": '{"place": "Rome", "degrees": 7}'}
    assert rollout.completion[2]["content"] == "Warm."
    (made,) = rollout.tool_calls
    assert (made.name, made.arguments, made.error) == ("weather", '{"place": "Rome"}', None)
    assert made.seconds > 0
    assert engine.prompts[1].first_token == len(turns[0])
    assert rollout.finish_reason == "stop"


def test_a_turn_that_ended_with_a_stop_string_is_closed_for_it():
    open_turn = said(call("weather", {"place": "Rome"}))[:-1]
    made = rules()

    def speak(prompt):
        return said("Warm.") if prompt.first_token else open_turn

    engine = ScriptedEngine(speak)
    episode = ToolEpisode(PromptRow(PROMPT_IDS, QUESTION, {}, 0), Request(0, 0, 0), made)
    with engine.session(SamplingParams(max_tokens=3000, stop_ids=(STOP,))) as session:
        session.add(episode.prompt())
        ((_, completion),) = session.advance()
    completion.finish_reason = "stop"
    episode.on_completion(completion)
    while (prompt := episode.prompt()) is None:
        time.sleep(0.001)
    assert prompt.ids[len(PROMPT_IDS) + len(open_turn)] == STOP


def test_results_for_which_there_is_no_room_are_left_out():
    first = said(call("weather", {"place": "Rome"}))
    for more in ({"max_completion": len(first) + 60}, {"context": len(PROMPT_IDS) + len(first) + 60}):
        (rollout,), engine = play(in_order(first, said("x")), rules(**more))
        assert rollout.completion_ids.tolist() == first
        assert rollout.finish_reason == "length"
        assert len(engine.prompts) == 1
        assert len(rollout.tool_calls) == 1  # it was run all the same


def test_a_later_turn_has_what_is_left_of_the_allowance():
    first = said(call("weather", {"place": "Rome"}))
    (rollout,), engine = play(in_order(first, said("word " * 900)), rules(max_completion=500))
    assert len(rollout.completion_ids) == 500
    assert engine.prompts[1].max_tokens == 500 - (len(engine.prompts[1].ids) - len(PROMPT_IDS))
    assert rollout.is_truncated


def test_rounds_are_limited():
    looping = said(call("weather", {"place": "Rome"}))
    (rollout,), engine = play(lambda prompt: looping, rules(max_rounds=2))
    assert len(engine.prompts) == 3
    assert len(rollout.tool_calls) == 2
    assert rollout.finish_reason == "stop"


@pytest.mark.parametrize("failing", [0, 1])
def test_a_turn_that_cannot_be_written_masks_its_episode(failing):
    first = said(call("weather", {"place": "Rome"}))

    def speak(prompt):
        is_failing = bool(prompt.first_token) == bool(failing) and prompt.sample == 2
        return Completion.failed("no room") if is_failing else said("x") if prompt.first_token else first

    rollouts, _ = play(speak, rules(), count=4)
    assert [rollout.masked for rollout in rollouts] == [False, False, True, False]
    assert (rollouts[2].error, rollouts[2].finish_reason) == ("no room", "error")
    assert rollouts[2].sample.trained.sum() == failing * len(first)


class Meeting:
    """A tool whose calls come back when `enough` of them are there at once, or when somebody lets them."""

    def __init__(self, enough: int) -> None:
        self.enough, self.inside, self.most = enough, 0, 0
        self.changed, self.open = threading.Condition(), False

    def meet(self, kind: str) -> str:
        """
        Wait for others.

        Args:
            kind: What comes back.
        """
        with self.changed:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.let_go(self.inside >= self.enough)
            came = self.changed.wait_for(lambda: self.open, 60)
            self.inside -= 1
        return kind if came else "nobody came"

    def let_go(self, really: bool = True) -> None:
        with self.changed:
            self.open = self.open or really
            self.changed.notify_all()


def test_episodes_do_not_wait_for_each_other():
    """The tool of one comes back when all others are over."""
    ended, meeting = [], Meeting(enough=2)
    waiting, direct = said(call("meet", {"kind": "k"})), said(call("weather", {"place": "Rome"}))

    def speak(prompt):
        if prompt.first_token:
            return said("Done")
        return waiting if prompt.sample == 0 and prompt.key == 0 else direct

    def over(index, rollout):
        ended.append((index, rollout.tool_calls[0].result))
        meeting.let_go(len(ended) == 39)

    made = rules([meeting.meet, *TOOLS], timeout=120)
    engine = ScriptedEngine(speak, per_advance=4)
    row = PromptRow(PROMPT_IDS, QUESTION, {}, 0)
    episodes = [ToolEpisode(row, Request(0, number // 4, number % 4), made) for number in range(40)]
    params = SamplingParams(max_tokens=1000, stop_ids=(STOP,))
    run_episodes(engine, episodes, params, over)
    assert ended[-1] == (0, "k")
    assert len(ended) == 40


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_of_a_turn_run_together_where_they_may(parallel):
    three = "\n".join(call("meet", {"kind": str(i)}) for i in range(3))
    meeting = Meeting(enough=3 if parallel else 1)
    (rollout,), _ = play(in_order(said(three), said("x")), rules([meeting.meet], timeout=120, parallel=parallel))
    assert [m["content"] for m in rollout.completion if m["role"] == "tool"] == ["0", "1", "2"]
    assert meeting.most == (3 if parallel else 1)


def test_an_episode_s_time_is_limited():
    """Its tool is still busy when it is over."""
    meeting = Meeting(enough=1)
    turns = in_order(said(call("meet", {"kind": "k"})), said("x"))
    made = rules([meeting.meet], timeout=120)
    (rollout,), engine = play(turns, EpisodeRules(**{**vars(made), "timeout": 100}))
    assert rollout.error is None
    meeting.enough, meeting.open = 2, False
    (rollout,), engine = play(turns, EpisodeRules(**{**vars(made), "timeout": 1.0}))
    assert meeting.inside == 1
    meeting.let_go()
    assert rollout.error == "The episode took longer than 1 s."
    assert (rollout.is_truncated, rollout.masked, len(engine.prompts)) == (True, False, 1)
    assert rollout.tool_calls[0].error == "The episode ended before the call did."
    assert rollout.sample.trained.sum() == len(engine.script(engine.prompts[0]))


class Stubborn:
    def reset(self, how):
        if how == "raise":
            raise RuntimeError("no")
        if how == "hang":
            time.sleep(5)
        return {"tell": "Look.", "image": [{"type": "image"}], "quiet": None}.get(how)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", "reset of Stubborn failed: RuntimeError: no"),
        ("hang", "reset of Stubborn failed: It took longer than 0.1 s."),
    ],
)
def test_a_reset_that_fails_ends_its_episode(how, told):
    made = rules(timeout=0.1 if how == "hang" else 60)
    (rollout,), engine = play(
        in_order(said("x")), made, lend=Environments(Stubborn, made.toolbox).take, columns={"how": how}
    )
    assert told in rollout.error
    assert rollout.masked
    assert not engine.prompts
    assert rollout.completion_ids.tolist() == []


def test_an_image_in_a_run_of_texts_ends_it():
    """The model would be trained on what it cannot see."""
    made = rules(timeout=60)
    lend = Environments(Stubborn, made.toolbox).take
    with pytest.raises(UnexpectedImage, match="reset of Stubborn: it returned an image"):
        play(in_order(said("x")), made, lend=lend, columns={"how": "image"})


def test_what_reset_tells_is_in_the_prompt():
    made = rules(timeout=60)
    for how, ending in (("tell", "HiLook."), ("quiet", "Hi")):
        environments = Environments(Stubborn, made.toolbox)
        (rollout,), engine = play(in_order(said("x")), made, lend=environments.take, columns={"how": how})
        assert rollout.prompt[-1]["content"] == ending
        assert TOKENIZER.decode(engine.prompts[0].ids).endswith(f"{ending}<|im_end|>\n<|im_start|>assistant\n")
        assert isinstance(rollout.environment, Stubborn)


# ---- suffixes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chatml", "mistral", "deepseek", "llama3"])
def test_a_suffix_is_what_the_template_writes(name):
    tokenizer = tiny.tokenizer(None)
    written = [*BUILT_IN_FORMATS[name].tokens, BUILT_IN_FORMATS[name].stop_token or "<|im_end|>"]
    tokenizer.add_special_tokens({"bos_token": "<s>", "additional_special_tokens": ["<|im_end|>", *written]})
    use_chat_format(tokenizer, name)
    renderer = Renderer(tokenizer)
    found = TurnSuffix(renderer)
    calls = [{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "22 <|im_end|> degrees"},
    ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    suffix = found.sample([ToolResult("f", "22 <|im_end|> degrees")]).input_ids
    assert whole.endswith(tokenizer.decode(suffix))
    assert whole.removesuffix(tokenizer.decode(suffix)).endswith(tokenizer.decode([found.closing]))
    plain = found.sample([ToolResult("f", "22 degrees")]).input_ids
    assert np.sum(np.isin(suffix, list(renderer.control_ids))) == np.sum(np.isin(plain, list(renderer.control_ids)))


@pytest.mark.parametrize("name", ["alpaca", "vicuna", "gemma", "zephyr", "llama2", "phi3", None])
def test_templates_without_tools_are_refused(name):
    with pytest.raises(ValueError, match=r"tools|Tools"):
        TurnSuffix(Renderer(tiny.tokenizer(name)))


def test_a_template_that_changes_the_past_is_refused():
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{- '<|im_start|>assistant\\n' -}}\n        {%- if",
        "{{- '<|im_start|>assistant\\n' ~ (loop.last) -}}\n        {%- if",
    )
    with pytest.raises(ValueError, match="changes the turn that calls a tool"):
        TurnSuffix(Renderer(tokenizer))
