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
    kept = memory.decisions
    last = json.loads(kept[-1]) if kept else None
    if last is not None and _said(last) == _said(entry):
        kept, entry["since"] = kept[:-1], last["since"]
    return memory._replace(decisions=(*kept, json.dumps(entry).encode())[-MOST_DECISIONS:])


def _said(entry: Mapping[str, Any]) -> list[Any]:
    return [entry[name] for name in ("replicas", "maxNumSeqs", "maxNumBatchedTokens", "cause", "blocker")]
