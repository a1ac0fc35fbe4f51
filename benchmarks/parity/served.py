"""A teacher behind our own server, whom both libraries ask: TRL's trainer through a client with the methods of TRL's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.parity.case import Case


@contextmanager
def teacher(library: str, case: Case, materials: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """The options that name the server, where the case has one; it lives as long as the context."""
    if case.method != "server_distillation":
        yield {}
        return
    end, options = started((materials / case.teacher).resolve(), folder)
    try:
        if library != "posttrain":
            options = {"teacher_model_server_url": put_client(options, case.options.get("loss_top_k", 1))}
        yield options
    finally:
        end()


def started(model: Path, folder: Path) -> tuple[Callable[[], object], dict[str, Any]]:
    """(what ends the server, the options that name it)."""
    from tests.methods import model_server

    words, options = model_server.address(model, folder)
    with (folder / "teacher.log").open("wb") as log:
        command = [sys.executable, "-m", "tests.methods.model_server", *words]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def end() -> None:
        server.kill()
        server.wait()

    return end, options


def put_client(options: dict[str, Any], top_k: int) -> str:
    """Put our client in the place of TRL's, which speaks with vLLM alone; the address of the server."""
    from trl.generation import vllm_client

    from posttrain.core.sample import Sample
    from posttrain.rollout.rollout import TEACHER_LOGPS
    from posttrain.trainer.online.served_teacher import TEACHER_TOP_IDS, TEACHER_TOP_LOGPS, ServedTeacher
    from tests import tiny

    url = options["teacher_model_server_url"]
    asked = ServedTeacher(url, top_k, token_file=options["teacher_server_token_file"], wait_seconds=60)
    asked.check(tiny.tokenizer())

    class Client:
        def __init__(self, base_url: str, connection_timeout: float) -> None:
            assert base_url == url

        def get_sequence_logprobs(
            self, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int, temperature: float
        ) -> dict[str, list[Any]]:
            samples = [Sample.of_text(ids[:start], ids[start:]) for ids, start in zip(sequences, prompt_lengths)]
            assert (asked.annotate(samples), top_logprobs) == ({}, top_k)
            names = {
                "actual_logprobs": TEACHER_LOGPS,
                "logprobs": TEACHER_TOP_LOGPS,
                "logprob_token_ids": TEACHER_TOP_IDS,
            }
            found = {key: [sample.read_trained(name) for sample in samples] for key, name in names.items()}
            return {key: [column.reshape(len(column), -1).tolist() for column in found[key]] for key in names}

    vllm_client.VLLMClient = Client
    return url
