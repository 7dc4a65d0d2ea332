"""How much device time a load takes, and about how many replicas: guesses before anything is simulated."""

import math
from itertools import takewhile

from headway_operator.slo import Target
from headway_simulator.step_model import StepModel
from headway_simulator.trace import Trace, part_of

# Work is spread over replicas at no more than this share of their time when a first number is guessed.
GUESSED_USE = 0.7
GUESSED_BATCH = 16
# Steps without prompts may take so much of a TPOT target; the rest is for prompts between them.
GUESSED_TPOT_USE = 0.8
BUSIEST_SECONDS = 60.0
# Of processor time, that a simulation takes without a controller that reads metrics.
SECONDS_PER_REQUEST = 0.4e-3
SECONDS_PER_PROMPT_TOKEN = 0.25e-6


def work_seconds(model: StepModel, trace: Trace, batch: int = GUESSED_BATCH) -> float:
    """Device time that the requests take in batches of so many."""
    step = model.seconds(0, 0, batch, 0) / batch
    context = 0.001 * model.decode_context_milliseconds
    return sum(
        one.prompt_tokens * 0.001 * model.prefill_token_milliseconds
        + one.prompt_tokens**2 / 2 * 0.001 * model.prefill_context_milliseconds
        + one.output_tokens * (step + context * (one.prompt_tokens + one.output_tokens / 2))
        for one in trace.arrivals
    )


def mean_replicas(model: StepModel, trace: Trace, batch: int = GUESSED_BATCH) -> float:
    """What a stretch of load needs on average."""
    return work_seconds(model, trace, batch) / trace.duration_seconds / GUESSED_USE


def guessed_replicas(model: StepModel, trace: Trace, target: Target) -> int:
    """About how many replicas a stretch of load needs, in batches as large as TPOT and the spec allow."""
    return max(1, math.ceil(mean_replicas(model, trace, guessed_batch(model, target))))


def guessed_batch(model: StepModel, target: Target) -> int:
    """The most sequences whose steps leave room for prompts in a TPOT target."""
    wanted, most = target.targets.tpot_milliseconds, target.highest.max_num_seqs
    if wanted is None:
        return min(GUESSED_BATCH, most)
    fits = (
        1000.0 * model.seconds(0, 0, batch, 0) <= GUESSED_TPOT_USE * wanted for batch in range(2, most + 1)
    )
    return 1 + sum(takewhile(bool, fits))


def simulated_seconds(trace: Trace) -> float:
    """Processor time that its whole simulation takes, as measured on a core of 2026's servers; a guess."""
    return sum(SECONDS_PER_REQUEST + SECONDS_PER_PROMPT_TOKEN * one.prompt_tokens for one in trace.arrivals)


def peak_replicas(model: StepModel, trace: Trace) -> float:
    """What its busiest minute needs."""
    count = max(1, math.floor(trace.duration_seconds / BUSIEST_SECONDS))
    length = trace.duration_seconds / count
    parts = (part_of(trace, index * length, (index + 1) * length) for index in range(count))
    return max(mean_replicas(model, part) for part in parts)
