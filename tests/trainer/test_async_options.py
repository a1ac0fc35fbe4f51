"""Options of rollouts beside training: what would have no effect, or cannot be read, is refused before anything is made."""

from __future__ import annotations

import pytest

from posttrain import AsyncGRPOConfig, GRPOConfig
from posttrain.rollout.schedule import Schedule
from posttrain.trainer.online_trainer import OnlineTrainer
from tests.trainer.test_online import trainer

NO_EFFECT = "no effect. Leave it out"
RAY = {"rollout_workers": "ray"}
SERVED = {"use_vllm": True, "vllm_mode": "server"}
SHARDED = {"fsdp": True}


def config(cls=GRPOConfig, **options):
    made = {
        "output_dir": "nowhere",
        "use_cpu": True,
        "report_to": "none",
        "per_device_train_batch_size": 8,
        "num_generations": 4,
    }
    return cls(**made, **({} if cls is AsyncGRPOConfig else {"async_rollouts": True}), **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"kv_after_update": "keep", "async_order": "in_order", "async_lead": 1},
            "`update_in_flight` is 'finish'.*" + NO_EFFECT,
        ),
        ({"kv_after_update": "keep", "update_in_flight": "restart"}, "`update_in_flight` is 'restart'.*" + NO_EFFECT),
        ({"kv_after_update": "keep", "async_lead": 0}, "`async_lead` is 0.*" + NO_EFFECT),
        ({"weight_sync_steps": 3, "async_lead": 0}, "`weight_sync_steps` is 3 and `async_lead` 0.*" + NO_EFFECT),
        ({"async_lead": "foo"}, r"`async_lead` is 'foo'; it takes a number of generations, 0 or more, or 'auto'\."),
        ({"async_lead": True}, "`async_lead` is True; it takes a number"),
        ({"async_lead": float("nan")}, "`async_lead` is nan; it takes a number"),
        ({"rollout_workers": 1.5}, r"`rollout_workers` is 1\.5; it takes a number of processes of 1 or more, or 'ray'"),
        ({"rollout_workers": True}, "`rollout_workers` is True; it takes a number of processes"),
        ({"rollout_workers": "two"}, "`rollout_workers` is 'two'; it takes a number of processes"),
        ({"max_staleness": 1.5}, r"`max_staleness` is 1\.5; it takes a whole number of 0 or more"),
        ({"max_staleness": "2"}, "`max_staleness` is '2'; it takes a whole number of 0 or more"),
        ({"weight_sync_steps": 1.5}, r"`weight_sync_steps` is 1\.5; it takes a whole number of 1 or more"),
        ({"queue_maxsize": "9"}, "`queue_maxsize` is '9'; it takes a whole number"),
        ({**RAY, "ray_workers": 0}, "`ray_workers` is 0; it takes a whole number of 1 or more"),
        (
            {**RAY, "worker_resources": "notjson"},
            "`worker_resources` is 'notjson'; it takes names with amounts, such as",
        ),
        ({**RAY, "worker_resources": "[1]"}, r"`worker_resources` is '\[1\]'; it takes names with amounts"),
        (
            {**RAY, "worker_resources": {"GPU": "one"}},
            r"`worker_resources\['GPU'\]` is 'one'; it takes a number of 0 or more",
        ),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        config(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_after_update": "keep"},
        {"kv_after_update": "keep", "async_lead": "1.5"},
        {"weight_sync_steps": 3, "async_lead": 0, "rollout_workers": "2"},  # what is published is sent to workers
        {"weight_sync_steps": 3, "async_lead": 0, **SERVED},  # and to servers
        {"weight_sync_steps": 3, "async_lead": 0, **SHARDED},  # a thread gathers what is published
        {**RAY, "worker_resources": '{"GPU": 0.5}'},
    ],
)
def test_what_has_an_effect_stays(options):
    assert config(**options).async_rollouts


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"vllm_mode": "colocate"}, "takes turns with the training"),
        ({"rollout_workers": 2}, "leave one out"),
        ({"kv_after_update": "keep"}, "compute keys and values"),
        ({"async_order": "in_order", "async_lead": 1}, "servers have the newest alone"),
    ],
)
def test_what_vllm_cannot_do_is_known_by_the_options_alone(options, said):
    """And not after a server was waited for, or vLLM looked for."""
    with pytest.raises(ValueError, match=said):
        config(**{**SERVED, **options})


def test_a_server_that_is_found_later_is_asked_about_again():
    """`use_vllm=None`: whether servers write is known when one was looked for."""
    found = config(AsyncGRPOConfig, kv_after_update="keep")
    found.use_vllm = True
    with pytest.raises(ValueError, match="compute keys and values"):
        found.check_writers()


def test_a_group_on_two_processes_is_refused(monkeypatch):
    monkeypatch.setattr(Schedule, "splits_groups", True)
    with pytest.raises(ValueError, match="some lie on several processes"):
        config()


def test_what_the_trainer_is_given_is_refused_before_an_engine_is_made(tmp_path, monkeypatch):
    def make_engine(self):
        raise AssertionError("an engine was made")

    monkeypatch.setattr(OnlineTrainer, "_make_engine", make_engine)
    with pytest.raises(ValueError, match="`rollout_func` is given the trainer"):
        trainer(tmp_path, rollout_func=lambda prompts, trainer: {}, async_rollouts=True)
