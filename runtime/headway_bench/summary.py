"""Sums up one point's records: latencies, rates, goodput, failures, and how well the client kept up.

| metric | from | to |
| --- | --- | --- |
| TTFT | sending | the first event with content |
| TPOT | the first event with content | the last one; divided by the tokens after those of the first |
| ITL | an event with content | the next; k tokens in it are k times a k-th of that time |
| E2E | sending | the end of the answer |

"From due" counts from when the request should have been sent: it holds what this client's own lateness hid.
Rates are of measured requests that completed, over the time from the first sending to the last end.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy

from headway_bench.percentiles import Distribution, Estimate, describe, describe_weighted, wilson_share
from headway_bench.record import INTERRUPTED, Record

PERCENTS = (50, 95, 99)
OBJECTIVES = ("ttft", "tpot", "e2e")
LATENCIES = ("ttft", "tpot", "itl", "e2e", "ttft_from_due", "e2e_from_due")


@dataclass(frozen=True, slots=True)
class Failures:
    """Failed requests of one kind, and what one of them said."""

    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that met every objective; failed ones count as missed, interrupted ones not at all."""

    objectives_milliseconds: Mapping[str, float]
    share: Estimate
    requests_per_second: float


@dataclass(frozen=True, slots=True)
class ClientUse:
    """How the client itself fared while the load ran."""

    cpu_seconds: float
    cpu_share_of_one_core: float
    connections_opened: int
    lag_milliseconds: Distribution | None
    connect_milliseconds: Distribution | None


@dataclass(frozen=True, slots=True)
class TokenUse:
    """Tokens of the completed requests. `counted_by`: requests by how the tokens of events were told.

    `one_token_an_event`: of the requests whose events did not tell, the share for which that holds.
    """

    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    mean_input: float
    mean_output: float
    input_as_wanted: Estimate | None
    output_as_wanted: Estimate
    counted_by: Mapping[str, int]
    one_token_an_event: Estimate | None
    tokens_per_event: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Everything that is reported of one point."""

    num_measured: int
    num_completed: int
    num_failed: int
    num_interrupted: int
    num_without_content: int
    num_warmup: int
    duration_seconds: float
    sending_per_second: float | None
    completed_per_second: float
    input_tokens_per_second: float
    output_tokens_per_second: float
    latency_milliseconds: Mapping[str, Distribution | None]
    goodput: Goodput | None
    failures: Mapping[str, Failures]
    tokens: TokenUse | None
    client: ClientUse


def summarize(
    records: Sequence[Record],
    objectives: Mapping[str, float],
    confidence: float,
    random: numpy.random.Generator,
    cpu_seconds: float,
    wall_seconds: float,
    connections_opened: int,
) -> Summary:
    """The summary of one point; `objectives` in milliseconds, the processor time over all `wall_seconds`."""
    measured = [record for record in records if not record.is_warmup]
    complete = [record for record in measured if record.is_complete]
    failed = [record for record in measured if record.failure not in ("", INTERRUPTED)]
    begin = min((record.sent_at for record in measured), default=0.0)
    end = max((record.ended_at for record in measured), default=0.0)
    duration = max(end - begin, 1e-9)
    tokens = _token_use(complete, confidence) if complete else None
    return Summary(
        num_measured=len(measured),
        num_completed=len(complete),
        num_failed=len(failed),
        num_interrupted=len(measured) - len(complete) - len(failed),
        num_without_content=sum(not record.token_times for record in complete),
        num_warmup=len(records) - len(measured),
        duration_seconds=duration,
        sending_per_second=_sending_rate(measured),
        completed_per_second=len(complete) / duration,
        input_tokens_per_second=tokens.input_tokens / duration if tokens else 0.0,
        output_tokens_per_second=tokens.output_tokens / duration if tokens else 0.0,
        latency_milliseconds=_latencies(complete, confidence, random),
        goodput=_goodput(complete, failed, objectives, confidence, duration) if objectives else None,
        failures=_failures(failed),
        tokens=tokens,
        client=_client_use(measured, confidence, cpu_seconds, wall_seconds, connections_opened),
    )


def itl_samples(record: Record) -> tuple[list[float], list[int]]:
    """Seconds for each token of an event, and how many tokens that was, for each event after the first."""
    times, counts = record.token_times, record.token_counts
    values = [(times[i] - times[i - 1]) / counts[i] for i in range(1, len(times))]
    return values, list(counts[1:])


def meets(record: Record, objectives: Mapping[str, float]) -> bool:
    """Whether a completed request met every objective (milliseconds).

    One without content is held to the TTFT by its end; one of a single event meets any TPOT.
    """
    ttft = record.e2e_seconds if record.ttft_seconds is None else record.ttft_seconds
    reached = {"ttft": ttft, "tpot": record.tpot_seconds or 0.0, "e2e": record.e2e_seconds}
    return all(1000 * reached[name] <= limit for name, limit in objectives.items())


def _latencies(
    complete: Sequence[Record], confidence: float, random: numpy.random.Generator
) -> dict[str, Distribution | None]:
    first = [(r.ttft_seconds, r.lag_seconds) for r in complete]
    values = {
        "ttft": [1000 * ttft for ttft, _ in first if ttft is not None],
        "ttft_from_due": [1000 * (ttft + lag) for ttft, lag in first if ttft is not None],
        "tpot": [1000 * tpot for r in complete if (tpot := r.tpot_seconds) is not None],
        "e2e": [1000 * r.e2e_seconds for r in complete],
        "e2e_from_due": [1000 * (r.e2e_seconds + r.lag_seconds) for r in complete],
    }
    found = {name: describe(each, PERCENTS, confidence) for name, each in values.items()}
    found["itl"] = _itl(complete, confidence, random)
    return {name: found[name] for name in LATENCIES}


def _itl(
    complete: Sequence[Record], confidence: float, random: numpy.random.Generator
) -> Distribution | None:
    samples = [itl_samples(record) for record in complete]
    return describe_weighted(
        1000 * numpy.fromiter((v for values, _ in samples for v in values), numpy.float64),
        numpy.fromiter((w for _, weights in samples for w in weights), numpy.float64),
        numpy.repeat(numpy.arange(len(samples)), [len(values) for values, _ in samples]),
        PERCENTS,
        confidence,
        random,
    )


def _goodput(
    complete: Sequence[Record],
    failed: Sequence[Record],
    objectives: Mapping[str, float],
    confidence: float,
    duration: float,
) -> Goodput | None:
    judged = len(complete) + len(failed)
    if not judged:
        return None
    good = sum(meets(record, objectives) for record in complete)
    return Goodput(dict(objectives), wilson_share(good, judged, confidence), good / duration)


def _failures(failed: Sequence[Record]) -> dict[str, Failures]:
    examples: dict[str, str] = {}
    for record in failed:
        examples.setdefault(record.failure, record.failure_detail)
    counts = Counter(record.failure for record in failed)
    return {kind: Failures(count, examples[kind]) for kind, count in counts.most_common()}


def _sending_rate(measured: Sequence[Record]) -> float | None:
    if len(measured) < 2:
        return None
    times = [record.sent_at for record in measured]
    return (len(times) - 1) / max(max(times) - min(times), 1e-9)


def _token_use(complete: Sequence[Record], confidence: float) -> TokenUse:
    told = [r for r in complete if r.prompt_tokens is not None]
    input_tokens = sum(
        (r.input_tokens_wanted or 0) if r.prompt_tokens is None else r.prompt_tokens for r in complete
    )
    output_tokens = sum(r.output_tokens for r in complete)
    # What a later turn's whole prompt should be depends on the answers before it.
    checked = [r for r in told if r.turn == 0 and r.input_tokens_wanted is not None]
    # Events that told their counts may leave out an end marker; events that did not are checked by the sum.
    counted = [r for r in complete if r.completion_tokens and r.token_counts and r.count_source == "events"]
    cached = [r.cached_tokens for r in complete if r.cached_tokens is not None]
    num_events = sum(len(r.token_counts) for r in complete)
    return TokenUse(
        input_tokens,
        output_tokens,
        sum(cached) if cached else None,
        input_tokens / len(complete),
        output_tokens / len(complete),
        _share([r.prompt_tokens == r.input_tokens_wanted for r in checked], confidence),
        wilson_share(
            sum(r.output_tokens == r.output_tokens_wanted for r in complete), len(complete), confidence
        ),
        dict(Counter(str(r.count_source) for r in complete)),
        _share([sum(r.token_counts) == r.completion_tokens for r in counted], confidence),
        output_tokens / num_events if num_events else 0.0,
    )


def _share(truths: Sequence[bool], confidence: float) -> Estimate | None:
    return wilson_share(sum(truths), len(truths), confidence) if truths else None


def _client_use(
    measured: Sequence[Record], confidence: float, cpu_seconds: float, wall_seconds: float, opened: int
) -> ClientUse:
    return ClientUse(
        cpu_seconds,
        cpu_seconds / max(wall_seconds, 1e-9),
        opened,
        describe([1000 * r.lag_seconds for r in measured], PERCENTS, confidence),
        describe(
            [1000 * r.connect_seconds for r in measured if r.connect_seconds is not None],
            PERCENTS,
            confidence,
        ),
    )
