"""When weights are sent again, how far apart two sides may be, and what happens where one of them breaks off."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain.data.vision.families import FAMILIES
from posttrain.models.load.weight_export import exported_adapter, exported_weights
from posttrain.rollout.engines.joint_export import JointExport
from posttrain.rollout.engines.protocol import SamplingParams
from posttrain.rollout.engines.vllm import colocate
from posttrain.rollout.engines.vllm.pictures import Pictures
from posttrain.rollout.engines.vllm.server_engine import ServedVLLM
from posttrain.rollout.engines.vllm.sync_probe import BOUNDS, WeightsDiffer, scored_by
from posttrain.rollout.engines.weight_sync import SECONDS, WeightSync
from tests import tiny
from tests.rollout.served import FakeClient


class SleepingVLLM:
    """What a VLLMEngine on a GPU does, without vLLM: it loads, compares and sleeps; `step` gives what `moves` says."""

    CAN: ClassVar = {"weights": True, "adapters": True, "images": True, "new_towers": True}

    def __init__(self, options):
        self.info = SimpleNamespace(capabilities=dict(self.CAN), notes=("It is an old one.",), context_length=512)
        self.calls, self.aborted = [], []

    def load_weights(self, tensors):
        self.calls.append("load")
        list(tensors)

    def reset_prefix_cache(self, running, images):
        self.calls.append(f"forget images: {images}")
        return True

    def sleep(self, level):
        self.calls.append("sleep")

    def wake(self, parts):
        self.calls.append(f"wake {parts[0]}")

    def add(self, job, adapter):
        self.calls.append("add")

    def step(self):
        return []

    def abort(self, names):
        self.aborted += names

    def in_workers(self, function, tensors, at_most, leaves_out):
        list(tensors)
        return [[]]

    def close(self):
        self.calls.append("close")


@pytest.fixture
def colocated(monkeypatch):
    """Makes an engine over SleepingVLLM for a model."""
    monkeypatch.setattr(colocate, "VLLMEngine", SleepingVLLM)
    made = []

    def make(model, pictures=None, **options):
        made.append(colocate.ColocatedVLLM(model, options=colocate.ColocateOptions(**options), pictures=pictures))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize(("level", "loads"), [(0, 1), (1, 1), (2, 3)])
def test_weights_that_sleep_has_dropped_are_sent_again_at_the_same_step(colocated, level, loads):
    model = tiny.causal_lm()
    engine = colocated(model, sleep_level=level)
    engine.score = scored_by(model)
    sync, took = WeightSync(engine, model), []
    for _ in range(3):  # an evaluation in two chunks and a window of training, say
        took.append(sync.ready(1))
        with engine.session(SamplingParams(max_tokens=4)):
            assert engine.holds_weights
        engine.sleep()
        assert engine.holds_weights == (level < 2)
    assert engine.engine.calls.count("load") == loads
    assert [SECONDS in one for one in took] == [True, loads > 1, loads > 1]


def test_a_probe_that_vllm_does_not_answer_is_a_sentence(colocated):
    model = tiny.causal_lm()
    engine = colocated(model, stall_seconds=0.2)
    engine.load_weights(None, 1)
    with pytest.raises(RuntimeError, match="no token for 0 s with 2 prompts in flight"):
        engine.score([[1, 2, 3], [4, 5, 6]])
    assert len(engine.engine.aborted) == 2


# ---- images ------------------------------------------------------------------------------------------------------------------


def pictures():
    return Pictures(SimpleNamespace(family=replace(FAMILIES["llava"], written_id=3, forbidden_ids=(3,))))


@pytest.mark.parametrize("frozen", [True, False])
def test_encoded_images_are_forgotten_after_an_update_unless_tower_and_projector_are_frozen(colocated, frozen):
    engine = colocated(tiny.causal_lm(), pictures(), images=1, keeps_images=frozen)
    engine.load_weights(None, 1)
    assert engine.engine.calls == ["load", f"forget images: {not frozen}"]


@pytest.mark.parametrize(("lacks", "frozen", "refused"), [
    ("new_towers", False, True), ("new_towers", True, False), ("images", True, True), ("images", False, True),
])  # fmt: skip
def test_a_vllm_that_cannot_forget_images_is_refused_where_the_tower_is_trained(
    colocated, monkeypatch, lacks, frozen, refused
):
    monkeypatch.setattr(SleepingVLLM, "CAN", SleepingVLLM.CAN | {lacks: False})
    with pytest.raises(ValueError, match=r"It is an old one.*`freeze_vision_tower`") if refused else nullcontext():
        colocated(tiny.causal_lm(), pictures(), images=1, keeps_images=frozen)


def test_layers_of_a_tower_that_vllm_does_not_have_are_no_difference(colocated):
    engine = colocated(tiny.causal_lm(), pictures(), images=1)
    assert engine._may_be_left_out("vision_tower.vision_model.encoder.layers.23.mlp.fc1.weight")
    assert not engine._may_be_left_out("language_model.model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(("gap", "differs"), [(1e-5, False), (0.02, True), (math.nan, False)])
def test_an_engine_that_sees_other_pixels_is_found_out(gap, differs):
    """Its weights and its log-probs after texts are the trainer's. NaN: it wrote nothing that could be compared."""
    model = rough_model(torch.float32)
    sync = WeightSync(Rounded(model, torch.float32), model, image_gap=lambda engine: gap)
    with pytest.raises(WeightsDiffer, match="after an image differ") if differs else nullcontext():
        assert sync.ready(1)["sync/logp_difference/images"] == pytest.approx(gap, nan_ok=True)


# ---- the bound ---------------------------------------------------------------------------------------------------------------


class Rounded:
    """An engine that holds the trainer's weights, rounded to its own dtype."""

    is_foreign, version = True, 1

    def __init__(self, model, dtype):
        self.dtype, self.vocabulary = dtype, model.config.vocab_size
        self.model = copy.deepcopy(model).to(dtype)

    def load_weights(self, weights, version): ...

    def wake(self): ...

    def probed(self, sequences):
        return [(scored_by(self.model)(sequences), lambda at_most: [])]


def rough_model(dtype):
    return tiny.causal_lm(initializer_range=0.1).to(dtype).eval()


@pytest.mark.parametrize(
    ("own", "engines", "expected"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.float16),
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_the_bound_is_that_of_the_coarser_side(own, engines, expected):
    model = rough_model(own)
    engine = Rounded(model, engines) if engines in BOUNDS else SimpleNamespace(dtype=engines, is_foreign=True)
    sync = WeightSync(engine, model)
    assert sync._coarsest_dtype() == expected
    if engines in BOUNDS:
        sync.ready(1)
        assert sync._probe.bound == BOUNDS[expected]


def test_rounding_of_a_bfloat16_server_is_no_difference_and_a_bound_that_was_set_counts():
    model = rough_model(torch.float32)
    found = WeightSync(Rounded(model, torch.bfloat16), model).ready(1)
    assert BOUNDS[torch.float32] < found["sync/logp_difference/mean"] < BOUNDS[torch.bfloat16]
    with pytest.raises(WeightsDiffer, match=r"0\.001 would be rounding"):
        WeightSync(Rounded(model, torch.bfloat16), model, tolerance=1e-3).ready(1)


@pytest.mark.parametrize(
    ("named", "dtype"),
    [
        (["float32", "float32"], torch.float32),
        (["float32", "float16"], torch.float16),
        (["float32", None], torch.bfloat16),
    ],
)
def test_the_dtype_of_servers_is_the_coarsest_of_theirs(named, dtype):
    clients = [FakeClient(f"fake-{number}") for number in range(2)]
    for client, name in zip(clients, named):
        client.about = {"dtype": name}
    with ServedVLLM(clients) as engine:
        assert engine.dtype == dtype


# ---- sharded weights ---------------------------------------------------------------------------------------------------------


class HasEnough:
    """An engine of a process's own that breaks off its comparison."""

    def __init__(self, after):
        self.after, self.seen = after, []

    def differing_tensors(self, at_most, weights=None):
        for number, (name, _) in enumerate(weights):
            if number == self.after:
                raise MemoryError("no room to compare")
            self.seen.append(name)
        return []

    def probed(self, sequences):
        return []


class CountedExport(JointExport):
    """Counts the tensors that are gathered."""

    def __init__(self, *given):
        super().__init__(*given)
        self.gathered = 0

    def _counted(self, tensors):
        for one in tensors:
            self.gathered += 1
            yield one

    def weights(self):
        self._walked = self._counted(super().weights())
        return self._walked

    def adapter(self):
        config, tensors = super().adapter()
        self._walked = self._counted(tensors)
        return config, self._walked


@pytest.mark.parametrize("by_adapter", [False, True])
@pytest.mark.parametrize("after", [0, 1, 10**6])
def test_a_comparison_that_breaks_off_on_one_process_is_walked_to_its_end(by_adapter, after, monkeypatch):
    """Every tensor is gathered by all processes: one that stops early would leave the others waiting."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    model = tiny.causal_lm()
    if by_adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
    joint, engine = CountedExport(model, None, by_adapter), HasEnough(after)
    if after < 10**6:
        with pytest.raises(MemoryError, match="no room to compare"):
            joint.probed(engine, [])
    else:
        assert joint.probed(engine, []) == []
    everything = exported_adapter(model)[1] if by_adapter else exported_weights(model)
    assert joint.gathered == len(list(everything))
