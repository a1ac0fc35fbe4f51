"""Which kernels the decoder layers get."""

from __future__ import annotations

import pytest
import torch

from posttrain import SFTConfig, SFTTrainer
from posttrain.core.batch import SHARED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.layers import kernels as layer_kernels
from posttrain.models.layers.checkpointing import allow_selective_checkpointing
from posttrain.models.layers.kernels import COMPILED, LIGER, PLAIN, on_copies_of_kept_products
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens
from tests import tiny


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({LIGER: 10.0, COMPILED: 9.0}, COMPILED),
        ({LIGER: 10.0, COMPILED: 9.8}, LIGER),  # not worth the wait
        ({LIGER: 10.0, COMPILED: None}, LIGER),
        ({LIGER: None, COMPILED: 12.0}, COMPILED),
        ({LIGER: None, COMPILED: None}, PLAIN),
    ],
)
def test_the_probe_takes_the_fastest_that_runs(monkeypatch, times, expected):
    def measured(innermost, name):
        if times[name] is None:
            raise RuntimeError("this family has no such layer")
        return times[name]

    monkeypatch.setattr(layer_kernels, "_milliseconds", measured)
    chosen, found = layer_kernels.fastest_kernels(tiny.causal_lm(), (LIGER, COMPILED))
    assert chosen == expected
    assert found == {name: value for name, value in times.items() if value is not None}


def test_a_model_of_one_layer_has_the_shape_of_the_model():
    model = tiny.causal_lm()
    small = layer_kernels._one_layer_model(model)
    layer, same = layer_kernels.decoder_layers(model)[0], layer_kernels.decoder_layers(small)[0]
    assert len(layer_kernels.decoder_layers(small)) == 1
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in same.named_parameters()}
    assert model.config.num_hidden_layers == 2


def test_what_a_probe_changes_in_the_familys_module_is_put_back():
    from transformers.models.qwen2 import modeling_qwen2

    before = modeling_qwen2.apply_rotary_pos_emb
    with layer_kernels._module_kept(tiny.causal_lm()):
        modeling_qwen2.apply_rotary_pos_emb = None
    assert modeling_qwen2.apply_rotary_pos_emb is before


def test_layers_with_adapters_are_not_compiled(monkeypatch):
    from peft import LoraConfig

    monkeypatch.setattr(layer_kernels, "_milliseconds", lambda *_: 1 / 0)  # one candidate is left: nothing is measured
    adapter = LoraConfig(r=2, target_modules=["q_proj"])
    loaded = load_model(tiny.causal_lm(), LoadOptions(layer_kernels=(PLAIN, COMPILED), peft_config=adapter))
    assert loaded.kernels == PLAIN
    assert all(layer._compiled_call_impl is None for layer in loaded.model.base_model.model.model.layers)
    with pytest.raises(ValueError, match="`compile_layers` is for models that are trained whole"):
        load_model(tiny.causal_lm(), LoadOptions(layer_kernels=(COMPILED,), peft_config=adapter))


def test_compiled_layers_keep_their_names_and_can_be_uncompiled():
    model = tiny.causal_lm()
    names = list(model.state_dict())
    loaded = load_model(model, LoadOptions(layer_kernels=(COMPILED,), layout="padded"))
    assert loaded.kernels == COMPILED
    assert "Decoder layers are compiled." in loaded.notes
    assert list(model.state_dict()) == names
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    layer_kernels.uncompile_layers(model)
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)


def test_compiled_layers_have_the_gradient_of_plain_ones_and_other_lengths_compile_nothing_new():
    """With the backend that only traces: a machine without a C++ compiler runs it too."""
    units = [tuple(Sample.of_text(range(1, 4 + i), range(5, 7 + i + j)) for j in (0, 2)) for i in range(6)]
    gradients = {}
    for is_compiled in (False, True):
        model = tiny.causal_lm()
        assert load_model(model, LoadOptions(share_prefixes=True)).layout == SHARED
        if is_compiled:
            torch._dynamo.reset()
            for layer in layer_kernels.decoder_layers(model):
                layer.compile(dynamic=True, backend="aot_eager")
        graphs = []
        for some in (units[:2], units[2:], units):
            model.zero_grad()
            batch = collate(some, ("chosen", "rejected"), SHARED)
            score_tokens(model, batch).logps.sum().backward()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        gradients[is_compiled] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert len(set(graphs)) == 1
    assert (gradients[True] - gradients[False]).norm() <= 1e-6 * gradients[False].norm()


@pytest.mark.slow
@pytest.mark.parametrize(("selective", "kernels"), [(True, PLAIN), (False, COMPILED)])
def test_selective_checkpointing_wants_uncompiled_layers(tmp_path, monkeypatch, selective, kernels):
    monkeypatch.setattr(SFTConfig, "layer_kernels", lambda self, steps: (COMPILED,))
    args = SFTConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, padding_free=False, gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False, "selective": selective},
    )  # fmt: skip
    made = SFTTrainer(tiny.causal_lm(), args, processing_class=tiny.tokenizer())
    assert made.loaded.kernels == kernels
    assert all((layer._compiled_call_impl is None) == selective for layer in made.model.model.layers)


@pytest.mark.parametrize("selective", [False, True])
def test_a_rotary_embedding_that_works_in_place_does_not_spoil_kept_products(monkeypatch, selective):
    """As Liger's kernel does: it writes past torch, whose versions do not change, so that nothing would notice."""
    from transformers.models.qwen2 import modeling_qwen2

    rotate = modeling_qwen2.apply_rotary_pos_emb

    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx, queries, keys, cos, sin):
            ctx.save_for_backward(cos, sin)
            turned = rotate(queries, keys, cos, sin)
            for target, source in zip((queries, keys), turned):
                target.detach().numpy()[:] = source.detach().numpy()
            return queries, keys

        @staticmethod
        def backward(ctx, of_queries, of_keys):
            cos, sin = ctx.saved_tensors
            return *rotate(of_queries, of_keys, cos, -sin), None, None

    def gradient():
        model = tiny.causal_lm()
        if selective:
            allow_selective_checkpointing(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"selective": True})
            model.enable_input_require_grads()
        model.train()(input_ids=torch.arange(40)[None], use_cache=False).logits.square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = gradient()
    monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", on_copies_of_kept_products(InPlace.apply))
    torch.testing.assert_close(gradient(), expected, rtol=1e-5, atol=1e-7)
    if selective:  # without copies it is wrong, and nobody says so
        monkeypatch.setattr(modeling_qwen2, "apply_rotary_pos_emb", InPlace.apply)
        assert (gradient() - expected).norm() > 0.01 * expected.norm()


def test_generating_with_a_cache_compiles_nothing(monkeypatch):
    graphs = []

    def counted(graph, inputs):
        graphs.append(graph)
        return graph

    monkeypatch.setattr(layer_kernels, "recomputing_inductor", counted)
    model = tiny.causal_lm()
    ids = torch.tensor([[5, 6, 7]])
    wanted = model.generate(ids, max_new_tokens=4, do_sample=False)
    layer_kernels.compile_layers(model)
    try:
        model(ids, use_cache=False)
        assert graphs
        graphs.clear()
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), wanted)
        assert not graphs
    finally:
        layer_kernels.uncompile_layers(model)
