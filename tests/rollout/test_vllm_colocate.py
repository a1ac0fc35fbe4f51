"""The colocated vLLM: what needs no vLLM here; the rest (`colocated_vllm.py`) in a process and an environment that has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from posttrain.rollout.engines.protocol import Prompt, SamplingParams
from posttrain.rollout.engines.vllm.params import (
    PROCESSED,
    RAW,
    completion_logps,
    refuse_unknown_to_vllm,
    request_seed,
    vllm_sampling,
)
from tests.with_vllm import needs_vllm, run_on_two_ranks, run_pytest, where_vllm_is

HERE = Path(__file__).resolve()
LONG = [pytest.mark.trust, where_vllm_is]
LOGPS = [-1.0, -0.5]
ITSELF, UNKNOWN, ZERO = "itself", "unknown", "zero"


@pytest.mark.parametrize(
    ("file", "seconds", "lengths"),
    [
        pytest.param("colocated_vllm.py", 600, {}, marks=needs_vllm, id="tiny"),
        pytest.param("colocated_vllm_real.py", 900, {}, marks=LONG, id="real"),
        pytest.param("colocated_vllm.py", 3600, {"COLOCATED_SYNCS": "1000"}, marks=LONG, id="tiny-long"),
        pytest.param(
            "colocated_vllm_real.py", 3600, {"REAL_PROMPTS": "100", "REAL_SYNCS": "50"}, marks=LONG, id="real-long"
        ),
    ],
)
def test_in_a_process_with_vllm(file, seconds, lengths):
    run_pytest(HERE.with_name(file), seconds, **lengths)


@pytest.mark.parametrize("tensor_parallel", [pytest.param("1", marks=LONG), pytest.param("2", marks=LONG)])
def test_two_ranks(tensor_parallel):
    """Each with a vLLM of its own, or one model over both."""
    run_on_two_ranks("tests.rollout.colocated_vllm_ranks", tensor_parallel)


@pytest.mark.parametrize(
    ("how", "mode", "sampling", "policy"),
    [
        ({}, PROCESSED, ITSELF, ITSELF),
        ({"temperature": 0.7}, PROCESSED, ITSELF, ITSELF),
        ({"top_k": 3}, PROCESSED, ITSELF, UNKNOWN),
        ({"top_p": 0.9}, PROCESSED, ITSELF, UNKNOWN),
        ({"min_p": 0.1}, PROCESSED, ITSELF, UNKNOWN),
        ({"repetition_penalty": 1.1}, PROCESSED, ITSELF, UNKNOWN),
        ({"logit_bias": {3: 1.0}}, PROCESSED, ITSELF, UNKNOWN),
        ({"regex": "a"}, PROCESSED, ITSELF, UNKNOWN),
        ({"temperature": 0}, PROCESSED, ZERO, ITSELF),
        ({"temperature": 0, "top_k": 3}, PROCESSED, ZERO, ITSELF),
        ({"temperature": 0, "repetition_penalty": 1.1}, PROCESSED, ZERO, UNKNOWN),
        ({}, RAW, ITSELF, ITSELF),
        ({"temperature": 0.7}, RAW, UNKNOWN, UNKNOWN),
        ({"top_p": 0.9}, RAW, UNKNOWN, ITSELF),
        ({"logit_bias": {3: 1.0}}, RAW, UNKNOWN, ITSELF),
        ({"regex": "a"}, RAW, UNKNOWN, UNKNOWN),
        ({"temperature": 0}, RAW, ZERO, ITSELF),
    ],
)
def test_what_vllms_one_number_says(how, mode, sampling, policy):
    """The number itself, not known, or zero."""
    found = completion_logps(SamplingParams(max_tokens=2, **how), mode, LOGPS)
    table = {ITSELF: LOGPS, UNKNOWN: [np.nan] * 2, ZERO: [0.0] * 2}
    np.testing.assert_array_equal(found[0], table[sampling])
    np.testing.assert_array_equal(found[1], table[policy])
    assert found[0].dtype == found[1].dtype == np.float32


def test_seeds_differ_by_everything_that_names_a_completion_and_by_nothing_else():
    params = SamplingParams(max_tokens=2, seed=3)
    seeds = {
        request_seed(SamplingParams(max_tokens=9, seed=seed), Prompt([1], key=key, sample=sample, first_token=first))
        for seed in range(3)
        for key in range(10)
        for sample in range(10)
        for first in range(10)
    }
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(params, Prompt([1], key=4)) == request_seed(params, Prompt([7, 8], key=4))


def test_sampling_parameters_go_over_one_by_one():
    params = SamplingParams(
        max_tokens=9, temperature=0.5, top_p=0.8, top_k=7, min_p=0.1, repetition_penalty=1.2, stop_ids=(1, 2),
        stop=("x",), logit_bias={5: 1.0}, regex="a+",
    )  # fmt: skip
    sent = vllm_sampling(params, 4, 77)
    for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop_ids", "regex"):
        assert getattr(sent, name) == getattr(params, name)
    assert (sent.max_tokens, sent.seed, sent.logit_bias, sent.stop) == (4, 77, ((5, 1.0),), ())
    assert vllm_sampling(SamplingParams(max_tokens=2, temperature=0), 2, 77).seed is None
    with pytest.raises(ValueError, match=r"vLLM would draw at 0\.01"):
        refuse_unknown_to_vllm(SamplingParams(max_tokens=2, temperature=0.005))
