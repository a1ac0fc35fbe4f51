"""Log-probs of finished rollouts, in passes of a bounded number of tokens: many rollouts need no more memory than an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from posttrain.core.batch import TokenBatch
from posttrain.core.sample import Sample
from posttrain.data.collate import Collator, as_units, split_by_tokens

TOKENS_OF_A_PASS = {"cuda": 32768, "cpu": 4096}
"""A forward without autograd keeps little: passes are large enough to fill the device."""


@torch.no_grad()
def write_logps(
    samples: list[Sample],
    name: str,
    logps_of: Callable[[TokenBatch], Tensor],
    collator: Collator,
    device: torch.device,
    passes: Callable[[int], int] = lambda needed: needed,
) -> None:
    """Write `logps_of` each trained token into `per_token[name]` of its sample; 0 where nothing is trained.

    `passes` says how many are run where this process needs so many: a sharded model is asked equally often by all.
    """
    budget = min(collator.max_tokens or 2**62, TOKENS_OF_A_PASS.get(device.type, TOKENS_OF_A_PASS["cuda"]))
    collator = replace(collator, max_tokens=budget)
    units = as_units(samples, collator)
    parts = split_by_tokens(units, collator.layout, budget)
    for part in [*parts, *[[]] * (passes(len(parts)) - len(parts))]:
        batch = collator.one_pass(part)
        found = logps_of(batch.to(device)).float().cpu().numpy()
        ends = np.cumsum(batch.counts.numpy())
        for sample, end, count in zip((s for unit in part for s in unit), ends, batch.counts.tolist()):
            column = np.zeros(len(sample), dtype=np.float32)
            column[1:][sample.trained[1:]] = found[end - count : end]
            sample.per_token[name] = column
