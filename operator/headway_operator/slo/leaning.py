"""Which of two kinds of limits, where there is little to choose between them: the one that is applied.

The best limits may be of one kind or another: the whole token budget, or steps that are kept short (even);
places for all, or few of them and a queue. Next to where one is as good as the other a little more or less
of the load would turn all replicas from the one to the other and back, each time with other latencies. So
what is applied stays for less than what it takes to be changed to: short steps for LEANING of that, few
places as long as they serve no less. Not while somebody is late (`sizing`): a crowd is to be served.
"""

from math import log

from headway_operator.samples import Limits

LEANING = 0.92


def is_nearer(applied: Limits | None, one: Limits, other: Limits) -> bool:
    """Whether the applied limits are more like one than like the other, by ratios; none are like nothing."""
    return applied is not None and _distance(applied, one) < _distance(applied, other)


def _distance(one: Limits, other: Limits) -> float:
    seqs = log(one.max_num_seqs / other.max_num_seqs)
    return abs(seqs) + abs(log(one.max_num_batched_tokens / other.max_num_batched_tokens))
