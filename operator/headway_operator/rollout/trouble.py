"""What keeps a new replica from serving, told apart: that there is no room for it, or that it fails."""

from headway_operator.state import Replica, is_crashing, is_unplaced

# What the scheduler, the admission of quotas and the allocation of devices say where room is wanting.
_NO_ROOM = ("Insufficient ", "Too many pods", "exceeded quota", "cannot allocate all claims")


def lacks_room(replica: Replica) -> bool:
    """Whether it waits for nothing but room: resources that others have, or a quota that is used up."""
    return is_unplaced(replica) and any(words in replica.message for words in _NO_ROOM)


def is_failing(replica: Replica) -> bool:
    """Failed, or starting once more after a failure; one that only lacks room is not."""
    return is_crashing(replica) and not lacks_room(replica)
