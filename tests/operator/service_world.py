"""A service as the tests of its status see it: each changes something of it."""

from typing import Any

from headway_operator import conditions
from headway_operator.manifests import render
from headway_operator.names import ServiceKey
from headway_operator.samples import Limits, Sample
from headway_operator.spec import InferenceServiceStatus, parse
from headway_operator.state import Attainment, Decision, Gateway, Loss, Observed, Rendered, Replica

KEY = ServiceKey("team", "demo")
NOW = 1_800_000_000.0
MET = Attainment(300.0, 212.4, 480, 3, "met")
VIOLATED = Attainment(300.0, 840.0, 60, 40, "violated")
UNKNOWN = Attainment(300.0, None, 0, 0, "unknown")
NO_TARGET = Attainment(None, 21.0, 0, 0, "unknown")

STEADY = Decision(
    at=NOW,
    replicas=2,
    limits=Limits(8, 512),
    cause="Steady",
    message="P95 TTFT 212 ms against 300 ms",
    blocker="",
    ttft=MET,
    tpot=NO_TARGET,
    evidence={},
)


class World:
    """A service with two ready replicas behind a ready gateway; each test changes something."""

    def __init__(self, build: Any, spec: dict[str, Any] | None = None) -> None:
        self.build = build
        self.manifest = build.manifest(spec)
        self.rendered: Rendered = render(parse(self.manifest), build.site(), "PEM", frozenset())
        self.replicas: list[Replica] = [self.replica("a"), self.replica("b")]
        self.gateway = Gateway(ready=True)
        self.decision = STEADY
        self.losses: tuple[Loss, ...] = ()
        self.previous: dict[str, Any] = {}

    def replica(self, name: str, **changes: Any) -> Replica:
        replica: Replica = self.build.replica(name, revision=self.rendered.revision.hash, **changes)
        return replica

    def status(self, now: float = NOW, problems: tuple[str, ...] = ()) -> dict[str, Any]:
        service = parse({**self.manifest, "status": self.previous})
        observed = Observed(
            replicas=tuple(self.replicas),
            gateway=self.gateway,
            url="http://demo.team",
            losses=self.losses,
        )
        sample = Sample(now, {"a": self.build.sample(now, limits=Limits(6, 512))})
        result = conditions.status(
            service, self.rendered, observed, sample, self.decision, now, conditions.Problems(problems)
        )
        InferenceServiceStatus.model_validate(result)
        return result
