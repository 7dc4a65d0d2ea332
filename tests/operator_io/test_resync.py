"""A watch that owes a change is found out; one that was merely overtaken is not."""

from typing import Any

from headway_operator.names import ServiceKey
from headway_operator.resync import Resync, Version, version_of

KEY = ServiceKey("team", "demo")


class Watched:
    """A Resync on a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.seen: dict[ServiceKey, Version] = {}
        self.woken: list[ServiceKey] = []
        self.num_missed = 0

        async def no_list() -> list[Any]:
            raise AssertionError("each list is given")

        self.resync = Resync(no_list, self.seen, self.woken.append, self.miss, clock=lambda: self.now)

    def miss(self) -> None:
        self.num_missed += 1

    def list(self, *services: tuple[str, str, int], after: float = 10.0) -> float:
        """A list of (name, uid, generation) after some seconds; how long the watch owes something."""
        self.now += after
        metadata = [{"namespace": "team", "name": n, "uid": u, "generation": g} for n, u, g in services]
        self.resync.compare(metadata)
        return self.resync.lag_seconds()


def test_what_the_watch_has_shown_is_owed_by_nobody() -> None:
    watched = Watched()
    watched.seen[KEY] = Version("u1", 3)
    assert watched.list(("demo", "u1", 3)) == 0.0
    assert watched.list(("demo", "u1", 2)) == 0.0  # a list from memory may be older than the watch
    assert (watched.woken, watched.num_missed) == ([], 0)


def test_a_change_that_is_owed_is_passed_over_at_once_and_counts_until_it_is_shown() -> None:
    watched = Watched()
    watched.seen[KEY] = Version("u1", 3)
    assert watched.list(("demo", "u1", 4)) == 0.0
    assert watched.woken == [KEY]
    assert watched.resync.owes(KEY)
    assert watched.num_missed == 0  # perhaps it was only overtaken
    assert watched.list(("demo", "u1", 4), after=60) == 60.0
    assert watched.list(("demo", "u1", 5), after=60) == 120.0
    assert watched.num_missed == 1
    watched.seen[KEY] = Version("u1", 5)
    assert watched.resync.lag_seconds() == 0.0  # without another list
    assert watched.list(("demo", "u1", 5)) == 0.0


def test_a_service_that_the_watch_never_showed_is_found() -> None:
    watched = Watched()
    watched.list(("demo", "u1", 1))
    assert watched.woken == [KEY]
    watched.seen[KEY] = Version("u1", 1)
    watched.list(("demo", "u2", 1))  # deleted and made anew
    assert watched.woken == [KEY, KEY]
    assert watched.list(after=100) == 0.0  # and gone


def test_a_version_is_read_from_metadata() -> None:
    assert version_of({"uid": "u1", "generation": 7}) == Version("u1", 7)
    assert version_of({}) == Version("", 0)
