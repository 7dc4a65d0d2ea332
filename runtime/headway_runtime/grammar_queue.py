"""Requests that wait for their grammar, before the scheduler hears of them.

Owns nothing but that wait: a request comes in, and goes out again as one that may be scheduled, with a
matcher of its own, or as one that failed. Waiting here delays nobody else.
"""

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway_runtime.grammar import GrammarError
from headway_runtime.grammar_compiler import GrammarCompiler
from headway_runtime.grammar_matcher import TokenMatcher
from headway_runtime.request import Grammar, Request

if TYPE_CHECKING:
    from llguidance import LLMatcher


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unusable:
    """A request whose grammar could not be compiled, why, and the request's field that is at fault."""

    request: Request
    message: str
    param: str


class GrammarQueue:
    """Used by the engine's thread alone; compiling happens in others."""

    def __init__(self, folder: Path, vocab_size: int, timeout_seconds: float) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._timeout_seconds = timeout_seconds
        self._compiler: GrammarCompiler | None = None
        self._waiting: dict[str, tuple[Request, Grammar, Future[LLMatcher]]] = {}
        self._has_news = threading.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def oldest_received_at(self) -> float | None:
        """When the longest waiting request was received; None if there is none."""
        return min((request.received_at for request, _, _ in self._waiting.values()), default=None)

    def adapters(self) -> list[str]:
        """Names of the adapters of those that wait here; "" for none."""
        return [request.adapter for request, _, _ in self._waiting.values()]

    def add(self, request: Request, grammar: Grammar) -> None:
        """Begin to compile, or find, the grammar of a request."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(
                self._folder, self._vocab_size, self._timeout_seconds, self._has_news.set
            )
        self._waiting[request.request_id] = (request, grammar, self._compiler.submit(grammar))

    def remove(self, request_id: str) -> Request | None:
        """Forget a request; None if it does not wait here."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return None
        request, grammar, future = found
        if self._compiler is not None and all(other is not future for _, _, other in self._waiting.values()):
            self._compiler.cancel(grammar)
        return request

    def take(self) -> tuple[list[tuple[Request, TokenMatcher]], list[Unusable]]:
        """Those whose wait is over since the last call, in the order in which they came."""
        self._has_news.clear()
        done = [one for one in self._waiting.values() if one[2].done()]
        ready, unusable = [], []
        for request, grammar, future in done:
            del self._waiting[request.request_id]
            error = future.exception()
            if error is None:
                ready.append((request, self._matcher(request, grammar, future.result().deep_copy())))
                continue
            if not isinstance(error, GrammarError):
                logger.error("compiling a grammar failed: %s: %s", type(error).__name__, error)
                error = GrammarError(f"the grammar cannot be compiled ({type(error).__name__})")
            at_fault = grammar if error.part is None else grammar.parts[error.part]
            unusable.append(Unusable(request, str(error), at_fault.param))
        return ready, unusable

    def wait(self, timeout_seconds: float) -> None:
        """Return when a grammar is done, or after that time. For a caller who has nothing else to do."""
        if not any(future.done() for _, _, future in self._waiting.values()):
            self._has_news.wait(timeout_seconds)

    def close(self) -> None:
        """End all that was started for grammars."""
        if self._compiler is not None:
            self._compiler.close()

    def _matcher(self, request: Request, grammar: Grammar, matcher: "LLMatcher") -> TokenMatcher:
        assert self._compiler is not None
        unwanted_ids = self._compiler.eos_token_ids - request.sampling.stop_token_ids
        return TokenMatcher(matcher, unwanted_ids, grammar.param)
