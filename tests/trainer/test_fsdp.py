"""FSDP2 on two processes ends where one process without it does; what it saves is whole, and resumes exactly."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from posttrain import SFTConfig, SFTTrainer
from posttrain.models.sharding import call_inside, is_sharded_module, plain_class
from posttrain.trainer.checkpoints import checkpoint as files
from posttrain.trainer.checkpoints.sharding import set_up_fsdp
from tests import tiny
from tests.forked import wait_for_group
from tests.trainer.fsdp_cells import CELLS, STEPS, assert_ends_alike, assert_resumed_exactly, final, start

pytestmark = pytest.mark.slow  # whole runs of several processes, or with every fault

TRIED = [name for name, cell in CELLS.items() if not cell.whole]


@pytest.fixture(scope="module")
def homes(tmp_path_factory):
    """(of one process, of two): where the cells have left their runs."""
    home = tmp_path_factory.mktemp("fsdp")
    for group in [start(1, home / "one", TRIED), start(2, home / "two", TRIED)]:
        wait_for_group(group)
    return home / "one", home / "two"


@pytest.mark.parametrize("name", [name for name in TRIED if not CELLS[name].fault])
def test_ends_where_one_process_does(name, homes):
    assert_ends_alike(name, *homes)


@pytest.mark.parametrize("name", [name for name, cell in CELLS.items() if cell.method == "ppo"])
def test_a_critic_is_saved_whole_and_apart(name, homes):
    places = (homes[0] / name, homes[1] / name, homes[1] / f"{name}-resumed")
    one, two, resumed = (load_file(place / "final" / "value_head.safetensors") for place in places)
    assert one["weight"].abs().sum() > 0
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(resumed[key], tensor) for key, tensor in two.items())
    assert not [key for key in final(homes[1], name) if "critic" in key]


@pytest.mark.parametrize("name", [name for name, cell in CELLS.items() if cell.resumes])
def test_resumes_exactly(name, homes):
    assert_resumed_exactly(name, homes[1], 2)


def test_checkpoints_are_ours_and_verify(homes):
    _, two = homes
    for folder in files.checkpoints(two / "sft"):
        files.verify(folder)
        names = {path.suffix for path in folder.iterdir()}
        assert not names & {".bin", ".pt", ".pth"}, "a pickle"
    first, second = (
        load_file(two / "sft" / f"checkpoint-{STEPS}" / f"optimizer_{rank}.safetensors") for rank in (0, 1)
    )
    elements = sum(
        tensor.numel() for tensor in load_file(two / "sft" / f"checkpoint-{STEPS}" / "model.safetensors").values()
    )
    masters = [sum(t.numel() for key, t in part.items() if "masters" in key) for part in (first, second)]
    assert sum(masters) == elements
    assert max(masters) < 0.6 * elements


@pytest.mark.parametrize(
    ("name", "auto"), [("sft-launched", AutoModelForCausalLM), ("reward", AutoModelForSequenceClassification)]
)
def test_what_is_saved_loads(name, auto, homes):
    loaded = auto.from_pretrained(homes[1] / name / "final")
    for key, tensor in final(homes[0], name).items():
        torch.testing.assert_close(loaded.state_dict()[key], tensor, rtol=1e-5, atol=1e-6)
    architectures = json.loads((homes[1] / name / "final" / "config.json").read_text())["architectures"]
    assert architectures == [auto.from_pretrained(homes[0] / name / "final").config.architectures[0]]


def test_a_step_that_is_not_finite_on_one_process_is_taken_by_none(homes):
    _, two = homes
    skipped = (two / "sft-nonfinite" / "skipped_steps.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in skipped] == [2]
    assert all(torch.isfinite(tensor).all() for tensor in final(two, "sft-nonfinite").values())


# ---- what is refused ---------------------------------------------------------------------------------------------------


def test_fsdp_where_accelerate_would_train_whole_copies_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    assert args.sharding == "fsdp"
    with pytest.raises(ValueError, match="accelerate does not shard here"):
        SFTTrainer(tiny.causal_lm(), args, processing_class=tiny.tokenizer())


def test_the_first_version_of_fsdp_is_refused():
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        set_up_fsdp(SimpleNamespace(), accelerator, is_enabled=True)


def test_masters_and_log_probs_stay_float32_where_layers_are_bfloat16():
    plugin = SimpleNamespace(
        fsdp_version=2,
        activation_checkpointing=True,
        activation_checkpointing_offload=False,
        mixed_precision_policy="accelerate's",
    )
    gradients = SimpleNamespace(plugin_kwargs={})
    config = SimpleNamespace(gradient_accumulation_kwargs=None)
    args = SimpleNamespace(bf16=True, activation_offloading=None, accelerator_config=config)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin), gradient_state=gradients)
    set_up_fsdp(args, accelerator, is_enabled=True)
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (torch.bfloat16, torch.float32, None)
    assert gradients.plugin_kwargs == {"sync_each_batch": True}
    assert args.gradient_checkpointing  # by transformers, without accelerate's wrappers
    assert not plugin.activation_checkpointing


def test_a_function_in_the_place_of_a_forward_sees_hooks_once_and_leaves_no_trace():
    layer = torch.nn.Linear(3, 2)
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append("gathered"))
    rows = torch.randn(4, 3)
    found = call_inside(layer, rows, lambda given, forward: torch.cat([forward(row[None]) for row in given]))
    torch.testing.assert_close(found, torch.nn.functional.linear(rows, layer.weight, layer.bias))
    assert calls == ["gathered"]
    assert "forward" not in layer.__dict__
    assert plain_class(layer) is torch.nn.Linear
    assert not is_sharded_module(layer)
