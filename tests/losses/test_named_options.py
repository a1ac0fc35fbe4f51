"""Options reach losses by name; one that nobody takes is found."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from posttrain.losses.named_options import call, options_taken, unused_options
from posttrain.losses.preference import PREFERENCE_LOSSES


@dataclass
class Config:
    beta: float = 0.1
    label_smoothing: float = 0.2
    unrelated: str = "x"


def by_keyword(pair, *, beta, label_smoothing=0.5):
    return pair, beta, label_smoothing


def by_position(pair, beta):
    return pair, beta


def with_own_default(pair, *, sharpness=3):
    return pair, sharpness


def two_inputs(batch, logps, beta):
    return batch, logps, beta


def test_options_come_from_a_dataclass_or_a_mapping():
    assert call(by_keyword, "pair", options=Config()) == ("pair", 0.1, 0.2)
    assert call(by_keyword, "pair", options={"beta": 7}) == ("pair", 7, 0.5)
    assert call(by_position, "pair", options=Config(beta=3)) == ("pair", 3)
    assert call(two_inputs, "batch", "logps", options=Config()) == ("batch", "logps", 0.1)
    assert call(with_own_default, "pair", options=Config()) == ("pair", 3)


def test_a_missing_option_is_named():
    with pytest.raises(TypeError, match=r"by_position takes an option 'beta', which the mapping with \['gamma'\]"):
        call(by_position, "pair", options={"gamma": 1})


def test_options_taken():
    assert options_taken(by_keyword) == {"beta", "label_smoothing"}
    assert options_taken(two_inputs, inputs=2) == {"beta"}
    assert {name: options_taken(loss.function) for name, loss in PREFERENCE_LOSSES.items()} == {
        "sigmoid": {"beta"},
        "hinge": {"beta"},
        "ipo": {"beta"},
        "exo_pair": {"beta", "label_smoothing"},
        "nca_pair": {"beta"},
        "robust": {"beta", "label_smoothing"},
        "bco_pair": {"beta"},
        "sppo_hard": {"beta"},
        "aot": {"beta", "label_smoothing"},
        "aot_unpaired": {"beta", "label_smoothing"},
        "apo_zero": {"beta"},
        "apo_down": {"beta"},
        "discopop": {"beta", "discopop_tau"},
        "sft": set(),
        "sigmoid_norm": {"beta"},
    }


def test_unused_options():
    options = ["beta", "label_smoothing", "discopop_tau"]

    def unused(names, set_by_user):
        return unused_options([PREFERENCE_LOSSES[name].function for name in names], options, set_by_user)

    assert unused(["sigmoid"], ["beta", "label_smoothing", "learning_rate"]) == ["label_smoothing"]
    assert unused(["sigmoid", "robust"], ["beta", "label_smoothing"]) == []
    assert unused(["sft"], ["discopop_tau", "beta"]) == ["beta", "discopop_tau"]
    assert unused([], ["beta"]) == ["beta"]
