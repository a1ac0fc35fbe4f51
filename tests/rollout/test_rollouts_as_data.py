"""Rollouts with tools, exported and trained on again: the same tokens, the same mask, the right version."""

from __future__ import annotations

import json

import pytest

from posttrain.data.options import PrepareOptions
from posttrain.data.render.conversation import Conversation
from posttrain.data.render.renderer import Renderer
from posttrain.data.render.turn_suffix import TurnSuffix
from posttrain.data.rows import formats
from posttrain.data.store.prepare import prepare_dataset
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.episodes.episode import run_episodes
from posttrain.rollout.episodes.tool_episode import EpisodeRules, ToolEpisode
from posttrain.rollout.episodes.tools import Toolbox
from posttrain.rollout.prompt_rows import PromptRow
from posttrain.rollout.rollout import Request
from posttrain.rollout.store import RolloutStore, record_of
from posttrain.view import api
from posttrain.view.api import Viewed
from posttrain.view.run_folder import open_runs
from tests.rollout.fuzzed_turns import STOP, TOKENIZER, call, weather
from tests.rollout.scripted_engine import ScriptedEngine

RENDERER = Renderer(TOKENIZER)
QUESTION = [{"role": "user", "content": "How warm is it?"}]
BOX = Toolbox([weather])
PROMPT_IDS = RENDERER.encode_prompts([Conversation(QUESTION, BOX.schemas)])[0].input_ids
RULES = EpisodeRules(RENDERER, TurnSuffix(RENDERER, BOX.schemas), BOX, frozenset([STOP]), 3000)


def said(text):
    return [*TOKENIZER(text, add_special_tokens=False)["input_ids"], STOP]


ASKS = said(call("weather", {"place": "Rome"}))
ANSWERS = [said("Seven degrees."), said("No idea.")]


def speak(prompt):
    return ANSWERS[prompt.sample] if prompt.first_token else ASKS


@pytest.fixture
def rollouts(tmp_path):
    """Two episodes of one prompt, kept in a run's folder."""
    row = PromptRow(PROMPT_IDS, QUESTION, {}, 0)
    found = {}
    episodes = [ToolEpisode(row, Request(0, 0, sample), RULES) for sample in range(2)]
    params = SamplingParams(max_tokens=3000, stop_ids=(STOP,), seed=1)
    run_episodes(ScriptedEngine(speak), episodes, params, found.__setitem__)
    for number, rollout in found.items():
        rollout.reward = 1.0 - number
    with RolloutStore(tmp_path) as store:
        store.write(1, [record_of(found[number], 0.0) for number in range(2)])
    return [found[number] for number in range(2)]


def exported(tmp_path, kind):
    made = api.exported(Viewed(open_runs([str(tmp_path)])), {"run": 0, "format": kind, "filter": {}})
    return [json.loads(line) for line in made["json_lines"].splitlines()]


def prepared(rows, tmp_path, *kinds, **options):
    return prepare_dataset(rows, kinds, RENDERER, PrepareOptions(cache_dir=tmp_path / "cache", **options))


def assert_trains_what_was_sampled(sample, rollout):
    """The template ends a conversation with a line break that the model never wrote; everything else is equal."""
    size = len(rollout.sample)
    assert sample.input_ids[:size].tolist() == rollout.sample.input_ids.tolist()
    assert sample.trained.nonzero()[0].tolist() == rollout.sample.trained.nonzero()[0].tolist()


@pytest.mark.parametrize("kind", ["sft", "prompt-completion", "dpo"])
def test_an_exported_rollout_trains_the_tokens_that_were_sampled_and_no_others(rollouts, tmp_path, kind):
    rows = exported(tmp_path, kind)
    assert all(row["tools"] == BOX.schemas and row["trained_roles"] == ["assistant"] for row in rows)
    known = (formats.PREFERENCE,) if kind == "dpo" else (formats.LANGUAGE_MODELLING, formats.PROMPT_COMPLETION)
    units = prepared(rows, tmp_path, *known)
    samples = units[0] if kind == "dpo" else [units[0][0], units[1][0]]
    for sample, rollout in zip(samples, rollouts):
        assert_trains_what_was_sampled(sample, rollout)


def test_rows_that_lost_their_tools_are_noted(rollouts, tmp_path):
    rows = [{name: value for name, value in row.items() if name != "tools"} for row in exported(tmp_path, "sft")]
    report = prepared(rows, tmp_path, formats.LANGUAGE_MODELLING).report
    assert "Noted: 2 rows call tools and have no 'tools'" in report.summary()


def test_trained_roles_takes_one_value(tmp_path):
    rows = [{"messages": [*QUESTION, {"role": "assistant", "content": "7"}], "trained_roles": ["user"]}]
    with pytest.raises(ValueError, match=r'column \'trained_roles\': .*the one value it takes is \["assistant"\]'):
        prepared(rows, tmp_path, formats.LANGUAGE_MODELLING)


def test_a_sample_is_labelled_with_the_oldest_version_that_wrote_it():
    """Its first turn was written by version 3, its second by version 5: it is as old as version 3."""
    episode = ToolEpisode(PromptRow(PROMPT_IDS, QUESTION, {}, 0), Request(0, 0, 0), RULES)
    engine = ScriptedEngine(speak)
    with engine.session(SamplingParams(max_tokens=3000, stop_ids=(STOP,))) as session:
        for version in (3, 5):
            while (prompt := episode.prompt()) is None:
                pass
            session.add(prompt)
            ((_, completion),) = session.advance()
            completion.version = version
            episode.on_completion(completion)
    assert episode.is_over
    assert episode.rollout().sample.policy_version == 3


# ---- templates that leave calls out --------------------------------------------------------------------------------------

WITHOUT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"place": "Rome"}}}
TALK = [
    *QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "7"},
    {"role": "assistant", "content": "Seven."},
]
ROWS = {
    "whole conversation": (formats.LANGUAGE_MODELLING, {"messages": TALK}),
    "in the prompt": (formats.PROMPT_COMPLETION, {"prompt": TALK[:3], "completion": TALK[3:]}),
    "in the completion": (formats.PROMPT_COMPLETION, {"prompt": TALK[:1], "completion": TALK[1:]}),
    "in a pair": (formats.PREFERENCE, {"prompt": TALK[:3], "chosen": TALK[3:], "rejected": TALK[3:4] * 1}),
    "in a prompt to continue": (formats.PROMPT_ONLY, {"prompt": TALK[:3]}),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("assistant_only", [False, True])
def test_calls_that_a_template_drops_are_refused_everywhere(name, assistant_only, tmp_path):
    """They trained an empty assistant turn, but for assistant-only loss, which had always refused them."""
    kind, row = ROWS[name]
    row = {**row, "rejected": [{"role": "assistant", "content": "Eight."}]} if "rejected" in row else row
    options = {"assistant_only_loss": True} if assistant_only and kind is not formats.PROMPT_ONLY else {}
    renderer = Renderer(TOKENIZER, WITHOUT_TOOLS)
    with pytest.raises(ValueError, match=r"drops the (call of the tool 'weather'|tool call)"):
        prepare_dataset([row], (kind,), renderer, PrepareOptions(cache_dir=tmp_path, **options))
    prepared([row], tmp_path, kind, **options)  # a template that writes them


def test_an_argument_that_a_template_drops_is_refused():
    names_only = WITHOUT_TOOLS.replace(
        "{{ m.content or '' }}",
        "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
    )
    (found,) = Renderer(TOKENIZER, names_only).encode_chats([Conversation(TALK)], "everything")
    assert "drops the argument 'place' of the tool 'weather' in the assistant's message 1" in str(found)
