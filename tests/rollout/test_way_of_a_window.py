"""Which module calls which in a window of GRPO: down from the trainer to the engine, and up to nothing but the method's hooks."""

from __future__ import annotations

import sys
import threading

import pytest
from datasets import Dataset

from posttrain import GRPOConfig, GRPOTrainer
from posttrain.rollout.collector import MethodHooks
from tests import tiny
from tests.rollout.scripted_engine import ScriptedEngine

HOOKS = {name for name in vars(MethodHooks) if not name.startswith("_") and callable(getattr(MethodHooks, name))}
ABOVE, BELOW = ("posttrain.trainer", "posttrain.methods"), ("posttrain.rollout", "posttrain.rewards")
WAY = ("trainer.", "rollout.loader", "rollout.source", "rollout.collector", "rollout.episodes.", "rollout.engines.")
"""From above to below; a module that stands further down calls none that stands further up."""
CALLBACKS = {"on_finished"}  # a finished rollout is handed to who asked for it


class Calls:
    """Records (module of the caller, module, function) of every call of posttrain's, on all threads."""

    def __init__(self):
        self.edges: set[tuple[str, str, str]] = set()
        self.under_hooks: set[tuple[str, str, str]] = set()  # the same, of rollout code that a hook calls

    def __enter__(self):
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)
        threading.setprofile(None)

    def _on_event(self, frame, event, _):
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith("posttrain."):
            return
        callers = [name for name in _modules_above(frame) if name.startswith("posttrain.")]
        if not callers:
            return
        edge = (callers[0], module, frame.f_code.co_name)
        self.edges.add(edge)
        # Rollout code under a trainer or a method that is itself under rollout code.
        place = next((i for i, name in enumerate(callers) if name.startswith(ABOVE)), len(callers))
        if module.startswith(BELOW) and any(name.startswith(BELOW) for name in callers[place:]):
            self.under_hooks.add(edge)


def _modules_above(frame):
    while (frame := frame.f_back) is not None:
        yield frame.f_globals.get("__name__", "")


ARGUMENTS = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 4, "max_steps": 2}
ARGUMENTS |= {"report_to": "none", "use_cpu": True, "reward_workers": 0, "save_strategy": "no", "num_iterations": 2}


def traced(folder, model=None, more_arguments=None, prompt="Say {}", **more) -> Calls:
    """A run with two updates on one window, so that old and reference log-probs are computed while it is collected."""
    trainer = GRPOTrainer(
        model or tiny.causal_lm(),
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 13) for ids in completion_ids],
        args=GRPOConfig(output_dir=str(folder), beta=0.1, **ARGUMENTS | (more_arguments or {})),
        train_dataset=Dataset.from_list([{"prompt": prompt} for _ in range(2)]),
        processing_class=tiny.tokenizer(),
        **more,
    )
    with Calls() as calls:
        trainer.train()
    return calls


@pytest.fixture(scope="module")
def calls(tmp_path_factory) -> Calls:
    return traced(tmp_path_factory.mktemp("window"))


def floor(module: str) -> int | None:
    """The place of a module on the way; None for one that is no part of it, such as a dataclass that all hold."""
    name = module.removeprefix("posttrain.")
    return next((place for place, stop in enumerate(WAY) if name.startswith(stop)), None)


def test_a_window_is_asked_for_floor_by_floor(calls):
    asked = {
        (caller.removeprefix("posttrain."), module.removeprefix("posttrain."), f) for caller, module, f in calls.edges
    }
    assert ("rollout.loader", "rollout.source", "next_window") in asked
    assert ("rollout.source", "rollout.collector", "collect") in asked
    assert ("rollout.collector", "rollout.episodes.writing", "write") in asked
    assert ("rollout.episodes.writing", "rollout.engines.weight_sync", "ready") in asked
    assert ("rollout.episodes.episode", "rollout.engines.native.engine", "advance") in asked
    assert ("rollout.collector", "rewards.reward_set", "open") in asked
    assert {caller.split(".")[0] for caller, module, f in asked if (module, f) == ("rollout.loader", "__iter__")} == {
        "trainer"
    }


def test_nothing_calls_up_but_the_hooks_of_the_method(calls):
    up = {edge for edge in calls.edges if edge[0].startswith(BELOW) and edge[1].startswith(ABOVE)}
    assert {function for *_, function in up} == HOOKS == {"author_of", "annotate", "credit", "spread", "arranged"}
    assert {caller for caller, *_ in up} == {"posttrain.rollout.collector", "posttrain.rollout.source"}


def test_the_hooks_call_no_rollout_code(calls):
    assert calls.under_hooks == set()


def test_within_rollout_calls_go_down(calls):
    climbs = {
        (caller, module, function)
        for caller, module, function in calls.edges
        if caller.startswith(BELOW) and None not in (floor(caller), floor(module)) and floor(caller) > floor(module)
    }
    assert {function for *_, function in climbs} - HOOKS == CALLBACKS
    assert not {
        edge
        for edge in calls.edges
        if edge[0].startswith("posttrain.rewards") and edge[1].startswith("posttrain.rollout")
    }


class Counting:
    """An environment with one tool."""

    def reset(self, **columns):
        self.total = 0

    def up(self) -> int:
        """
        Count one more.
        """
        self.total += 1
        return self.total

    def get_reward(self) -> float:
        return float(self.total)


def with_environment(folder) -> Calls:
    stop = tiny.tokenizer().eos_token_id
    turn = tiny.tokenizer()('<tool_call>\n{"name": "up", "arguments": {}}\n</tool_call>', add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt: [*turn["input_ids"], stop] if not prompt.first_token else [40, 41, stop])
    model = tiny.causal_lm(max_position_embeddings=2048)
    prompt = [{"role": "user", "content": "Count."}]
    options = {"max_completion_length": 400}
    return traced(folder, model, options, prompt, engine=engine, environment_factory=Counting)


def with_function(folder) -> Calls:
    def write(prompts, trainer):
        return {"prompt_ids": [[40, 41]] * len(prompts), "completion_ids": [[42, 43 + i] for i in range(len(prompts))]}

    return traced(folder, rollout_func=write)


WRITING = "posttrain.rollout.episodes.writing"


@pytest.mark.parametrize(
    ("run", "asked"),
    [
        (
            with_environment,
            {
                (WRITING, "posttrain.rollout.episodes.tool_episode", "__call__"),
                ("posttrain.rollout.collector", "posttrain.rollout.episodes.environment", "give_back"),
            },
        ),
        (with_function, {(WRITING, WRITING, "rollouts_from_function")}),
    ],
)
def test_tools_environments_and_rollout_functions_do_not_climb_either(tmp_path, run, asked):
    calls = run(tmp_path)
    assert asked <= calls.edges
    test_nothing_calls_up_but_the_hooks_of_the_method(calls)
    test_the_hooks_call_no_rollout_code(calls)
