"""What the samples say: attainment of both promises, and how busy the replicas are.

A request that still waits has no TTFT yet, so judging only those that have one would flatter a queue that
grows. Requests waiting for longer than the target are counted as misses already; only the oldest age is
known, so the ages are taken as spread evenly below it. A request that was turned away for good is missed too.

A window of 30 s is judged first; it grows to 60, 120 and 300 s, and no further than the promise says, until
there is evidence enough for a verdict.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, isqrt

from headway_operator.samples import GatewaySample, Limits, ReplicaSample, Sample
from headway_operator.slo import histogram
from headway_operator.slo.slices import Numbers
from headway_operator.slo.target import Target
from headway_operator.slo.verdict import verdict
from headway_operator.slo.window import Recent
from headway_operator.state import Attainment

WINDOWS_SECONDS = (30.0, 60.0, 120.0, 300.0)
# What counts as happening now.
RECENT_SECONDS = 10.0
# A sample older than this says nothing about now.
STALE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the sampled replicas are, all together, right now and over the last 10 s.

    late: waiting requests older than the TTFT target. kv_use: of the fullest replica.
    queue_milliseconds, prefill_milliseconds: means. prefill_share: share of prompt tokens in all tokens
    computed. num_sampled: replicas that gave a sample. num_queues: replicas where requests wait.
    num_queues_with_room: those of them that could run two more (one free place is one about to be taken)
    beside the places that are left to who may be in time.
    num_late_queues: replicas where requests are late.
    busiest_running: running on the busiest replica.
    ttft_missed, tpot_missed: requests that just missed. in_flight: requests that gateways have given to
    replicas. received: requests that replicas just received.
    """

    num_sampled: int = 0
    running: int = 0
    waiting: int = 0
    late: int = 0
    oldest_waiting_seconds: float = 0.0
    kv_use: float = 0.0
    has_preempted: bool = False
    queue_milliseconds: float = 0.0
    prefill_milliseconds: float = 0.0
    prefill_share: float = 0.0
    num_queues: int = 0
    num_queues_with_room: int = 0
    num_late_queues: int = 0
    busiest_running: int = 0
    ttft_missed: int = 0
    tpot_missed: int = 0
    in_flight: int = 0
    received: int = 0


def fresh(sample: Sample, now: float) -> Sample:
    """Without what says nothing about now."""
    ages = {
        name: now - one.taken_at
        for some in (sample.replicas, sample.gateways)
        for name, one in some.items()
        if one is not None and now - one.taken_at > STALE_SECONDS
    }
    return without(sample, {name: f"its sample is {age:.0f} s old" for name, age in ages.items()})


def without(sample: Sample, errors: Mapping[str, str]) -> Sample:
    """As if these replicas and gateways had given no sample, and why that is of no use."""
    if not errors:
        return sample
    return replace(
        sample,
        replicas={name: None if name in errors else one for name, one in sample.replicas.items()},
        gateways={name: None if name in errors else one for name, one in sample.gateways.items()},
        errors={**sample.errors, **errors},
    )


def sampled_replicas(sample: Sample) -> dict[str, ReplicaSample]:
    """Those that gave one."""
    return {name: one for name, one in sample.replicas.items() if one is not None}


def applied_limits(sample: Sample) -> Limits | None:
    """What most replicas run with."""
    limits = Counter(one.limits for one in sample.replicas.values() if one is not None)
    return limits.most_common(1)[0][0] if limits else None


def load(target: Target, happened: Recent, sample: Sample, now: float) -> Load:
    """How busy the replicas are."""
    replicas = [one for one in sampled_replicas(sample).values() if not one.draining]
    running = [one.running for one in replicas]
    kv_uses = [one.kv_blocks_used / max(1, one.kv_blocks_total) for one in replicas]
    queued = [one for one in replicas if one.waiting]
    queues: list[ReplicaSample | GatewaySample] = [*queued]
    queues += [one for one in sample.gateways.values() if one is not None and one.waiting]
    # The last slice always counts, however long the time between passes.
    totals = happened.totals(now - RECENT_SECONDS, least=1)
    prompt, generated = totals.get("prompt_tokens", 0), totals.get("generated_tokens", 0)
    return Load(
        num_sampled=len(replicas),
        running=sum(running),
        waiting=sum(one.waiting for one in queues),
        late=sum(num_late(one.waiting, one.oldest_waiting_seconds, target) for one in queues),
        oldest_waiting_seconds=max((one.oldest_waiting_seconds for one in queues), default=0.0),
        kv_use=max(kv_uses, default=0.0),
        has_preempted=totals.get("preemptions", 0) > 0,
        queue_milliseconds=_mean(totals, "queue"),
        prefill_milliseconds=_mean(totals, "prefill"),
        prefill_share=prompt / (prompt + generated) if prompt + generated else 0.0,
        num_queues=len(queued),
        num_queues_with_room=sum(_has_room(one) for one in queued),
        num_late_queues=sum(num_late(one.waiting, one.oldest_waiting_seconds, target) > 0 for one in queued),
        busiest_running=max(running, default=0),
        ttft_missed=int(totals.get("ttft_missed", 0) + totals.get("refused", 0)),
        tpot_missed=int(totals.get("tpot_missed", 0)),
        in_flight=sum(one.in_flight for one in sample.gateways.values() if one is not None),
        received=int(totals.get("received", 0)),
    )


def _has_room(one: ReplicaSample) -> bool:
    most = one.limits.max_num_seqs
    return most - num_left_by_the_late(most) - one.running > 1


def num_left_by_the_late(most: int) -> int:
    """Of so many places: replicas admit nobody who is late to as many as the root of their number."""
    return min(most - 1, isqrt(most))


def attainments(
    target: Target, happened: Recent, now_load: Load, now: float, since: float = 0.0
) -> tuple[Attainment, Attainment]:
    """TTFT and TPOT against their targets, on evidence after `since` only."""
    return (
        _attainment("ttft", target.targets.ttft_milliseconds, target, happened, now_load, now, since),
        _attainment("tpot", target.targets.tpot_milliseconds, target, happened, now_load, now, since),
    )


def _attainment(
    name: str,
    milliseconds: float | None,
    target: Target,
    happened: Recent,
    now_load: Load,
    now: float,
    since: float,
) -> Attainment:
    met, missed, start = 0, 0, since
    for window in windows(target.window_seconds):
        start = max(now - window, since)
        totals = happened.totals(start)
        met, missed = (int(totals.get(f"{name}_{word}", 0)) for word in ("met", "missed"))
        if name == "ttft":
            missed += int(totals.get("refused", 0)) + now_load.late
        judged = verdict(met, missed, target.percentile) if milliseconds is not None else "unknown"
        if judged != "unknown" or now - window <= since:
            break
    counts = happened.counts(name, start)
    if name == "ttft":
        counts = _with_late(counts, now_load, milliseconds)
    value = histogram.percentile(counts, target.percentile)
    if milliseconds is None:
        return Attainment(None, value, 0, 0, "unknown")
    return Attainment(milliseconds, value, met, missed, judged)


def windows(longest_seconds: float) -> list[float]:
    """The windows to judge, the shortest first and none longer than asked."""
    return [window for window in WINDOWS_SECONDS if window < longest_seconds] + [longest_seconds]


def _with_late(counts: histogram.Counts, now_load: Load, milliseconds: float | None) -> histogram.Counts:
    if not now_load.late or milliseconds is None:
        return counts
    waited = (milliseconds + now_load.oldest_waiting_seconds * 1000.0) / 2
    return histogram.total((counts, {histogram.bucket_of(waited): now_load.late}))


def num_late(waiting: int, oldest_seconds: float, target: Target) -> int:
    """How many of `waiting` are older than the TTFT target, ages spread evenly up to the oldest."""
    milliseconds = target.targets.ttft_milliseconds
    if milliseconds is None or waiting == 0 or oldest_seconds * 1000.0 <= milliseconds:
        return 0
    return max(1, ceil(waiting * (1.0 - milliseconds / (oldest_seconds * 1000.0))))


def _mean(totals: Numbers, name: str) -> float:
    count = totals.get(f"{name}_count", 0)
    return totals.get(f"{name}_milliseconds", 0.0) / count if count else 0.0
