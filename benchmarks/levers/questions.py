"""Questions about documents, most of them about one: what is asked, and whether an answer is right.

A document is a table of the kind that the bundled model was trained to look things up in. A prompt holds a
line that is never twice the same (a number, a time), as prompts of real programs do: where it stands first,
no two prompts begin alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from benchmarks.levers.rows import Asking, Sizes

from bundled_model.recall import Document, ask, draw_table
from headway_bench.workload import Conversation, Turn

# One of so many questions, somewhere among them, is about a document of its own.
QUESTIONS_PER_OWN_DOCUMENT = 5
_SHARED_DOCUMENT = -1


@dataclass(frozen=True, slots=True)
class Question:
    """One request. answer: what the right one begins with."""

    prompt: str
    answer: str
    output_tokens: int


class Questions:
    """The questions of one run: alike in all runs, in the same order, so that rows differ by levers alone.

    run: its own number; documents that are not shared, and lines, are never met again.
    """

    def __init__(self, sizes: Sizes, asking: Asking, run: int, count_tokens: Callable[[str], int]) -> None:
        self._sizes = sizes
        self._asking = asking
        self._run = run
        self._count_tokens = count_tokens
        self._shared = _document(sizes.prefix_tokens, _SHARED_DOCUMENT, count_tokens)

    def question(self, number: int) -> Question:
        """The n-th one, n from 0: always the same."""
        random = Random(f"levers/{number}")
        document = self._shared
        group, place = divmod(number, QUESTIONS_PER_OWN_DOCUMENT)
        if place == Random(f"levers/group/{group}").randrange(QUESTIONS_PER_OWN_DOCUMENT):
            own = self._run * 100_000 + number
            document = _document(self._sizes.prefix_tokens, own, self._count_tokens)
        exchange = ask(random, random.choice(document.pairs), value_only=False)
        of_run = Random(f"levers/{self._run}/{number}")
        line = f"Request {of_run.randrange(10_000)}, {of_run.randrange(24)}:{of_run.randrange(10, 60)}."
        length = random.randint(*self._sizes.uncapped_tokens)
        if self._asking.is_static_first:
            prompt = f"{document.text}\n\n{line}\n{exchange.question}"
        else:
            prompt = f"{line}\n{document.text}\n\n{exchange.question}"
        if self._asking.is_capped:
            length = self._sizes.answer_tokens
        return Question(prompt, exchange.answer, length)

    def conversation(self, number: int) -> Conversation:
        """As the load generator wants it."""
        question = self.question(number)
        return (Turn(question.prompt, None, question.output_tokens),)

    def is_right(self, number: int, text: str) -> bool:
        """Whether an answer begins as it must. What follows is filler: all answers are of a given length."""
        return text.strip().startswith(self.question(number).answer)


@cache
def _document(num_tokens: int, seed: int, count_tokens: Callable[[str], int]) -> Document:
    return draw_table(Random(f"levers/document/{seed}"), num_tokens, count_tokens)
