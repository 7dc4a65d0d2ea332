"""How much device time a load takes, and about how many replicas: guesses before anything is simulated."""

import math

from headway_simulator.step_model import StepModel
from headway_simulator.trace import Trace, part_of

# Work is spread over replicas at no more than this share of their time when a first number is guessed.
GUESSED_USE = 0.7
GUESSED_BATCH = 16
BUSIEST_SECONDS = 60.0


def work_seconds(model: StepModel, trace: Trace) -> float:
    """Device time that the requests take in batches of GUESSED_BATCH."""
    step = model.seconds(0, 0, GUESSED_BATCH, 0) / GUESSED_BATCH
    context = 0.001 * model.decode_context_milliseconds
    return sum(
        one.prompt_tokens * 0.001 * model.prefill_token_milliseconds
        + one.prompt_tokens**2 / 2 * 0.001 * model.prefill_context_milliseconds
        + one.output_tokens * (step + context * (one.prompt_tokens + one.output_tokens / 2))
        for one in trace.arrivals
    )


def mean_replicas(model: StepModel, trace: Trace) -> float:
    """What a stretch of load needs on average."""
    return work_seconds(model, trace) / trace.duration_seconds / GUESSED_USE


def guessed_replicas(model: StepModel, trace: Trace) -> int:
    """About how many replicas a stretch of load needs."""
    return max(1, math.ceil(mean_replicas(model, trace)))


def peak_replicas(model: StepModel, trace: Trace) -> float:
    """What its busiest minute needs."""
    count = max(1, math.floor(trace.duration_seconds / BUSIEST_SECONDS))
    length = trace.duration_seconds / count
    parts = (part_of(trace, index * length, (index + 1) * length) for index in range(count))
    return max(mean_replicas(model, part) for part in parts)
