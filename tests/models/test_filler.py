"""A pass without images in a model that reads texts only: nothing is encoded, whatever the tokens came as."""

from __future__ import annotations

import torch

from posttrain.models.scoring.token_scores import ScoreRequest, TokenQuestion, install_scores
from tests import tiny


def test_a_body_that_is_handed_embeddings_is_asked_as_one_that_is_handed_ids():
    model = tiny.causal_lm()
    install_scores(model)
    ids = torch.arange(3, 9)[None]
    question = TokenQuestion(torch.arange(5), ids[0, 1:], {})
    by_ids, by_embeddings = (
        model(**given, use_cache=False, score=ScoreRequest((question,), 6))["logps"]
        for given in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)})
    )
    assert torch.equal(by_ids, by_embeddings)
