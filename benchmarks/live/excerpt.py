"""The load: ten minutes of a trace, faster, and as dense as replicas of this machine can bear.

Lengths are scaled down to what the bundled model takes. Without a file there is a wave of our own making:
three times as much in its middle as at its ends.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from headway_simulator.generators import Course, generated
from headway_simulator.rates import Lengths
from headway_simulator.trace import Trace, part_of, scaled_rate
from headway_simulator.trace_files import read_trace

WAVE_RATE, WAVE_FACTOR = 10.0, 3.0


@dataclass(frozen=True, slots=True)
class Shape:
    """trace: None for the wave. start_seconds, seconds: of the excerpt, in time of the trace.

    speed: of time. length_scale: of prompts and answers. longest_prompt: tokens; longer ones are cut.
    """

    trace: Path | None
    start_seconds: float
    seconds: float
    speed: float
    length_scale: float
    longest_prompt: int
    seed: int


def excerpt(shape: Shape, factor: float = 1.0) -> Trace:
    """As it was recorded, in time of this machine, with `factor` times as many requests."""
    if shape.trace is None:
        course = Course("diurnal", WAVE_RATE, shape.seconds, factor=WAVE_FACTOR, period_seconds=shape.seconds)
        found = generated(course, Lengths(None), shape.seed)
    else:
        whole = read_trace(shape.trace)
        if not isinstance(whole, Trace):
            raise SystemExit(f"--trace {shape.trace} holds rates; give a trace of requests")
        found = part_of(whole, shape.start_seconds, shape.start_seconds + shape.seconds)
    if not found.arrivals:
        raise SystemExit(f"no request arrives in the {shape.seconds:g} s from {shape.start_seconds:g} on")

    # In time of the trace: copies of a request are moved by its seconds.
    found = scaled_rate(found, factor, shape.seed)

    def scaled(tokens: int, most: int) -> int:
        return max(1, min(most, round(tokens * shape.length_scale)))

    arrivals = tuple(
        replace(
            one,
            at_seconds=one.at_seconds / shape.speed,
            prompt_tokens=scaled(one.prompt_tokens, shape.longest_prompt),
            output_tokens=scaled(one.output_tokens, shape.longest_prompt),
            hash_ids=(),
        )
        for one in found.arrivals
    )
    return replace(found, arrivals=arrivals, duration_seconds=found.duration_seconds / shape.speed)


def write(trace: Trace, path: Path) -> None:
    """As Mooncake's traces are written, which `headway bench` reads."""
    with path.open("w", encoding="utf-8") as file:
        for one in trace.arrivals:
            row = {
                "timestamp": round(1000 * one.at_seconds, 3),
                "input_length": one.prompt_tokens,
                "output_length": one.output_tokens,
            }
            file.write(json.dumps(row) + "\n")
