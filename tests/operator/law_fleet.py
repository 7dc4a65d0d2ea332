"""A service of replicas that tell what a known step model makes of a load, for tests of the law."""

from dataclasses import replace
from typing import Any

from headway_operator.samples import GatewaySample, Limits, Sample, Targets
from headway_operator.slo import Memory, decide
from headway_operator.slo.memory import Recommended
from headway_operator.slo.predictions import Workload
from headway_operator.slo.slices import Slice
from headway_operator.slo.step_fit import StepFit, StepModel
from headway_operator.state import Decision, Observed, Replica, ReplicaPhase, Revision

NOW = 100_000.0
MODEL = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=0.0)
# What MODEL says for the load below: 25 run on average, and more than 33 at once would miss TPOT.
BEST = Limits(33, 2048)
# Requests per second that one replica keeps both targets with, as MODEL and the load below make it.
CAPACITY = 6.06


class Fleet:
    """Replicas of a known model under a steady load of 1,000 prompt and 200 generated tokens a request."""

    def __init__(self, build: Any, ready: int = 4, per_second: float = 20.0) -> None:
        self.build = build
        self.target = build.target(
            targets=Targets(700.0, 26.0), max_replicas=64, initial=BEST, stabilization_seconds=300.0
        )
        self.per_second = per_second
        # Tokens of a request: of its prompt and their square on average, of its answer.
        self.tokens = (1000.0, 2e6, 200.0)
        self.totals: dict[str, float] = {"ttft_met": 4000, "tpot_met": 4000}
        self.now_totals: dict[str, float] = {}
        self.ttft_bucket, self.tpot_bucket = 50, 24
        # Requests that are counted by TTFT and by TPOT in each slice.
        self.counted = 10
        self.gauges: dict[str, Any] = {"limits": BEST, "running": 10}
        self.waiting = 0
        self.replicas = {f"r{number}": build.replica(f"r{number}") for number in range(ready)}
        self.lost: set[str] = set()
        self.own: dict[str, dict[str, Any]] = {}
        self.gateway_lost = False
        self.other_scaler = ""
        self.memory = Memory(
            began_at=1.0,
            replicas=ready,
            limits=BEST,
            initial=BEST,
            targets=self.target.targets,
            fit=StepFit(model=MODEL),
            workload=Workload(1000.0, 2e6, 200.0, 1200.0, 0.0),
            watched_since=NOW - 5000,
            replicas_raised_at=1.0,
        )

    def promise(self, targets: Targets) -> None:
        """Instead of the one before."""
        self.target = replace(self.target, targets=targets)
        self.memory = self.memory._replace(targets=targets)

    def pending(self, count: int, age: float = 5.0, reason: str = "") -> None:
        phase: ReplicaPhase = "pending"
        for number in range(len(self.replicas), len(self.replicas) + count):
            self.replicas[f"p{number}"] = Replica(
                f"p{number}", "1a2b3c4d", phase, None, created_at=NOW - age, reason=reason
            )
        self.memory = self.memory._replace(replicas=len(self.replicas), replicas_raised_at=NOW - age)

    def violated(self, *names: str) -> None:
        for name in names:
            self.totals |= {f"{name}_met": 100, f"{name}_missed": 300}
            self.now_totals[f"{name}_missed"] = 30

    def slices(self) -> tuple[Slice, ...]:
        """Five minutes in slices of 5 s; the last one holds what happens now as well."""
        count = self.per_second * 5
        num_ready = sum(one.phase == "ready" for one in self.replicas.values())
        prompt, square, answer = self.tokens
        requests = {
            "arrived": count,
            "prompts": count,
            "prompt_sum": prompt * count,
            "prompt_squares": square * count,
            "answers": count,
            "answer_sum": answer * count,
            "decoded": answer * count,
            "attended": 1.2 * prompt * answer * count,
            "replica_seconds": 5.0 * num_ready,
        }
        judged = {name: value / 60 for name, value in self.totals.items()}
        made = [
            Slice(
                NOW - 5 * k,
                NOW - 5 * (k - 1),
                {**requests, **judged},
                {"tpot": {self.tpot_bucket: self.counted}, "ttft": {self.ttft_bucket: self.counted}},
            )
            for k in range(60, 0, -1)
        ]
        last = made[-1]
        totals = {
            name: last.total(name) + self.now_totals.get(name, 0.0)
            for name in {*last.totals, *self.now_totals}
        }
        return (*made[:-1], last.with_totals(totals))

    def decide(self, now: float = NOW) -> tuple[Decision, Memory]:
        return self.decided_with(self.memory._replace(slices=self.slices()), now)

    def decided_with(self, memory: Memory, now: float) -> tuple[Decision, Memory]:
        ready = [name for name, one in self.replicas.items() if one.phase == "ready"]
        samples = {
            name: None
            if name in self.lost
            else self.build.sample(
                now, targets=self.target.targets, **{**self.gauges, **self.own.get(name, {})}
            )
            for name in ready
        }
        gateway = GatewaySample("g", now, self.waiting, 20.0 if self.waiting else 0.0, 0, {})
        sample = Sample(now, samples, {"g": None if self.gateway_lost else gateway})
        observed = Observed(
            revisions=(Revision("demo-1a2b3c4d", "1a2b3c4d", len(self.replicas), 0.0),),
            replicas=tuple(self.replicas.values()),
            other_scaler=self.other_scaler,
        )
        return decide(self.target, memory, sample, observed, now)


def quiet(build: Any, recommended: int = 3, ready: int = 6) -> Fleet:
    """Six replicas where three would do."""
    fleet = Fleet(build, ready, 9.0)
    history = tuple(Recommended(NOW - age, recommended) for age in (170.0, 110.0, 50.0))
    fleet.memory = fleet.memory._replace(recommended=history)
    return fleet
