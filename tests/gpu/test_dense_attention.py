"""cuDNN's attention for long segments: it agrees with flash, is faster, and a model takes it."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.batch import RAGGED
from posttrain.core.sample import Sample
from posttrain.data.collate import collate
from posttrain.models.attention import dense
from posttrain.models.load.model import LoadOptions, load_model
from posttrain.models.scoring.token_scores import score_tokens
from tests.rollout import families

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
LENGTHS = (9000, 3500, 2100)


def gradients(model, batch):
    model.zero_grad()
    scores = score_tokens(model, batch)
    scores.logps.mean().backward()
    return scores.logps.detach().float(), {name: p.grad.float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_attends_by_it_in_long_segments(compiled, monkeypatch):
    loaded = load_model(
        families.model_of("llama", max_position_embeddings=16_384, **SHAPE).train().cuda().bfloat16(),
        LoadOptions(device=torch.device("cuda"), layer_kernels=("compiled",) if compiled else ("plain",)),
    )
    calls, plain = [], dense.cudnn
    monkeypatch.setattr(dense, "cudnn", lambda *given: calls.append(given[0].shape[2]) or plain(*given))
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(20, 180, (length,), generator=draw, dtype=torch.int32).numpy() for length in LENGTHS]
    batch = collate([(Sample(row, row > 0),) for row in rows], ("text",), RAGGED).to("cuda")
    found = gradients(loaded.model, batch)
    assert set(calls) == {9216, 3584, 2112}
    monkeypatch.setattr(dense, "_chosen", set())
    calls.clear()
    wanted = gradients(loaded.model, batch)
    assert not calls
    assert (found[0] - wanted[0]).abs().mean() < 0.05
    for name, gradient in wanted[1].items():
        apart = (found[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-9)
        assert apart < 0.1, name


@pytest.mark.whole_gpu
def test_it_is_chosen_for_the_heads_of_models_in_use():
    from posttrain.models.attention.ragged import choose_long_attention

    for heads, key_heads, width in ((12, 2, 128), (14, 2, 64), (32, 8, 128)):
        config = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": width, "hidden_size": 64}
        said = choose_long_attention(families.model_of("llama", **config).bfloat16(), torch.device("cuda"))
        print(said)
        assert said is not None
