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

They can be compared where most that ended have a TPOT (COUNTED), an answer is over within ANSWER_SHARE of the
time looked at on average, and about as many tokens were waited for as answers that ended had (SAME_TOKENS):
else clients leave, the load has just changed, or guesses make many of the tokens. As next to that some tokens
are of other requests yet, what was found first is believed until the contrary has been seen for HELD_SECONDS
on end. How wrong tokens are told is then the mean of what was found, over the time that tokens are looked at;
and a doubt that nobody could confirm for as long is none.
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
# The first bucket has no middle; and of so short a time the next ones are wide.
LEAST_MILLISECONDS = 2.0
COUNTED = 0.9
ANSWER_SHARE = 1.0 / 6.0
SAME_TOKENS = (0.8, 1.25)
LIKELY = 1.2
HELD_SECONDS = 60.0


class Pace(NamedTuple):
    """times: as long as told. is_doubted: what is told of the time between tokens; None before it could be
    compared. compared_at: when it last could; contrary_since: since when it has been found otherwise. num: of
    comparisons that `times` is a mean of, while it is doubted."""

    times: float = 1.0
    is_doubted: bool | None = None
    compared_at: float | None = None
    contrary_since: float | None = None
    num: int = 0


AS_TOLD = Pace()


def pace(happened: Recent, now: float, before: Pace) -> Pace:
    """Of the last five minutes, or what was found in them where that is doubted; as told where there were too
    few tokens, or where guesses made most of them. before: what was found in the last pass."""
    totals, lately = happened.totals(now - PACE_SECONDS), happened.totals(now - DOUBT_SECONDS)
    if totals.get("told_count", 0.0) < 0.5 * totals.get("generated_tokens", 0.0):
        return before._replace(times=1.0, contrary_since=None, num=0)
    counts = happened.counts("tpot", now - DOUBT_SECONDS)
    mean, deviation = histogram.mean_and_deviation(counts)
    if not _are_comparable(lately, sum(counts.values()), mean):
        is_unconfirmed = before.compared_at is not None and now - before.compared_at > PACE_SECONDS
        found = AS_TOLD if before.is_doubted and is_unconfirmed else before._replace(contrary_since=None)
        return found if found.is_doubted else found._replace(times=_believed(_seen(totals), totals))
    is_apart = _are_apart(lately, mean, deviation)
    found = _with_verdict(before, now, is_apart=is_apart)
    if not found.is_doubted:
        return found._replace(times=_believed(_seen(totals), totals), num=0)
    if not is_apart:
        return found
    passed = 0.0 if before.compared_at is None else now - before.compared_at
    weight = max(1.0 / (found.num + 1), min(1.0, passed / PACE_SECONDS))
    times = exp((1.0 - weight) * log(found.times) + weight * log(_believed(mean, lately)))
    return found._replace(times=times, num=found.num + 1)


def _with_verdict(before: Pace, now: float, *, is_apart: bool) -> Pace:
    """The first one counts at once, the contrary of what is believed once it has held."""
    found = before._replace(compared_at=now, contrary_since=None)
    if before.is_doubted is None:
        return found._replace(is_doubted=is_apart, num=0)
    if is_apart == before.is_doubted:
        return found
    since = now if before.contrary_since is None else before.contrary_since
    if now - since < HELD_SECONDS:
        return found._replace(contrary_since=since)
    return found._replace(is_doubted=is_apart, num=0)


def _believed(seen: float, totals: Numbers) -> float:
    """So many milliseconds between tokens over those that steps were told to take, as far as it is believed;
    1 where one of them is not known."""
    told = totals.get("told_milliseconds", 0.0) / max(1.0, totals.get("told_count", 0.0))
    if told <= 0.0 or seen <= 0.0:
        return 1.0
    ratio = log(min(MOST_PACE, max(LEAST_PACE, seen / told)))
    chance, certain = map(log, ODD_PACES)
    return exp(ratio * min(1.0, max(0.0, (abs(ratio) - chance) / (certain - chance))))


def _seen(totals: Numbers) -> float:
    """Milliseconds between tokens as told, on average; 0 of too few."""
    num = totals.get("gaps", 0.0)
    return totals.get("gap_milliseconds", 0.0) / num if num >= LEAST_GAPS else 0.0


def _are_comparable(totals: Numbers, num: int, mean: float) -> bool:
    """Whether tokens are mostly those of requests that ended, of which so many have a TPOT, on average of
    `mean` milliseconds; see the header."""
    length, answers = _length(totals), totals.get("answers", 0.0)
    if num < max(LEAST_REQUESTS, COUNTED * answers) or mean < LEAST_MILLISECONDS or _seen(totals) <= 0.0:
        return False
    if length * mean > 1000.0 * ANSWER_SHARE * DOUBT_SECONDS:
        return False
    least, most = (share * length * answers for share in SAME_TOKENS)
    return 0.0 < least <= totals.get("gaps", 0.0) <= most


def _are_apart(totals: Numbers, mean: float, deviation: float) -> bool:
    """Whether the means over requests and over tokens are further from each other than those of the same
    requests can be."""
    seen, length, answers = _seen(totals), _length(totals), totals.get("answers", 0.0)
    variance = max(0.0, totals.get("answer_squares", 0.0) / answers - (length + 1.0) ** 2)
    is_near = abs(log(mean / seen)) <= log(LIKELY)
    return not is_near and abs(mean - seen) * length > LIKELY * sqrt(variance) * deviation


def _length(totals: Numbers) -> float:
    """Tokens of an answer but the first, before which there is no time, on average."""
    answers = totals.get("answers", 0.0)
    return totals.get("answer_sum", 0.0) / answers - 1.0 if answers else 0.0
