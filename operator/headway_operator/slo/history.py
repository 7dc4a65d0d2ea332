"""The ring of the last decisions, each with its numbers: in the checkpoint, for `headway status` and people.

A decision that says the same as the one before it (what is wanted, why, what blocks it) replaces that one's
numbers and keeps its `since`, so that an hour of calm is one entry and a hundred go back a long way.
"""

import json
from collections.abc import Mapping
from typing import Any

from headway_operator.slo.memory import Memory
from headway_operator.state import Decision

MOST_DECISIONS = 100


def with_decision(memory: Memory, decision: Decision) -> Memory:
    """The memory with this decision as the last one."""
    entry = {
        "since": decision.at,
        "at": decision.at,
        "replicas": decision.replicas,
        "maxNumSeqs": decision.limits.max_num_seqs,
        "maxNumBatchedTokens": decision.limits.max_num_batched_tokens,
        "cause": decision.cause,
        "blocker": decision.blocker,
        "message": decision.message,
        "inputs": dict(decision.evidence),
    }
    last = memory.last_decision
    if last is None:
        return memory._replace(last_decision=entry)
    if _said(last) == _said(entry):
        return memory._replace(last_decision=entry | {"since": last["since"]})
    before = (*memory.decisions, json.dumps(last).encode())[1 - MOST_DECISIONS :]
    return memory._replace(decisions=before, last_decision=entry)


def _said(entry: Mapping[str, Any]) -> list[Any]:
    return [entry[name] for name in ("replicas", "maxNumSeqs", "maxNumBatchedTokens", "cause", "blocker")]
