"""The oracle without a search, where a run shows that nobody can do better.

A service has `minReplicas` all the time, so a run that never had more, and attains the objective, costs what
the cheapest schedule does. Two weeks of a quiet service need no search of twenty thousand intervals then. Not
of a run with faults, which the oracle is spared.
"""

from math import ceil, isclose

from headway_operator.slo import target_of
from headway_simulator.cluster import Setting
from headway_simulator.measures import Measures
from headway_simulator.oracle import INTERVAL_SECONDS, Oracle
from headway_simulator.records import Run
from headway_simulator.trace import Trace


def oracle_of(run: Run, found: Measures, trace: Trace, setting: Setting) -> Oracle | None:
    """The run as the oracle's, or None where there may be a cheaper one; no request may have been refused for
    its length. Its limits are those of the last pass."""
    target, conditions = target_of(setting.service.spec), setting.conditions
    has_faults = conditions.missing_samples or conditions.deaths_per_pod_hour
    has_faults = has_faults or conditions.step_time_error != 1
    least_hours = target.min_replicas * trace.duration_seconds / 3600
    is_attained = found.joint_attainment * 100 >= target.percentile
    if has_faults or not run.passes or not is_attained:
        return None
    if not isclose(found.replica_hours, least_hours, rel_tol=1e-9):
        return None
    intervals = max(1, ceil(trace.duration_seconds / INTERVAL_SECONDS))
    return Oracle(
        replicas=(target.min_replicas,) * intervals,
        limits=run.passes[-1].limits,
        measures=found,
        is_attained=True,
        num_simulated=0,
        ended_by_budget=False,
        least_replica_hours=least_hours,
    )
