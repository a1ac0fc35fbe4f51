"""Four real servers of our own engine, one of them slowed down: each is given what it can do."""

from __future__ import annotations

import time

import numpy as np
import pytest

from posttrain.models.load.weight_export import exported_weights
from posttrain.rollout.engines.protocol import Prompt, SamplingParams, generate
from posttrain.rollout.engines.vllm.client import ServerClient
from posttrain.rollout.engines.vllm.server_engine import ServedOptions, ServedVLLM
from tests import tiny
from tests.rollout.served import QUICK, ForkedNativeProcess, needs_uvicorn

pytestmark = [needs_uvicorn, pytest.mark.slow]
TOKEN, SLOTS = "a-token-of-this-test", 6


def serve_with_pauses(seconds):
    """A server whose steps take so much longer that nothing else counts, with four of them on two cores."""

    def serve(arguments):
        from posttrain.rollout.engines.native import serving

        step = serving.ServedNative.step
        serving.ServedNative.step = lambda self: time.sleep(seconds) or step(self)
        return serving.main(arguments)

    return serve


def test_one_of_four_is_half_as_fast(tmp_path):
    model = tiny.causal_lm(0)
    model.save_pretrained(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--dtype", "float32"]
    words += ["--engine-args", f'{{"max_slots": {SLOTS}, "steps_per_look": 2}}']
    servers = [ForkedNativeProcess(words, tmp_path / f"{i}.log", token=TOKEN, deadlines=QUICK) for i in range(4)]
    for number, server in enumerate(servers):
        server._serve = serve_with_pauses(0.3 if number == 3 else 0.15)
        server.start()
    try:
        for server in servers:
            server.wait_until_healthy()
        clients = [ServerClient(server.client.name, TOKEN, QUICK) for server in servers]
        with ServedVLLM(clients, options=ServedOptions(QUICK, per_server=SLOTS)) as engine:
            engine.load_weights(exported_weights(model), 1)
            params = SamplingParams(24, stop_ids=tuple(range(8)), seed=3)  # lengths as chance has them
            asked = [
                Prompt(np.arange(20, 30) + key, key=key, sample=sample) for key in range(48) for sample in range(4)
            ]
            began = time.perf_counter()
            lengths = [len(one.ids) for one in generate(engine, asked, params)]
            seconds = time.perf_counter() - began
            speeds = engine.fleet.balancer._speeds([client.name for client in clients])
    finally:
        for server in servers:
            server.close()
    *fast, slow = speeds.values()
    assert slow < 0.7 * np.mean(fast), speeds
    rows = np.repeat([*fast, slow], SLOTS)
    ends = np.zeros(len(rows))
    for length in sorted(lengths, reverse=True):
        place = (ends + length / rows).argmin()
        ends[place] += length / rows[place]
    print(f"{seconds:.1f} s; who knows all lengths needs {ends.max():.1f} s; tokens a second of a request: {speeds}")
    assert seconds < 1.3 * ends.max()
