"""Our server around a tiny transformers model, for tests of server mode where there is no vLLM."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from posttrain.models.load.weight_export import exported_specs
from posttrain.rollout.engines.vllm.launcher import free_port
from posttrain.serve import launch
from posttrain.serve.engine.protocol import LENGTH, STOP, AdapterRef, Job, Progress, ScoreJob
from tests.forked import Child
from tests.serve.echo_engine import EchoEngine


class ModelEngine(EchoEngine):
    """Writes a whole completion, or scores, in one step."""

    def __init__(self, folder: str, has_adapters: bool) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        super().__init__({name: tensor.detach() for name, tensor in self.model.state_dict().items()}, 256)
        self.specs = {spec.name: spec for spec in exported_specs(self.model)}
        changes = {"vocabulary": self.model.config.vocab_size, "adapter_modules": ("q_proj", "v_proj")}
        self.info = type(self.info)(
            **{**vars(self.info), **changes, "capabilities": self.info.capabilities | {"adapters": has_adapters}}
        )
        self.adapters: dict[int, Any] = {}
        self.used: dict[str, Any] = {}  # the model of each job

    def add(self, job: Job, adapter: AdapterRef | None) -> None:
        super().add(job, adapter)
        self.used[job.job_id] = self.model if adapter is None else self.adapters[adapter.number]

    @torch.no_grad()
    def _write(self, writing: Any) -> Progress:
        job, model = writing.job, self.used.pop(writing.job.job_id)
        generator = torch.Generator().manual_seed(job.sampling.seed or 0)
        ids, logps = list(job.ids), []
        while len(logps) < job.sampling.max_tokens and (not logps or ids[-1] not in job.sampling.stop_ids):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1] / (job.sampling.temperature or 1.0)
            chances = logits.softmax(-1)
            token = (
                int(torch.multinomial(chances, 1, generator=generator))
                if job.sampling.temperature
                else int(chances.argmax())
            )
            ids.append(token)
            logps.append(float(logits.log_softmax(-1)[token]))
        reason = STOP if ids[-1] in job.sampling.stop_ids else LENGTH
        return Progress(job.job_id, ids[len(job.ids) :], reason, logps)

    @torch.no_grad()
    def _score(self, job: ScoreJob) -> Progress:
        logits = self.used.pop(job.job_id)(input_ids=torch.tensor([list(job.ids)])).logits[0]
        logps = logits[job.start - 1 : -1].log_softmax(-1)
        own, likeliest = logps.gather(1, torch.tensor(job.ids[job.start :])[:, None])[:, 0], logps.topk(job.top_k, -1)
        top = (
            [[*zip(*place)] for place in zip(likeliest.indices.tolist(), likeliest.values.tolist())]
            if job.top_k
            else []
        )
        return Progress(job.job_id, job.ids[job.start :], LENGTH, own.tolist(), top)

    @torch.no_grad()
    def load_weights(self, tensors: Any) -> None:
        own: dict[str, Tensor] = dict(self.model.state_dict())
        for name, tensor in tensors:
            own[name].copy_(tensor)

    def known_tensors(self) -> dict[str, Any]:
        return self.specs

    def add_adapter(self, adapter: AdapterRef) -> None:
        self.adapters[adapter.number] = PeftModel.from_pretrained(copy.deepcopy(self.model), adapter.path).eval()

    def remove_adapter(self, adapter: AdapterRef) -> None:
        self.adapters.pop(adapter.number)


def address(model: Path, folder: Path) -> tuple[tuple[str, ...], dict[str, Any]]:
    """(arguments of a server of the model in that folder, the options with which it is a teacher's)."""
    token, port = folder / "teacher.token", free_port()
    token.touch(mode=0o600)
    token.write_text("0123456789abcdef" * 3)
    words = ("--model", str(model), "--port", str(port), "--token-file", str(token))
    url = f"http://127.0.0.1:{port}"
    return words, {"teacher_model_server_url": url, "teacher_server_token_file": str(token)}


def started(model: Path, folder: Path) -> tuple[Child, dict[str, Any]]:
    """(a server of the model in that folder, the options with which it is a teacher's)."""
    words, options = address(model, folder)
    return Child(lambda: main(words), folder / "teacher.log"), options


def main(words: Sequence[str]) -> None:
    launch.make_engine = lambda args: ModelEngine(args.model, args.adapter_folder is not None)
    sys.exit(launch.main(words))


if __name__ == "__main__":
    main(sys.argv[1:])
