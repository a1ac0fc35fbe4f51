"""Between our sampling parameters and vLLM's, and between the log-probs that vLLM returns and those of a Completion.

vLLM returns ONE number per token, by its `logprobs_mode`:

    processed   log-prob under the distribution that was drawn from: penalty, bias, temperature, truncation, grammar all applied
                (greedy: temperature and truncation play no part)
    raw         log softmax(logits): before all of them, the temperature included; a grammar's mask counts even here

A Completion has two, and what cannot be known from the one number is NaN, never a guess.

vLLM applies the bias before the penalty and min_p before top_k and top_p, our own engines the other way round: with both of a
pair set, tokens are drawn from a slightly different distribution. The log-probs are those of the one that was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from posttrain.rollout.engines.noise import noise_base, word_of
from posttrain.rollout.engines.protocol import Prompt, SamplingParams
from posttrain.serve.engine.protocol import Sampling

PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
MIN_TEMPERATURE = 0.01
"""Below it vLLM takes 0.01 instead, with a warning."""


def request_seed(params: SamplingParams, prompt: Prompt) -> int:
    """A seed for one request, 63 bits: a completion depends on (seed, key, sample, first token), not on its batch."""
    return word_of(noise_base(params.seed, prompt.key, prompt.sample), prompt.first_token) >> 1


def refuse_unknown_to_vllm(params: SamplingParams) -> None:
    """ValueError for what vLLM would silently do otherwise."""
    if 0 < params.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"Sampling: `temperature` is {params.temperature:g}; vLLM would draw at {MIN_TEMPERATURE}. Give 0 (greedy), or at "
            f"least {MIN_TEMPERATURE}."
        )


def vllm_sampling(params: SamplingParams, max_tokens: int, seed: int) -> Sampling:
    """For one request. Stop strings are left to `request.EndOfText`: it needs no tokenizer on vLLM's side."""
    own_seed = seed if params.temperature > 0 else None
    bias = tuple(params.logit_bias.items())
    return Sampling(**(vars(params) | {"max_tokens": max_tokens, "stop": (), "logit_bias": bias, "seed": own_seed}))


def completion_logps(params: SamplingParams, mode: str, logps: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """(sampling log-probs, policy log-probs) of a Completion; NaN where vLLM's number does not say."""
    known = np.asarray(logps, np.float32)
    unknown = np.full_like(known, np.nan)
    greedy = params.temperature == 0
    penalised = params.repetition_penalty != 1 or bool(params.logit_bias)
    bent = params.regex is not None or penalised or (params.truncates and not greedy)
    knows_sampling = mode == PROCESSED or (params.temperature == 1 and not bent)
    sampling = np.zeros_like(known) if greedy else known if knows_sampling else unknown
    if mode == PROCESSED:
        knows_policy = not bent
    else:
        knows_policy = params.temperature in (0, 1) and params.regex is None
    return sampling, known.copy() if knows_policy else unknown
