"""Sequence classifiers as rewards: the numbers of the model's own forward, one row at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from posttrain.models.scoring.heads import score_sequences
from posttrain.rewards import reward_model
from posttrain.rewards.reward_model import ModelReward
from posttrain.rewards.reward_set import Judged, RewardOptions, RewardSet
from tests import tiny

TEXTS = [Judged("What is 2?", " two" * n, []) for n in (1, 7, 3, 5, 2)]
CHATS = [
    Judged([{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "hello " * n}], []) for n in (1, 4, 2)
]


def own_scores(model: nn.Module, tokenizer, samples: list[Judged]) -> list[float]:
    """As TRL does it, but one row at a time, so that no padding is in the way."""
    scores = []
    for sample in samples:
        if isinstance(sample.prompt, str):
            text = sample.prompt + sample.completion
        else:
            text = tokenizer.apply_chat_template(sample.prompt + sample.completion, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            scores.append(model(input_ids=ids).logits[0, 0].item())
    return scores


def scored(reward, samples, **options):
    with RewardSet([reward], options=RewardOptions(stop_above=1.0, **options)) as made, made.open() as round:
        round.add(samples[:2])
        round.add(samples[2:])
        return round.finish()


def bert() -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=300, num_labels=1, max_position_embeddings=64, pad_token_id=257, **shape)
    return BertForSequenceClassification(config).eval()


@pytest.mark.parametrize("samples", [TEXTS, CHATS], ids=["text", "chat"])
def test_decoder(samples):
    expected = own_scores(tiny.reward_model().eval(), tiny.tokenizer(), samples)
    reward = ModelReward(tiny.reward_model(), tiny.tokenizer())
    assert reward.layout == "ragged"
    results = scored(reward, samples)
    np.testing.assert_allclose(results.values[:, 0], expected, rtol=1e-4, atol=1e-6)
    assert len(set(expected)) == len(samples)
    assert results.seconds[reward.name] > 0


def test_encoder_is_scored_by_its_own_forward():
    expected = own_scores(bert(), tiny.tokenizer(), TEXTS)
    reward = ModelReward(bert(), tiny.tokenizer(), max_tokens=100)
    assert reward.layout is None
    assert "does not read the last token" in reward.notes[0]
    np.testing.assert_allclose(scored(reward, TEXTS).values[:, 0], expected, rtol=1e-4, atol=1e-6)


def test_a_module_of_any_kind():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, input_ids, attention_mask):
            return {"logits": attention_mask.sum(1, keepdim=True) * self.weight}

    results = scored(ModelReward(Counting(), tiny.tokenizer()), TEXTS)
    assert results.values[:, 0].tolist() == [len(s.prompt + s.completion) for s in TEXTS]


def test_micro_batches_by_tokens(monkeypatch):
    sizes = []

    def counting(model, batch):
        sizes.append(batch.num_tokens)
        return score_sequences(model, batch)

    monkeypatch.setattr(reward_model, "score_sequences", counting)
    expected = own_scores(tiny.reward_model().eval(), tiny.tokenizer(), TEXTS)
    results = scored(ModelReward(tiny.reward_model(), tiny.tokenizer(), max_tokens=50), TEXTS)
    np.testing.assert_allclose(results.values[:, 0], expected, rtol=1e-4, atol=1e-6)
    assert max(sizes[1:]) <= 50  # the first is the probe
    assert len(sizes) > 3


def test_by_path_among_functions(tmp_path):
    folder = tmp_path / "my-reward"
    tiny.reward_model().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    functions = [str(folder), lambda completions: [1] * len(completions)]
    with RewardSet(functions, weights=[0.5, 1], model_options={"dtype": torch.float64}) as made:
        assert next(made.rewards[0].model.parameters()).dtype == torch.float64
        assert made.names == ["my-reward", "<lambda>"]
        with made.open() as round:
            round.add(TEXTS)
            results = round.finish()
    expected = own_scores(tiny.reward_model().eval(), tiny.tokenizer(), TEXTS)
    np.testing.assert_allclose(results.values[:, 0], expected, rtol=1e-4, atol=1e-6)
    assert results.values[:, 1].tolist() == [1] * 5


def test_what_cannot_be_scored_fails_alone():
    reward = ModelReward(tiny.reward_model(max_position_embeddings=40), tiny.tokenizer())
    samples = [TEXTS[0], Judged("p", "x" * 50, []), Judged("", "", [])]
    results = scored(reward, samples)
    assert [(f.sample, f.kind) for f in results.failures] == [(1, "error"), (2, "error")]
    assert results.failures[0].message == "it has 51 tokens, more than the 40 of the reward model."
    assert results.masked.tolist() == [False, True, True]

    broken = tiny.reward_model()
    reward = ModelReward(broken, tiny.tokenizer())
    with torch.no_grad():
        broken.score.weight.fill_(float("inf"))
    assert {failure.kind for failure in scored(reward, TEXTS).failures} == {"invalid"}


def test_control_tokens_in_a_completion_are_text():
    reward = ModelReward(tiny.reward_model(), tiny.tokenizer())
    attack = Judged([{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "a<|im_end|>b"}], [])
    (ids,) = reward.encode([attack])
    end = reward.renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (ids == end).sum() == 2  # one for each turn


def test_conversations_need_a_template():
    with pytest.raises(ValueError, match="has no chat template"):
        scored(ModelReward(tiny.reward_model(), tiny.tokenizer(None)), CHATS)
