"""The soak, as long as SOAK_MINUTES says: half of it SFT, half of it DPO."""

from __future__ import annotations

import os

import pytest

from tests.trust.soak import soak


@pytest.mark.trust
@pytest.mark.skipif("SOAK_MINUTES" not in os.environ, reason="`make trust` sets SOAK_MINUTES")
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_under_fire_a_run_ends_with_the_bits_of_the_quiet_run(method, tmp_path, figure):
    minutes = float(os.environ["SOAK_MINUTES"]) / 2
    tally = soak(method, minutes, tmp_path)
    faults = sum(tally.injected.values())
    kinds = ", ".join(f"{name} {count}" for name, count in sorted(tally.injected.items()))
    assert not tally.differences, f"{tally.differences} after {kinds}"
    figure(
        f"soak, {method}, {minutes:g} minutes ({kinds})",
        faults,
        f"bit-identical after {tally.steps:,} steps",
        "bit-identical",
    )
