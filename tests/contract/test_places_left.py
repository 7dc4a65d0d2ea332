"""What the operator takes for a full replica and a late request, and what a replica does."""

from headway_operator.slo import evidence, knobs
from headway_runtime import promptness, scheduler


def test_both_leave_as_many_places_to_who_may_be_in_time() -> None:
    """Else the operator would find places free that a replica keeps, and no replica full."""
    for most in range(1, 1025):
        assert evidence.num_left_by_the_late(most) == scheduler.num_left_by_the_late(most), most
        assert 0 <= scheduler.num_left_by_the_late(most) < most, "the late would be admitted nowhere"


def test_both_take_nobody_for_late_before_the_same_share_of_the_target() -> None:
    assert knobs.LEAST_PATIENCE == promptness.LEAST_SHARE
