"""How long replicas and gateways have to finish their requests when they are removed.

The longest answer that is promised must fit: one that begins as the drain begins has its first token within
`slo.ttftMilliseconds`, and then a token each `slo.tpotMilliseconds` until the context of `model.maxModelLen`
is full; or ends within `slo.endToEndMilliseconds`. Where neither says anything, the engine's context and pace
are not known here, and what the user wrote is all there is.

    seconds = min(max(drainTimeoutSeconds, ttft + maxModelLen * tpot, endToEnd), an hour)

It is an upper bound: a pod ends as soon as nothing is in hand.
"""

import math

from headway_operator.spec.fields import LONGEST_DRAIN_SECONDS, InferenceServiceSpec


def longest_answer_seconds(spec: InferenceServiceSpec) -> int:
    """Of an answer that keeps every promise; 0 where nothing is promised that has an end."""
    if spec.slo is None:
        return 0
    first, each = spec.slo.ttft_milliseconds or 0, spec.slo.tpot_milliseconds
    most_tokens = spec.model.max_model_len
    whole = 0 if each is None or most_tokens is None else first + each * most_tokens
    return math.ceil(max(whole, spec.slo.end_to_end_milliseconds or 0) / 1000)


def drain_seconds(spec: InferenceServiceSpec) -> int:
    """What pods of a new revision get (1 to LONGEST_DRAIN_SECONDS)."""
    return min(max(spec.drain_timeout_seconds, longest_answer_seconds(spec)), LONGEST_DRAIN_SECONDS)
