"""TrlParser reads the options of every config: their defaults, given or not, and kinds that argparse does not know."""

from __future__ import annotations

import dataclasses

import pytest

from posttrain import ModelConfig, ScriptArguments, TrlParser
from posttrain.core.options import default_of, is_ours
from posttrain.methods.table import METHODS

PARTS = {name: (method.config_class, ["--output_dir", "out"]) for name, method in METHODS.items()}
PARTS |= {"model": (ModelConfig, []), "script": (ScriptArguments, [])}


def parsed(name, *words):
    config, needed = PARTS[name]
    return TrlParser((config,)).parse_args_and_config([*needed, *words])[0]


def spelled(default):
    return [str(one) for one in default] if isinstance(default, list) else [str(default)]


@pytest.mark.parametrize("name", PARTS)
def test_no_arguments_are_the_defaults(name):
    config, _ = PARTS[name]
    found, made = parsed(name), config(**({"output_dir": "out"} if name in METHODS else {}))
    for field in [field for field in dataclasses.fields(config) if is_ours(field)]:
        assert getattr(found, field.name) == getattr(made, field.name), field.name


@pytest.mark.parametrize("name", PARTS)
def test_the_defaults_spelled_out_are_the_defaults(name):
    """Every option of ours that has a value by default, given back as words."""
    ours = [field for field in dataclasses.fields(PARTS[name][0]) if is_ours(field) and field.name != "output_dir"]
    given = [field for field in ours if default_of(field) not in (None, [], {})]
    words = [word for field in given for word in (f"--{field.name}", *spelled(default_of(field)))]
    found, plain = parsed(name, *words), parsed(name)
    assert len(given) >= (0 if name == "script" else 5)
    for field in given:
        assert getattr(found, field.name) == getattr(plain, field.name), field.name


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["batch"], "batch"), (["none"], "none"), (["False"], "none"), (["false"], "none"), (["True"], "group"), ([], "group"),
    ],
)  # fmt: skip
def test_scale_rewards_is_a_name_or_a_switch(words, wanted):
    assert parsed("grpo", "--scale_rewards", *words).scale_rewards == wanted


def test_scale_rewards_of_a_file(tmp_path):
    (tmp_path / "options.yaml").write_text("scale_rewards: false\n")
    assert parsed("grpo", "--config", str(tmp_path / "options.yaml")).scale_rewards == "none"


def test_an_unknown_name_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match=r"scale_rewards.*'median'.*group.*batch.*none"):
        parsed("grpo", "--scale_rewards", "median")


def test_other_kinds_that_argparse_does_not_know():
    assert parsed("rloo", "--reward_clip_range", "-1", "2.5").reward_clip_range == [-1.0, 2.5]
    with pytest.raises(ValueError, match=r"reward_clip_range.*\(low, high\)"):
        parsed("rloo", "--reward_clip_range", "2")
    vllm = ("--use_vllm", "--vllm_mode", "server", "--vllm_server_base_url")
    for urls in (["http://a:1", "http://b:2"], ["http://a:1"]):
        assert parsed("grpo", *vllm, *urls).vllm_server_base_url == urls


def test_parsing_leaves_the_configs_as_they_were():
    before = {field.name: field.type for field in dataclasses.fields(METHODS["grpo"].config_class)}
    parsed("grpo")
    parsed("grpo")
    assert {field.name: field.type for field in dataclasses.fields(METHODS["grpo"].config_class)} == before
