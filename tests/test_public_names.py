"""What `import posttrain` promises: every public name is there, every method is exported, and nothing heavy is imported."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import posttrain
import posttrain.rewards
from posttrain.cli.running.named_objects import reward_named
from posttrain.methods.table import METHODS
from posttrain.rewards import BUILT_IN_REWARDS

HEAVY = (
    *("torch", "transformers", "datasets", "accelerate", "peft", "numpy", "huggingface_hub", "rich", "safetensors"),
    *("starlette", "uvicorn", "pydantic", "prometheus_client", "httpcore"),
)


@pytest.mark.parametrize("name", posttrain.__all__)
def test_public_name_can_be_imported(name):
    assert getattr(posttrain, name) is not None
    assert name in dir(posttrain)


def test_import_is_light():
    """In a fresh interpreter, neither the package nor its command line's help imports torch or its like."""
    check = (
        "import sys, posttrain; from posttrain.cli.main import main; main(['--help']); main(['--version']); "
        f"print('imported:', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "imported: []"


def test_every_method_is_exported():
    for method in METHODS.values():
        assert getattr(posttrain, method.trainer) is method.trainer_class
        assert getattr(posttrain, method.config) is method.config_class
        assert method.trainer_class.config_class is method.config_class


def test_table_names_methods_as_trainers_do():
    assert {name: method.trainer_class.method for name, method in METHODS.items()} == {name: name for name in METHODS}


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainr'"):
        _ = posttrain.GRPOTrainr


def test_names_are_listed_once():
    assert len(posttrain.__all__) == len(set(posttrain.__all__))


def test_built_in_rewards_are_names_of_their_package():
    """`from posttrain.rewards import accuracy_reward`, whichever module it is in; the package itself imports nothing."""
    for name, (module, _) in BUILT_IN_REWARDS.items():
        assert getattr(posttrain.rewards, name) is getattr(importlib.import_module(module), name)
        assert getattr(posttrain.rewards, name) is getattr(posttrain, name)
    with pytest.raises(AttributeError, match="no attribute 'acuracy_reward'"):
        _ = posttrain.rewards.acuracy_reward


@pytest.mark.parametrize("name", BUILT_IN_REWARDS)
def test_built_in_rewards_are_made_by_their_names(name):
    assert callable(reward_named(name))
