"""A process in which grammars are compiled for trial, and which is killed if that takes too much.

Some grammars of a few bytes would keep a thread busy for minutes, and a thread cannot be stopped. So each new
grammar is compiled here first; only one that comes through in time is compiled in the engine process.

    python -m headway_runtime.grammar_trial MODEL_FOLDER VOCAB_SIZE

Reads one grammar as JSON per line and answers each with one line: what is wrong with it, or null, and with
which part of it, if one of them is at fault on its own. Before, one line names the model's end-of-sequence
tokens, and one says that it is ready. Ends when its input does.
"""

import json
import os
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headway_runtime.grammar import GrammarError, faulty_part, library_text, shorten
from headway_runtime.request import Grammar, GrammarPart

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Memory that one compilation may take beyond what the process has when it is ready.
MEMORY_BYTES = 1 << 30
# Below the engine: what it computes has a client who waits for each token.
NICENESS = 10


def main(argv: list[str]) -> int:
    """The process."""
    folder, vocab_size = Path(argv[0]), int(argv[1])
    os.nice(NICENESS)
    from headway_runtime.tokenizer import Tokenizer

    eos_token_ids = sorted(Tokenizer(folder).eos_token_ids)
    # The engine may read the vocabulary at the same time.
    _answer({"eos_token_ids": eos_token_ids})
    try:
        tokenizer = load_library_tokenizer(folder, vocab_size, eos_token_ids)
    except ValueError as error:
        _answer({"error": str(error)})
        return 1
    _limit_memory()
    _answer({"error": None})
    for line in sys.stdin:
        kind, source, parts = json.loads(line)
        grammar = Grammar(kind, source, parts=tuple(GrammarPart("", "", part) for part in parts))
        problem, part = problem_of(grammar, tokenizer), None
        if problem is not None and (found := faulty_part(grammar)) is not None:
            part, problem = found
        _answer({"error": problem, "part": part})
    return 0


def problem_of(grammar: Grammar, tokenizer: "LLTokenizer") -> str | None:
    """Compile a grammar to the end; says what is wrong with it."""
    try:
        matcher = compile_grammar(grammar, tokenizer)
    except GrammarError as error:
        return str(error)
    # The first mask may cost more than all that was before it.
    matcher.compute_bitmask()
    return shorten(matcher.get_error()) if matcher.is_error() else None


def compile_grammar(grammar: Grammar, tokenizer: "LLTokenizer") -> "LLMatcher":
    """A matcher at its start. GrammarError if there can be none."""
    from llguidance import LLMatcher

    matcher = LLMatcher(tokenizer, library_text(grammar), log_level=0, limits=parser_limits())
    if matcher.is_error():
        raise GrammarError(shorten(matcher.get_error()))
    return matcher


def parser_limits() -> "LLParserLimits":
    """The library's own limits keep a step below about 20 ms; its long reports are for its authors."""
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)


def load_library_tokenizer(folder: Path, vocab_size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    """The vocabulary as llguidance needs it. ValueError if it cannot be read.

    Ids that the model has and the tokenizer has not are never allowed by any grammar.
    """
    from llguidance import LLTokenizer

    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_token_ids or None)


def _limit_memory() -> None:
    # Address space is what Linux can limit; there is no telling it elsewhere.
    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _answer(value: object) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
