"""A teacher behind a real server process: what it says, what is trained on it, and what happens when it dies."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain import (
    DistillationConfig,
    DistillationTrainer,
    GKDConfig,
    GOLDConfig,
    MiniLLMConfig,
    Sample,
    ServerDistillationConfig,
    ServerDistillationTrainer,
)
from posttrain.losses.distributions import Divergence
from posttrain.trainer.online.served_teacher import (
    TEACHER_LOGPS,
    TEACHER_TOP_IDS,
    TEACHER_TOP_LOGPS,
    ServedTeacher,
)
from tests import tiny
from tests.methods import model_server
from tests.rollout.served import SocketServer, http, needs_uvicorn, read_request

PROMPTS = [{"prompt": f"What is {i}?"} for i in range(8)]
COMMON = {
    "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 3, "learning_rate": 1e-3,
    "per_device_train_batch_size": 4, "max_completion_length": 4, "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture
def served(tmp_path):
    """(the server's process, options that name it); the teacher is `tiny.causal_lm(1)`."""
    tiny.causal_lm(1).save_pretrained(tmp_path / "teacher")
    return model_server.started(tmp_path / "teacher", tmp_path)


def make(folder, given=None, **options):
    return ServerDistillationTrainer(
        tiny.causal_lm(),
        ServerDistillationConfig(output_dir=str(folder / "out"), **COMMON, **options),
        **{"train_dataset": Dataset.from_list(PROMPTS), "processing_class": tiny.tokenizer(), **(given or {})},
    )


def logs(trainer):
    return [line for line in trainer.state.log_history if "loss" in line]


# ---- what is learned -----------------------------------------------------------------------------------------------------


class LocalTopK(DistillationTrainer):
    """The same with the teacher in memory: its likeliest tokens of all that it says."""

    @property
    def divergence(self):
        return Divergence(0.0, top_k=3, tail=True)


@needs_uvicorn
def test_loss_and_gradient_are_those_of_the_likeliest_tokens_of_a_local_teacher(served, tmp_path):
    options = {"beta": 0.0, "loss_top_k": 3, **served[1]}
    with pytest.raises(ValueError, match=r"tokenizers of the student and of the teacher echo at http://127\.0\.0\.1:"):
        make(tmp_path, {"teacher_processing_class": tiny.merging_tokenizer()}, **options)
    trainer = make(tmp_path, {"teacher_processing_class": tiny.tokenizer()}, **options)
    trainer.train()
    local = LocalTopK(
        tiny.causal_lm(),
        tiny.causal_lm(1),
        DistillationConfig(output_dir=str(tmp_path / "local"), beta=0.0, **COMMON),
        train_dataset=Dataset.from_list(PROMPTS),
        processing_class=tiny.tokenizer(),
        teacher_processing_class=tiny.tokenizer(),
    )
    local.train()
    assert len(logs(trainer)) == 3
    for ours, theirs in zip(logs(trainer), logs(local)):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-4)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["teacher/unanswered"] == 0
    for own, other in zip(trainer.model.parameters(), local.model.parameters()):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-4)
    losses = [one.evaluate(Dataset.from_list(PROMPTS[:3]))["eval_loss"] for one in (trainer, local)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert trainer.teacher.words == tiny.causal_lm().config.vocab_size


# ---- a server that dies --------------------------------------------------------------------------------------------------


class Dying:
    """Kills the server after its first answer of a generation: the second one is asked in vain."""

    def __init__(self, trainer, server):
        self.server, self.asked = server, 0
        self.annotate, trainer.teacher.annotate = trainer.teacher.annotate, self

    def __call__(self, samples):
        self.asked += 1
        if self.asked == 2:
            self.server.end()
        return self.annotate(samples)


@needs_uvicorn
@pytest.mark.parametrize("most", [0.5, 1.0])
def test_a_server_that_is_killed_stops_the_run_or_masks_as_configured(served, tmp_path, caplog, most):
    server, options = served
    trainer = make(tmp_path, teacher_max_unanswered=most, **options)
    trainer.teacher._wait = 1.0  # it had longer to start
    Dying(trainer, server)
    if most < 1:
        with pytest.raises(
            RuntimeError, match=r"left 4 of 4 .* `teacher_max_unanswered`=0.5 of them\. The first: POST /score"
        ):
            trainer.train()
        return
    trainer.train()
    assert [line["teacher/unanswered"] for line in logs(trainer)] == [0, 1, 1]
    assert [line["rollouts/masked"] for line in logs(trainer)] == [0, 1, 1]
    assert [line["loss"] for line in logs(trainer)][1:] == [0, 0]
    assert logs(trainer)[0]["loss"] > 0
    assert any(
        "4 of 4 completions of a generation unanswered; they are masked." in r.getMessage() for r in caplog.records
    )


def test_a_server_that_is_not_there_is_refused_at_the_start(tmp_path):
    with pytest.raises(
        ConnectionError, match=r"No teacher answered at http://127\.0\.0\.1:9 within `teacher_server_timeout`=0.5 s"
    ):
        make(tmp_path, teacher_model_server_url="http://127.0.0.1:9", teacher_server_timeout=0.5)


@needs_uvicorn
def test_a_server_that_wants_another_token_is_refused_at_the_start(served, tmp_path, monkeypatch):
    monkeypatch.delenv("POSTTRAIN_SERVE_TOKEN", raising=False)
    url = served[1]["teacher_model_server_url"]
    with pytest.raises(ConnectionError, match=r"cannot be asked: .* No token was given \(`teacher_server_token_file`"):
        make(tmp_path, teacher_model_server_url=url)


# ---- a plain vLLM --------------------------------------------------------------------------------------------------------

LIKELY = [{}, {"7": {"logprob": -0.7}, "9": {"logprob": -0.9}}, {"8": {"logprob": -0.1}}]


def places(ids):
    """`prompt_logprobs` of some tokens: the likeliest ones and the one that stands there, in any order."""
    return [None, *({str(token): {"logprob": -2.5}, **likely} for token, likely in zip(ids[1:], LIKELY[1:]))]


def plain_vllm(bodies, tokens=None, most=20, words=1 << 20, answers=places):
    """Answers as `vllm serve` does. Refuses tokens of 250, from `words` on, and more than `most` likely ones."""

    def behave(connection, number):
        while True:
            head, body = read_request(connection)
            path = head.split()[1].decode()
            said = json.loads(body) if body else {}
            if path == "/v1/models":
                answer = {"data": [{"id": "org/big", "root": "org/big", "max_model_len": 99, "parent": None}]}
            elif path == "/v1/completions":
                bodies.append(said)
                answer = {"choices": [{"prompt_logprobs": answers(said["prompt"])}]}
            elif path == "/tokenize" and tokens is not None:
                answer = {"tokens": tokens}
            else:
                connection.sendall(http(b'{"error": "not here"}', "404 Not Found"))
                continue
            refused = path == "/v1/completions" and (250 in said["prompt"] or max(said["prompt"]) >= words)
            refused = refused or said.get("prompt_logprobs", 0) > most
            data = b'{"error": "token 250?"}' if refused else json.dumps(answer).encode()
            connection.sendall(http(data, "400 Bad Request" if refused else "200 OK"))

    return SocketServer(behave)


def test_answers_of_a_plain_vllm_are_sorted_and_cut(tmp_path):
    bodies = []
    server = plain_vllm(bodies)
    teacher = ServedTeacher(f"{server.url}/v1/", 2, wait_seconds=2)
    teacher.check(tiny.tokenizer())
    good, bad = Sample.of_text([1], [5, 3]), Sample.of_text([1], [250, 3])
    failed = teacher.annotate([bad, good])
    assert list(failed) == [0]
    assert "was refused with status 400: token 250?" in failed[0]
    assert good.per_token[TEACHER_LOGPS].tolist() == [0, -2.5, -2.5]
    assert good.per_token[TEACHER_TOP_IDS].tolist() == [[0, 0], [7, 9], [8, 3]]
    assert np.allclose(good.per_token[TEACHER_TOP_LOGPS], [[0, 0], [-0.7, -0.9], [-0.1, -2.5]])
    asked = next(body for body in bodies if len(body["prompt"]) == 3 and 250 not in body["prompt"])
    assert (asked["prompt"], asked["prompt_logprobs"], asked["model"]) == ([1, 5, 3], 2, "org/big")
    server.close()


def test_a_plain_vllm_with_other_tokens_is_refused(tmp_path):
    server = plain_vllm([], tokens=[1, 2, 3])
    with pytest.raises(
        ValueError, match=r"tokenizers of the student and of the teacher org/big at .* differ: token 0 of a text is"
    ):
        ServedTeacher(server.url, wait_seconds=2).check(tiny.tokenizer())
    server.close()


@pytest.mark.parametrize(
    ("how", "error", "sentence"),
    [
        ({"most": 4}, ValueError, "gives log-probs of fewer tokens than `loss_top_k`=5: .* `--max-logprobs 5`"),
        (
            {"words": 100},
            ValueError,
            r"org/big at .* does not know token \d+, which the student's tokenizer has: .* status 400",
        ),
        (
            {"words": 0},
            ConnectionError,
            r"gives no log-probs of given tokens: .* status 400.* is a `posttrain vllm-serve`",
        ),
        (
            {"answers": lambda ids: None},
            ConnectionError,
            "no log-probs of given tokens: .* it has no `prompt_logprobs`",
        ),
        (
            {"answers": lambda ids: [None, {str(ids[1]): {"logprob": 3.5}}]},
            ConnectionError,
            "has a number that is not a log-prob",
        ),
        (
            {"answers": lambda ids: [None, {str(ids[1]): {"logprob": -0.1}, "4": {"logprob": -0.1}}]},
            ConnectionError,
            "has probabilities that sum to more than 1",
        ),
    ],
)
def test_a_plain_vllm_that_cannot_teach_is_refused_at_the_start(how, error, sentence):
    server = plain_vllm([], **how)
    with pytest.raises(error, match=sentence):
        ServedTeacher(server.url, 5, wait_seconds=2).check(tiny.tokenizer())
    server.close()


def test_a_plain_vllm_that_never_answers_is_refused_when_the_deadline_has_passed():
    server = plain_vllm([], answers=lambda ids: time.sleep(30))
    with pytest.raises(ConnectionError, match=r"is there and does not answer: POST /v1/completions"):
        ServedTeacher(server.url, 1, wait_seconds=0.6, call_seconds=0.3).check(tiny.tokenizer())
    server.close()


# ---- several teachers ----------------------------------------------------------------------------------------------------


def several(*servers):
    return json.dumps({name: server.url for name, server in zip(("maths", "code"), servers)})


def test_a_row_names_the_teacher_that_is_asked_and_one_that_dies_masks_its_own_rows(tmp_path):
    asked = {"maths": [], "code": []}

    def likely(ids):  # the written token at -1, the teacher's favourite at -0.6
        return [None, *({str(token): {"logprob": -1.0}, "3": {"logprob": -0.6}} for token in ids[1:])]

    servers = [plain_vllm(bodies, answers=likely) for bodies in asked.values()]
    rows = [{**row, "teacher_id": "code" if i % 2 else "maths"} for i, row in enumerate(PROMPTS)]
    options = {"teacher_server_urls": several(*servers), "teacher_server_timeout": 0.5}
    trainer = make(tmp_path, {"train_dataset": Dataset.from_list(rows)}, **options)
    assert trainer.teacher.name == "code: org/big; maths: org/big"
    trainer.args.max_steps = 1
    trainer.train()
    for bodies, texts in zip(asked.values(), ([0, 2, 4, 6], [1, 3, 5, 7])):
        prompts = [tiny.tokenizer()(PROMPTS[i]["prompt"])["input_ids"] for i in texts]
        about = [body["prompt"] for body in bodies if len(body["prompt"]) > 2]
        assert about
        assert all(any(ids[: len(prompt)] == prompt for prompt in prompts) for ids in about)
    (line,) = logs(trainer)
    assert line["teacher/unanswered"] == line["teacher/maths/unanswered"] == line["teacher/code/unanswered"] == 0

    servers[1].close()
    trainer.args.max_steps, trainer.args.teacher_max_unanswered = 3, 1.0
    trainer.train()
    line = logs(trainer)[-1]
    assert (line["teacher/maths/unanswered"], line["teacher/code/unanswered"]) == (0, 1)
    assert 0 < line["teacher/unanswered"] < 1
    servers[0].close()


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([None], r"Row 0 has no `teacher_id`, and `teacher_server_urls` names several teachers \('maths', 'code'\)"),
        (
            ["maths", "art"],
            r"`teacher_id` of row 1 is 'art'; the teachers of `teacher_server_urls` are 'maths', 'code'",
        ),
    ],
)
def test_a_row_without_a_teacher_is_found_before_anybody_is_asked(tmp_path, ids, sentence):
    rows = [{"prompt": "What?", **({} if one is None else {"teacher_id": one})} for one in ids]
    urls = {"maths": "http://127.0.0.1:9", "code": "http://127.0.0.1:9"}
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path, {"train_dataset": Dataset.from_list(rows)}, teacher_server_urls=urls)


# ---- options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [DistillationConfig, GKDConfig, GOLDConfig, MiniLLMConfig])
@pytest.mark.parametrize("option", [{"use_teacher_server": True}, {"teacher_model_server_url": "http://127.0.0.1:9"}])
def test_methods_that_compare_whole_vocabularies_name_those_that_ask_a_server(tmp_path, config, option):
    with pytest.raises(
        ValueError, match=r"likeliest tokens only.*`posttrain server_distillation`, or `posttrain iw_opd`"
    ):
        config(output_dir=str(tmp_path), use_cpu=True, **option)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"temperature": 0.7}, "`temperature` is 0.7; a server's log-probs of given tokens are those at temperature 1"),
        ({"loss_top_k": 0, "beta": 0.0}, "answers with its likeliest tokens and not with the whole vocabulary"),
        ({"loss_top_k": 4}, "`loss_top_k` is 4 and `beta` 1; above 0"),
        ({"reverse_kl_top_1_mode": "argmax"}, "does not know what the student will find likeliest"),
        ({"loss_add_tail": False}, "the loss is always 0"),
        ({"loss_add_tail": False, "beta": 0.0}, "the loss is always 0"),
        ({"teacher_model_name_or_path": "big"}, "The teacher is on a server"),
        ({"teacher_max_unanswered": 1.5}, "`teacher_max_unanswered` is 1.5"),
        ({"teacher_server_urls": ["http://a"]}, "it is a mapping of names to addresses"),
        ({"teacher_server_urls": {"a": "http://a"}, "teacher_model_server_url": "http://b"}, "give one of the two"),
        ({}, "ServerDistillationTrainer needs a teacher's server: set `teacher_model_server_url`"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(tmp_path, **options)
