"""The proofs of distillation run to their verdicts on a model that can learn nothing in two steps; what they measure is exact."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks.real_runs import distillation
from benchmarks.real_runs.drawn_answers import Drawn, draw, entropies, rise, surprisals, user
from benchmarks.real_runs.self_distillation import begins_with, facts, is_object
from posttrain.rollout.engines.vllm.launcher import ServerProcess
from tests import tiny
from tests.methods import model_server
from tests.rollout.served import needs_uvicorn

WORDS = 320  # a multiple of 64: the model is not enlarged for its tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.causal_lm(1, num_hidden_layers=3, vocab_size=WORDS, max_position_embeddings=1024).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch):
    for module in (distillation, distillation.self_distillation):
        monkeypatch.setattr(module, "TOPICS", "rain bread maps clocks")
        monkeypatch.setattr(module, "HELD_OUT_TOPICS", "milk wolves")


def run(name, model, folder):
    words = [model, name, "--steps", "1", "--output", str(folder)]
    (found,) = distillation.results([name], distillation.parser().parse_args(words))
    return json.loads(json.dumps(found))


@pytest.mark.parametrize("name", ["gkd-forward", "iw_opd", "minillm"])
def test_a_student_is_measured_beside_its_teacher(name, model, tmp_path, monkeypatch):
    monkeypatch.setattr(distillation, "PROMPTS_A_STEP", 4)
    found = run(name, model, tmp_path)
    assert not found["holds"]
    assert 0 < found["after"][found["trains"]] < found["before"][found["trains"]]
    assert found["control"]["holds"]
    assert found["control"]["grad_norm"] < 1e-3 * found["first_grad_norm"]


@pytest.mark.slow  # a server process, with its seconds of imports
@needs_uvicorn
def test_a_student_learns_from_a_server(model, tmp_path, monkeypatch):
    class StandIn(ServerProcess):
        PROGRAM = Path(model_server.__file__).parent / "serve_model.py"

    monkeypatch.setattr(distillation, "ServerProcess", StandIn)
    monkeypatch.setattr(distillation, "PROMPTS_A_STEP", 4)
    found = run("server_distillation", model, tmp_path)
    assert found["after"]["forward_own"] < found["before"]["forward_own"]
    assert found["control"]["holds"]
    assert found["control"]["largest_loss"] < 1e-6


@pytest.mark.trust
def test_a_model_that_cannot_add_is_not_paid(model, tmp_path):
    found = run("sdpo", model, tmp_path)
    assert not found["holds"]
    assert found["control"] == {"largest_move": 0.0}
    assert found["rewards_at_weight_0"] == found["rewards_of_grpo"] == [0.0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sdft", "ssd"])
def test_self_distillation_runs_with_its_control(name, model, tmp_path):
    found = run(name, model, tmp_path)
    assert not found["holds"]
    assert found["before"].keys() >= {"right"} if name == "sdft" else found["before"]["parsable"] == 0


def test_what_is_said_of_drawn_tokens_is_that_of_each_row_alone(model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    drawn = draw(made, tokenizer, [user("Hi"), user("What is it that you see?")], 6)
    assert isinstance(drawn, Drawn)
    assert drawn.real.shape[1] <= 6
    wanted, spread = [], []
    for ids, seen in zip(drawn.ids, drawn.seen):
        alone = ids[seen.bool()]
        count = int(seen[drawn.start :].sum())
        logps = made(alone[None]).logits[0, -count - 1 : -1].log_softmax(-1)
        wanted += (-logps.gather(-1, alone[-count:, None])).flatten().tolist()
        spread += (-(logps.exp() * logps).sum(-1)).tolist()
    assert drawn.mean(surprisals, made) == pytest.approx(sum(wanted) / len(wanted), abs=1e-4)
    assert drawn.mean(entropies, made) == pytest.approx(sum(spread) / len(spread), abs=1e-4)
    assert drawn.mean(lambda p, q, _: distillation.divergence(p, q), made, made) == 0


def test_standard_errors_are_those_of_questions():
    before, after = [False] * 8, [True, True, False, False, True, True, False, False]
    found = rise(before, after, 4)  # two answers to each of four questions: changes 1, 0, 1, 0
    assert (found["before"], found["after"]) == (0, 0.5)
    assert found["standard_errors"] == pytest.approx(0.5 / (math.sqrt(1 / 3) / 2))
    assert rise(before, before, 4)["standard_errors"] == 0
    assert rise(before, [True] * 8, 4)["standard_errors"] == math.inf


def test_answers_are_judged():
    assert len({word for *_, word in facts()}) == 20
    assert all(word in fact and word not in question for question, fact, word in facts())
    assert begins_with(" 18.", 18)
    assert not begins_with("It is 18", 18)
    assert not begins_with("181", 18)
    assert is_object('{"thing": 1}')
    assert not is_object("[1]")
    assert not is_object("Sure: {}")
    assert torch.isclose(
        distillation.divergence(*torch.tensor([[0.5, 0.5], [0.25, 0.75]]).log()[:, None]), torch.tensor(0.14384)
    )
