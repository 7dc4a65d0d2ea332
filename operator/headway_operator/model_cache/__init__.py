"""What a ModelCache holds, what is to be done for it, what is said of it, and how services come to it. Pure.

`facts` is what the cluster shows, `content` what lies on a claim in full, `course` decides, `told` makes the
status, `offer` turns `cache://NAME` of a service into the folder on the claim, or says why it cannot yet.
"""

from headway_operator.model_cache.course import Course, course_of, refused
from headway_operator.model_cache.facts import Claim, Fetch, ObservedCache
from headway_operator.model_cache.offer import caches_used, is_other_offer, with_caches
from headway_operator.model_cache.told import events, status

__all__ = [
    "Claim",
    "Course",
    "Fetch",
    "ObservedCache",
    "caches_used",
    "course_of",
    "events",
    "is_other_offer",
    "refused",
    "status",
    "with_caches",
]
