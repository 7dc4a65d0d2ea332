"""How many times as long as they are told to be steps take, by what requests saw.

Replicas tell what steps take, from which a model is learnt (`step_fit`); what their requests saw of the time
between tokens; and, counted apart, each request's own mean of that (TPOT), by which the promise is judged.
They are to agree. If tokens come more slowly, or faster, than steps were told to take, it is the steps that
are told wrong: little of that is believed next to the lower of ODD_PACES, as tokens may be late for reasons
of their own, such as preemption, and all beyond the other.

The mean over tokens is that over requests weighed by their tokens, so that they differ by the covariance of
TPOT and length over the mean length, which is at most what lengths vary by, as a share of their mean, times
the standard deviation of TPOT (Cauchy and Schwarz). Where they differ by more, and by more than LIKELY, the
time between tokens is told wrong as well, and the mean over requests is believed in its stead. With other
requests it may lie within by chance; so what is doubted stays so until both are as near as LIKELY.
"""

from math import exp, log, sqrt
from typing import NamedTuple

from headway_operator.slo import histogram
from headway_operator.slo.slices import Numbers
from headway_operator.slo.window import Recent

PACE_SECONDS, DOUBT_SECONDS = 300.0, 120.0
ODD_PACES = (1.2, 1.5)
LEAST_PACE, MOST_PACE = 0.4, 3.0
LEAST_GAPS, LEAST_REQUESTS = 200, 20
# Counts are of buckets, and the requests that ended are not all whose tokens were counted.
LIKELY = 1.2


class Pace(NamedTuple):
    """times: as long as told. is_doubted: whether what is told of the time between tokens is not believed."""

    times: float
    is_doubted: bool


AS_TOLD = Pace(1.0, is_doubted=False)


def pace(happened: Recent, now: float, before: Pace) -> Pace:
    """Of the last minutes; as told where there were too few tokens, or where guesses made most of the tokens.
    before: what was found in the last pass; what is doubted then is so until enough requests tell more."""
    since = now - DOUBT_SECONDS
    counts, lately = happened.counts("tpot", since), happened.totals(since)
    is_doubted = False
    if _seen(lately) > 0.0 and sum(counts.values()) >= LEAST_REQUESTS:
        is_doubted = _are_apart(counts, lately, is_doubted=before.is_doubted)
    elif before.is_doubted:
        return before
    totals = lately if is_doubted else happened.totals(now - PACE_SECONDS)
    seen = histogram.mean_and_deviation(counts)[0] if is_doubted else _seen(totals)
    num_told = totals.get("told_count", 0.0)
    told = totals.get("told_milliseconds", 0.0) / max(1.0, num_told)
    is_guessed = num_told < 0.5 * totals.get("generated_tokens", 0.0)
    if is_guessed or told <= 0.0 or seen <= 0.0:
        return AS_TOLD
    ratio = log(min(MOST_PACE, max(LEAST_PACE, seen / told)))
    chance, certain = map(log, ODD_PACES)
    share = min(1.0, max(0.0, (abs(ratio) - chance) / (certain - chance)))
    return Pace(exp(ratio * share), is_doubted)


def _seen(totals: Numbers) -> float:
    """Milliseconds between tokens as told, on average; 0 of too few."""
    num = totals.get("gaps", 0.0)
    return totals.get("gap_milliseconds", 0.0) / num if num >= LEAST_GAPS else 0.0


def _are_apart(counts: histogram.Counts, totals: Numbers, *, is_doubted: bool) -> bool:
    """Whether the means over requests and over tokens are further from each other than they can be; or, where
    that was doubted, than is likely."""
    seen, (mean, deviation) = _seen(totals), histogram.mean_and_deviation(counts)
    if abs(log(mean / seen)) <= log(LIKELY):
        return False
    answers = max(1.0, totals.get("answers", 0.0))
    # The first token of an answer has no time before it.
    length = totals.get("answer_sum", 0.0) / answers - 1.0
    variance = max(0.0, totals.get("answer_squares", 0.0) / answers - (length + 1.0) ** 2)
    return is_doubted or (length > 0.0 and abs(mean - seen) * length > sqrt(variance) * deviation)
