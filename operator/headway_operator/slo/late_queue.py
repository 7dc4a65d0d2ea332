"""How many are late in a queue in which the late yield."""

from math import exp, inf

# Of an exponent: beyond it nearly all that is too much is late, however much longer the others would wait.
MOST_EXPONENT = 50.0


def late_of_queue(rate: float, served: float, patience_seconds: float) -> float:
    """The share of requests that find no place within their patience.

    rate, served: requests a second that come, and for which places become free. Who has waited for too long
    takes no place from the others: a queue with deadlines, M/M/1+D (Barrer 1957). The wait that one would
    have has the density v0 * rate * e^((rate - served) x) up to the deadline, and falls by e^(-served x)
    beyond it. Served at just the rate, one in 2 + rate * patience is late.
    """
    if rate <= 0.0 or patience_seconds == inf:
        return 0.0
    if served <= 0.0:
        return 1.0
    slope = rate - served
    grown = exp(min(MOST_EXPONENT, slope * patience_seconds))
    in_time = rate * (grown - 1.0) / slope if abs(slope) > 1e-9 * rate else rate * patience_seconds
    beyond = rate * grown / served
    return beyond / (1.0 + in_time + beyond)
