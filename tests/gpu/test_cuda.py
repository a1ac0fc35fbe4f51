"""What only a CUDA device can show. Skipped elsewhere; CI has no GPU, so these are run by hand on one:

python -m pytest tests/gpu
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen2Config, TrainerCallback

from posttrain import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    Sample,
    SFTConfig,
    SFTTrainer,
)
from posttrain.core.batch import RAGGED
from posttrain.data.collate import collate
from posttrain.models.attention.ragged import RAGGED_ATTENTION, install_ragged_attention
from posttrain.models.layers import fp8
from posttrain.models.layers.kernels import COMPILED, compile_layers, fastest_kernels
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.memory.fit import activation_cost
from posttrain.models.scoring.token_scores import score_tokens
from posttrain.trainer.step.master_adamw import MasterAdamW
from posttrain.trainer.step.masters import MasterWeights
from posttrain.trainer.step.optimizer import FiniteSteps
from tests import tiny
from tests.mixers import answers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE = {"hidden_size": 64, "intermediate_size": 128}  # heads of 16: torch's flash kernel wants multiples of 8


def model(dtype):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).to("cuda", dtype)


def units():
    rng = np.random.default_rng(0)
    return [(Sample(rng.integers(0, 4096, n), np.arange(n) > n // 3),) for n in rng.integers(16, 512, 8)]


@pytest.mark.parametrize(("dtype", "logps", "gradient"), [(torch.float32, 1e-4, 1e-5), (torch.bfloat16, 0.05, 0.03)])
def test_varlen_flash_and_every_other_way_give_the_float32_padded_answer(dtype, logps, gradient):
    found = {}
    for case_dtype in {torch.float32, dtype}:
        made = model(case_dtype)
        assert load_model(made, LoadOptions()).layout == "ragged"
        for layout in ("ragged", "padded"):
            for summed in (False, True):
                batch = collate(units(), ("text",), layout).to("cuda")
                made.zero_grad()
                scores = score_tokens(made, batch, summed=summed)
                (scores.nll_sum if summed else -scores.logps.sum()).div(batch.num_trained).backward()
                gradients = torch.cat([p.grad.float().flatten() for p in made.parameters()])
                found[case_dtype, layout, summed] = (scores.logps.float().detach(), gradients)
    truth = found[torch.float32, "padded", False]
    for layout in ("ragged", "padded"):
        for summed in (False, True):
            mine = found[dtype, layout, summed]
            assert (mine[0] - truth[0]).abs().max() < logps
            assert (mine[1] - truth[1]).norm() / truth[1].norm() < gradient


def pairs():
    rng = np.random.default_rng(0)
    made = []
    for row in range(6):
        prompt = rng.integers(0, 4096, int(rng.integers(1, 300)))
        prompts = (prompt, prompt[::-1]) if row == 3 else (prompt, prompt)  # one pair has nothing in common
        made.append(tuple(Sample.of_text(p, rng.integers(0, 4096, int(rng.integers(1, 200)))) for p in prompts))
    return made


@pytest.mark.parametrize(("dtype", "logps", "gradient"), [(torch.float32, 1e-4, 1e-5), (torch.bfloat16, 0.05, 0.03)])
def test_shared_prompts_give_the_float32_answer_of_repeated_ones(dtype, logps, gradient):
    found = {}
    for case_dtype, layout in ((torch.float32, "padded"), (dtype, "ragged"), (dtype, "shared")):
        made = model(case_dtype)
        assert load_model(made, LoadOptions(share_prefixes=True)).layout == "shared"
        batch = collate(pairs(), ("chosen", "rejected"), layout).to("cuda")
        scores = score_tokens(made, batch)
        weights = torch.linspace(-1, 1, batch.num_trained, device="cuda")
        (scores.logps * weights).sum().backward()
        gradients = torch.cat([p.grad.float().flatten() for p in made.parameters()])
        found[layout] = (scores.logps.float().detach(), gradients)
    truth = found["padded"]
    for layout in ("ragged", "shared"):
        assert (found[layout][0] - truth[0]).abs().max() < logps
        assert (found[layout][1] - truth[1]).norm() / truth[1].norm() < gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_logits_give_the_same_bits_as_computed_ones(dtype):
    """Triton writes slopes over the logits that were kept: a second backward of the same graph computes them."""
    made = model(dtype)
    load_model(made, LoadOptions())
    batch = collate(units(), ("text",)).to("cuda")
    factors = torch.linspace(-1, 1, batch.num_trained, device="cuda")

    def gradients(keep_logits):
        logps = score_tokens(made, batch, chunk_tokens=256, keep_logits=keep_logits).logps
        found = []
        for retain in (True, False):
            made.zero_grad()
            (logps * factors).sum().backward(retain_graph=retain)
            found.append(made.lm_head.weight.grad.clone())
        return found

    (computed, again), (kept, kept_again) = gradients(False), gradients(True)
    assert torch.equal(computed, kept)
    assert torch.equal(again, kept_again)


@pytest.mark.parametrize("accumulates", [False, True])
def test_one_pass_adamw_takes_the_steps_of_adamw_in_float64(accumulates):
    """bfloat16 weights, clipping, one skipped step; masters against AdamW on the same (rounded) gradients in float64."""
    torch.manual_seed(0)
    low = [torch.nn.Parameter(torch.randn(shape, device="cuda").bfloat16()) for shape in ((300, 17), (5,), (4096,))]
    exact = [torch.nn.Parameter(p.detach().double()) for p in low]
    options = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.98)}
    optimizer = torch.optim.AdamW(low, fused=True, **options)
    truth = torch.optim.AdamW(exact, **options)
    masters = MasterWeights(optimizer, accumulates=accumulates)
    assert isinstance(optimizer, MasterAdamW)
    assert masters.folds == accumulates
    finite = FiniteSteps(optimizer, masters=masters)
    for step in range(6):
        scale = 100.0 if step % 2 else 0.01  # clipped and not
        gradients = [torch.randn_like(p) * scale for p in low]
        bad = step == 3
        for p, q, g in zip(low, exact, gradients):
            (p * g).sum().backward()
            q.grad = g.double()
        finite.clip(1.0, torch.tensor(float("nan") if bad else 1.0, device="cuda"), None)
        optimizer.step()
        if not bad:
            torch.nn.utils.clip_grad_norm_(exact, 1.0)
            truth.step()
        truth.zero_grad()
    for (parameter, master), q in zip(masters.pairs, exact):
        assert (master.double() - q).abs().max() < 1e-6 * q.abs().max() + 1e-6
        assert torch.equal(parameter, master.bfloat16())
        assert parameter.grad is None
        assert optimizer.state[master]["step"] == 5


class NoSync(TrainerCallback):
    """From the fifth step on, any operation that makes the host wait for the device is an error."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step >= 4:
            torch.cuda.set_sync_debug_mode("error")

    def on_step_end(self, args, state, control, **kwargs):
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("method", ["sft", "sft-compiled", "sft-passes", "dpo", "dpo-compiled", "reward"])
def test_ordinary_steps_do_not_synchronise(tmp_path, method, accumulation):
    """bfloat16 with masters, finite check, accumulation: torch's sync debug mode sees none. (A log reads the device, of course.)"""
    trainer, config = {
        "sft": (SFTTrainer, SFTConfig),
        "dpo": (DPOTrainer, DPOConfig),
        "reward": (RewardTrainer, RewardConfig),
    }[method.split("-")[0]]
    made = (
        tiny.reward_model(dtype=torch.bfloat16, **WIDE)
        if method == "reward"
        else tiny.causal_lm(dtype=torch.bfloat16, **WIDE)
    )
    args = config(
        output_dir=str(tmp_path), max_steps=10, logging_steps=100, per_device_train_batch_size=4, report_to="none",
        gradient_accumulation_steps=accumulation, save_strategy="no", learning_rate=1e-3, bf16=True,
        compile_layers=True if "compiled" in method else None, max_tokens_per_pass=100 if "passes" in method else None,
    )  # fmt: skip
    rows = tiny.chats(40 * accumulation) if "sft" in method else tiny.pairs(40 * accumulation)
    made = trainer(
        model=made, args=args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer(), callbacks=[NoSync()]
    )  # fmt: skip
    try:
        made.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.loaded.layout == ("ragged" if "sft" in method else "shared")
    assert made.guard.masters.folds == (accumulation > 1 or "passes" in method)
    assert made.guard.finite.on_device
    assert made.state.global_step == 10


class NoSyncBetweenSteps(TrainerCallback):
    """As NoSync, but the rollouts of a step, which come before its beginning, may not wait either."""

    def on_step_end(self, args, state, control, **kwargs):
        torch.cuda.set_sync_debug_mode("error" if 4 <= state.global_step < 9 else "default")


def test_rollouts_from_elsewhere_do_not_synchronise(tmp_path):
    """The host prepares the next step of GRPO while the device is busy with the last one."""

    def written(prompts, trainer):
        ids = [[5 + (i * 7 + j) % 90 for j in range(3 + i % 5)] for i in range(len(prompts))]
        logps = [[-4.0] * len(one) for one in ids]
        return {"prompt_ids": [[3, 4, 5]] * len(prompts), "completion_ids": ids, "logprobs": logps}

    made = GRPOTrainer(
        model=tiny.causal_lm(dtype=torch.bfloat16, **WIDE),
        reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
        rollout_func=written,
        args=GRPOConfig(
            output_dir=str(tmp_path), max_steps=10, logging_steps=100, per_device_train_batch_size=8, num_generations=4,
            report_to="none", save_strategy="no", learning_rate=1e-3, bf16=True, max_completion_length=16,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"Say {i}."} for i in range(20)]),
        processing_class=tiny.tokenizer(),
        callbacks=[NoSyncBetweenSteps()],
    )  # fmt: skip
    try:
        made.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.state.global_step == 10


def test_the_probe_measures_every_candidate_and_leaves_the_familys_module_alone():
    from transformers.models.qwen2 import modeling_qwen2

    before = dict(vars(modeling_qwen2))
    made = model(torch.bfloat16)
    chosen, times = fastest_kernels(made, ("plain", "compiled"))
    print(f"one layer, forward and backward: {times}")
    assert set(times) == {"plain", "compiled"}
    assert chosen in times
    assert all(vars(modeling_qwen2)[name] is value for name, value in before.items())
    assert len(made.model.layers) == 4


def test_compiled_layers_keep_less_than_uncompiled_ones():
    install_ragged_attention()
    plain, compiled = (model(torch.bfloat16) for _ in range(2))
    for each in (plain, compiled):
        each.set_attn_implementation(RAGGED_ATTENTION)
    compile_layers(compiled)
    kept = [activation_cost(each).kept["none"] for each in (compiled, plain)]
    print(f"a token keeps {kept[0] / 2**10:.1f} KiB compiled, {kept[1] / 2**10:.1f} KiB else")
    assert kept[0] < 0.6 * kept[1]


def test_the_smallest_peak_is_smaller(tmp_path):
    rows = [{"input_ids": torch.randint(3, 250, (512,)).tolist()} for _ in range(64)]
    peaks, norms = {}, {}
    for memory in (None, "least"):
        args = SFTConfig(
            output_dir=str(tmp_path), max_steps=2, logging_steps=1, per_device_train_batch_size=64, report_to="none",
            save_strategy="no", bf16=True, compile_layers=False, memory=memory,
        )  # fmt: skip
        made = SFTTrainer(
            model(torch.bfloat16), args, train_dataset=Dataset.from_list(rows), processing_class=tiny.tokenizer()
        )
        torch.cuda.reset_peak_memory_stats()
        made.train()
        peaks[memory], norms[memory] = torch.cuda.max_memory_allocated(), made.state.log_history[0]["grad_norm"]
        del made
    print(f"peak: {peaks}")
    assert peaks["least"] < 0.8 * peaks[None]
    assert norms["least"] == pytest.approx(norms[None], rel=0.02)


def test_a_nan_gradient_on_the_device_is_skipped_and_heard_of_later(tmp_path):
    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            self.handle = None
            if state.global_step == 2:
                self.handle = next(model.parameters()).register_hook(lambda gradient: gradient * float("nan"))

        def on_step_end(self, args, state, control, **kwargs):
            if self.handle is not None:
                self.handle.remove()

    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=8, logging_steps=2, per_device_train_batch_size=4, report_to="none", save_steps=4,
        learning_rate=1e-3, bf16=True,
    )  # fmt: skip
    made = SFTTrainer(
        tiny.causal_lm(dtype=torch.bfloat16, **WIDE), args, train_dataset=Dataset.from_list(tiny.chats(40)),
        processing_class=tiny.tokenizer(), callbacks=[Poison()],
    )  # fmt: skip
    made.train()
    assert made.checkpoints.run_state.skipped_total == 1
    assert (tmp_path / "skipped_steps.jsonl").read_text().startswith('{"step": 3')
    assert all(torch.isfinite(p).all() for p in made.model.parameters())


@pytest.mark.parametrize(("rows", "width"), [(37, 48), (1025, 3584), (4096, 1000)])
def test_rounding_in_8_bits_is_that_of_the_formula(rows, width):
    """But for a division that may be off in its last bit: then a number is rounded to the other neighbour."""
    x = torch.randn(rows, width, device="cuda").bfloat16()
    found = [*fp8.by_rows(x), *fp8.by_columns(x), *fp8.BOTH(x)]
    columns, straight = fp8._columns(x), fp8.scaled(x)
    for one, other in zip(found, [*straight, *columns, *columns, *straight], strict=True):
        assert one.shape == other.shape
        one, other = one.float(), other.float()
        assert (one == other).float().mean() > 0.999
        torch.testing.assert_close(one, other, rtol=2**-3, atol=2**-9)


def test_compiled_products_in_8_bits_are_as_near_to_float32_as_the_formulas(monkeypatch):
    """Forward, and backward with a number of rows that is no multiple of 16; the formula is computed on the host."""

    def found(dtype, device, **more):
        made = load_model(
            tiny.causal_lm(dtype=dtype, **WIDE).to(device),
            LoadOptions(layout=RAGGED, device=torch.device(device), **more),
        )
        logps, gradients = answers(made.model, RAGGED)
        return logps.float().cpu(), torch.cat([gradient.flatten().float().cpu() for gradient in gradients.values()])

    def product(a, b, dtype):
        one, other = (numbers.float() * scales for numbers, scales in (a, b))
        return (one @ other.t()).to(dtype)

    exact = found(torch.float32, "cpu")
    on_card = found(torch.bfloat16, "cuda", fp8=True, layer_kernels=(COMPILED,))
    monkeypatch.setattr(fp8, "why_not", lambda device: None)
    monkeypatch.setattr(fp8, "scaled_product", product)
    formulas = found(torch.bfloat16, "cpu", fp8=True)
    apart = [(logps - exact[0]).abs().mean().item() for logps, _ in (on_card, formulas)]
    sines = [
        1 - torch.nn.functional.cosine_similarity(flows, exact[1], dim=0).square().item()
        for _, flows in (on_card, formulas)
    ]
    assert 0.7 < apart[0] / apart[1] < 1.4, apart
    assert 0.5 < sines[0] / sines[1] < 2, sines
