"""How sure a share is, and a difference of two: Wilson's interval, and the exact test of paired answers.

Pure arithmetic. Both take tasks as independent of each other.
"""

import math
from statistics import NormalDist

CONFIDENCE = 0.95


def wilson(num_right: int, num_all: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of a share (Wilson, 1927); it stays inside [0, 1] and has a width at 0 and at 1, too."""
    assert 0 <= num_right <= num_all, (num_right, num_all)
    assert num_all > 0, num_all
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    share = num_right / num_all
    scale = 1 + z * z / num_all
    centre = share + z * z / (2 * num_all)
    half = z * math.sqrt(share * (1 - share) / num_all + z * z / (4 * num_all * num_all))
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def discordant_probability(num_lost: int, num_won: int) -> float:
    """How probable a split at least as uneven is, if a change of answer is as likely for better as for worse.

    The exact, two-sided form of McNemar's test (1947): of the tasks that only one of the two got right,
    `num_lost` are the baseline's and `num_won` the model's; the others say nothing. 1.0 without any.
    """
    total = num_lost + num_won
    if total == 0:
        return 1.0
    fewer = min(num_lost, num_won)
    tail = sum(math.comb(total, k) for k in range(fewer + 1))
    return min(1.0, tail / (1 << (total - 1)))
