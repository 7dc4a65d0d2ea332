"""How many times as long as they are told to be steps take, by what requests saw.

Replicas tell what steps take, from which a model is learnt (`step_fit`); what their requests saw of the time
between tokens; and, counted apart, each request's own mean of that (TPOT), by which the promise is judged.
They are to agree. If tokens come more slowly, or faster, than steps were told to take, it is the steps that
are told wrong: little of that is believed next to the lower of ODD_PACES, as tokens may be late for reasons
of their own, such as preemption, and all beyond the other.

A mean over all tokens lies among the means of single requests. Where it does not (BELIEVED), it is told wrong
as well, and the mean of the requests is believed in its stead: of many short answers and few long ones that
is not quite the same, and better than what cannot be. On replicas that are slower beside others it may lie
within by chance; so what is doubted stays so until the two means are as near as LIKELY.
"""

from math import exp, log
from typing import NamedTuple

from headway_operator.slo import histogram
from headway_operator.slo.window import Recent

PACE_SECONDS = 300.0
ODD_PACES = (1.2, 1.5)
LEAST_PACE, MOST_PACE = 0.4, 3.0
LEAST_GAPS, LEAST_REQUESTS = 200, 20
# Percentiles of requests by their TPOT.
BELIEVED = (5.0, 95.0)
LIKELY = 1.2


class Pace(NamedTuple):
    """times: as long as told. is_doubted: whether what is told of the time between tokens is not believed."""

    times: float
    is_doubted: bool


AS_TOLD = Pace(1.0, is_doubted=False)


def pace(happened: Recent, now: float, *, is_doubted: bool) -> Pace:
    """Of the last minutes; 1 where there were too few tokens, or where guesses made most of the tokens.
    is_doubted: what was found in the last pass."""
    since = now - PACE_SECONDS
    totals = happened.totals(since)
    num_told, num_seen = totals.get("told_count", 0.0), totals.get("gaps", 0.0)
    if num_seen < LEAST_GAPS or num_told < 0.5 * totals.get("generated_tokens", 0.0):
        return Pace(1.0, is_doubted)
    told = totals.get("told_milliseconds", 0.0) / max(1.0, num_told)
    seen = totals.get("gap_milliseconds", 0.0) / num_seen
    counts = happened.counts("tpot", since)
    if seen > 0.0 and sum(counts.values()) >= LEAST_REQUESTS:
        mean = histogram.mean(counts)
        is_doubted = _is_out(seen, counts) or (is_doubted and abs(log(mean / seen)) > log(LIKELY))
        seen = mean if is_doubted else seen
    if told <= 0.0 or seen <= 0.0:
        return Pace(1.0, is_doubted)
    ratio = log(min(MOST_PACE, max(LEAST_PACE, seen / told)))
    chance, certain = map(log, ODD_PACES)
    share = min(1.0, max(0.0, (abs(ratio) - chance) / (certain - chance)))
    return Pace(exp(ratio * share), is_doubted)


def _is_out(seen: float, counts: histogram.Counts) -> bool:
    least, most = (histogram.percentile(counts, percent) or 0.0 for percent in BELIEVED)
    return not least <= seen <= most
