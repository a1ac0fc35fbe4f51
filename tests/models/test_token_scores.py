"""What a model says about tokens, without logits, against the same from full logits."""

from __future__ import annotations

import copy
import weakref

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    DogeConfig,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    MistralConfig,
)

from posttrain.core.batch import PADDED, RAGGED, SHARED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.attention.ragged import RAGGED_ATTENTION
from posttrain.models.layers.kernels import COMPILED, PLAIN
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring import fused_head
from posttrain.models.scoring.heads import CAUSAL_LM, TOKEN_LABELS
from posttrain.models.scoring.probe import why_not_ragged
from posttrain.models.scoring.token_scores import TOKEN_STATS, score_tokens
from tests import tiny

SHAPE = {**tiny.SHAPE, "vocab_size": 259, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "head_dim": 4}
NO_HEAD_DIM = {name: value for name, value in SHAPE.items() if name != "head_dim"}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip
SIGHTS = {"windows": {"sliding_window": 4}, "whole": {"layer_types": ["full_attention"] * 2}}


def gpt_oss(**own):
    config = GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, **own)
    return AutoModelForCausalLM.from_config(config, experts_implementation="eager")  # torch's has no float64


def gemma2(**own):
    """By `eager`: transformers' SDPA leaves the soft-cap out."""
    config = Gemma2Config(**SHAPE, attn_logit_softcapping=0.5, query_pre_attn_scalar=4, **own)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


FAMILIES = {
    "qwen2": lambda: tiny.causal_lm(),
    "llama": lambda: tiny.causal_lm(family="llama"),
    "mistral-window": lambda: AutoModelForCausalLM.from_config(MistralConfig(**SHAPE, sliding_window=4)),
    "cohere-scale": lambda: AutoModelForCausalLM.from_config(CohereConfig(**NO_HEAD_DIM, logit_scale=0.3)),
    "granite-scale": lambda: AutoModelForCausalLM.from_config(GraniteConfig(**NO_HEAD_DIM, logits_scaling=3.0)),
    "gemma2-softcap": lambda: AutoModelForCausalLM.from_config(
        Gemma2Config(**SHAPE, final_logit_softcapping=2.0, attn_logit_softcapping=50.0, query_pre_attn_scalar=4)
    ),
    "gpt-oss-sinks": lambda: gpt_oss(),
    "deepseek-v3-latent": lambda: AutoModelForCausalLM.from_config(
        DeepseekV3Config(**NO_HEAD_DIM | LATENT, first_k_dense_replace=2)
    ),
}
SINKS_OR_CAPS = {
    **{f"gemma2-{name}": lambda own=own: gemma2(**own) for name, own in SIGHTS.items()},
    **{f"gpt-oss-{name}": lambda own=own: gpt_oss(**own) for name, own in SIGHTS.items()},
}


def samples() -> list[tuple[Sample, ...]]:
    rng = np.random.default_rng(3)
    lengths = (5, 11, 2, 8)
    return [(Sample(rng.integers(3, 250, n), rng.random(n) < 0.7, row=i),) for i, n in enumerate(lengths)]


def full_logits(model, temperature=1.0):
    """(N, V) float64 logits at the asked positions and the targets, one sequence at a time, by the model's own forward."""
    rows, targets = [], []
    for (sample,) in samples():
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))
        logits = model(input_ids=ids[None]).logits[0].double()
        at = torch.from_numpy(np.flatnonzero(sample.trained[1:]))
        rows.append(logits[at] / temperature)
        targets.append(ids[at + 1])
    return torch.cat(rows), torch.cat(targets)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_equal_to_full_logits_for_every_family(family, temperature):
    torch.manual_seed(0)
    model = FAMILIES[family]().double().eval()
    logits, targets = full_logits(model, temperature)
    expected = logits.log_softmax(-1)
    loaded = load_model(model, LoadOptions())
    for layout in (loaded.layout, PADDED):
        batch = collate(samples(), ("text",), layout)
        scores = score_tokens(model, batch, tuple(TOKEN_STATS), temperature=temperature, chunk_tokens=3)
        torch.testing.assert_close(scores.logps, expected.gather(-1, targets[:, None])[:, 0], rtol=1e-9, atol=1e-9)
        probs = expected.exp()
        by_hand = {
            "entropy": -(probs * expected).sum(-1),
            "is_most_likely": (logits.argmax(-1) == targets).double(),
            "mean_logit": logits.mean(-1),
            "mean_logps": expected.mean(-1),
            "log_sum_squared_probs": (probs**2).sum(-1).log(),
        }
        for name, value in by_hand.items():
            torch.testing.assert_close(
                scores.stats[name], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )
            assert not scores.stats[name].requires_grad


@pytest.mark.parametrize("family", [*SINKS_OR_CAPS, "deepseek-v3-latent"])
def test_gradients_do_not_depend_on_the_layout(family):
    """Of pairs that begin alike, of weights by which soft-caps and sinks matter; against transformers' own forward of each row."""
    torch.manual_seed(0)
    model = tiny.with_exact_norms((SINKS_OR_CAPS | FAMILIES)[family]().eval())
    for parameter in model.parameters():
        parameter.data.mul_(4) if parameter.dim() > 1 else parameter.data.normal_()
    plain, rng = copy.deepcopy(model).double(), np.random.default_rng(4)
    rows = [rng.integers(3, 250, n) for n in (12, 9, 7, 15)]
    rows[1][:4], rows[3][:4] = rows[0][:4], rows[2][:4]
    samples = [Sample(ids, np.arange(len(ids)) >= 4, row=place // 2) for place, ids in enumerate(rows)]
    logps = [plain(input_ids=torch.from_numpy(ids)[None]).logits[0].log_softmax(-1) for ids in rows]
    wanted = torch.cat([each[3:-1].gather(-1, torch.from_numpy(ids[4:, None])) for each, ids in zip(logps, rows)])
    slopes = torch.linspace(-1, 2, len(wanted), dtype=torch.float64)
    (wanted[:, 0] * slopes).sum().backward()
    loaded = load_model(model, LoadOptions(share_prefixes=True))
    model.double()  # after transformers' eager, whose rows of padding are no numbers in float64, was asked
    layouts = [RAGGED, PADDED] if "windows" in family else [SHARED, RAGGED, PADDED]
    assert loaded.layout == layouts[0], loaded.notes
    close = 1e-5 if "gemma2" in family else 1e-9  # its `eager` has a softmax in float32
    found = {}
    for layout in layouts:
        model.zero_grad()
        batch = collate([tuple(samples[:2]), tuple(samples[2:])], ("chosen", "rejected"), layout)
        scores = score_tokens(model, batch)
        (scores.logps * slopes).sum().backward()
        found[layout] = [scores.logps.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
    oracle = [wanted[:, 0].detach(), *(parameter.grad for parameter in plain.parameters())]
    for each in found.values():
        torch.testing.assert_close(each, oracle, rtol=close, atol=close)
        torch.testing.assert_close(each, found[PADDED], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("family", "reason"), [("gemma2-softcap", "soft-cap"), ("gpt-oss-sinks", "no SDPA attention")])
def test_what_has_no_kernel_is_padded_on_a_gpu(family, reason):
    model = FAMILIES[family]()
    assert reason in why_not_ragged(model, model, CAUSAL_LM, on_gpu=True)
    assert load_model(model, LoadOptions()).layout == RAGGED


def test_a_trained_model_generates_as_a_fresh_one_does_left_padded():
    """The ragged attention stands aside for calls without segments."""
    fresh = tiny.causal_lm().eval()
    ours = copy.deepcopy(fresh)
    assert load_model(ours, LoadOptions()).layout == RAGGED
    assert ours.config._attn_implementation == RAGGED_ATTENTION
    score_tokens(ours, collate(samples(), ("text",)))
    ids = torch.tensor([[257, 257, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = (ids != 257).long()
    wanted = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 257}
    assert torch.equal(fresh.generate(**wanted), ours.generate(**wanted))
    torch.testing.assert_close(
        fresh(input_ids=ids, attention_mask=mask).logits[mask.bool()],
        ours(input_ids=ids, attention_mask=mask).logits[mask.bool()],
    )


def test_a_deep_copy_answers_for_itself():
    model = tiny.causal_lm()
    load_model(model, LoadOptions())
    other = copy.deepcopy(model)
    batch = collate(samples(), ("text",))
    with torch.no_grad():
        before = score_tokens(model, batch).logps
        next(other.parameters()).mul_(2)
        assert torch.equal(score_tokens(model, batch).logps, before)
        assert not torch.equal(score_tokens(other, batch).logps, before)


def test_gradient_checkpointing_keeps_segments_apart():
    """Segments travel as arguments: the recomputation runs on autograd's thread and must see them."""
    gradients = []
    for checkpointing in (False, True):
        model = tiny.causal_lm(dtype=torch.float64)
        load_model(model, LoadOptions())
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        score_tokens(model, collate(samples(), ("text",))).logps.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


EXPERTS = {"family": "qwen3_moe", "router_aux_loss_coef": 0.01}


def test_router_loss_is_the_models_own():
    model = tiny.causal_lm(**EXPERTS)
    loaded = load_model(model, LoadOptions())
    assert loaded.router_loss_weight == 0.01  # though the config, as it is published, asks for no logits of routers
    assert "The load-balancing loss of its experts counts with 0.01 (`router_aux_loss_coef`)." in loaded.notes
    (sample,) = samples()[1]
    ids = torch.from_numpy(sample.input_ids.astype(np.int64))[None]
    expected = model(input_ids=ids, output_router_logits=True).aux_loss
    batch = collate([(sample,)], ("text",))
    torch.testing.assert_close(score_tokens(model, batch, router_loss=True).aux_loss, expected)


@pytest.mark.slow
def test_routers_are_recorded_in_compiled_layers():
    """Their hooks are there before anything is compiled: in evaluation, in training, and after calls that ask for no routers."""
    found = []
    for kernels in (PLAIN, COMPILED):
        model = tiny.causal_lm(**EXPERTS)
        assert load_model(model, LoadOptions(layer_kernels=(kernels,))).router_loss_weight == 0.01
        batch, losses = collate(samples(), ("text",)), []
        for is_training in (False, True, False):
            model.train(is_training)
            with torch.set_grad_enabled(is_training):
                score_tokens(model, batch)
                losses.append(score_tokens(model, batch, router_loss=True).aux_loss.clone())
        losses[1].backward()
        found.append([*(loss.detach() for loss in losses), model.model.layers[0].mlp.gate.weight.grad])
    torch.testing.assert_close(*found)


def test_whose_experts_are_balanced():
    assert load_model(tiny.causal_lm(**EXPERTS), LoadOptions(router_aux_loss_coef=0.0)).router_loss_weight == 0
    assert load_model(tiny.causal_lm(**EXPERTS), LoadOptions(router_aux_loss_coef=0.2)).router_loss_weight == 0.2
    scores = load_model(tiny.process_reward_model(**EXPERTS), LoadOptions(task=TOKEN_LABELS))
    assert scores.router_loss_weight == 0
    with pytest.raises(ValueError, match="not a mixture of experts"):
        load_model(tiny.causal_lm(), LoadOptions(router_aux_loss_coef=0.1))
    dense = AutoModelForCausalLM.from_config(DogeConfig(**SHAPE))  # its config has the coefficient, and it no experts
    loaded = load_model(dense, LoadOptions())
    assert loaded.router_loss_weight == 0
    assert any("trained without a load-balancing loss: transformers computes none" in note for note in loaded.notes)
    with pytest.raises(ValueError, match="there is no load-balancing loss: transformers computes none"):
        load_model(dense, LoadOptions(router_aux_loss_coef=0.1))


@pytest.mark.parametrize("multiple", [None, 16])
def test_router_loss_is_the_same_in_every_layout(multiple):
    """A token of a shared prompt counts once for each of its answers, and filling does not count."""
    shared = [5, 9, 14, 23, 31]
    answers = [[40, 41], [50], [60, 61, 62, 63]]
    group = tuple(Sample(shared + more, [False] * 5 + [True] * len(more)) for more in answers)
    pair = (Sample([7, 8, 70], [False, False, True]), Sample([7, 8, 80, 81], [False, False, True, True]))
    alone = (Sample([11, 12, 13], [False, True, True]),)
    found = {}
    for layout in (PADDED, RAGGED, SHARED):
        model = tiny.causal_lm(dtype=torch.float64, **EXPERTS)
        model.set_experts_implementation("eager")  # the grouped kernel has no float64
        load_model(model, LoadOptions(layout=PADDED if layout == PADDED else None))
        batch = collate([group, pair, alone], ("text",), layout, pad_to_multiple_of=multiple)
        loss = score_tokens(model, batch, router_loss=True).aux_loss
        loss.backward()
        found[layout] = [loss.detach(), *(p.grad for name, p in model.named_parameters() if p.grad is not None)]
    assert len(found[PADDED]) > 10
    for layout in (RAGGED, SHARED):
        torch.testing.assert_close(found[layout], found[PADDED], rtol=1e-5, atol=1e-8)  # the family sums in float32


def test_the_tokens_of_a_row_know_how_many_samples_have_them():
    group = tuple(Sample([5, 6, 7, *more], [False] * 3 + [True] * len(more)) for more in ([8], [9, 10]))
    alone = (Sample([11, 12], [False, True]),)
    batch = collate([group, alone], ("text",), SHARED, pad_to_multiple_of=5)
    assert batch.samples_of_tokens().tolist() == [[2, 2, 2, 1, 1, 1, 1, 1, 0, 0]]
    assert collate([group, alone], ("text",), RAGGED).samples_of_tokens().tolist() == [[1] * 11]
    assert collate([], ("text",), RAGGED).samples_of_tokens().tolist() == [[1]]


def test_logits_are_not_kept_unless_asked_for():
    """Between forward and backward nothing of the size of the logits is alive: saved tensors stay below one chunk."""
    model = tiny.causal_lm()
    load_model(model, LoadOptions())
    batch = collate(samples() * 4, ("text",))
    vocabulary = model.config.vocab_size
    largest = [0]

    def pack(tensor):
        if (
            tensor.dim()
            and tensor.shape[-1] == vocabulary
            and tensor.dim() == 2
            and not isinstance(tensor, torch.nn.Parameter)
        ):
            largest[0] = max(largest[0], tensor.shape[0])
        return tensor

    for summed in (False, True):
        largest[0] = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            scores = score_tokens(model, batch, chunk_tokens=4, summed=summed)
        assert largest[0] == 0, f"{largest[0]} rows of logits were saved (summed={summed})"
        (scores.nll_sum if summed else -scores.logps.sum()).backward()


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kept_logits_give_the_same_bits_as_computed_ones(family, dtype):
    """Of a fused head (llama) and of one with a soft-cap (gemma2); also in a second backward of the same graph."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype)
    load_model(model, LoadOptions(dtype=dtype))
    batch = collate(samples() * 4, ("text",))
    slopes = torch.linspace(-1, 1, batch.num_trained)

    def gradients(keep_logits):
        logps = score_tokens(model, batch, chunk_tokens=4, keep_logits=keep_logits).logps
        twice = []
        for retain in (True, False):
            model.zero_grad()
            (logps * slopes.to(logps.dtype)).sum().backward(retain_graph=retain)
            twice.append([parameter.grad.clone() for parameter in model.parameters()])
        return twice

    (computed, again), (kept, kept_again) = gradients(False), gradients(True)
    for each in zip(computed, again, kept, kept_again):
        assert all(torch.equal(each[0], other) for other in each)


@pytest.mark.parametrize("summed", [False, True])
def test_one_chunk_of_logits_is_alive_at_a_time(summed, monkeypatch):
    model = tiny.causal_lm()
    load_model(model, LoadOptions())
    batch = collate(samples() * 4, ("text",))
    alive, most = weakref.WeakSet(), [0]
    real = fused_head.Reader.logits

    def counted(reader, part):
        found = real(reader, part)
        alive.add(found)
        most[0] = max(most[0], len(alive))
        return found

    monkeypatch.setattr(fused_head.Reader, "logits", counted)
    scores = score_tokens(model, batch, chunk_tokens=4, summed=summed)
    (scores.nll_sum if summed else -scores.logps.sum()).backward()
    assert most[0] == 1
