"""A service as single decisions see it: each test changes something of it."""

from dataclasses import replace
from typing import Any

from headway_operator.samples import GatewaySample, Limits, ReplicaSample, Sample
from headway_operator.slo import Memory, decide
from headway_operator.slo.slices import Slice
from headway_operator.state import Decision, Observed, Revision

NOW = 10_000.0


class Scene:
    """One replica (or more) with a past of twenty seconds, changed by each test and decided once."""

    def __init__(self, build: Any) -> None:
        self.build = build
        self.target = build.target(initial=Limits(8, 512))
        self.totals: dict[str, float] = {"ttft_met": 50, "tpot_met": 50}
        self.tpot = {18.0: 50}
        self.ttft: dict[float, int] = {}
        self.past: tuple[Slice, ...] = ()
        self.replicas = {"a": build.replica("a")}
        self.samples: dict[str, ReplicaSample | None] = {"a": build.sample(NOW, limits=Limits(8, 512))}
        self.memory = Memory(
            began_at=1.0,
            replicas=1,
            limits=Limits(8, 512),
            targets=self.target.targets,
            violated_since=NOW - 60,
            violated_at=NOW - 2,
            replicas_raised_at=1.0,
        )
        self.other_scaler = ""
        self.gateways: dict[str, GatewaySample | None] = {}
        self.errors: dict[str, str] = {}
        self.now = NOW

    def sample(self, **changes: Any) -> None:
        self.samples = {name: replace(one, **changes) if one else None for name, one in self.samples.items()}

    def slow_ttft(self) -> None:
        """Full, with a long queue that grows."""
        self.totals |= {"ttft_missed": 30, "queue_milliseconds": 90_000, "queue_count": 30}
        self.sample(running=8, waiting=40, oldest_waiting_seconds=3.0)

    def slow_tpot(self) -> None:
        self.totals |= {"tpot_missed": 30, "prompt_tokens": 100, "generated_tokens": 1000}
        self.tpot = {60.0: 80}
        self.sample(running=8)

    def decide(self) -> tuple[Decision, Memory]:
        counts = {
            name: {i: count for i, count in enumerate(self.build.histogram(told).counts) if count}
            for name, told in (("tpot", self.tpot), ("ttft", self.ttft))
        }
        past = Slice(self.now - 9, self.now, self.totals, counts)
        memory = self.memory._replace(slices=(*self.past, past))
        observed = Observed(
            revisions=(Revision("demo-1a2b3c4d", "1a2b3c4d", len(self.replicas), 0.0),),
            replicas=tuple(self.replicas.values()),
            other_scaler=self.other_scaler,
        )
        sample = Sample(self.now, self.samples, self.gateways, self.errors)
        return decide(self.target, memory, sample, observed, self.now)
