"""The memory ladder: what is counted, and what is decided about made-up amounts of free memory."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks

from posttrain import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from posttrain.models.critic import as_critic, attach_critic
from posttrain.models.layers.kernels import PLAIN
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.memory import fit as memory
from posttrain.models.memory.fit import (
    FULL,
    NONE,
    SELECTIVE,
    ActivationCost,
    BatchTokens,
    MemoryOverrides,
    StateCost,
    memory_plan,
)
from posttrain.models.memory.shape import Shape
from posttrain.models.scoring.heads import SEQUENCE_REWARD
from posttrain.trainer import base
from posttrain.trainer import online_trainer as online
from posttrain.trainer.step import memory_fit
from tests import tiny

GIB = 2**30
KIB = 2**10


def cost_of(model):
    return memory.activation_cost(model)


def kept(body, config, tokens):
    """Bytes that a forward of `body` keeps, counted here independently: every saved tensor's storage once, weights not."""
    weights = {p.untyped_storage().data_ptr() for p in body.parameters()}
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = body(**memory._probe_inputs(config, tokens, torch.device("cpu")), use_cache=False)
    del output
    return sum(storage.nbytes() for address, storage in storages.items() if address not in weights)


# ---- counting -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_activations_are_measured_and_grow_with_tokens(family):
    model = load_model(tiny.causal_lm(family=family), LoadOptions()).model
    cost = cost_of(model)
    found = kept(model.model, model.config, 600) - kept(model.model, model.config, 100)
    assert cost.kept[NONE] == pytest.approx(found / 500, rel=0.01)
    assert cost.is_measured


@pytest.mark.parametrize("of", [cost_of, lambda model: Shape(model).activations(PLAIN)], ids=["measured", "estimated"])
def test_a_value_model_keeps_activations_of_its_own(of):
    """PPO's value model runs in the policy's pass: its body keeps as much again as the policy's."""
    policy = load_model(tiny.causal_lm(num_hidden_layers=4), LoadOptions()).model
    alone = of(policy)
    critic = load_model(tiny.reward_model(num_hidden_layers=4), LoadOptions(task=SEQUENCE_REWARD)).model
    attach_critic(policy, as_critic(critic))
    both = of(policy)
    for level in (NONE, SELECTIVE, FULL):
        assert both.kept[level] == pytest.approx(2 * alone.kept[level], rel=0.01), level
    assert both.layer == alone.layer


def test_full_checkpointing_keeps_the_layer_inputs():
    model = load_model(tiny.causal_lm(num_hidden_layers=6), LoadOptions()).model
    cost = cost_of(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model.enable_input_require_grads()
    found = (kept(model.model, model.config, 600) - kept(model.model, model.config, 100)) / 500
    assert cost.kept[FULL] == 6 * 16 * 4
    assert found - cost.kept[FULL] < 0.2 * cost.kept[NONE]  # cos, sin, the last norm and ids come on top of it
    assert cost.kept[FULL] < cost.kept[SELECTIVE] < cost.kept[NONE]


def test_the_probe_leaves_no_trace():
    model = load_model(tiny.causal_lm(), LoadOptions()).model.train()
    before = {n: p.clone() for n, p in model.named_parameters()}
    state = torch.get_rng_state()
    cost_of(model)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None and torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_the_probe_does_not_keep_the_weights_alive():
    """Operations that keep their own result, such as rsqrt, made the graph of the probe own itself: 3 GiB a trainer at 1.5B."""
    model = load_model(tiny.causal_lm(), LoadOptions()).model.train()
    cost_of(model)
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_a_lora_keeps_less_when_it_is_fused_and_trains_only_its_own_weights():
    config = LoraConfig(r=4, target_modules="all-linear")
    costs = []
    for fused in (True, False):
        loaded = load_model(
            tiny.causal_lm(intermediate_size=96), LoadOptions(peft_config=config, fuse_lora=fused)
        ).model
        costs.append(cost_of(loaded.base_model.model).kept[NONE])
    assert costs[0] < 0.75 * costs[1]
    state = memory.state_cost(loaded.parameters(), None)
    trained = sum(p.numel() for p in loaded.parameters() if p.requires_grad)
    assert state.trained == trained
    assert state.gradients == 4 * trained


def test_state_of_bfloat16_weights_is_16_bytes_a_weight_and_of_float32_12():
    for dtype, masters, gradients in ((torch.bfloat16, 4, 4), (torch.float32, 0, 4)):
        model = tiny.causal_lm(dtype=dtype)
        count = sum(p.numel() for p in model.parameters())
        state = memory.state_cost(model.parameters(), None)
        assert state.masters == masters * count
        largest = max(p.numel() for p in model.parameters()) * 2 if dtype == torch.bfloat16 else 0
        assert state.gradients == gradients * count + largest
        assert state.moments("adamw_torch_fused") == 8 * count
        assert state.moments("adamw_8bit") == pytest.approx(2.03 * count, rel=1e-3)
        assert state.moments("sgd") == 0
    assert memory.state_cost(model.parameters(), None, world_size=2).gradients == 8 * count  # DDP's buckets


def test_masters_of_8_bit_moments_are_half_the_bits():
    """Together with their bfloat16 weights, and gradients that stay in bfloat16: 8 bytes a weight, as AdamW in bfloat16 takes."""
    cost = memory.state_cost(tiny.causal_lm().bfloat16().parameters(), None)
    assert (cost.masters_of("adamw_torch"), cost.masters_of("adamw_8bit")) == (4 * cost.trained, 2 * cost.trained)
    assert 2 + 2 + cost.moments("adamw_8bit") / cost.trained + cost.written / cost.trained == pytest.approx(8, abs=0.05)


def test_sharded_models_are_estimated():
    cost = Shape(tiny.causal_lm(), torch.bfloat16).activations(PLAIN)
    assert not cost.is_measured
    assert cost.kept[FULL] < cost.kept[SELECTIVE] < cost.kept[NONE]
    assert cost.kept[FULL] == 2 * tiny.config().num_hidden_layers * tiny.config().hidden_size  # of what is computed in


# ---- deciding -----------------------------------------------------------------------------------------------------------

COST = ActivationCost({NONE: 1000 * KIB, SELECTIVE: 500 * KIB, FULL: 100 * KIB}, 4 * KIB, 36 * KIB)
# 17 GiB with float32 moments, 9 with 8 bits.
STATE = StateCost(trained=GIB, masters=4 * GIB, sums=4 * GIB, head_chunks=GIB)
TOKENS = 16384  # 16 GiB of activations if all are kept


def plan(free, **overrides):
    return memory_plan(
        free * GIB / memory.HEAD_ROOM, BatchTokens(TOKENS, TOKENS), COST, STATE, MemoryOverrides(**overrides)
    )


def test_a_large_micro_batch_is_split_before_anything_is_recomputed():
    room = STATE.total("adamw") + 20000 * COST.of(NONE, False)
    batch = BatchTokens(largest=100_000, longest=2048)
    found = memory_plan(room / memory.HEAD_ROOM, batch, COST, STATE, MemoryOverrides())
    assert (found.checkpointing, found.offload, found.eight_bit) == (NONE, False, False)
    assert found.tokens_per_pass == pytest.approx(20000, abs=1)
    assert f"up to 100000 tokens, run in passes of up to {found.tokens_per_pass}," in found.sentence
    unsplit = memory_plan(
        room / memory.HEAD_ROOM, BatchTokens(100_000, 2048, can_split=False), COST, STATE, MemoryOverrides()
    )
    assert unsplit.checkpointing == FULL
    assert unsplit.tokens_per_pass is None
    gathering = memory_plan(
        (room - 5000 * COST.of(NONE, False)) / memory.HEAD_ROOM,
        replace(batch, enough=memory.ENOUGH_TO_GATHER),
        COST,
        STATE,
        MemoryOverrides(),
    )
    assert gathering.checkpointing == SELECTIVE  # 15,000 tokens would do for one process, not for weights in pieces
    given = memory_plan(room / memory.HEAD_ROOM, batch, COST, STATE, MemoryOverrides(tokens_per_pass=5000))
    assert (given.checkpointing, given.tokens_per_pass) == (NONE, 5000)


def test_logits_are_kept_where_passes_are_large_enough_beside_them():
    logit_bytes = 300 * KIB
    batch = BatchTokens(largest=100_000, longest=2048)

    def planned(tokens, a_token, **overrides):
        room = STATE.total("adamw") + tokens * a_token
        return memory_plan(
            room / memory.HEAD_ROOM + 1, batch, COST, STATE, MemoryOverrides(**overrides), True, logit_bytes
        )

    kept = COST.of(NONE, False)
    roomy = planned(20_000, kept + logit_bytes)
    assert (roomy.keep_logits, roomy.checkpointing, roomy.tokens_per_pass) == (True, NONE, 20_000)
    assert "logits 5.72 GiB" in roomy.sentence
    tight = planned(5_000, kept)
    assert (tight.keep_logits, tight.checkpointing, tight.tokens_per_pass) == (False, NONE, 5_000)
    forced = planned(4_500, kept, keep_logits=True)  # no longer large enough: cheap activations are computed again
    assert (forced.keep_logits, forced.checkpointing) == (True, SELECTIVE)
    one_pass = planned(100_000, kept + logit_bytes)
    assert (one_pass.keep_logits, one_pass.tokens_per_pass) == (True, None)
    not_split_for_them = planned(100_000, kept + logit_bytes / 2)
    assert (not_split_for_them.keep_logits, not_split_for_them.tokens_per_pass) == (False, None)
    assert not planned(40_000, kept + logit_bytes, keep_logits=False).keep_logits
    assert not memory_plan(
        1000 * GIB, batch, COST, STATE, MemoryOverrides()
    ).keep_logits  # a loss that does not need them


def need(level, offload=False, eight_bit=False):
    return (STATE.total("adamw_8bit" if eight_bit else "adamw") + TOKENS * COST.of(level, offload)) / GIB


@pytest.mark.parametrize("rung", memory.rungs(MemoryOverrides()), ids=str)
def test_the_mildest_rung_that_fits_is_taken(rung):
    level, offload, eight_bit = rung
    amount = need(level, offload, eight_bit)
    chosen = plan(amount + 0.001)
    milder = next(r for r in memory.rungs(MemoryOverrides()) if need(*r) <= amount + 0.001)
    assert (chosen.checkpointing, chosen.offload, chosen.eight_bit) == milder
    assert "too much" not in chosen.sentence


def test_the_order_of_the_ladder():
    found = [(c.checkpointing, c.offload, c.eight_bit) for c in map(plan, (200, 27, 20, 18.4, 10.5))]
    assert found == [
        (NONE, False, False), (SELECTIVE, False, False), (FULL, False, False), (FULL, True, False), (FULL, True, True),
    ]  # fmt: skip


def test_the_sentence_has_the_numbers_and_the_largest_term():
    said = plan(27).sentence
    assert "kept where recomputing them is expensive (selective checkpointing)" in said
    assert "16384 tokens would keep 16.19 GiB (1036 KiB a token, measured)" in said
    assert "the optimizer's moments 8.00 GiB, masters 4.00 GiB, gradients 4.00 GiB, the head 1.00 GiB" in said
    assert "27.00 GiB of 30.00 GiB free may be used" in said
    assert "The largest term is activations" in said
    short = plan(5)
    assert (short.checkpointing, short.offload, short.eight_bit) == (FULL, True, True)
    assert "too much: lower `per_device_train_batch_size`" in short.sentence


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"checkpointing": NONE, "offload": False, "optim": "adamw_torch"}, (NONE, False, False)),
        ({"checkpointing": NONE, "offload": False}, (NONE, False, True)),
        ({"checkpointing": FULL, "optim": "adamw_torch"}, (FULL, True, False)),
        ({"checkpointing": FULL, "offload": False, "optim": "sgd"}, (FULL, False, False)),
        ({"offload": True, "optim": "adamw_torch"}, (FULL, True, False)),
        ({"checkpointing": NONE, "offload": True, "optim": "adamw_torch"}, (NONE, True, False)),
        ({"checkpointing": SELECTIVE, "optim": "adamw_8bit"}, (SELECTIVE, False, True)),
    ],
)
def test_what_the_user_has_set_stays(overrides, expected):
    found = plan(1, **overrides)
    assert (found.checkpointing, found.offload, found.eight_bit) == expected


def test_a_model_that_cannot_recompute_is_not_asked_to():
    found = memory_plan(GIB, BatchTokens(TOKENS, TOKENS), COST, STATE, MemoryOverrides(), can_recompute=False)
    assert (found.checkpointing, found.offload, found.eight_bit) == (NONE, False, True)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, (FULL, True, True)),
        ({"offload": False}, (FULL, False, True)),
        ({"checkpointing": NONE, "offload": False, "optim": "adamw_torch"}, (NONE, False, False)),
        ({"checkpointing": SELECTIVE}, (SELECTIVE, False, True)),
    ],
)
def test_the_smallest_peak_is_the_rung_that_needs_least(overrides, expected):
    batch = BatchTokens(100_000, 2048)
    found = memory_plan(1000 * GIB, batch, COST, STATE, MemoryOverrides(**overrides), logit_bytes=KIB, least=True)
    assert (found.checkpointing, found.offload, found.eight_bit) == expected
    assert (found.tokens_per_pass, found.keep_logits) == (2048, False)
    assert "too much" not in found.sentence


def test_the_smallest_peak_of_what_cannot_be_split_is_one_pass():
    batch = BatchTokens(100_000, 2048, can_split=False)
    found = memory_plan(math.inf, batch, COST, STATE, MemoryOverrides(), least=True)
    assert found.tokens_per_pass is None
    assert "inf" not in found.sentence


# ---- in the trainer -----------------------------------------------------------------------------------------------------


def trainer(tmp_path, **options):
    args = SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=1, **options)
    rows = Dataset.from_list(tiny.chats(12))
    return SFTTrainer(tiny.causal_lm(), args, train_dataset=rows, processing_class=tiny.tokenizer())


def test_wishes_are_read_from_the_options(tmp_path):
    made = trainer(tmp_path, gradient_checkpointing=True)
    assert memory_fit.memory_overrides(made) == MemoryOverrides(FULL, None, None)
    made.args.gradient_checkpointing_kwargs = {"selective": True}
    made.args.optim = "adafactor"
    assert memory_fit.memory_overrides(made) == MemoryOverrides(SELECTIVE, None, "adafactor")
    made = trainer(tmp_path, activation_offloading=False)
    assert made.args.gradient_checkpointing is False  # decided: host memory is assumed to be enough
    assert memory_fit.memory_overrides(made) == MemoryOverrides(NONE, False, None)


def test_the_smallest_peak_has_the_same_gradient(tmp_path):
    made = [trainer(tmp_path / name, **options) for name, options in (("all", {}), ("least", {"memory": "least"}))]
    assert (made[1].args.gradient_checkpointing, made[1].args.optim) == (True, "adamw_8bit")
    assert made[1].args.max_tokens_per_pass == max(made[1].train_dataset.unit_lengths)
    norms = []
    for one in made:
        one.train()
        norms.append(one.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize(
    ("given", "error"), [("much", "it is a size such as"), ("0GB", "a size"), ("8GiB", "on a CPU")]
)
def test_a_bound_that_cannot_be_kept_is_refused(tmp_path, given, error):
    with pytest.raises(ValueError, match=error):
        trainer(tmp_path, memory=given)


@pytest.mark.parametrize(("given", "free"), [(None, 60), ("40GiB", 28), ("80GiB", 60)])
def test_a_bound_counts_what_is_there_already(tmp_path, monkeypatch, given, free):
    made = trainer(tmp_path)
    made.args.memory = given
    monkeypatch.setattr(memory, "free_memory", lambda device: 62 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    made.reserved_bytes = lambda: 2 * GIB
    assert memory_fit._free(made) == free * GIB


def with_groups(tmp_path, **options):
    args = GRPOConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, max_steps=1, num_generations=4, **options
    )
    rows = Dataset.from_list([{"prompt": "Say it"}] * 8)
    reward = lambda completions, **columns: [0.0] * len(completions)  # noqa: E731
    return GRPOTrainer(tiny.causal_lm(), reward, args, train_dataset=rows, processing_class=tiny.tokenizer())


def test_a_vllm_that_stays_on_the_device_is_not_free_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 70 * GIB)
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    made = with_groups(tmp_path)
    assert memory_fit._free(made) == 70 * GIB
    made.args.use_vllm = True
    assert memory_fit._free(made) == pytest.approx(70 * GIB - 0.3 * 80 * GIB)
    made.args.vllm_enable_sleep_mode = True
    assert memory_fit._free(made) == 70 * GIB
    made.args.vllm_enable_sleep_mode, made.args.vllm_mode = False, "server"
    assert memory_fit._free(made) == 70 * GIB


@pytest.mark.parametrize(("size", "groups"), [(4, 1), (8, 2), (2, 1), (6, 3)])
def test_the_prompt_of_a_group_is_counted_once_in_a_micro_batch(tmp_path, size, groups):
    """Six rollouts of groups of four may be parts of three groups."""
    made = with_groups(
        tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=12 // size if size != 8 else 1
    )
    prompt, longest = made.train_dataset.longest, made.args.max_completion_length
    found = memory_fit.batch_tokens(made)
    assert (found.largest, found.longest) == (groups * prompt + size * longest, prompt + longest)
    made.data_collator.layout = "ragged"
    assert memory_fit.batch_tokens(made).largest == size * (prompt + longest)


def test_memory_is_looked_at_when_reward_models_are_on_the_device(tmp_path, monkeypatch):
    seen = []
    for module in (base, online):
        monkeypatch.setattr(module, "fit_memory", lambda made: seen.append(hasattr(made, "rewards")))
    with_groups(tmp_path)
    trainer(tmp_path)
    assert seen == [True, False]


def test_logits_are_worth_keeping_where_a_fused_head_would_compute_them_again(tmp_path):
    """One copy in the dtype of the head. Through autograd, as for a bonus on the entropy, it would be several in float32."""
    one_copy = {
        "dft": trainer(tmp_path, loss_type="dft"),
        "grpo": with_groups(tmp_path),
    }
    none = {
        "nll has its gradient in the forward": trainer(tmp_path),
        "entropy": with_groups(tmp_path, entropy_coef=0.01),
        "adaptive entropy": with_groups(tmp_path, use_adaptive_entropy=True, entropy_target=1.0),
    }
    for name, made in one_copy.items():
        assert memory_fit.logit_bytes_of(made, made.model) == 4 * made.model.config.vocab_size, name
    for name, made in none.items():
        assert memory_fit.logit_bytes_of(made, made.model) == 0, name


def test_the_largest_micro_batch_is_one_that_the_run_will_make(tmp_path):
    made = trainer(tmp_path, per_device_train_batch_size=3, num_train_epochs=2)
    lengths = [sum(map(len, made.train_dataset[i])) for i in range(12)]
    seen = []
    loader = made.get_train_dataloader()
    for epoch in range(2):
        loader.set_epoch(epoch)
        seen += [batch.num_tokens for batch in loader]
    assert memory_fit.batch_tokens(made) == BatchTokens(max(seen), max(lengths))
    made.train_dataset = None
    assert memory_fit.batch_tokens(made) == BatchTokens(3 * 1024, 1024)


@pytest.mark.parametrize(
    ("level", "expected"), [(NONE, (False, False)), (SELECTIVE, (True, True)), (FULL, (True, False))]
)
def test_a_plan_is_carried_out(tmp_path, level, expected):
    made = trainer(tmp_path)
    made.args.gradient_checkpointing = None
    memory_fit.apply(made, memory.MemoryPlan(level, False, level == FULL, ""))
    assert (made.args.gradient_checkpointing, "selective" in made.args.gradient_checkpointing_kwargs) == expected
    assert (made.args.optim == "adamw_8bit") == (level == FULL)
    made.train()
    assert made.state.global_step == 1


def test_a_sharded_run_is_planned_by_the_shape_of_its_model(tmp_path, monkeypatch):
    """Shards cannot be run, so nothing is measured; plain layers of the size of the model's are counted, in what is computed."""
    made, said = trainer(tmp_path, per_device_train_batch_size=3), []
    made.args.gradient_checkpointing = None
    monkeypatch.setattr(SFTConfig, "device", property(lambda args: torch.device("cuda")))
    monkeypatch.setattr(SFTConfig, "sharding", property(lambda args: "fsdp"))
    monkeypatch.setattr(memory_fit, "_free", lambda run: 3 * GIB)
    monkeypatch.setattr(memory_fit, "say", said.append)
    monkeypatch.setattr(memory, "activation_cost", lambda *_: pytest.fail("shards were run"))
    memory_fit._decide(made)
    a_token = Shape(made.model).activations(PLAIN).of(NONE, False)
    assert f"({a_token / KIB:.0f} KiB a token, estimated)" in said[0]
    assert not made.args.gradient_checkpointing
    monkeypatch.setattr(memory_fit, "_free", lambda run: GIB)
    made.args.gradient_checkpointing = made.args.activation_offloading = made.args.max_tokens_per_pass = None
    memory_fit._decide(made)
    assert made.args.gradient_checkpointing  # two chunks of logits alone are more than there is
    assert "too much" in said[1]


def test_the_decision_is_taken_when_the_reference_is_there(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("posttrain.trainer.base.fit_memory", lambda trainer: seen.append(trainer.reference))
    args = DPOConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    rows = Dataset.from_list(tiny.pairs(4))
    DPOTrainer(tiny.causal_lm(), args=args, train_dataset=rows, processing_class=tiny.tokenizer())
    assert seen[0].model is not None


def test_peft_models_are_asked_through_their_wrappers():
    model = get_peft_model(tiny.causal_lm(), LoraConfig(target_modules=["q_proj"]))
    innermost = memory_fit.innermost_model(model)
    assert cost_of(innermost).kept[NONE] > 0


def test_a_process_of_a_sharded_run_has_its_part_of_everything_and_gathers_two_layers():
    model = tiny.causal_lm(family="llama")
    count, layer = (sum(p.numel() for p in part.parameters()) for part in (model, model.model.layers[0]))
    cost = memory.sharded_state_cost(model, model.model.layers, None, 4, torch.bfloat16, "cuda")
    assert cost.trained == count // 4
    assert cost.masters == count  # 4 bytes of a quarter
    outside = count - 2 * layer
    assert cost.gradients == 4 * (count // 4) + (outside + 2 * layer) * 6
