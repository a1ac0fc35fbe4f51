"""The client of a plain `vllm serve`, for those who run one already.

What it can do: completions of token ids with log-probs, scores, and LoRA adapters that are exchanged by name. What it cannot:
take full weights, promise which weights wrote a token (so every version is an adapter with a name of its own, and a request
names it), run a request once only (one that is sent again is computed again; its seed makes it the same completion).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from posttrain.core.transport import ServerAnswer, ServerRefused, Token
from posttrain.rollout.engines.protocol import LENGTH, STOP, SamplingParams
from posttrain.rollout.engines.vllm.client import (
    NOT_OFFERED,
    Client,
    GenerateRequest,
    ServerCompletion,
    ServerInfo,
    check_tokens,
)
from posttrain.rollout.engines.vllm.kept_weights import KeptWeights
from posttrain.rollout.engines.vllm.params import RAW
from posttrain.rollout.engines.vllm.transport import Deadlines

NAME = re.compile(r"posttrain-(\d{1,16})-([0-9a-f]{32})")
LARGEST_BIAS = 100.0
MISSING = (
    "A plain `vllm serve` takes no weights from a trainer. Start the server with `posttrain vllm-serve`; or train a LoRA "
    "adapter, start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and name a folder that both sides see "
    "(`adapter_folder`)."
)


class UpstreamClient(Client):
    """Calls of one plain `vllm serve`. `logprobs_mode` is what it was started with: it cannot be asked."""

    def __init__(
        self,
        base_url: str,
        token: Token = None,
        deadlines: Deadlines | None = None,
        adapter_folder: Path | None = None,
        logprobs_mode: str = RAW,
    ) -> None:
        super().__init__(base_url, token, deadlines)
        # A folder per server: the others' clients write and remove adapters of the same names at the same time.
        self._folder = None if adapter_folder is None else Path(adapter_folder) / _folder_name(self.name)
        self._logprobs_mode = logprobs_mode
        self._models: dict[int, str] = {}  # version -> name of the model; 0 is the base model

    def health(self) -> None:
        self._transport.ask("GET", "/health", None, self.deadlines.health, reads=False)

    def info(self) -> ServerInfo:
        """The adapter of the highest version serves, or the base model as version 0."""
        answer = self._transport.ask("GET", "/v1/models", None, self.deadlines.control)
        base, context, adapters = self._checked("/v1/models", _models, answer)
        self._models = {0: base} | {version: f"posttrain-{version}-{mark}" for version, mark in adapters.items()}
        version = max(adapters, default=0)
        can = {"weights": False, "adapters": self._folder is not None}
        known = (base, "vllm serve", context, None, self._logprobs_mode, version, adapters.get(version))
        return ServerInfo(*known, capabilities=can, notes=(MISSING,))

    def why_no_images(self, info: ServerInfo, most: int) -> str:
        return (
            f"{self.name} is a plain `vllm serve`, whose completions of token ids are shown no images. Start the server with "
            f"`posttrain vllm-serve --images {most}`."
        )

    # tokens ---------------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> ServerCompletion:
        if request.images is not None:
            raise ServerRefused(self.why_no_images(self.info(), len(request.images.entries)), NOT_OFFERED)
        body = {
            "model": self._model(request.version),
            "prompt": list(request.ids),
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "logprobs": 1,
            "return_token_ids": True,
            "ignore_eos": True,  # the request alone decides what ends a completion
            "skip_special_tokens": False,
            "add_special_tokens": False,
        }
        answer = self._ask_completions(body | _sampling(request.params))
        return self._checked("/v1/completions", lambda value: self._written(value, request), answer)

    def _written(self, fields: Any, request: GenerateRequest) -> ServerCompletion:
        (choice,) = fields["choices"]
        ids, logps, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        check_tokens(ids, logps, request.max_tokens)
        if reason not in (STOP, LENGTH) or not ids:
            raise ValueError(f"it ends with {str(reason)[:60]!r} after {len(ids)} tokens")
        if reason == STOP and ids[-1] not in request.params.stop_ids and not request.params.stop:
            raise ServerRefused(
                f"{self.name} ended a completion at token {ids[-1]}, which the trainer does not stop at: it follows the "
                "model's generation_config. Start it with `--generation-config vllm`.",
                NOT_OFFERED,
            )
        return ServerCompletion(ids, [float(x) for x in logps], reason, request.version, self._logprobs_mode)

    def score(
        self, sequences: Sequence[Sequence[int]], version: int | None = None, start: int = 1
    ) -> list[list[float]]:
        """The log-probs of the tokens from number `start` on of each sequence, at temperature 1."""
        scores = []
        for ids in sequences:
            body = {"model": self._model(version or 0), "prompt": [int(token) for token in ids], "max_tokens": 1}
            answer = self._ask_completions(
                body | {"prompt_logprobs": 0, "temperature": 0.0, "add_special_tokens": False}
            )
            scores.append(self._checked("/v1/completions", _prompt_logps(ids, start), answer))
        return scores

    def _ask_completions(self, body: dict[str, Any]) -> Any:
        try:
            return self._transport.ask("POST", "/v1/completions", body, self.deadlines.completion)
        except ServerRefused as error:
            if error.status == 404:  # it was started anew, without the adapter
                raise ServerRefused(str(error), 409, error.kind) from error
            raise

    def _model(self, version: int) -> str:
        if version not in self._models:
            self.info()
        if version not in self._models:
            raise ServerRefused(f"{self.name} has no adapter of version {version}.", 409)
        return self._models[version]

    # adapters -------------------------------------------------------------------------------------------------------

    def refuse_if_not_offered(self, kept: KeptWeights, info: ServerInfo) -> None:
        if kept.adapter_config is None or self._folder is None:
            raise ServerRefused(f"{self.name}: {MISSING}", NOT_OFFERED)

    def stage(self, kept: KeptWeights, version: int, bucket_bytes: int = 0) -> None:
        """Write the adapter where the server sees it: whole, or not at all."""
        self.refuse_if_not_offered(kept, self.info())
        path = self._path(kept, version)
        unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            _write_adapter(unfinished, kept)
            shutil.rmtree(path, ignore_errors=True)
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def commit(self, kept: KeptWeights, version: int, in_flight: str = "drain") -> None:
        """Load it under a name of its own; requests that run keep theirs. Of older ones the newest is kept."""
        path = self._path(kept, version)
        self.info()
        before = max((other for other in self._models if other < version), default=0)  # requests may still run with it
        for other in [other for other in self._models if other not in (0, before, version)]:
            self._unload(other)
        if self._models.get(version) != path.name:
            self._transport.ask(
                "POST",
                "/v1/load_lora_adapter",
                {"lora_name": path.name, "lora_path": str(path.resolve())},
                self.deadlines.commit,
                reads=False,
            )
        info = self.info()
        if (info.version, info.fingerprint) != (version, kept.fingerprint):
            raise ServerAnswer(f"{self.name} loaded the adapter {path.name} and lists version {info.version}.")

    def abort(self, version: int) -> None:
        self.info()
        if version in self._models:
            self._unload(version)
        for staged in [] if self._folder is None else self._folder.glob(f"posttrain-{version}-*"):
            shutil.rmtree(staged, ignore_errors=True)

    def _unload(self, version: int) -> None:
        name = self._models.pop(version, None)
        if name is None:
            return
        self._transport.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, self.deadlines.control, reads=False)
        if self._folder is not None:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _path(self, kept: KeptWeights, version: int) -> Path:
        return self._folder / f"posttrain-{version}-{kept.fingerprint}"

    def sleep(self, level: int) -> str | None:
        return "A plain `vllm serve` is not put to sleep by a trainer."

    def wake(self) -> None:
        """It never slept."""


def _folder_name(server: str) -> str:
    """Of a server's address: readable, and unique to this server."""
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", server.partition("://")[2]).strip("-.")
    return f"{readable}-{hashlib.blake2b(server.encode(), digest_size=4).hexdigest()}"


def _write_adapter(folder: Path, kept: KeptWeights) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors = {}
    for spec in kept.specs:
        flat = torch.frombuffer(bytearray(kept.data[spec.name]), dtype=getattr(torch, spec.dtype))
        tensors[spec.name] = flat.view(spec.shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(kept.adapter_config))


def _sampling(params: SamplingParams) -> dict[str, Any]:
    large = [token for token, value in params.logit_bias.items() if abs(value) > LARGEST_BIAS]
    if large:
        raise ServerRefused(
            f"`logit_bias` of token {large[0]} is larger than {LARGEST_BIAS:g}, which a plain `vllm serve` would cut off.",
            NOT_OFFERED,
        )
    fields: dict[str, Any] = {
        **{name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
        "stop_token_ids": list(params.stop_ids),
        "include_stop_str_in_output": True,
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.logit_bias:
        fields["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
    if params.regex is not None:
        fields["structured_outputs"] = {"regex": params.regex}
    return fields


def _models(fields: Any) -> tuple[str, int, dict[int, str]]:
    """(base model, context length, version -> fingerprint of the adapters that a trainer of this library loaded)."""
    base = [model for model in fields["data"] if not model.get("parent")][0]  # noqa: RUF015 (an IndexError is caught)
    context = base["max_model_len"]
    if type(context) is not int or not isinstance(base["id"], str):
        raise ValueError("it lists no base model with a context length")
    found = [NAME.fullmatch(str(model["id"])) for model in fields["data"]]
    return base["id"], context, {int(match[1]): match[2] for match in found if match}


def _prompt_logps(ids: Sequence[int], start: int) -> Any:
    def read(fields: Any) -> list[float]:
        (choice,) = fields["choices"]
        places = choice["prompt_logprobs"]
        logps = [float(place[str(token)]["logprob"]) for token, place in zip(ids[start:], places[start:], strict=True)]
        if not all(math.isfinite(logp) for logp in logps):
            raise ValueError("a log-prob is not a number")
        return logps

    return read
