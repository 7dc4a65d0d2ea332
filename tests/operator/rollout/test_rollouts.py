"""Whole rollouts: with room and without, paused, given up, never tried again, none through upgrades."""

from typing import Any

import pytest

Toy = Any  # of conftest.py

CHANGE = {"drainTimeoutSeconds": 5}


def lowest_while(toy: Toy, passes: int) -> int:
    """The fewest ready replicas seen."""
    lowest: int = toy.num_ready
    for _ in range(passes):
        toy.step()
        lowest = min(lowest, toy.num_ready)
    return lowest


def test_with_room_all_new_replicas_come_before_any_old_one_goes(toy: Toy) -> None:
    old = toy.current
    toy.edit(**CHANGE)
    toy.step(2)
    assert toy.count(toy.current, "starting", "ready", "pending") == 2
    assert toy.status["rollout"]["candidate"] == toy.rendered.revision.name
    assert lowest_while(toy, 10) == 2
    assert (toy.count(toy.current, "ready"), toy.count(old, "ready")) == (2, 0)
    assert len(toy.revisions) == 1
    assert "candidate" not in toy.status["rollout"]
    assert toy.status["rollout"]["stable"]["name"] == toy.rendered.revision.name
    assert toy.told_of("Progressing")[1] == "Settled"


@pytest.mark.parametrize(("wanted", "room", "want_lowest"), [(3, 3, 2), (1, 1, 0), (3, 4, 3)])
def test_without_room_one_goes_out_for_one_that_comes_in(
    toy: Toy, wanted: int, room: int, want_lowest: int
) -> None:
    toy.edit(replicas=wanted)
    toy.room = room
    toy.until(lambda: toy.num_ready == wanted)
    toy.step(2)
    old = toy.current
    toy.edit(**CHANGE)
    reasons, lowest = set(), wanted
    for _ in range(60):
        toy.step()
        reasons.add(toy.told_of("Progressing")[1])
        lowest = min(lowest, toy.num_ready)
        assert sum(pod.phase not in ("pending",) for pod in toy.pods) <= room + 1
    assert (toy.count(toy.current, "ready"), toy.count(old, "ready")) == (wanted, 0)
    assert lowest == want_lowest
    assert "MakingRoom" in reasons


def test_with_max_unavailable_0_nothing_is_taken_from_what_serves(toy: Toy) -> None:
    toy.room = 2
    old = toy.current
    toy.edit(**CHANGE, rollout={"maxUnavailable": 0})
    assert lowest_while(toy, 20) == 2
    assert toy.count(old, "ready") == 2
    status, reason, message = toy.told_of("Progressing")
    assert (status, reason) == ("True", "WaitingForRoom")
    assert "Insufficient nvidia.com/gpu" in message
    toy.room = 3
    toy.until(lambda: toy.count(old, "ready") == 0)
    assert lowest_while(toy, 3) == 2


def test_a_replica_that_cannot_be_placed_for_another_reason_takes_no_place(toy: Toy) -> None:
    old = toy.current
    toy.edit(**CHANGE)
    toy.step()
    for _ in range(20):
        for pod in toy.pods:
            if pod.revision == toy.current:
                pod.phase, pod.reason = "pending", "Unschedulable"
                pod.message = "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector."
        toy._pass()
        toy.now += 5
    assert toy.count(old, "ready") == 2
    assert toy.revisions[f"demo-{old}"].replicas == 2


def test_a_rollout_whose_replicas_fail_is_paused_and_the_old_ones_follow_what_is_wanted(toy: Toy) -> None:
    old = toy.current
    toy.edit(**CHANGE, rollout={"progressDeadlineSeconds": 1000})
    toy.step()
    toy.crashing.add(toy.current)
    toy.until(lambda: toy.rollout.is_paused)
    assert toy.told_of("Progressing")[:2] == ("False", "CrashLoopBackOff")
    assert "paused, 2 replicas of older revisions serve" in toy.told_of("Progressing")[2]
    toy.edit(replicas=4)
    toy.until(lambda: toy.count(old, "ready") == 4)
    assert toy.revisions[f"demo-{toy.current}"].replicas == 2
    toy.crashing.clear()
    toy.until(lambda: toy.told_of("Progressing")[1] == "Settled")
    assert (toy.count(toy.current, "ready"), toy.count(old, "ready")) == (4, 0)


def test_after_the_deadline_the_revision_before_serves_again_and_the_spec_is_not_tried_again(
    toy: Toy,
) -> None:
    old = toy.current
    toy.edit(**CHANGE, rollout={"progressDeadlineSeconds": 60})
    toy.step()
    failed = toy.current
    toy.crashing.add(failed)
    toy.until(lambda: toy.current == old)
    toy.step(3)
    for kind, status in (("Progressing", "False"), ("Degraded", "True")):
        got, reason, message = toy.told_of(kind)
        assert (got, reason) == (status, "ProgressDeadlineExceeded")
        assert f"revision demo-{failed} was given up: no progress for 60 s" in message
        assert "out of cheese" in message
    toy.step(20)
    assert toy.current == old
    assert list(toy.revisions) == [f"demo-{old}"]
    assert toy.num_ready == 2
    assert toy.status["revision"]["name"] == f"demo-{old}"

    # Neither a live edit nor a newer operator tries it again.
    toy.edit(replicas=3)
    toy.image = "example.test/runtime:2"
    toy.step(10)
    assert (toy.current, toy.num_ready, list(toy.revisions)) == (old, 3, [f"demo-{old}"])

    # Another spec is another matter, and after it the failed one, asked for anew, is as well.
    toy.edit(drainTimeoutSeconds=7)
    toy.until(lambda: toy.told_of("Progressing")[1] == "Settled")
    assert "failed" not in toy.status["rollout"]
    assert toy.told_of("Degraded")[0] == "False"
    toy.edit(**CHANGE)
    toy.step()
    assert toy.status["rollout"]["candidate"] == toy.rendered.revision.name


def test_going_back_by_hand_ends_the_failure(toy: Toy) -> None:
    old = toy.current
    toy.edit(**CHANGE, rollout={"progressDeadlineSeconds": 30})
    toy.step()
    toy.crashing.add(toy.current)
    toy.until(lambda: toy.current == old)
    del toy.manifest["spec"]["drainTimeoutSeconds"]
    toy.step(2)
    assert (toy.current, toy.told_of("Degraded")[0]) == (old, "False")
    assert "failed" not in toy.status["rollout"]
    assert toy.told_of("Progressing")[1] == "Settled"


def test_where_nothing_else_serves_a_failing_revision_is_given_up_at_once(toy: Toy) -> None:
    toy.edit(replicas=1)
    toy.until(lambda: toy.num_ready == 1)
    toy.room = 1
    toy.step(2)
    old = toy.current
    toy.edit(**CHANGE)
    toy.step()
    toy.crashing.add(toy.current)
    toy.until(lambda: toy.current == old and toy.num_ready == 1, passes=20)
    assert toy.told_of("Progressing")[1] == "CandidateFailed"
    toy.step(20)
    assert (toy.current, toy.num_ready) == (old, 1)


def test_what_serves_of_a_given_up_revision_stays_until_it_is_made_up_for(toy: Toy) -> None:
    """Half of the new replicas are ready and serve when the other half fails for good."""
    toy.edit(replicas=4)
    toy.room = 4
    toy.until(lambda: toy.num_ready == 4)
    toy.step(2)
    old = toy.current
    toy.edit(**CHANGE, rollout={"progressDeadlineSeconds": 60})
    toy.until(lambda: toy.count(toy.current, "ready") == 2 and toy.current != old)
    failed = toy.current
    toy.crashing.add(failed)
    lowest = 4
    for _ in range(80):
        toy.step()
        lowest = min(lowest, toy.num_ready)
    assert (toy.current, toy.count(old, "ready"), len(toy.pods)) == (old, 4, 4)
    assert lowest >= 2


def test_the_first_revision_has_nothing_to_go_back_to(build: Any, toy: Toy) -> None:
    fresh = type(toy)(build.manifest({"replicas": 2, "rollout": {"progressDeadlineSeconds": 30}}), build)
    fresh.step()
    fresh.crashing.add(fresh.current)
    fresh.step(30)
    assert "failed" not in fresh.status["rollout"]
    fresh.crashing.clear()
    fresh.until(lambda: fresh.num_ready == 2)


def test_while_no_replica_is_wanted_no_deadline_passes(toy: Toy) -> None:
    toy.edit(**CHANGE, rollout={"progressDeadlineSeconds": 30}, suspend=True)
    toy.step(30)
    assert (toy.num_ready, "failed" in toy.status["rollout"]) == (0, False)
    toy.edit(suspend=False)
    toy.until(lambda: toy.num_ready == 2)
    toy.step(2)
    assert toy.told_of("Progressing")[1] == "Settled"


def test_a_newer_operator_rolls_nothing(toy: Toy) -> None:
    before = [pod.name for pod in toy.pods]
    toy.image = "example.test/runtime:2"
    toy.step(10)
    assert [pod.name for pod in toy.pods] == before
    assert "candidate" not in toy.status["rollout"]


def test_a_status_of_before_there_was_a_record_tells_what_to_go_back_to(toy: Toy) -> None:
    old = toy.current
    del toy.status["rollout"]
    toy.edit(**CHANGE, rollout={"progressDeadlineSeconds": 30})
    toy.step()
    toy.crashing.add(toy.current)
    toy.until(lambda: toy.current == old)
    assert toy.num_ready == 2


@pytest.mark.parametrize(
    ("surge", "unavailable", "most", "least"),
    [
        pytest.param("25%", 1, 5, 4, id="one more than wanted"),
        pytest.param("26%", 1, 6, 4, id="rounded up"),
        pytest.param(3, 1, 7, 4, id="a number"),
        pytest.param(0, 1, 4, 3, id="none: one out, one in"),
        pytest.param("0%", 2, 4, 2, id="none: two out, two in"),
        pytest.param("100%", 0, 8, 4, id="all of them"),
    ],
)
def test_a_rollout_has_no_more_replicas_than_its_surge_and_serves_with_enough(
    toy: Toy, surge: int | str, unavailable: int, most: int, least: int
) -> None:
    toy.edit(replicas=4)
    toy.until(lambda: toy.num_ready == 4)
    toy.step(2)
    old = toy.current
    toy.edit(**CHANGE, rollout={"maxSurge": surge, "maxUnavailable": unavailable})
    highest, lowest = 0, 4
    for _ in range(60):
        toy.step()
        # Draining ones are on their way out, as a Deployment counts them.
        highest = max(highest, sum(pod.phase != "draining" for pod in toy.pods))
        lowest = min(lowest, toy.num_ready)
    assert (toy.count(toy.current, "ready"), toy.count(old, "ready")) == (4, 0)
    assert (highest, lowest) == (most, least)
    assert toy.told_of("Progressing")[1] == "Settled"


def test_a_surge_counts_on_no_room_that_is_not_there(toy: Toy) -> None:
    """Room for three and a surge of two: the ones without a place wait for one out, one in."""
    toy.edit(replicas=3)
    toy.until(lambda: toy.num_ready == 3)
    toy.step(2)
    toy.room = 3
    old = toy.current
    toy.edit(**CHANGE, rollout={"maxSurge": 2})
    assert lowest_while(toy, 60) == 2
    assert (toy.count(toy.current, "ready"), toy.count(old, "ready")) == (3, 0)


def test_a_surge_is_held_while_the_new_replicas_fail_and_after_they_were_given_up(toy: Toy) -> None:
    toy.edit(replicas=4)
    toy.until(lambda: toy.num_ready == 4)
    toy.step(2)
    old = toy.current
    toy.edit(**CHANGE, rollout={"maxSurge": 1, "progressDeadlineSeconds": 60})
    toy.step()
    failed = toy.current
    toy.crashing.add(failed)
    for _ in range(40):
        toy.step()
        assert toy.count(old, "ready") == 4
        assert toy.count(failed, "pending", "starting", "failed") <= 1
    assert (toy.current, len(toy.pods)) == (old, 4)
