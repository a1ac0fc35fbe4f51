"""8-bit moments: the grid, the quantiser's error, AdamW's results, exact resuming, two bytes a weight."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from posttrain import SFTConfig, SFTTrainer
from posttrain.trainer.checkpoints.checkpoint import load_tree, save_tree
from posttrain.trainer.step.adam8bit import (
    BLOCK,
    SIGNED_BITS,
    SMALLEST,
    UNSIGNED_BITS,
    AdamW8bit,
    grid,
    place_on_grid,
    quantised,
    restored,
)
from posttrain.trainer.step.masters import MasterWeights, SplitMaster
from posttrain.trainer.step.optimizer import FiniteSteps
from tests import tiny

BITS = (SIGNED_BITS, UNSIGNED_BITS)


# ---- the grid -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", BITS)
def test_the_grid_ends_at_0_and_1_and_every_point_finds_itself(bits):
    points = grid(bits)
    assert len(points) == 2**bits
    assert points[0] == 0
    assert points[-1] == 1
    assert (points[1:] > points[:-1]).all()
    torch.testing.assert_close(place_on_grid(points, bits), torch.arange(2.0**bits), rtol=1e-5, atol=1e-4)


def test_spacing_is_at_most_a_seventieth_of_the_top_and_small_shares_are_kept():
    assert (grid(SIGNED_BITS).diff() <= 0.9 / 64 + 1e-6).all()
    assert (grid(UNSIGNED_BITS).diff() <= 0.9 / 128 + 1e-6).all()
    assert grid(SIGNED_BITS)[1] == pytest.approx(1e-6)
    assert grid(UNSIGNED_BITS)[1] == pytest.approx(1e-7)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_round_trip_error_is_within_half_a_step_of_the_grid(bits, spread):
    torch.manual_seed(0)
    values = torch.randn(50, BLOCK) * (spread * torch.randn(50, BLOCK)).exp()
    values = values if bits == SIGNED_BITS else values.square()
    codes, largest = quantised(values, bits)
    assert codes.dtype == (torch.int8 if bits == SIGNED_BITS else torch.uint8)
    back = restored(codes, largest, grid(bits))
    points = grid(bits)
    share = values.abs() / largest[:, None]
    above = torch.searchsorted(points, share.contiguous()).clamp(1, len(points) - 1)
    step = (points[above] - points[above - 1]) * largest[:, None]
    error = (back - values).abs()
    is_lifted = (bits == UNSIGNED_BITS) & (share < points[1])
    assert (error <= 0.5001 * step)[~is_lifted].all()
    assert (error <= step)[is_lifted].all()
    assert (back.sign() == values.sign())[share > points[1]].all()
    assert ((back - values).norm() / values.norm()) < 0.012


def test_rounding_by_chance_has_the_right_mean_and_never_gives_0_for_something():
    torch.manual_seed(0)
    values = torch.rand(1, BLOCK) ** 4
    values[0, 0], values[0, 1], values[0, 2] = 1, 1e-9, 0
    total = torch.zeros_like(values)
    for _ in range(1500):
        codes, largest = quantised(values, UNSIGNED_BITS, torch.rand(values.shape))
        assert codes[0, 1] == 1
        assert codes[0, 2] == 0
        total += restored(codes, largest, grid(UNSIGNED_BITS))
    mean = total / 1500
    large = values > 1e-5
    torch.testing.assert_close(mean[large], values[large], rtol=0.02, atol=1e-6)


def test_blocks_of_zeros_stay_zeros():
    codes, largest = quantised(torch.zeros(2, BLOCK), SIGNED_BITS)
    assert not codes.any()
    assert not largest.any()
    assert not restored(codes, largest, grid(SIGNED_BITS)).any()


# ---- the optimizer ------------------------------------------------------------------------------------------------------


def regression(seed=0, noise=0.1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 32))
    x, truth = torch.randn(512, 64), torch.randn(64, 32)
    return model, x, torch.tanh(x @ truth / 4) + noise * torch.randn(512, 32)


def train(make, steps=200, batch=64, model_and_data=None):
    model, x, y = model_and_data or regression()
    optimizer = make(model.parameters())
    order = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (batch,), generator=order)
        optimizer.zero_grad()
        (model(x[rows]) - y[rows]).square().mean().backward()
        optimizer.step()
    return (model(x) - y).square().mean().item(), model, optimizer


SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.01}


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.9, 0.999)])
def test_200_steps_end_within_2_percent_of_adamw(betas):
    settings = {**SETTINGS, "betas": betas}
    expected, _, _ = train(lambda p: torch.optim.AdamW(p, **settings))
    found, _, _ = train(lambda p: AdamW8bit(p, **settings))
    start = train(lambda p: torch.optim.SGD(p, lr=0.0), steps=1)[0]
    assert expected < 0.2 * start
    assert abs(found - expected) <= 0.02 * expected


def test_v_follows_a_gradient_that_changes_scale():
    """Rounded to the nearest, v = 1 would never leave its code under beta2 = 0.995; after 600 steps it must be near 4."""
    weight = nn.Parameter(torch.zeros(SMALLEST))
    optimizer = AdamW8bit([weight], lr=0.0, betas=(0.9, 0.995))
    for scale in (1.0,) * 400 + (2.0,) * 600:
        weight.grad = torch.full_like(weight, scale)
        weight.grad[::BLOCK] = 3.0  # another value sets the block's largest
        optimizer.step()
    state = optimizer.state[weight]
    v = restored(state["v"].view(-1, BLOCK), state["v_largest"], grid(UNSIGNED_BITS))
    expected = (1 - 0.995**400) * 0.995**600 + 4 * (1 - 0.995**600)
    assert v[:, 1:].mean() == pytest.approx(expected, rel=0.03)


def test_one_step_from_rest_is_adamws_exactly():
    """Moments start at 0: nothing is rounded before the first update."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(70, 100)), nn.Parameter(torch.randn(50))]
    others = copy.deepcopy(weights)
    for a, b in zip(weights, others):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    AdamW8bit(weights, **SETTINGS).step()
    torch.optim.AdamW(others, **SETTINGS).step()
    for a, b in zip(weights, others):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_moments_take_two_bytes_a_weight_and_small_tensors_keep_float32():
    large, small = nn.Parameter(torch.randn(1000, 300)), nn.Parameter(torch.randn(SMALLEST - 1))
    optimizer = AdamW8bit([large, small])
    for parameter in (large, small):
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    used = sum(t.numel() * t.element_size() for name, t in optimizer.state[large].items() if name != "step")
    assert used / large.numel() == pytest.approx(2 + 8 / BLOCK, rel=1e-3)
    assert {name: t.dtype for name, t in optimizer.state[small].items()} == dict.fromkeys(
        ("step", "m", "v"), torch.float32
    )


def test_resuming_is_bit_exact(tmp_path):
    whole = train(lambda p: AdamW8bit(p, **SETTINGS), steps=30)[1:]
    half, x, y = regression()
    _, half, optimizer = train(lambda p: AdamW8bit(p, **SETTINGS), steps=15, model_and_data=(half, x, y))
    save_tree(tmp_path / "optimizer", optimizer.state_dict())
    resumed = AdamW8bit(half.parameters(), **{**SETTINGS, "lr": 1.0})
    resumed.load_state_dict(load_tree(tmp_path / "optimizer"))
    order = torch.Generator().manual_seed(1)
    for step in range(30):
        rows = torch.randint(0, len(x), (64,), generator=order)
        if step >= 15:
            resumed.zero_grad()
            (half(x[rows]) - y[rows]).square().mean().backward()
            resumed.step()
    for a, b in zip(half.parameters(), whole[0].parameters()):
        assert torch.equal(a, b)
    for mine, other in zip(half.parameters(), whole[0].parameters()):
        a, b = resumed.state[mine], whole[1].state[other]
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype
            assert torch.equal(a[name], b[name])


def test_a_step_with_found_inf_changes_nothing():
    model, x, y = regression()
    _, model, optimizer = train(lambda p: AdamW8bit(p, **SETTINGS), steps=3, model_and_data=(model, x, y))
    finite = FiniteSteps(optimizer)
    assert finite.on_device
    for bad in (True, False):
        before = copy.deepcopy((list(model.parameters()), [dict(s) for s in optimizer.state.values()]))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        next(model.parameters()).grad[0, 0] = float("nan") if bad else 0.0
        finite.clip(1.0, torch.tensor(0.0), None)
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(model.parameters(), before[0])]
        same += [torch.equal(s[n], o[n]) for s, o in zip(optimizer.state.values(), before[1]) for n in s]
        assert all(same) if bad else not any(same[:4])
    assert [skipped for _, skipped in finite.finished()] == [True, False]


def test_bfloat16_weights_learn_through_float32_masters():
    weight = nn.Parameter(torch.ones(SMALLEST, dtype=torch.bfloat16))
    optimizer = AdamW8bit([weight], lr=1e-5, weight_decay=0.0)
    masters = MasterWeights(optimizer)
    for _ in range(800):
        (weight.float().sum()).backward()
        optimizer.step()
    (master,) = masters.saved()
    assert master.mean() == pytest.approx(1 - 800e-5, abs=2e-4)
    assert (weight < 1).all()


def test_a_gradient_scaler_is_honoured():
    weight = nn.Parameter(torch.randn(SMALLEST))
    other = nn.Parameter(weight.detach().clone())
    gradient = torch.randn(SMALLEST)
    weight.grad, other.grad = gradient * 1024, gradient.clone()
    scaled, plain = AdamW8bit([weight]), AdamW8bit([other])
    scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    scaled.step()
    plain.step()
    torch.testing.assert_close(weight, other)


def test_strided_and_sharded_weights_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        AdamW8bit([nn.Parameter(torch.randn(100, 100).T)])
    weight = nn.Parameter(torch.randn(10))
    weight.ds_id = 0
    with pytest.raises(ValueError, match="adamw_bnb_8bit"):
        AdamW8bit([weight])


def sft(tmp_path, **options):
    settings = {"max_steps": 6, "save_steps": 3, "report_to": "none", "use_cpu": True, "learning_rate": 1e-2, **options}
    return SFTTrainer(
        tiny.causal_lm(hidden_size=64, intermediate_size=128),
        SFTConfig(output_dir=str(tmp_path), **settings),
        train_dataset=Dataset.from_list(tiny.chats(16)),
        processing_class=tiny.tokenizer(),
    )


def test_the_option_chooses_it_and_a_run_resumes_bit_for_bit(tmp_path):
    whole = sft(tmp_path / "whole", optim="adamw_8bit")
    whole.train()
    inner = whole.optimizer.optimizer
    assert type(inner) is AdamW8bit
    assert inner.param_groups[0]["weight_decay"] == whole.args.weight_decay
    again = sft(tmp_path / "whole", optim="adamw_8bit")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    for a, b in zip(whole.model.parameters(), again.model.parameters()):
        assert torch.equal(a, b)


def test_arguments_of_bitsandbytes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="adamw_bnb_8bit"):
        sft(tmp_path, optim="adamw_8bit", optim_args="min_8bit_size=1").create_optimizer()


def test_bitsandbytes_keeps_its_own_name(tmp_path):
    pytest.importorskip("bitsandbytes")
    made = sft(tmp_path, optim="adamw_bnb_8bit")
    assert "bitsandbytes" in type(made.create_optimizer()).__module__


# ---- masters in two halves ----------------------------------------------------------------------------------------------


def split_of(values):
    low = nn.Parameter(torch.zeros(values.shape, dtype=torch.bfloat16))
    split = SplitMaster(low)
    split.take(values)
    return split


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_two_halves_are_the_same_bits(numbers):
    values = torch.tensor(numbers, dtype=torch.float32)
    split = split_of(values)
    assert torch.equal(split.joined().view(torch.int32), values.view(torch.int32))
    finite = torch.isfinite(values.bfloat16())
    # to the nearest, as torch rounds, but for the middle between two numbers
    apart = (split.low.detach().float() - values).abs() - (values.bfloat16().float() - values).abs()
    assert (apart[finite] == 0).all()


@pytest.mark.parametrize("accumulates", [False, True])
def test_two_halves_learn_as_a_master_does(accumulates):
    """The same gradients in bfloat16; masters, moments and counters are equal to the bit."""
    torch.manual_seed(0)
    start = [torch.randn(64, 100).bfloat16(), torch.randn(10).bfloat16()]
    split, whole = ([nn.Parameter(one.to(dtype)) for one in start] for dtype in (torch.bfloat16, torch.float32))
    optimizers = [AdamW8bit(weights, **SETTINGS) for weights in (split, whole)]
    masters = MasterWeights(optimizers[0], accumulates=accumulates)
    assert masters.folds == accumulates
    guards = [FiniteSteps(optimizers[0], masters=masters), FiniteSteps(optimizers[1])]
    for step in range(5):
        total = [torch.zeros_like(one) for one in whole]
        for _ in range(1 + accumulates):
            for low, added in zip(split, total):
                gradient = torch.randn(low.shape).bfloat16()
                (low * gradient).sum().backward()
                added += gradient.float()
        for one, gradient in zip(whole, total):
            one.grad = gradient
        loss = torch.tensor(float("nan") if step == 3 else 0.0)
        for guard in guards:
            guard.clip(0.5, loss, None)
            guard.optimizer.step()
        for one in whole:
            one.grad = None
    for saved, one in zip(masters.saved(), whole, strict=True):
        assert torch.equal(saved, one)
    for mine, other in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in other)
    assert all(low.grad is None for low in split)


def test_two_halves_take_and_give_what_a_checkpoint_has():
    values = [torch.randn(64, 100), torch.randn(10)]
    weights = [nn.Parameter(one.bfloat16()) for one in values]
    masters = MasterWeights(AdamW8bit(weights))
    masters.load(values)
    assert all(torch.equal(saved, one) for saved, one in zip(masters.saved(), values))
    assert all(torch.equal(weight, one.bfloat16()) for weight, one in zip(weights, values))
    masters.reload()
    assert all(torch.equal(saved, one.bfloat16().float()) for saved, one in zip(masters.saved(), values))


def test_a_run_in_bfloat16_resumes_bit_for_bit(tmp_path):
    def made(folder):
        args = SFTConfig(
            output_dir=str(folder), max_steps=6, save_steps=3, report_to="none", use_cpu=True, bf16=True,
            learning_rate=1e-3, optim="adamw_8bit",
        )  # fmt: skip
        model = tiny.causal_lm(hidden_size=64, intermediate_size=128).bfloat16()
        rows = Dataset.from_list(tiny.chats(16))
        return SFTTrainer(model, args, train_dataset=rows, processing_class=tiny.tokenizer())

    whole = made(tmp_path / "whole")
    whole.train()
    assert whole.guard.masters.split
    again = made(tmp_path / "whole")
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert all(torch.equal(a, b) for a, b in zip(whole.guard.masters.saved(), again.guard.masters.saved(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True))
