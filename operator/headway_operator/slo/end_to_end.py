"""Whole answers against `slo.endToEndMilliseconds`: reported and judged, and nothing is moved for them.

How long an answer takes is mostly how long it is, which no replica and no batch limit changes; what they can
change is in TTFT and TPOT, by which the controller moves them. Windows and verdicts are those of `evidence`:
the shortest window that allows one. A request that was turned away for good is missed.
"""

from dataclasses import replace

from headway_operator.slo import histogram
from headway_operator.slo.evidence import windows
from headway_operator.slo.memory import Memory
from headway_operator.slo.target import Target
from headway_operator.slo.verdict import verdict
from headway_operator.slo.window import Recent
from headway_operator.state import NOT_PROMISED, Attainment, Decision


def with_end_to_end(decision: Decision, target: Target, memory: Memory) -> Decision:
    """The decision with what is known of whole answers. memory: of the pass that took it."""
    return replace(decision, end_to_end=end_to_end(target, Recent(memory.slices), decision.at))


def end_to_end(target: Target, happened: Recent, now: float) -> Attainment:
    """Against the target, over the window that was judged."""
    milliseconds = target.targets.e2e_milliseconds
    if milliseconds is None:
        return NOT_PROMISED
    judged = NOT_PROMISED
    for window in windows(target.window_seconds):
        totals = happened.totals(now - window)
        met = int(totals.get("e2e_met", 0))
        missed = int(totals.get("e2e_missed", 0) + totals.get("refused", 0))
        value = histogram.percentile(happened.counts("e2e", now - window), target.percentile)
        judged = Attainment(milliseconds, value, met, missed, verdict(met, missed, target.percentile))
        if judged.verdict != "unknown":
            break
    return judged
