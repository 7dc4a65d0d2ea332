"""The gate on quality: what is judged, what the verdict on it is, and what may be served because of it. Pure.

`judged` names what is judged by a hash, `verdict_wire` reads what an evaluation leaves behind, `judgement` is
what is kept of it in status, `gate` decides, `withhold` holds a revision back.
"""

from headway_operator.quality.gate import Gate, awaiting_model, materials, open_or_shut
from headway_operator.quality.judgement import Check, Judgement
from headway_operator.quality.withhold import gated, withheld

__all__ = [
    "Check",
    "Gate",
    "Judgement",
    "awaiting_model",
    "gated",
    "materials",
    "open_or_shut",
    "withheld",
]
