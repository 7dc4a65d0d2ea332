"""Which revision takes the next request while the operator gives each a share: smooth weighted round robin.

Each revision that can take one gets its weight in credit; the richest takes the request and pays what all
together got. So of every round each takes exactly its share, spread evenly. Source of the method:
nginx, commit 52327e0627f4 ("Upstream: smooth weighted round-robin balancing").
"""

from collections.abc import Collection, Mapping


class Shares:
    """The weights in force and the credit of each revision."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        """weights: revision -> share; empty: nobody is chosen here."""
        self._weights = dict(weights)
        self._credit = dict.fromkeys(weights, 0)

    def draw(self, available: Collection[str]) -> str | None:
        """One of `available`; None where none of them has a share, so that any will do."""
        weights = {name: self._weights[name] for name in available if self._weights.get(name)}
        if not weights:
            return None
        for name, weight in weights.items():
            self._credit[name] += weight
        richest = max(weights, key=lambda name: self._credit[name])
        self._credit[richest] -= sum(weights.values())
        return richest
