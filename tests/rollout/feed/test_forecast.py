"""The forecast against what can be worked out by hand; `benchmarks/async_model.py` compares it with real runs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rollout.feed.forecast import Parts, forecast
from posttrain.rollout.feed.pacing import DROP, FIRST_FINISHED, IN_ORDER, MASK, WAIT, WINDOW, Lead, Pace

SECONDS = st.floats(0.1, 20.0)


def fixed(lead):
    return Lead(lead, lead, adapts=False)


@settings(max_examples=60, deadline=None)
@given(group=SECONDS, update=SECONDS, lead=st.integers(0, 4))
def test_equal_groups_are_limited_by_the_update_or_by_the_way_round(group, update, lead):
    """Window b begins with update b - lead: 1 + lead of them are made in the time of a group and an update."""
    found = forecast(Pace(4, order=IN_ORDER), fixed(lead), Parts(lambda _: group, update), windows=60, warm_up=20)
    wanted = max(update, (group + update) / (1 + lead))
    assert found.seconds == pytest.approx(wanted, rel=0.02)
    assert found.waits == pytest.approx(1 - update / wanted, abs=0.02)
    assert found.group_age == found.oldest == lead


@settings(max_examples=30, deadline=None)
@given(update=SECONDS, engine=SECONDS)
def test_nobody_trains_on_more_than_the_engine_writes(update, engine):
    found = forecast(Pace(4), fixed(4), Parts(lambda _: engine, update, engine / 4), windows=40, warm_up=20)
    assert found.seconds == pytest.approx(max(update, engine), rel=0.05)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 99),
    order=st.sampled_from([WINDOW, FIRST_FINISHED]),
    stale=st.sampled_from([WAIT, DROP]),
    adapts=st.booleans(),
)
def test_the_bound_holds_in_the_forecast_as_in_the_run(seed, order, stale, adapts):
    drawn = np.random.default_rng(seed).lognormal(0, 1, 5000)
    found = forecast(
        Pace(4, max_staleness=4, order=order, on_stale=stale), Lead(2.0, 4.0, adapts), Parts(lambda n: drawn[n], 0.3)
    )
    assert found.oldest <= 4
    assert (found.dropped > 0) <= (stale == DROP)


def test_whoever_is_not_waited_for_pays_with_age():
    """Heavy tails: strict order is slowest, the first finished fastest and oldest; an adapting lead does not wait much."""
    drawn = np.random.default_rng(0).lognormal(0, 1, 5000)
    parts = Parts(lambda n: drawn[n], 1.0)
    strict = forecast(Pace(8, order=IN_ORDER), fixed(2), parts)
    window = forecast(Pace(8, order=WINDOW), fixed(2), parts)
    first = forecast(Pace(8, order=FIRST_FINISHED, on_stale=MASK), fixed(2), parts)
    assert strict.seconds > window.seconds >= first.seconds
    assert strict.oldest <= window.oldest <= 4 < first.oldest
    assert forecast(Pace(8, order=FIRST_FINISHED, on_stale=MASK), Lead(1.0, 4.0, adapts=True), parts).waits < 0.1


@pytest.mark.parametrize(
    ("mean", "sigma", "wanted"), [(0.67, 0.5, 1.2), (2.0, 0.5, 2.6), (2.0, 1.0, 2.6), (3.0, 0.1, 3.6)]
)
def test_the_lead_settles_within_25_windows(mean, sigma, wanted):
    """First finished: groups of so many updates, from hardly different to heavy-tailed."""
    drawn = np.random.default_rng(0).lognormal(np.log(mean) - sigma**2 / 2, sigma, 5000)
    pace, parts = Pace(8, order=FIRST_FINISHED, on_stale=MASK), Parts(lambda n: drawn[n], 1.0)
    for windows in (1, 15, 35, 75):
        found = forecast(pace, Lead(1.0, 4.0, adapts=True), parts, windows=windows, warm_up=24)
        assert found.lead == pytest.approx(wanted, abs=0.4), windows
    assert found.waits < 0.03
