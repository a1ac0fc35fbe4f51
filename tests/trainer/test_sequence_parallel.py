"""Processes that share the tokens of each row have the gradient of one process that computes all of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import ParallelismConfig
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors.torch import load_file

from posttrain import RewardConfig, RewardTrainer, Sample
from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.data.collate import Collator
from posttrain.models.attention.sequence_parallel import repeats
from posttrain.models.load.model import LoadOptions, _refuse_shared_rows, load_model
from posttrain.rollout.schedule import Schedule
from posttrain.trainer.options.processes import lay_out_processes
from scripts.families import small_model
from tests import tiny
from tests.forked import wait_for_group
from tests.trainer.sequence_parallel_cells import CELLS, SAVED, STEPS, start

QUICK = ("sft", "dpo", "grpo")
SHARING = {"2": (2, 2), "2x2": (4, 2), "4": (4, 4)}
"""Processes, of which so many share a row."""
IN_TURN = [
    pytest.param(sharing, name, id=f"{sharing}-{name}", marks=[] if row % len(SHARING) == column else pytest.mark.trust)
    for column, sharing in enumerate(SHARING)
    for row, name in enumerate(CELLS)
]
"""CI tries each cell in one way of sharing, `make trust` in all."""
COMPARED = (
    "loss", "eval_loss", "grad_norm", "num_tokens", "entropy", "eval_entropy", "reward", "eval_reward", "kl", "rewards/margins",
    "mean_token_accuracy", "completions/mean_length",
)  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """(of one process, of two that share every row)"""
    home = tmp_path_factory.mktemp("shared-rows")
    groups = [start(1, 1, home / "one", list(QUICK)), start(2, 2, home / "two", list(QUICK))]
    for group in groups:
        wait_for_group(group)
    return home / "one", home / "two"


@pytest.fixture(scope="module")
def homes(request, tmp_path_factory):
    """Where the cells that this session tries have left their runs: one launch for each way of sharing, when it is asked for."""
    asked = [item for item in request.session.items if item.path == request.path and "both" in item.fixturenames]
    cells = [item.callspec.params for item in asked]

    @functools.cache
    def of(sharing: str | None) -> Path:
        home = tmp_path_factory.mktemp("shared-rows") / (sharing or "one")
        names = [
            name for name in CELLS if any(cell["name"] == name and sharing in (None, cell["sharing"]) for cell in cells)
        ]
        wait_for_group(start(*SHARING.get(sharing, (1, 1)), home, names), 1200)
        return home

    return of


@pytest.fixture
def both(homes, sharing):
    """(of one process, of several)"""
    return homes(None), homes(sharing)


def tensors(file: Path) -> dict[str, torch.Tensor]:
    if not file.exists():
        home = next(parent for parent in file.parents if (parent / "rank-0.log").exists())
        errors = [path.read_text() for path in home.glob("*.error")]
        pytest.fail("\n".join(errors) or (home / "rank-0.log").read_text()[-3000:])
    return load_file(file)


def logged(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_same_gradients(alone: Path, together: Path) -> None:
    for step in range(STEPS):
        file = f"gradients/gradient-{step}.safetensors"
        one, other = tensors(alone / file), tensors(together / file)
        assert one.keys() == other.keys()
        assert max(gradient.abs().max() for gradient in one.values()) > 1e-3
        for key, gradient in one.items():
            torch.testing.assert_close(
                other[key], gradient, rtol=1e-6, atol=1e-8, msg=lambda m, key=f"{step} {key}": f"{key}: {m}"
            )


def assert_same_log(alone: Path, together: Path) -> None:
    seen = set()
    for line, other in zip(logged(alone), logged(together), strict=True):
        for key in {*COMPARED} & line.keys():
            seen.add(key)
            assert other[key] == pytest.approx(line[key], rel=1e-5, abs=1e-7), key
    assert {"loss", "grad_norm", "num_tokens"} <= seen


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_two_processes_have_the_gradient_of_one(name, quick):
    assert_same_gradients(*(home / name for home in quick))
    assert_same_log(*(home / name for home in quick))


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_each_of_two_processes_keeps_half_of_the_activations(name, quick):
    one, two = (json.loads((home / name / "kept_bytes.json").read_text()) for home in quick)
    for alone, shared in zip(one, two, strict=True):
        assert shared < 0.6 * alone  # both count and weigh all trained tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in QUICK if CELLS[name].resumes])
def test_two_processes_resume_exactly(name, quick):
    assert_resumed(quick[1], name)


def assert_resumed(home: Path, name: str) -> None:
    whole, resumed = (
        tensors(next((home / run / "final").glob("*model.safetensors"))) for run in (name, f"{name}-resumed")
    )
    assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())
    lines = [[line for line in logged(home / run) if "loss" in line] for run in (name, f"{name}-resumed")]
    for line, other in zip(lines[0][SAVED:], lines[1], strict=True):
        for key in COMPARED:
            assert other.get(key) == line.get(key), key


@pytest.mark.slow
@pytest.mark.parametrize(("sharing", "name"), IN_TURN)
def test_gradients_are_those_of_one_process(sharing, name, both):
    one, several = both
    assert_same_gradients(one / name, several / name)
    assert_same_log(one / name, several / name)
    if CELLS[name].resumes:
        assert_resumed(several, name)


# ---- the arithmetic ------------------------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 8))
def test_key_heads_are_repeated_no_more_than_they_must_be(key_heads, shared_by, size):
    heads = key_heads * shared_by
    assume(heads % size == 0)
    times = repeats(heads, key_heads, size)
    repeated = np.repeat(np.arange(key_heads), times)
    for own_heads, own_keys in zip(np.split(np.arange(heads), size), np.split(repeated, size)):
        read = np.repeat(own_keys, len(own_heads) // len(own_keys))  # as grouped attention does
        assert (read == own_heads // shared_by).all()
    assert times == 1 or key_heads % size


@given(st.lists(st.integers(2, 12), min_size=1, max_size=5), st.integers(2, 5), st.sampled_from([RAGGED, SHARED]))
def test_each_trained_token_is_asked_on_one_process(lengths, size, layout):
    samples = [Sample(np.arange(n) % 7, np.arange(n) >= 2) for n in lengths]
    batches = [Collator(("text",), 0, layout, part=(rank, size))([tuple(samples)]) for rank in range(size)]
    width = batches[0].input_ids.shape[1]
    assert width % size == 0
    assert batches[0].cu_segments[-1] == width
    asked = torch.cat([batch.part.asked for batch in batches])
    assert sorted(asked.tolist()) == list(range(batches[0].num_trained))
    for batch in batches:
        here = batch.positions[batch.part.asked]
        run = batch.part.run(width)
        assert ((run.start <= here) & (here < run.stop)).all()


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(2, 4), st.booleans())
def test_samples_that_processes_write_in_parts_come_together_in_order(batch, readers, accumulation, micro, size, whole):
    micro = micro * accumulation if whole else micro
    schedule = Schedule(1, batch, readers, accumulation, micro, 1)
    try:
        written = schedule.written_by(size)
    except ValueError:
        assume(False)
    assert written.samples == schedule.samples
    for reader in range(readers):
        parts = [[(place,) for place in written.places(reader * size + part)] for part in range(size)]
        steps = written.micro_batches
        each = len(parts[0]) // steps
        together = [
            unit[0] for step in range(steps) for part in parts for unit in part[step * each : (step + 1) * each]
        ]
        assert together == schedule.places(reader)


# ---- what is refused -----------------------------------------------------------------------------------------------------

OPTIONS = {
    "world_size": 4, "sharding": None, "dp_replicate_size": 1, "sequence_parallel_size": 2, "parallelism_config": None,
    "padding_free": None, "neftune_noise_alpha": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"world_size": 3}, "all processes must be in such groups"),
        ({"world_size": 1}, "with 1 process: "),
        ({"sequence_parallel_size": -2}, "`sequence_parallel_size` is -2"),
        ({"sharding": "deepspeed"}, "under DeepSpeed leave it at 1"),
        ({"padding_free": False}, "need padded ones"),
        ({"neftune_noise_alpha": 5.0}, "need padded ones"),
        ({"async_rollouts": True}, "not known to `async_rollouts`"),
        ({"parallelism_config": ParallelismConfig(sp_size=4)}, "`sequence_parallel_size` is 2, and .* has 4"),
    ],
)
def test_options_that_do_not_go_together_are_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        lay_out_processes(SimpleNamespace(**OPTIONS | changes))


def test_the_size_that_accelerate_was_given_is_ours():
    asked = SimpleNamespace(
        **OPTIONS | {"sequence_parallel_size": 1, "parallelism_config": ParallelismConfig(sp_size=4)}
    )
    lay_out_processes(asked)
    assert (asked.sequence_parallel_size, asked.parallelism_config) == (4, None)


def test_methods_that_ask_about_whole_rows_are_refused(tmp_path):
    args = RewardConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    args.sequence_parallel_size = 2
    with pytest.raises(ValueError, match="RewardTrainer trains on whole rows"):
        RewardTrainer(tiny.reward_model(), args, processing_class=tiny.tokenizer())


@pytest.mark.parametrize(
    ("layout", "sentence"), [(PADDED, "Batches are padded"), (RAGGED, "4 attention heads, which 3 proc")]
)
def test_models_whose_rows_cannot_be_cut_are_refused(layout, sentence):
    model = tiny.causal_lm()
    with pytest.raises(ValueError, match=f"`sequence_parallel_size` cannot be honoured for tiny: .*{sentence}"):
        _refuse_shared_rows(model, model, LoadOptions(row_part=(0, 3)), layout, 0.0, "tiny", [])


def test_a_loss_of_routers_is_refused_with_what_switches_it_off():
    model = tiny.causal_lm(family="qwen3_moe")
    with pytest.raises(ValueError, match="router_aux_loss_coef=0"):
        _refuse_shared_rows(model, model, LoadOptions(row_part=(0, 2)), RAGGED, 0.1, "tiny", [])


def test_recurrences_read_whole_rows():
    model = small_model("lfm2")
    load_model(model, LoadOptions())
    with pytest.raises(
        ValueError, match="honoured for tiny: it has recurrences or convolutions, which read whole rows"
    ):
        _refuse_shared_rows(model, model, LoadOptions(row_part=(0, 2)), RAGGED, 0.0, "tiny", [])
