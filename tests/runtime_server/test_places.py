"""Who has a place, who has to go, and who is told that there is none."""

from __future__ import annotations

from headway_runtime.server.places import REST_SECONDS, Places


class Guest:
    """A connection that only notes what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told = ""

    def close(self) -> None:
        self.told += "close"

    def turn_out(self) -> None:
        self.told += "turn out"


def guests(names: str) -> list[Guest]:
    return [Guest(name) for name in names]


def test_who_has_just_come_or_been_answered_is_not_pushed_out() -> None:
    places = Places(2)
    first, second, third, fourth = guests("1234")
    assert places.enter(first, 0.0)
    assert places.enter(second, 0.0)
    places.works(second)
    places.rests(second, 5.0)
    places.works(first)
    assert not places.enter(third, 5.0 + REST_SECONDS / 2)
    assert places.is_turned_away(third)
    assert places.enter(fourth, 5.0 + REST_SECONDS)
    assert [one.told for one in (first, second, third, fourth)] == ["", "close", "", ""]


def test_the_longest_rest_is_ended_first() -> None:
    places = Places(3)
    first, second, third, fourth, fifth, sixth = guests("123456")
    for one in (first, second, third):
        assert places.enter(one, 0.0)
        places.works(one)
    for now, one in enumerate((second, third, first)):
        places.rests(one, float(now))
    places.works(third)
    assert places.enter(fourth, 9.0)
    assert places.enter(fifth, 9.0)
    assert not places.enter(sixth, 9.0)
    assert [one.told for one in (first, second, third)] == ["close", "close", ""]


def test_who_found_no_place_gets_one_that_became_free_before_it_is_told() -> None:
    places = Places(1)
    first, second, third = guests("123")
    assert places.enter(first, 0.0)
    places.works(first)
    assert not places.enter(second, 0.0)
    assert not places.find(second, 0.5)
    places.leave(first)
    assert places.find(second, 0.6)
    assert not places.is_turned_away(second)
    # It is at work, as it was looked for when its request had come.
    assert not places.enter(third, 100.0)


def test_those_without_a_place_are_bounded_and_the_oldest_goes_first() -> None:
    places = Places(1, num_turned_away=3)
    busy, *others = guests("abcdefgh")
    assert places.enter(busy, 0.0)
    places.works(busy)
    for one in others:
        assert not places.enter(one, 0.0)
    assert [one.told for one in others] == ["turn out"] * 4 + [""] * 3
    assert [places.is_turned_away(one) for one in others] == [False] * 4 + [True] * 3
    places.leave(others[-1])
    last = Guest("z")
    assert not places.enter(last, 0.0)
    assert others[-2].told == ""
