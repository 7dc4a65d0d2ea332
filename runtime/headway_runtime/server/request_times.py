"""Where the time of one HTTP request went, as its access line and its `usage` say it.

When tokens were computed the engine says, with each of them, and waiting and prefill with the first: so these
times are those of the engine's histograms, however late a busy process gets to read them. What begins or ends
with the client's bytes is measured where these are written. Of several choices the slowest counts. Knows no
JSON and no metric.
"""

import math
import time
from array import array

from headway_runtime.request import RequestOutput
from headway_runtime.server.log import AccessEntry


class RequestTimes:
    """Fills the times of `log` as outputs come and bytes go. received_at: `time.monotonic()`."""

    __slots__ = ("_computed_seconds", "_first_at", "_gaps", "_last_at", "_log", "_received_at")

    def __init__(self, received_at: float, log: AccessEntry) -> None:
        self._received_at = received_at
        self._log = log
        # By engine request id: from receipt to the first token computed, and when that was.
        self._computed_seconds: dict[str, float] = {}
        self._first_at: dict[str, float] = {}
        # When its last token was computed, and the seconds between tokens of all of them; k tokens that come
        # together are k times a k-th of their gap.
        self._last_at: dict[str, float] = {}
        self._gaps = array("d")

    def first_token(self, output: RequestOutput) -> None:
        """The first output of a request."""
        assert output.queue_seconds is not None
        log = self._log
        log.queue_milliseconds = _slowest(log.queue_milliseconds, output.queue_seconds)
        if output.prefill_seconds is not None:
            log.prefill_milliseconds = _slowest(log.prefill_milliseconds, output.prefill_seconds)
            self._computed_seconds[output.request_id] = output.queue_seconds + output.prefill_seconds
        self._first_at[output.request_id] = self._last_at[output.request_id] = output.computed_at

    def later_tokens(self, request_id: str, num_tokens: int, computed_at: float) -> None:
        """An output after the first."""
        last_at = self._last_at.get(request_id)
        if last_at is None or num_tokens == 0:
            return
        self._last_at[request_id] = computed_at
        seconds = computed_at - last_at
        if last_at == self._first_at[request_id]:
            self._log.first_decode_milliseconds = _slowest(self._log.first_decode_milliseconds, seconds)
        if num_tokens == 1:
            self._gaps.append(seconds)
        else:
            self._gaps.extend([seconds / num_tokens] * num_tokens)

    def ended(self, request_id: str, num_generated: int, finish_reason: str) -> None:
        """The last output of a request."""
        log = self._log
        first_at = self._first_at.get(request_id)
        if first_at is not None and num_generated > 1:
            seconds = (self._last_at[request_id] - first_at) / (num_generated - 1)
            log.tpot_milliseconds = _slowest(log.tpot_milliseconds, seconds)
        log.outcome = finish_reason
        log.finish_reasons = [*(log.finish_reasons or ()), finish_reason]

    def first_bytes(self) -> float:
        """First bytes have been written: seconds since the request came."""
        ttft_seconds = time.monotonic() - self._received_at
        if self._log.ttft_milliseconds is None:
            self._log.ttft_milliseconds = round(ttft_seconds * 1000.0, 3)
        return ttft_seconds

    def delivery_seconds(self, request_id: str, ttft_seconds: float) -> float | None:
        """The part of a time to first token after the engine had computed it; None if it did not say."""
        computed = self._computed_seconds.get(request_id)
        return None if computed is None else ttft_seconds - computed

    def sum_up(self) -> None:
        """Write what is known of all gaps so far: their percentiles, by nearest rank."""
        if not self._gaps:
            return
        ordered, log = sorted(self._gaps), self._log
        log.itl_p50_milliseconds, log.itl_p95_milliseconds, log.itl_p99_milliseconds = (
            round(ordered[math.ceil(len(ordered) * percent / 100) - 1] * 1000.0, 3)
            for percent in (50, 95, 99)
        )

    def as_usage(self) -> dict[str, float]:
        """What `usage.headway` says, in milliseconds; what does not apply is left out."""
        self.sum_up()
        log = self._log
        named = {
            "queue_milliseconds": log.queue_milliseconds,
            "prefill_milliseconds": log.prefill_milliseconds,
            "ttft_milliseconds": log.ttft_milliseconds,
            "first_decode_milliseconds": log.first_decode_milliseconds,
            "tpot_milliseconds": log.tpot_milliseconds,
            "itl_p50_milliseconds": log.itl_p50_milliseconds,
            "itl_p95_milliseconds": log.itl_p95_milliseconds,
            "itl_p99_milliseconds": log.itl_p99_milliseconds,
            "e2e_milliseconds": round((time.monotonic() - self._received_at) * 1000.0, 3),
        }
        return {name: value for name, value in named.items() if value is not None}


def _slowest(milliseconds: float | None, seconds: float) -> float:
    return max(milliseconds or 0.0, round(seconds * 1000.0, 3))
