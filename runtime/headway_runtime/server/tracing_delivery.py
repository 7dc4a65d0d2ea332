"""What becomes of spans on their way to a collector: counted, and told once instead of at every attempt.

Imports OpenTelemetry, so it is imported only where an endpoint is set. Knows no request.
"""

import logging
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

logger = logging.getLogger(__name__)

# Where the library says why an attempt failed.
LIBRARY_LOGGER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class CountingExporter(SpanExporter):
    """Hands spans on. num_delivered is read by other threads than the one that exports."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._complaints = _FirstOnly()
        self._num_lost = 0
        self.num_delivered = 0
        logging.getLogger(LIBRARY_LOGGER).addFilter(self._complaints)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.num_delivered += len(spans)
            if self._num_lost:
                logger.warning("the collector takes spans again; %d before were dropped", self._num_lost)
                self._num_lost = 0
            self._complaints.is_quiet = False
            return result
        if not self._num_lost:
            logger.warning("the collector does not take spans; they are dropped until it does")
        self._num_lost += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()
        logging.getLogger(LIBRARY_LOGGER).removeFilter(self._complaints)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._inner.force_flush(timeout_millis)


class _FirstOnly(logging.Filter):
    """Lets the first complaint through, and no other until spans have been delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.is_quiet = False

    def filter(self, record: logging.LogRecord) -> bool:
        was_quiet, self.is_quiet = self.is_quiet, True
        return not was_quiet
