"""The loads that the simulator is validated with take the same share of any machine."""

import pytest
from benchmarks.slo.validate import BATCH, FITTED, LEAST_REQUESTS, OTHERS, Load, rate_of, trace_of

from headway_simulator.step_model import PROFILES, slower
from headway_simulator.work import work_seconds

FAST = PROFILES["llama-3.1-8b-a100-tp2"]


@pytest.mark.parametrize("load", [FITTED, *OTHERS], ids=lambda load: load.name)
@pytest.mark.parametrize("factor", [1.0, 40.0])
def test_a_load_takes_its_share_of_the_machine(load: Load, factor: float) -> None:
    speed = slower(FAST, factor)
    trace = trace_of(load, speed, 20_000 / rate_of(load, speed), 5)
    assert work_seconds(speed, trace, BATCH) / trace.duration_seconds == pytest.approx(load.use, rel=0.1)


def test_a_slow_machine_is_sent_as_many_requests_as_a_percentile_needs() -> None:
    speed = slower(FAST, 500.0)
    for load in (FITTED, *OTHERS):
        assert rate_of(load, speed) * 60.0 < LEAST_REQUESTS
        assert len(trace_of(load, speed, 60.0, 1).arrivals) > 0.5 * LEAST_REQUESTS
        assert trace_of(load, speed, 60.0, 1) == trace_of(load, speed, 60.0, 1)
