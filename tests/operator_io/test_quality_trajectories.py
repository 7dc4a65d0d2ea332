"""Whatever happens around a gate, in whatever order: nothing unverified starts, and what serves is not lost.

Edits, verdicts, lost Jobs, changed files, operators that restart or are upgraded, drawn at random; the
invariants hold after each pass. Against the cluster in memory of `test_reconcile`.
"""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from headway_operator.passes import Carried
from headway_operator.state import ChildKey, Evaluation, EvaluationPhase

SEEDS, STEPS = range(16), 100
FILE = "configmap://judge/a"
LEVERS = ("none", "int8", "fp8", "int4")
BAD_LEVERS = ("int4",)  # what every verdict goes against
CHECK = {"name": "mean KL divergence", "value": 0.1, "limit": 0.2, "unit": "nats", "note": ""}


class Trajectory:
    """One service and what is known of it from outside."""

    def __init__(self, stage: Any, seed: int) -> None:
        self.stage = stage
        self.random = random.Random(seed)
        self.cluster = stage.cluster
        self.cluster.files[FILE] = "1"
        self.spec = stage.manifest["spec"]
        self.spec |= {"quantization": "int8", "quality": {}}
        self.begun: dict[str, int] = {}
        self.without_verdict: set[str] = set()
        self.served: set[str] = set()

    def act(self) -> None:
        """Something happens."""
        actions = (
            *(self.edit_lever, self.end_job, self.end_job, self.edit_live, self.nothing, self.nothing),
            *(self.toggle_gate, self.edit_file, self.lose_job, self.restart, self.upgrade, self.edit_limits),
        )
        self.random.choice(actions)()

    def nothing(self) -> None:
        """Time goes by."""

    def edit_lever(self) -> None:
        self.spec["quantization"] = self.random.choice(LEVERS)

    def edit_limits(self) -> None:
        if "quality" in self.spec:
            text = self.random.choice(({}, {"text": FILE}))
            self.spec["quality"] = {**text, "thresholds": {"maxKl": self.random.choice(("10m", "20m"))}}

    def edit_live(self) -> None:
        self.spec["scaling"] = {"minReplicas": self.random.randint(1, 3), "maxReplicas": 4}
        self.spec["slo"] = {"ttftMilliseconds": self.random.randint(100, 900)}

    def toggle_gate(self) -> None:
        if self.spec.pop("quality", None) is None:
            self.spec["quality"] = {}

    def edit_file(self) -> None:
        if self.random.random() < 0.2:
            self.cluster.files.pop(FILE, None)
        else:
            self.cluster.files[FILE] = str(self.random.randint(1, 3))

    def lose_job(self) -> None:
        """Somebody deletes it, or its time after the end is over."""
        for child in [child for child in self.cluster.children if child.kind == "Job"]:
            del self.cluster.children[child]
            del self.cluster.evaluations[child.name]

    def restart(self) -> None:
        self.stage.carried = Carried()

    def upgrade(self) -> None:
        self.restart()
        number = self.random.randint(1, 3)
        self.cluster.site = replace(self.cluster.site, runtime_image=f"runtime:{number}")

    def end_job(self, *, has_verdict: bool = False) -> None:
        for name, evaluation in list(self.cluster.evaluations.items()):
            if evaluation.phase != "running":
                continue
            args = self.cluster.children[ChildKey("Job", name)]["spec"]["template"]["spec"]["containers"][0][
                "args"
            ]
            is_good = not any(lever in args for lever in BAD_LEVERS)
            verdict = {"schema_version": 1, "passed": is_good, "tasks": [], "left_out": 0}
            output = json.dumps({**verdict, "checks": [{**CHECK, "passed": is_good}]})
            ends: list[tuple[EvaluationPhase, str]] = [("ended", output)]
            if not has_verdict:
                ends += [("ended", output), ("ended", ""), ("timed_out", "")]
            phase, words = self.random.choice(ends)
            self.cluster.evaluations[name] = Evaluation(name, phase, output=words)
            if not words:
                self.without_verdict.add(name)

    async def step(self) -> None:
        before, jobs = self.stage.runtime(), set(self.cluster.evaluations)
        running = {name for name, one in self.cluster.evaluations.items() if one.phase == "running"}
        outcome = await self.stage.step()
        assert outcome.problems == []
        after, gate = self.stage.runtime(), outcome.gate
        for name in set(self.cluster.evaluations) - jobs:
            self.begun[name] = self.begun.get(name, 0) + 1
        self.check_start(set(after) - set(before), gate)
        assert sum(before.values()) == 0 or sum(after.values()) > 0, "what served is gone"
        assert len(self.cluster.evaluations) <= 1, "only what is asked for is judged"
        assert not (running & set(self.cluster.evaluations)) or gate is None or not gate.begins
        if gate is not None:
            assert self.cluster.status["quality"]["reason"] == gate.reason
            assert len(self.cluster.status["quality"]["history"]) <= 8

    def check_start(self, started: set[str], gate: Any) -> None:
        for name in started:
            [container] = self.cluster.children[ChildKey("Deployment", name)]["spec"]["template"]["spec"][
                "containers"
            ]
            if gate is not None:
                assert gate.is_open, "a revision was started before its verdict"
                assert not any(lever in container["args"] for lever in BAD_LEVERS), "a bad one was started"


@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_happens_nothing_unverified_starts_and_what_serves_stays(
    stage: Any, seed: int
) -> None:
    trajectory = Trajectory(stage, seed)
    for _ in range(STEPS):
        trajectory.act()
        await trajectory.step()
    # Calm returns: what is asked for is judged, and served if it is good.
    trajectory.cluster.files[FILE] = "1"
    trajectory.spec |= {"quantization": "fp8", "quality": {"text": FILE}}
    for _ in range(12):
        trajectory.end_job(has_verdict=True)
        await trajectory.step()
        if stage.told("QualityVerified")[1] in ("TimedOut", "JobFailed"):
            trajectory.lose_job()
    assert stage.told("QualityVerified") == ("True", "Passed")
    assert stage.told("Ready") == ("True", "Serving")
    assert stage.told("Progressing") == ("False", "Settled")


@pytest.mark.parametrize("seed", SEEDS)
async def test_what_came_to_a_verdict_is_not_judged_twice(stage: Any, seed: int) -> None:
    """As long as it is remembered, which the fewer inputs here all are."""
    trajectory = Trajectory(stage, seed)
    calm = (
        trajectory.edit_lever,
        trajectory.end_job,
        trajectory.nothing,
        trajectory.restart,
        trajectory.lose_job,
    )
    verdicts: set[str] = set()
    for _ in range(STEPS):
        trajectory.random.choice(calm)()
        verdicts |= {name for name, one in trajectory.cluster.evaluations.items() if one.output}
        begun = dict(trajectory.begun)
        await trajectory.step()
        recorded = {f"demo-quality-{one['hash']}" for one in stage.cluster.status["quality"]["history"]}
        again = {name for name, count in trajectory.begun.items() if begun.get(name, 0) < count}
        assert not again & recorded & verdicts - trajectory.without_verdict
    assert trajectory.begun
