"""What the gateway counts, in plain integers; how they are exposed is `metrics.py` and `admin.py`.

Each received request ends in exactly one of `finished`, `rejected`, `failed` and `client_aborted`:

    received = finished + rejected + failed + client_aborted + (still in flight or waiting)

- received: read whole from the client (a body that is refused or never arrives is not counted).
- forwarded: a replica took it and its response head was passed on.
- finished: the replica's answer reached its end, whatever its status.
- rejected: answered with a 5xx by the gateway itself, or with a replica's 503: nobody accepted it or lived to
  answer it.
- retried: attempts after the first one.
- failed: the answer broke off after its head.
- client_aborted: the client went away first.

By revision: `requests` that one of its replicas accepted, and `errors` among them: no answer, a 5xx (but for
a 503 with Retry-After, which another one may take), or an answer that broke off. In neither, as nobody knows
what would have become of them: `client_aborted`, that reached a replica and whose client went before the
first piece of an answer came.
"""

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

End = Literal["finished", "rejected", "failed", "client_aborted"]


@dataclass(slots=True)
class RevisionCounts:
    """Requests accepted by the replicas of one revision, those of them that failed, and those left before."""

    requests: int = 0
    errors: int = 0
    client_aborted: int = 0


@dataclass(slots=True)
class Counters:
    """Counted since the process started. The three `Counter`s are by reason."""

    received: int = 0
    forwarded: int = 0
    finished: int = 0
    client_aborted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    backend_list_errors: int = 0
    backend_list_seen_at: float = field(default_factory=time.monotonic)  # the start, where none has come
    by_revision: dict[str, RevisionCounts] = field(default_factory=dict)

    def count_accepted(self, revision: str, *, is_error: bool) -> None:
        """A replica accepted a request; is_error: and gave no answer, or a 5xx."""
        counts = self.by_revision.setdefault(revision, RevisionCounts())
        counts.requests += 1
        counts.errors += is_error

    def count_left(self, revision: str) -> None:
        """A request reached a replica, and its client went before an answer came."""
        self.by_revision.setdefault(revision, RevisionCounts()).client_aborted += 1

    def count_broken(self, revision: str) -> None:
        """An answer that was counted already broke off."""
        self.by_revision.setdefault(revision, RevisionCounts()).errors += 1

    def keep_revisions(self, revisions: Collection[str]) -> None:
        """Forget all others, but for what is of none ("")."""
        for revision in self.by_revision.keys() - {*revisions, ""}:
            del self.by_revision[revision]

    def count_end(self, end: End, reason: str) -> None:
        """One request is over. `reason` is the label of `rejected` and `failed`."""
        if end == "finished":
            self.finished += 1
        elif end == "client_aborted":
            self.client_aborted += 1
        else:
            by_reason = self.rejected if end == "rejected" else self.failed
            by_reason[reason] += 1

    def totals(self) -> dict[str, int]:
        """The sums that `/admin/sample` carries."""
        return {
            "received": self.received,
            "forwarded": self.forwarded,
            "finished": self.finished,
            "rejected": self.rejected.total(),
            "retried": self.retried.total(),
            "failed": self.failed.total(),
            "client_aborted": self.client_aborted,
        }
