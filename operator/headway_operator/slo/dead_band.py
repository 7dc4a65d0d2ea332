"""How much more than the load fewer replicas must be good for, so that none goes that is wanted back.

    band = BAND_DEVIATIONS * sqrt(IDC / (rate * LEVEL_SECONDS) + square(work) / (rate * seconds of work))

is how well the load is known: the level of the rate by what came in LEVEL_SECONDS, the work of a request, of
whose square over the mean's the second term is a share, by the requests of the time that it is taken from
(`sizing`), whose answers are taken to be exponential. It is no less than LEAST_BAND, and no more than
MOST_BAND, which is more than chance makes of all but the smallest loads. It is a share of the rate above all:
under a target close to the latency of an idle replica, a tenth of that is a third of what a replica can do.
And the load as it is must leave some of both targets (MOST_USE), which are not known better than that.
"""

from bisect import bisect_left
from dataclasses import replace
from math import sqrt

from headway_operator.slo.capacity import Replica
from headway_operator.slo.forecast import LEVEL_SECONDS, Forecast
from headway_operator.slo.situation import Situation
from headway_operator.slo.sizing import Sizing, workload_seconds

BAND_DEVIATIONS = 1.3
LEAST_BAND, MOST_BAND = 0.03, 0.1
MOST_USE = 0.95


def after_dead_band(situation: Situation, found: Sizing, rate: float, number: int) -> int:
    """The fewest replicas, from `number` up to those that there are, that could take more than this rate.
    With fewer to choose from, a gateway gives each of them more that come at once."""
    band = width(situation.forecast, found.replica)

    def keeps(replica: Replica, fewer: int, share: float, more: float) -> bool:
        if more > fewer * found.bound:
            return False
        if more <= fewer * found.kappa * found.least_per_second:
            return True
        predicted = replica.latencies(more / fewer / found.kappa, found.capacity.limits, found.factors)
        return replica.is_kept(predicted, situation.target, share)

    def takes(fewer: int) -> bool:
        replica = found.replica if found.replica.fleet == 1 else replace(found.replica, fleet=fewer)
        return keeps(replica, fewer, 1.0, rate * (1.0 + band)) and keeps(replica, fewer, MOST_USE, rate)

    # More replicas are never slower.
    wanted = range(max(1, number), situation.supply.desired)
    return wanted.start + bisect_left(wanted, True, key=takes)


def width(load: Forecast, replica: Replica) -> float:
    """As a share of the rate; see the header."""
    if load.now <= 0.0:
        return MOST_BAND
    model, work = replica.model, replica.workload
    answer = work.answer * (model.sequence + model.kv * work.context)
    mean = work.prompt * model.prefill + answer
    prompts = model.prefill**2 * max(0.0, work.prompt_square - work.prompt**2)
    square = 1.0 + (prompts + answer**2) / max(1e-9, mean**2)
    known = load.idc / LEVEL_SECONDS + square / workload_seconds(load.now)
    return min(MOST_BAND, max(LEAST_BAND, BAND_DEVIATIONS * sqrt(known / load.now)))
