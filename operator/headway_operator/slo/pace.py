"""How many times as long as they are told to be steps take, by what requests saw.

Replicas tell what steps take, from which a model is learnt (`step_fit`); what their requests saw of the time
between tokens; and, counted apart, each request's own mean of that (TPOT), by which the promise is judged.
They are to agree. If tokens come more slowly, or faster, than steps were told to take, it is the steps that
are told wrong: little of that is believed next to the lower of ODD_PACES, as tokens may be late for reasons
of their own, such as preemption, and all beyond the other.

Of the same requests the mean over tokens is that over requests weighed by their tokens: both differ by the
covariance of TPOT and length over the mean length, which is at most what lengths vary by, as a share of their
mean, times the standard deviation of TPOT (Cauchy and Schwarz). Where they differ by more, and by more than
LIKELY, the time between tokens is told wrong as well, and the mean over requests is believed in its stead.

They are of the same requests where an answer is over within ANSWER_SHARE of the time looked at, and about as
many tokens were waited for as answers that ended had (SAME_TOKENS): else the load has just changed, or
guesses make many of the tokens. What nobody can tell then stays doubted for as long as tokens are looked at.
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
ANSWER_SHARE = 1.0 / 6.0
SAME_TOKENS = (0.8, 1.25)
# Counts are of buckets.
LIKELY = 1.2
# By so much more must both be apart for a doubt to begin than for it to last.
SLACK = 1.2


class Pace(NamedTuple):
    """times: as long as told. doubted_at: when it was last seen that what is told of the time between tokens
    is not to be believed; None while it is."""

    times: float
    doubted_at: float | None = None


AS_TOLD = Pace(1.0)


def pace(happened: Recent, now: float, before: Pace) -> Pace:
    """Of the last minutes; as told where there were too few tokens, or where guesses made most of the tokens.
    before: what was found in the last pass."""
    since = now - DOUBT_SECONDS
    counts, lately = happened.counts("tpot", since), happened.totals(since)
    mean, deviation = histogram.mean_and_deviation(counts)
    if sum(counts.values()) >= LEAST_REQUESTS and _are_of_the_same(lately, mean):
        slack = SLACK if before.doubted_at is None else 1.0
        doubted_at = now if _are_apart(lately, mean, slack * deviation) else None
    elif before.doubted_at is not None and now - before.doubted_at <= PACE_SECONDS:
        return before
    else:
        doubted_at = None
    totals = happened.totals(now - PACE_SECONDS) if doubted_at is None else lately
    seen = _seen(totals) if doubted_at is None else mean
    num_told = totals.get("told_count", 0.0)
    told = totals.get("told_milliseconds", 0.0) / max(1.0, num_told)
    is_guessed = num_told < 0.5 * totals.get("generated_tokens", 0.0)
    if is_guessed or told <= 0.0 or seen <= 0.0:
        return AS_TOLD
    ratio = log(min(MOST_PACE, max(LEAST_PACE, seen / told)))
    chance, certain = map(log, ODD_PACES)
    share = min(1.0, max(0.0, (abs(ratio) - chance) / (certain - chance)))
    return Pace(exp(ratio * share), doubted_at)


def _seen(totals: Numbers) -> float:
    """Milliseconds between tokens as told, on average; 0 of too few."""
    num = totals.get("gaps", 0.0)
    return totals.get("gap_milliseconds", 0.0) / num if num >= LEAST_GAPS else 0.0


def _are_of_the_same(totals: Numbers, mean: float) -> bool:
    """Whether tokens and requests, whose TPOT is so much on average, can be compared."""
    length = _length(totals)
    if _seen(totals) <= 0.0 or length * mean > 1000.0 * ANSWER_SHARE * DOUBT_SECONDS:
        return False
    least, most = (share * length * totals.get("answers", 0.0) for share in SAME_TOKENS)
    return 0.0 < least <= totals.get("gaps", 0.0) <= most


def _are_apart(totals: Numbers, mean: float, deviation: float) -> bool:
    """Whether the means over requests and over tokens are further from each other than they can be."""
    seen, length, answers = _seen(totals), _length(totals), totals.get("answers", 0.0)
    variance = max(0.0, totals.get("answer_squares", 0.0) / answers - (length + 1.0) ** 2)
    is_near = abs(log(mean / seen)) <= log(LIKELY)
    return not is_near and abs(mean - seen) * length > sqrt(variance) * deviation


def _length(totals: Numbers) -> float:
    """Tokens of an answer but the first, before which there is no time, on average."""
    answers = totals.get("answers", 0.0)
    return totals.get("answer_sum", 0.0) / answers - 1.0 if answers else 0.0
