"""The ring of decisions: what is one entry, how many are kept, and that a checkpoint brings all back."""

import json
from typing import Any

from headway_operator.samples import Limits, Sample
from headway_operator.slo import Memory, resume
from headway_operator.slo.history import MOST_DECISIONS, with_decision
from headway_operator.state import Attainment, Decision

NO_SAMPLE = Sample(0.0, {})
UNKNOWN = Attainment(None, None, 0, 0, "unknown")


def decision(at: float, replicas: int = 2, **changes: Any) -> Decision:
    told = {"cause": "Steady", "message": f"at {at:g}", "blocker": "", "evidence": {"load": at}} | changes
    return Decision(at=at, replicas=replicas, limits=Limits(8, 512), ttft=UNKNOWN, tpot=UNKNOWN, **told)


def entries(memory: Memory) -> list[dict[str, Any]]:
    """As a checkpoint has them."""
    found: list[dict[str, Any]] = json.loads(json.dumps(memory.to_dict()))["decisions"]
    return found


def test_decisions_that_say_the_same_are_one_entry_with_the_latest_numbers() -> None:
    memory = Memory(began_at=1.0)
    for at in (5.0, 10.0, 15.0):
        memory = with_decision(memory, decision(at))
    [entry] = entries(memory)
    assert (entry["since"], entry["at"], entry["message"]) == (5.0, 15.0, "at 15")
    assert entry["inputs"] == {"load": 15.0}
    memory = with_decision(memory, decision(20.0, blocker="AtMaxReplicas"))
    assert [(one["since"], one["blocker"]) for one in entries(memory)] == [(5.0, ""), (20.0, "AtMaxReplicas")]


def test_a_hundred_that_differ_are_kept_and_the_oldest_goes() -> None:
    memory = Memory(began_at=1.0)
    for number in range(MOST_DECISIONS + 30):
        memory = with_decision(memory, decision(5.0 * number, 1 + number % 2))
    kept = entries(memory)
    assert MOST_DECISIONS == 100
    assert [one["at"] for one in kept] == [5.0 * number for number in range(30, MOST_DECISIONS + 30)]


def test_a_restart_loses_none() -> None:
    memory = Memory(began_at=1.0)
    for number in range(MOST_DECISIONS + 5):
        memory = with_decision(memory, decision(5.0 * number, 1 + number % 2))
    before = entries(memory)
    last_at = 5.0 * (MOST_DECISIONS + 4)
    after = resume(json.loads(json.dumps(memory.to_dict())), NO_SAMPLE, last_at + 10.0)
    assert entries(after) == before
    after = with_decision(after, decision(last_at + 15.0, 1 + (MOST_DECISIONS + 4) % 2))
    assert entries(after)[-1]["since"] == last_at, "what says the same goes on"
    assert len(entries(after)) == MOST_DECISIONS
