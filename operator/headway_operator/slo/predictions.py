"""What is known of requests, and what is predicted of a replica that serves them: values, no rule."""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from headway_operator.samples import Limits


@dataclass(frozen=True, slots=True)
class Workload:
    """What requests bring, on average: prompt tokens to compute, by cost, with mean square, tokens generated,
    tokens that a decode attends to, the share of the KV cache that a running sequence holds, and prompt
    tokens to compute by number, 0 where that is not known."""

    prompt: float
    prompt_square: float
    answer: float
    context: float
    kv_share: float
    tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class Factors:
    """Measured over predicted, of latencies at the percentile; and from how many requests beyond it each was
    learnt."""

    ttft: float = 1.0
    tpot: float = 1.0
    num_ttft: float = 0.0
    num_tpot: float = 0.0


class Latencies(NamedTuple):
    """What is predicted of one replica at some rate. running: sequences that decode, on average.

    is_bounded: TPOT is that of the longest step there is, which hangs on no guess.
    """

    ttft: float
    tpot: float
    running: float
    kv_use: float
    is_bounded: bool = False


OVERLOADED = Latencies(inf, inf, inf, inf)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests per second of one replica, with the limits that allow them. bound: what its places, its memory
    and its device allow, whatever the latencies. full_num_seqs: places that keep TPOT even while all of them
    are taken all the time, as under more load than can be served."""

    per_second: float
    limits: Limits
    bound: float
    full_num_seqs: int
    use: float = 1.0
