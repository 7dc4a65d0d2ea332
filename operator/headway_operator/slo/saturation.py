"""How many places a replica has while all of them are taken, by more load than can be served.

So many that TPOT is kept with all of them taken (`full_num_seqs`) serve everybody who is let in as promised.
Where TPOT leaves little beside what a step takes, that may be one or two, which serve a fraction of what a
replica can do; and who is not let in is not served as promised either. So it is the number with which most
requests end within TPOT: the rate at which they end, times the share of them that keeps it.
"""

from bisect import bisect_left

from headway_operator.slo.capacity import MOST_KV_USE, Replica
from headway_operator.slo.predictions import Capacity, Factors


def places(replica: Replica, found: Capacity, factors: Factors, tpot_milliseconds: float | None) -> int:
    """From as many as keep TPOT up to the model's best."""
    full, best = found.full_num_seqs, found.limits.max_num_seqs
    if replica.workload.kv_share > 0.0:
        best = min(best, int(MOST_KV_USE / replica.workload.kv_share))
    if tpot_milliseconds is None or best <= full:
        return full
    if full > 1 and replica.full_tpot(full, factors) > tpot_milliseconds:
        return full  # it is the longest step that keeps it, whatever is guessed

    def served(taken: int) -> float:
        kept = 1.0 - replica.full_missing_tpot(taken, factors, tpot_milliseconds)
        return kept * replica.full_per_second(taken, factors)

    # From where others begin to stop each other it rises with their number up to one, and falls from there.
    most = full + bisect_left(range(full, best), True, key=lambda taken: served(taken + 1) <= served(taken))
    return max(full, most, key=served)
