"""What one decision costs: `python -m benchmarks.operator.decision [--replicas 100] [--decisions 200]`.

Replicas that all serve a steady load, five seconds between passes, histograms and sums as engines fill
them. Prints the median and the highest decile in milliseconds of processor time; samples are made outside of
it.
"""

import argparse
import time
from statistics import median, quantiles

from headway_operator.sample_wire import REPLICA_COUNTERS
from headway_operator.samples import GatewaySample, Histogram, Limits, Moments, ReplicaSample, Sample, Targets
from headway_operator.slo import Memory, Target, decide
from headway_operator.slo.histogram import EDGES
from headway_operator.state import Observed, Replica, Revision

TARGETS = Targets(700.0, 26.0)
BEST = Limits(64, 2048)
BEGIN = 1_000_000.0


def target(replicas: int) -> Target:
    """Both promises at P95; room for twice the replicas."""
    return Target(
        targets=TARGETS,
        percentile=95,
        window_seconds=300.0,
        fixed_replicas=None,
        min_replicas=1,
        max_replicas=2 * replicas,
        stabilization_seconds=300.0,
        lowest=Limits(1, 16),
        highest=BEST,
        initial=BEST,
    )


def bell(middle: int, width: int, requests: int) -> Histogram:
    """About so many requests, over buckets on either side of the middle."""
    counts = [0] * 106
    for bucket in range(middle - width, middle + width):
        counts[bucket] = requests * (width - abs(middle - bucket)) // width**2
    return Histogram(EDGES, tuple(counts), sum(counts), EDGES[middle] * sum(counts))


def sample(name: str, passes: int, now: float) -> ReplicaSample:
    """One replica after so many passes: 25 requests and 375 steps in each."""
    requests, steps = 25 * passes, 300 * passes
    d, k, p = 10.0, 12_000.0, 500.0
    t, u = 8.3 + 0.25 * d, 8.3 + 0.25 * d + 0.05 * p
    # A fifth of the steps has prompts: so much is between two tokens, 16 ms, which TPOT is around.
    gap = 0.8 * t + 0.2 * u
    latencies, gaps = bell(40, 20, requests), bell(24, 5, requests)
    decode = (1, 0, d, k, 0, 0, 0, d * d * 1.2, d * k * 1.2, k * k * 1.3, t, 0, t * d, t * k, t * t)
    prompt = (1, p, d, k, p * p * 2, p * d, p * k, d * d, d * k, k * k, u, u * p, u * d, u * k, u * u)
    return ReplicaSample(
        instance=name,
        taken_at=now,
        limits=BEST,
        envelope=BEST,
        targets=TARGETS,
        running=10,
        waiting=0,
        oldest_waiting_seconds=0.0,
        kv_blocks_used=100,
        kv_blocks_total=1000,
        draining=False,
        counters=dict.fromkeys(REPLICA_COUNTERS, 0)
        | {"ttft_met": requests, "tpot_met": requests, "received": requests, "steps": steps},
        histograms=dict.fromkeys(("ttft", "queue", "prefill", "e2e"), latencies)
        | dict.fromkeys(("tpot", "step"), gaps),
        moments=Moments(
            tuple(steps * one for one in decode),
            tuple(steps / 4 * one for one in prompt),
            (requests, 1000 * requests, 2_000_000 * requests),
            (requests, 200 * requests, 60_000 * requests),
            (199 * requests, gap * 199 * requests),
        ),
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--decisions", type=int, default=200)
    options = parser.parse_args()
    names = [f"replica-{number}" for number in range(options.replicas)]
    replicas = tuple(Replica(name, "1", "ready", "", BEGIN - 900, BEGIN - 800) for name in names)
    observed = Observed((Revision("demo-1", "1", len(names), 0.0),), replicas)
    promise, memory, taken = target(len(names)), Memory(began_at=BEGIN), []
    for passes in range(1, options.decisions + 1):
        now = BEGIN + 5.0 * passes
        received = 25 * passes * len(names)
        gateway = GatewaySample("g", now, 0, 0.0, 0, {"received": received, "rejected": 0})
        seen = Sample(now, {name: sample(name, passes, now) for name in names}, {"g": gateway})
        began = time.process_time()
        decision, memory = decide(promise, memory, seen, observed, now)
        taken.append(1000.0 * (time.process_time() - began))
    settled = taken[len(taken) // 4 :]
    print(f"{options.replicas} replicas, {decision.cause}, {len(settled)} decisions: {decision.message}")
    print(f"median {median(settled):.2f} ms, highest decile {quantiles(settled, n=10)[-1]:.2f} ms")


if __name__ == "__main__":
    main()
