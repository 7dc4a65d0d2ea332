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
from headway_operator.slo.slices import Numbers
from headway_operator.slo.window import Recent

PACE_SECONDS, DOUBT_SECONDS = 300.0, 120.0
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


def pace(happened: Recent, now: float, before: Pace) -> Pace:
    """Of the last minutes; as told where there were too few tokens, or where guesses made most of the tokens.
    before: what was found in the last pass; what is doubted then is so until enough requests tell more."""
    since = now - DOUBT_SECONDS
    counts = happened.counts("tpot", since)
    lately = _seen(happened.totals(since))
    is_doubted = False
    if lately > 0.0 and sum(counts.values()) >= LEAST_REQUESTS:
        is_doubted = _is_out(lately, counts) or (before.is_doubted and not _are_alike(lately, counts))
    elif before.is_doubted:
        return before
    totals = happened.totals(since if is_doubted else now - PACE_SECONDS)
    seen = histogram.mean(counts) if is_doubted else _seen(totals)
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


def _is_out(seen: float, counts: histogram.Counts) -> bool:
    least, most = (histogram.percentile(counts, percent) or 0.0 for percent in BELIEVED)
    return not least <= seen <= most


def _are_alike(seen: float, counts: histogram.Counts) -> bool:
    return abs(log(histogram.mean(counts) / seen)) <= log(LIKELY)
