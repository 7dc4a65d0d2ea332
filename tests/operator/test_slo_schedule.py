"""Bounds that follow the clock: when they hold, from how early on, and what the decision says of them."""

from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from headway_operator.errors import SpecError
from headway_operator.samples import Sample
from headway_operator.slo import Memory, decide, target_of
from headway_operator.slo.schedule import scheduled
from headway_operator.slo.target import Target
from headway_operator.spec import parse
from headway_operator.spec.schedule import ScheduleEntry
from headway_operator.state import Observed, Revision

OFFICE = {"start": "0 8 * * MON-FRI", "end": "0 18 * * MON-FRI", "timeZone": "Europe/Berlin"}


def at(text: str, zone: str = "Europe/Berlin") -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


def entry(**fields: Any) -> ScheduleEntry:
    return ScheduleEntry.model_validate({**OFFICE, "minReplicas": 3, **fields})


def bounds(build: Any, now: float, *entries: ScheduleEntry, **changes: Any) -> tuple[int, int]:
    target: Target = scheduled(build.target(schedule=entries, **changes), now)
    return target.min_replicas, target.max_replicas


@pytest.mark.parametrize(
    ("moment", "want"),
    [
        pytest.param("2026-11-23 07:59:59", 1, id="Monday before it opens"),
        pytest.param("2026-11-23 08:00:00", 3, id="as it opens"),
        pytest.param("2026-11-23 17:59:59", 3, id="before it closes"),
        pytest.param("2026-11-23 18:00:00", 1, id="as it closes"),
        pytest.param("2026-11-22 12:00:00", 1, id="Sunday"),
        pytest.param("2026-07-20 08:00:00", 3, id="in summer, by the same clock"),
    ],
)
def test_an_entry_holds_from_its_start_to_its_end_by_its_own_clock(
    build: Any, moment: str, want: int
) -> None:
    assert bounds(build, at(moment), entry()) == (want, 4)


@pytest.mark.parametrize(
    ("moment", "want"),
    [
        pytest.param("2026-11-27 23:00", 2, id="Friday night"),
        pytest.param("2026-11-28 12:00", 2, id="Saturday"),
        pytest.param("2026-11-30 05:59", 2, id="Monday morning"),
        pytest.param("2026-11-30 06:00", 1, id="Monday"),
    ],
)
def test_an_entry_may_last_over_midnights(build: Any, moment: str, want: int) -> None:
    weekend = entry(start="0 22 * * FRI", end="0 6 * * MON", minReplicas=2)
    assert bounds(build, at(moment), weekend) == (want, 4)


def test_clocks_that_are_set_move_spans_and_lose_none(build: Any) -> None:
    """Berlin, 2026-03-29: 02:00 becomes 03:00. 2026-10-25: 03:00 becomes 02:00."""
    night = entry(start="30 2 * * *", end="0 5 * * *", minReplicas=2)
    utc = [at(text, "UTC") for text in ("2026-03-29 00:59", "2026-03-29 01:30", "2026-03-29 03:00")]
    assert [bounds(build, now, night)[0] for now in utc] == [1, 2, 1]
    fall = [at(text, "UTC") for text in ("2026-10-25 00:29", "2026-10-25 00:30", "2026-10-25 03:59")]
    assert [bounds(build, now, night)[0] for now in fall] == [1, 2, 2]
    assert bounds(build, at("2026-10-25 04:00", "UTC"), night)[0] == 1


def test_replicas_are_asked_for_by_what_one_takes_to_start_early(build: Any) -> None:
    late, early = at("2026-11-23 07:58:29"), at("2026-11-23 07:58:30")
    assert bounds(build, late, entry(), start_seconds=90.0) == (1, 4)
    assert bounds(build, early, entry(), start_seconds=90.0) == (3, 4)
    assert bounds(build, early, entry(), start_seconds=0.0) == (1, 4), "no start was seen yet"


def test_a_maximum_lowers_nothing_before_its_time_and_raises_early(build: Any) -> None:
    before, opened = at("2026-11-23 07:59"), at("2026-11-23 08:00")
    capped = entry(minReplicas=None, maxReplicas=2)
    assert bounds(build, before, capped, start_seconds=90.0) == (1, 4)
    assert bounds(build, opened, capped, start_seconds=90.0) == (1, 2)
    wider = entry(minReplicas=6, maxReplicas=8)
    assert bounds(build, before, wider, start_seconds=90.0) == (6, 8)
    assert bounds(build, opened, wider, start_seconds=90.0) == (6, 8)


def test_of_several_that_hold_the_largest_of_each_bound_counts(build: Any) -> None:
    now = at("2026-11-23 12:00")
    entries = entry(minReplicas=2, maxReplicas=3), entry(minReplicas=None, maxReplicas=6), entry()
    assert bounds(build, now, *entries) == (3, 6)
    assert bounds(build, now, entry(minReplicas=4), entry(minReplicas=None, maxReplicas=2)) == (4, 4)


def test_a_fixed_number_has_no_schedule(build: Any) -> None:
    target = build.target(schedule=(entry(),), fixed_replicas=1)
    assert scheduled(target, at("2026-11-23 12:00")) == target


def observed(replicas: int) -> Observed:
    return Observed((Revision("demo-1", "1", replicas, 0.0),))


def test_the_decision_follows_and_says_why(build: Any) -> None:
    target = build.target(schedule=(entry(),), start_seconds=90.0, min_replicas=0, may_sleep=True)
    memory = Memory(began_at=1.0, replicas=0)
    asleep, memory = decide(target, memory, Sample(0.0), observed(0), at("2026-11-23 07:58"))
    assert (asleep.replicas, asleep.cause) == (0, "Asleep")
    assert "schedule" not in asleep.message
    raised, memory = decide(target, memory, Sample(0.0), observed(0), at("2026-11-23 07:59"))
    assert (raised.replicas, raised.cause) == (3, "BoundsChanged")
    assert raised.message == (
        "the spec's bounds ask for it: replicas 0 -> 3; scaling.schedule[0] has at least 3 replicas from "
        "2026-11-23 08:00 until 2026-11-23 18:00 Europe/Berlin, asked for early, since one takes up to 90 s "
        "to start"
    )
    held, memory = decide(target, memory, Sample(0.0), observed(3), at("2026-11-23 12:00"))
    assert held.replicas == 3
    assert held.message.endswith(
        "; scaling.schedule[0] has at least 3 replicas until 2026-11-23 18:00 Europe/Berlin"
    )
    # As it ends, nothing is thrown away: replicas go one by one, once fewer have been enough.
    after, _ = decide(target, memory, Sample(0.0), observed(3), at("2026-11-23 18:01"))
    assert after.replicas == 3
    assert "schedule" not in after.message


def test_what_a_maximum_no_longer_allows_goes_at_once(build: Any) -> None:
    wide = entry(minReplicas=None, maxReplicas=8)
    target, memory = build.target(schedule=(wide,)), Memory(began_at=1.0, replicas=8)
    before, memory = decide(target, memory, Sample(0.0), observed(8), at("2026-11-23 17:59"))
    assert before.replicas == 8
    after, _ = decide(target, memory, Sample(0.0), observed(8), at("2026-11-23 18:00"))
    assert (after.replicas, after.cause) == (4, "BoundsChanged")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        pytest.param({"start": "0 8 * *"}, "start", id="four fields"),
        pytest.param({"start": "0 0 8 * * *"}, "start", id="seconds"),
        pytest.param({"start": "0 25 * * *"}, "'0 25 * * *' is no time of cron (Bad hour)", id="hour 25"),
        pytest.param({"start": "0 8 * * FRI-MON"}, "Bad day-of-week", id="a range upside down"),
        pytest.param({"end": "0 8 30 2 *"}, "Bad day-of-month", id="30 February"),
        pytest.param({"timeZone": "Mars/Olympus"}, "such as Europe/Berlin or UTC", id="no zone"),
        pytest.param({"timeZone": "Europe"}, "such as Europe/Berlin or UTC", id="a folder of zones"),
        pytest.param({"end": OFFICE["start"]}, "must differ", id="no length"),
        pytest.param({"minReplicas": None}, "set minReplicas, maxReplicas or both", id="no bound"),
        pytest.param({"maxReplicas": 2}, "got 3 and 2", id="upside down"),
        pytest.param({"minReplicas": 5}, "schedule[0].minReplicas 5", id="above the service's maximum"),
        pytest.param(
            {"minReplicas": None, "maxReplicas": 1}, "schedule[0].maxReplicas 1", id="below its minimum"
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(build: Any, fields: dict[str, Any], words: str) -> None:
    told = {
        name: value for name, value in {**OFFICE, "minReplicas": 3, **fields}.items() if value is not None
    }
    with pytest.raises(SpecError) as caught:
        parse(build.manifest({"scaling": {"minReplicas": 2, "schedule": [told]}}))
    assert words in str(caught.value)


def test_the_target_has_the_spec_s_schedule(build: Any) -> None:
    spec = parse(build.manifest({"scaling": {"schedule": [{**OFFICE, "minReplicas": 3}]}})).spec
    assert target_of(spec, 40.0).schedule == (entry(),)
    assert target_of(spec, 40.0).start_seconds == 40.0
