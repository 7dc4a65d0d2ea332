"""Whether the engine's loop still goes round, as far as can be told from outside.

The engine is asked for a sign of life every tenth of the time limit, and every message of its counts as one.
It answers between two steps, so the limit must be longer than its longest step. Time is counted in tenths of
the limit that this process itself lived through: a machine that was suspended, or a container that was
frozen, is not taken for an engine that hangs.
"""

import asyncio
import logging

from headway_runtime.server.engine_client import EngineClient

logger = logging.getLogger(__name__)

PARTS = 10


class EngineWatch:
    """Lives in the event loop's thread."""

    def __init__(self, client: EngineClient, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds
        self._client = client
        self._num_heard = 0
        self._num_silent_parts = 0

    @property
    def is_stalled(self) -> bool:
        """Whether an engine that was ready has been silent for the whole limit, and still is."""
        return self._num_silent_parts >= PARTS and self._client.num_heard == self._num_heard

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(self.timeout_seconds / PARTS)
            self._look()

    def _look(self) -> None:
        client = self._client
        if not client.is_ready:
            return
        if client.num_heard != self._num_heard:
            if self._num_silent_parts >= PARTS:
                logger.warning("the engine answers again")
            self._num_heard = client.num_heard
            self._num_silent_parts = 0
            client.ping()
            return
        self._num_silent_parts += 1
        if self._num_silent_parts == PARTS:
            logger.error("the engine has not answered for %g s; /health fails", self.timeout_seconds)
