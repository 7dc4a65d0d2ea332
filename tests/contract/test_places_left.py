"""What the operator takes for a full replica, and when a replica admits no more of those who are late."""

from headway_operator.slo import evidence
from headway_runtime import scheduler


def test_both_leave_the_same_share_of_the_places_to_who_may_be_in_time() -> None:
    """Else the operator would find places free that a replica keeps, and no replica full."""
    assert evidence.PLACES_FOR_ONE_IN_TIME == scheduler.PLACES_FOR_ONE_IN_TIME
