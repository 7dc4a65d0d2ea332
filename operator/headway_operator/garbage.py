"""Keeps Python's garbage collector from holding passes up.

What the operator knows of a thousand services is half a million objects, nearly all of which go when nobody
refers to them any more; the collector is there for the few that refer to each other. Left to itself it looks
through all of them every few seconds, half a second each time, in which nothing else runs.
"""

import asyncio
import gc

# Objects more than before the youngest are looked through (all made since, ten times as many, as others go);
# and how often, before those that outlived it are looked through, too.
YOUNG_OBJECTS, YOUNG_ROUNDS = 1_000, 2
NEVER = 2**30
PERIOD_SECONDS = 600.0


def hold_on() -> None:
    """From now on look through the young alone, and never through what is there by now."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, NEVER)


async def collect_now_and_then() -> None:
    """The others, until cancelled."""
    while True:
        await asyncio.sleep(PERIOD_SECONDS)
        gc.collect()
