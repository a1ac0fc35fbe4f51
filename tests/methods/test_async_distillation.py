"""AsyncDistillation: TRL's names, defaults and numbers, with servers and with somebody else's worker."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from posttrain import AsyncDistillationConfig, AsyncDistillationTrainer
from posttrain.core.options import default_of
from posttrain.trainer.options import trl_async
from tests import tiny
from tests.methods import model_server
from tests.methods.scripted_worker import RecordingTransfer, ScriptedWorker
from tests.methods.test_async_grpo import KeepWeights
from tests.trainer.test_online import logged

DEFAULTS = {
    "model_init_kwargs": None, "dtype": "float32", "ignore_data_skip": True, "trust_remote_code": False,
    "learning_rate": 1e-6, "logging_steps": 1, "max_completion_length": 2048, "temperature": 1.0, "top_p": 1.0, "top_k": 0,
    "min_p": None, "repetition_penalty": 1.0, "chat_template_kwargs": None, "vllm_server_base_url": "http://localhost:8000",
    "vllm_server_timeout": 240.0, "teacher_server_urls": None, "request_timeout": 600, "weight_sync_timeout": 1800,
    "beta": 0.0, "teacher_temperature": 1.0, "teacher_top_k": 8, "add_tail_bucket": True, "token_budget": None,
    "max_inflight_tasks": -1, "max_staleness": 4, "queue_maxsize": 1024, "weight_sync_steps": 1,
    "heartbeat_stale_after_s": 300.0, "log_completions": False, "log_completions_steps": 100,
    "num_completions_to_print": None,
}  # fmt: skip
"""The 31 fields of TRL 1.16's AsyncDistillationConfig."""
ORDER = (
    "model", "args", "train_dataset", "processing_class", "callbacks", "optimizers", "peft_config", "rollout_worker",
    "weight_transfer",
)  # fmt: skip
PROMPTS = [{"prompt": f"Say {i}"} for i in range(12)]
TOP_K = 3


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    monkeypatch.setattr(trl_async, "_answers", lambda address: False)


def config(folder, **options):
    own = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", "per_device_train_batch_size": 4}
    own |= {"max_completion_length": 6, "max_steps": 3, "learning_rate": 0.05, "save_strategy": "no"}
    return AsyncDistillationConfig(**{**own, "teacher_top_k": TOP_K, "disable_tqdm": True, **options})


def test_fields_and_defaults_are_trl_s(tmp_path):
    fields = {one.name: one for one in dataclasses.fields(AsyncDistillationConfig)}
    assert {name: default_of(fields[name]) for name in DEFAULTS} == DEFAULTS
    assert config(tmp_path).teacher_servers() == {"default": "http://localhost:8001"}
    assert config(tmp_path, teacher_server_urls='{"a": "http://x:1"}').teacher_servers() == {"a": "http://x:1"}


def test_arguments_are_in_trl_s_order():
    named = list(inspect.signature(AsyncDistillationTrainer.__init__).parameters)[1:]
    assert tuple(named[: len(ORDER)]) == ORDER


# ---- another's worker ----------------------------------------------------------------------------------------------------


@dataclass
class Taught:
    """What TRL's workers put into their buffer here: the teacher's likeliest tokens by rank, -1 and -inf for none."""

    prompt: Any
    completion: Any
    input_ids: np.ndarray
    completion_mask: np.ndarray
    teacher_topk_ids: np.ndarray
    teacher_topk_logprobs: np.ndarray
    model_version: int
    prompt_id: int
    metrics: dict[str, float] = field(default_factory=dict)
    teacher_id: str = "default"
    enqueued_at: float | None = None


def taught(rng, group, version):
    """Of the written token's places one is the teacher's likeliest, one is not among the likeliest, one has no answer."""
    ids = np.concatenate([np.full(2, 5 + group % 7), rng.integers(10, 60, 5)])
    mask = np.arange(len(ids)) >= 2
    names = np.full((len(ids), TOP_K + 1), -1)
    logps = np.full(names.shape, -np.inf, np.float32)
    for place in range(2, 6):  # nobody was asked about the last one
        others = 60 + rng.permutation(20)[:TOP_K]
        is_among = place % 2 == 0
        if is_among:
            others[0] = ids[place]
        names[place, :TOP_K] = others
        names[place, TOP_K] = -1 if is_among else ids[place]
        chances = np.sort(rng.dirichlet(np.ones(TOP_K + 2)))[::-1]
        logps[place] = np.where(names[place] >= 0, np.log(chances[: TOP_K + 1]), -np.inf)
    return Taught("p", "c", ids, mask.astype(np.int64), names, logps, version, group)


def divergence(ours, theirs, beta, tail):
    """On k tokens and, with a tail, all others as one more; renormalised without."""
    if tail:
        ours, theirs = (torch.cat([p, 1 - p.sum(0, keepdim=True)]) for p in (ours, theirs))
    else:
        ours, theirs = ours / ours.sum(), theirs / theirs.sum()
    if beta in (0, 1):
        p, q = (theirs, ours) if beta == 0 else (ours, theirs)
        return (p * (p / q).log()).sum()
    mixture = (1 - beta) * ours + beta * theirs
    return beta * (theirs * (theirs / mixture).log()).sum() + (1 - beta) * (ours * (ours / mixture).log()).sum()


def loss_of(model, samples, beta, tail):
    """TRL's, in float64; places that no teacher was asked about count nowhere."""
    values = []
    for one in samples:
        chances = model(input_ids=torch.tensor(one.input_ids)[None]).logits[0].softmax(-1)
        for place in np.flatnonzero(one.completion_mask):
            known = one.teacher_topk_ids[place] >= 0
            said = dict(
                zip(one.teacher_topk_ids[place][known], np.exp(one.teacher_topk_logprobs[place][known].astype(float)))
            )
            if not said:
                continue
            written, first = int(one.input_ids[place]), int(one.teacher_topk_ids[place][0])
            names = [*said] if beta == 0 else [written] if beta == 1 else [*dict.fromkeys((first, written))]
            theirs = torch.tensor([said[name] for name in names])
            values.append(divergence(chances[place - 1][names], theirs, beta, tail))
    return torch.stack(values).mean()


@pytest.mark.parametrize(("beta", "tail"), [(0.0, True), (0.0, False), (0.5, True), (1.0, True)])
def test_losses_of_scripted_rollouts_are_trl_s(tmp_path, beta, tail):
    keep, worker, transfer = KeepWeights(), ScriptedWorker(4, 1, sample=taught), RecordingTransfer()
    made = AsyncDistillationTrainer(
        tiny.causal_lm(), config(tmp_path, beta=beta, add_tail_bucket=tail), Dataset.from_list(PROMPTS), tiny.tokenizer(),
        [keep], rollout_worker=worker, weight_transfer=transfer,
    )  # fmt: skip
    made.train()
    made.close()
    found = [line["loss"] for line in logged(tmp_path) if "loss" in line]
    model = tiny.causal_lm().double()
    for step, loss in enumerate(found):
        model.load_state_dict(keep.kept[step])
        wanted = loss_of(model, worker.put[4 * step : 4 * step + 4], beta, tail)
        assert loss == pytest.approx(wanted.item(), abs=2e-6)
    assert len(found) == 3
    assert worker.calls == [("version", 1), "start", ("version", 2), ("version", 3), ("version", 4), "stop"]
    assert transfer.calls == ["init", *["pause", "send", "resume"] * 4, "destroy"]


# ---- a teacher's server --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_a_teacher_s_server_and_our_own_writers(tmp_path, capsys):
    pytest.importorskip("uvicorn")
    tiny.causal_lm(1).save_pretrained(tmp_path / "teacher")
    server, options = model_server.started(tmp_path / "teacher", tmp_path)
    try:
        url = options.pop("teacher_model_server_url")
        args = config(tmp_path / "run", teacher_server_urls={"default": url}, **options)
        made = AsyncDistillationTrainer(tiny.causal_lm(), args, Dataset.from_list(PROMPTS), tiny.tokenizer())
        made.train()
        made.close()
    finally:
        server.end()
    lines = [line for line in logged(tmp_path / "run") if "loss" in line]
    assert len(lines) == 3
    assert all(line["loss"] > 0 and line["teacher/unanswered"] == 0 for line in lines)
    assert max(line["async/token_age/max"] for line in lines) > 0
    assert "no server answers, and none was asked for, at http://localhost:8000" in " ".join(
        capsys.readouterr().out.split()
    )


REFUSED = {
    "`teacher_temperature` is 0.5, which has no effect here. A server's log-probs": {"teacher_temperature": 0.5},
    "`temperature` is 0.5": {"temperature": 0.5},
    "`proximal_policy` is 'sampler', and the loss of AsyncDistillationConfig clips no ratio": {
        "proximal_policy": "sampler"
    },
    "The teacher is on a server": {"teacher_model_name_or_path": "model"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_is_refused(tmp_path, said):
    with pytest.raises(ValueError, match=said):
        config(tmp_path, **REFUSED[said])
