"""Replica time that no schedule goes below if it attains the objective: a fluid bound, proven here.

1. Requests that may miss cost nothing: the floor of (1 - percentile) * arrivals dearest ones are left out.
2. Nor do requests cost anything whose targets reach beyond the load's end: what is done after it is not paid.
3. Of the others each prompt token is computed once, at `prefill_token` and, for each token before it,
   `prefill_context`; but not where its block (a hash id) was a block of an earlier request: some replica may
   have it cached. The first token of the answer comes of the prompt's last step.
4. Each further token is a row of a step of its own: `decode`, `decode_context` for its context, and a share
   of the step's `base`. A request that meets its TPOT target t has steps of at most t on average, so with
   base + decode * rows <= step it has at most B = (t - base) / decode rows beside and with it on average. By
   Jensen its shares of `base`, 1 / rows, are on average at least 1 / B. No step has more than `max_num_seqs`
   rows, so B is at most that. A target of none leaves that alone.
5. Steps of one replica never overlap, so their time is replica time; and `minReplicas` are there all the
time.

What arrives before a load is judged costs nothing, but its blocks may be cached.

Queueing, whole replicas, cold starts and arrivals that come unevenly cost more than this: it lies below the
true least cost. With guesses a step gives more than a row's token: then the bound is that of minReplicas
alone.
"""

import math

from headway_operator.slo import Target
from headway_simulator.cluster import Setting
from headway_simulator.step_model import StepModel
from headway_simulator.trace import Arrival, Trace


def least_replica_seconds(
    trace: Trace, setting: Setting, target: Target, judged_from_seconds: float = 0.0
) -> float:
    """See the header. Seconds of a replica, within the time of the load that is judged."""
    idle = target.min_replicas * (trace.duration_seconds - judged_from_seconds)
    if setting.engine.speculation is not None:
        return idle
    model = setting.engine.model
    rows = _most_rows(model, target)
    seen: set[tuple[int, int]] = set()
    works = []
    for one in trace.arrivals:
        work = 0.001 * (_prompt_milliseconds(model, one, seen) + _answer_milliseconds(model, one, rows))
        if one.at_seconds < judged_from_seconds:
            continue
        works.append(work if _ends_within(one, trace, target) else 0.0)
    may_miss = math.floor(len(works) * (1 - target.percentile / 100) + 1e-9)
    return max(idle, sum(sorted(works)[: len(works) - may_miss]))


def _most_rows(model: StepModel, target: Target) -> float:
    """B of step 4, at least 1."""
    most = float(target.highest.max_num_seqs)
    tpot = target.targets.tpot_milliseconds
    if tpot is None or model.decode_milliseconds == 0:
        return most
    return max(1.0, min(most, (tpot - model.base_milliseconds) / model.decode_milliseconds))


def _prompt_milliseconds(model: StepModel, one: Arrival, seen: set[tuple[int, int]]) -> float:
    """Step 3; adds the prompt's blocks to `seen`. The last token is always computed."""
    cached = 0
    for place, block in enumerate(one.hash_ids):
        key = (one.user_space, block)
        if key in seen:
            cached += min(one.hash_block_tokens, one.prompt_tokens - place * one.hash_block_tokens)
        seen.add(key)
    computed = max(1, one.prompt_tokens - cached)
    # Whichever tokens are computed, they attend to no fewer than the first ones do.
    context = computed * (computed + 1) / 2
    return computed * model.prefill_token_milliseconds + context * model.prefill_context_milliseconds


def _answer_milliseconds(model: StepModel, one: Arrival, rows: float) -> float:
    """Step 4."""
    num_steps = one.output_tokens - 1
    context = num_steps * one.prompt_tokens
    return (
        num_steps * (model.decode_milliseconds + model.base_milliseconds / rows)
        + context * model.decode_context_milliseconds
    )


def _ends_within(one: Arrival, trace: Trace, target: Target) -> bool:
    """Whether a request that meets its targets has certainly ended when the load does."""
    ttft, tpot = target.targets.ttft_milliseconds, target.targets.tpot_milliseconds
    if ttft is None or tpot is None:
        return False
    return one.at_seconds + 0.001 * (ttft + (one.output_tokens - 1) * tpot) <= trace.duration_seconds
