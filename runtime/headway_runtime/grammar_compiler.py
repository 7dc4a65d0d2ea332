"""Grammars of requests compiled in threads, each new one for trial in a process first, and kept for the next.

Owns those threads and processes, the library's view of the vocabulary, and the cache of what was compiled.
All of it comes into being with the first grammar; an engine that sees none pays nothing. Knows no request and
no queue: `grammar_queue.py` waits for what is made here.

The library lets other threads run while it compiles, and a trial that passes its time is killed with its
process. It does not let them run while it reads the vocabulary, once: 20 ms for 1,500 tokens, one to two
seconds for 128,000, in which no step is made.
"""

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headway_runtime.grammar import GrammarError
from headway_runtime.grammar_trial import compile_grammar, load_library_tokenizer
from headway_runtime.request import Grammar, GrammarKind

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

# Grammars that are compiled at once; so many bad ones at a time still let none else wait for long.
NUM_THREADS = 4
NUM_KEPT_GRAMMARS = 128
NUM_KEPT_PROCESSES = 1
# A process of its own imports a few things and reads the whole vocabulary.
PROCESS_START_SECONDS = 60.0

Key = tuple[GrammarKind, str, tuple[str, ...]]


class GrammarTimeoutError(GrammarError):
    """Compiling took longer than it may."""


class GrammarCompiler:
    """All methods but the internal ones are called by one thread.

    on_done: called, by any thread, whenever a compilation has ended.
    """

    def __init__(
        self, folder: Path, vocab_size: int, timeout_seconds: float, on_done: Callable[[], None]
    ) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._timeout_seconds = timeout_seconds
        self._on_done = on_done
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar")
        self._kept: OrderedDict[Key, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()
        self._is_closed = False
        self._idle: list[_Trial] = []
        self._all: weakref.WeakSet[_Trial] = weakref.WeakSet()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self.eos_token_ids: frozenset[int] = frozenset()

    def submit(self, grammar: Grammar) -> "Future[LLMatcher]":
        """The grammar's matcher, to be copied; the future fails with GrammarError. Equal ones share it."""
        key = _key_of(grammar)
        found = self._kept.get(key)
        if found is not None and not (found.done() and _is_passing(found)):
            self._kept.move_to_end(key)
            return found
        future = self._threads.submit(self._compile, grammar)
        future.add_done_callback(lambda _: self._on_done())
        self._kept[key] = future
        if len(self._kept) > NUM_KEPT_GRAMMARS:
            self._kept.popitem(last=False)
        return future

    def cancel(self, grammar: Grammar) -> None:
        """Nobody waits for this grammar any more: do not begin with it, if that is not done yet."""
        key = _key_of(grammar)
        future = self._kept.get(key)
        if future is not None and future.cancel():
            del self._kept[key]

    def close(self) -> None:
        """End the threads and processes; what is being compiled fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            self._is_closed = True
            idle, busy = self._idle, set(self._all).difference(self._idle)
            self._idle = []
        for trial in idle:
            trial.close()
        for trial in busy:
            # Its thread closes it: a descriptor that is closed under a reader may already be another's.
            trial.kill()

    def _compile(self, grammar: Grammar) -> "LLMatcher":
        trial = self._take_trial()
        try:
            self.eos_token_ids = trial.eos_token_ids()
            tokenizer = self._load_tokenizer()
            problem, part = trial.problem_of(grammar, self._timeout_seconds)
        except BaseException:
            trial.close()
            raise
        self._give_back(trial)
        if problem is not None:
            raise GrammarError(problem, part)
        matcher = compile_grammar(grammar, tokenizer)
        # What the first mask takes is shared by all copies.
        matcher.compute_bitmask()
        return matcher

    def _take_trial(self) -> "_Trial":
        with self._lock:
            if self._idle:
                return self._idle.pop()
        trial = _Trial(self._folder, self._vocab_size)
        with self._lock:
            self._all.add(trial)
            is_closed = self._is_closed
        if is_closed:
            trial.close()
            raise GrammarError("the engine ends; send the request again")
        return trial

    def _give_back(self, trial: "_Trial") -> None:
        with self._lock:
            is_kept = len(self._idle) < NUM_KEPT_PROCESSES and not self._is_closed
            if is_kept:
                self._idle.append(trial)
        if not is_kept:
            trial.close()

    def _load_tokenizer(self) -> "LLTokenizer":
        with self._tokenizer_lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = load_library_tokenizer(
                        self._folder, self._vocab_size, sorted(self.eos_token_ids)
                    )
                except ValueError as error:
                    raise _unreadable(str(error)) from error
            return self._tokenizer


def _key_of(grammar: Grammar) -> Key:
    return grammar.kind, grammar.source, tuple(part.source for part in grammar.parts)


def _is_passing(future: "Future[LLMatcher]") -> bool:
    """Whether what came of it may be different the next time."""
    return future.cancelled() or isinstance(future.exception(), GrammarTimeoutError)


class _Trial:
    """One process for trials, used by one thread at a time."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "headway_runtime.grammar_trial", str(folder), str(vocab_size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            # Nothing of the model's own threads is wanted here.
            env={**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        self._unread = b""
        self._is_ready = False
        self._eos_token_ids: frozenset[int] | None = None
        # However this object ends, the process does, too.
        self.close = weakref.finalize(self, _end, self._process)

    def kill(self) -> None:
        """End the process; a thread that waits for it then learns that it has ended."""
        self._process.kill()

    def eos_token_ids(self) -> frozenset[int]:
        """The model's end-of-sequence tokens. GrammarError if the process cannot tell."""
        if self._eos_token_ids is None:
            self._eos_token_ids = frozenset(self._read_start()["eos_token_ids"])
        return self._eos_token_ids

    def problem_of(self, grammar: Grammar, timeout_seconds: float) -> tuple[str | None, int | None]:
        """What is wrong with the grammar, and the index of the part that is at fault, if one alone is.

        GrammarError if the process cannot tell; it is of no use then.
        """
        self.eos_token_ids()
        if not self._is_ready:
            self._read_start()
            self._is_ready = True
        try:
            asked = [grammar.kind, grammar.source, [part.source for part in grammar.parts]]
            _pipe(self._process.stdin).write(json.dumps(asked) + "\n")
            _pipe(self._process.stdin).flush()
            answer = self._read(timeout_seconds)
        except (OSError, EOFError, ValueError):
            raise GrammarError("the grammar takes too much memory to compile; send a simpler one") from None
        if answer is None:
            raise GrammarTimeoutError(
                f"the grammar was not compiled within {timeout_seconds:g} s; send a simpler one"
            )
        return answer["error"], answer["part"]

    def _read_start(self) -> dict[str, Any]:
        """The next of the lines that it writes before it is asked."""
        try:
            answer = self._read(PROCESS_START_SECONDS)
        except (OSError, EOFError, ValueError):
            raise _unreadable("the process that reads it has ended") from None
        if answer is None:
            raise _unreadable(f"it was not read within {PROCESS_START_SECONDS:g} s")
        if answer.get("error") is not None:
            raise _unreadable(answer["error"])
        return answer

    def _read(self, timeout_seconds: float) -> dict[str, Any] | None:
        """The next line; None if it does not come in time, EOFError if the process has ended.

        Reads past the buffers of Python's files: a line in one of them is none that a poll sees.
        """
        descriptor = _pipe(self._process.stdout).fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000.0):
                return None
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise EOFError
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _unreadable(problem: str) -> GrammarError:
    logger.error("no grammar can be used: the tokenizer cannot be read: %s", problem)
    return GrammarError(f"this model's tokenizer cannot be used with grammars: {problem}")


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        # There may be a line that it never read.
        with contextlib.suppress(OSError, ValueError):
            _pipe(pipe).close()
    process.wait()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe
