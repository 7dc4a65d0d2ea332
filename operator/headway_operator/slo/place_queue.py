"""The queue for places: where a replica computes few requests at once, so that others wait for it to end one.

All tokens of a replica wait while a prompt is computed. Where prompts take long beside answers, few places
keep TPOT however many requests come: they take turns in place of stopping each other, and wait in TTFT, which
often has the time.

Model. A request holds its place for its prompt and its answer. Of k places on each of n replicas the gateway
gives out one that is free: M/G/kn, so that, of a share u of the time that they are held, a share
u^(sqrt(2(kn + 1)) - 1) of requests waits (Sakasegawa 1977), for what is left of one request's work over
kn * (1 - u). Nobody moves to a replica that is free sooner. Of equals the gateway takes the one that it
picked longest ago, of whose work less is left: so it is no less than LEAST_LEFT of that over k.
"""

from math import sqrt

LEAST_LEFT = 0.5
MOST_HELD = 0.97


def queue_for_places(held: float, left: float, places: int, fleet: int) -> tuple[float, float] | None:
    """The share of requests that waits for a place, and for how long on average; None where there is no
    balance.

    held: the share of the time that a place is. left: of a request's time in its place, on average, when
    another one comes. places: of each of so many replicas (fleet).
    """
    if held >= MOST_HELD:
        return None
    number = places * fleet
    share = held ** (sqrt(2.0 * (number + 1.0)) - 1.0)
    return share, left * max(LEAST_LEFT / places, 1.0 / (number * (1.0 - held)))
