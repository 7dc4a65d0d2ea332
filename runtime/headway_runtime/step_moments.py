"""Sums over steps and requests from which a reader fits how long a step takes; kept in the engine's loop.

With x = (1, cost of prompt tokens P, decoding sequences D, tokens that these attend to K) and milliseconds t,
the sums of all products of x with x and with t are all that a least-squares fit of t on x needs. A prompt's
token costs the more the more it attends to (`prompt_cost`). Sums only ever grow, so the difference of two
readings is the fit's input for the steps between them. Steps that computed prompts are kept apart from those
that only decoded: the many of one kind must not drown the few of the other. Steps with guesses are in
neither; they are another function of the batch.

Knows no model and fits nothing. Whole numbers stay whole: a difference is exact however long an engine lives.
"""

from dataclasses import dataclass

# Of one kind of steps, in this order; `t` in milliseconds.
STEP_SUMS = ("n", "P", "D", "K", "PP", "PD", "PK", "DD", "DK", "KK", "t", "tP", "tD", "tK", "tt")


@dataclass(frozen=True, slots=True)
class MomentsSnapshot:
    """decode_steps, prompt_steps: as STEP_SUMS. prompts: number, sum and sum of squares of what the prompt
    tokens cost that requests had to compute; answers: the same of the tokens that requests generated."""

    decode_steps: tuple[float, ...]
    prompt_steps: tuple[float, ...]
    prompts: tuple[int, int, int]
    answers: tuple[int, int, int]


class StepMoments:
    """The sums of one engine."""

    __slots__ = ("_answers", "_decode_steps", "_prompt_steps", "_prompts")

    def __init__(self) -> None:
        self._decode_steps: list[float] = [0] * len(STEP_SUMS)
        self._prompt_steps: list[float] = [0] * len(STEP_SUMS)
        self._prompts = [0, 0, 0]
        self._answers = [0, 0, 0]

    def step(self, milliseconds: float, prompt_cost: int, num_decodes: int, num_kv_tokens: int) -> None:
        """One step without guesses. prompt_cost: of its prompt tokens. num_kv_tokens: that its decodes
        attend to, their own included."""
        sums = self._prompt_steps if prompt_cost else self._decode_steps
        sums[0] += 1
        sums[2] += num_decodes
        sums[3] += num_kv_tokens
        sums[7] += num_decodes * num_decodes
        sums[8] += num_decodes * num_kv_tokens
        sums[9] += num_kv_tokens * num_kv_tokens
        sums[10] += milliseconds
        sums[12] += milliseconds * num_decodes
        sums[13] += milliseconds * num_kv_tokens
        sums[14] += milliseconds * milliseconds
        if prompt_cost:
            sums[1] += prompt_cost
            sums[4] += prompt_cost * prompt_cost
            sums[5] += prompt_cost * num_decodes
            sums[6] += prompt_cost * num_kv_tokens
            sums[11] += milliseconds * prompt_cost

    def prompt(self, cost: int) -> None:
        """A request was scheduled. cost: of those tokens of its prompt that were not in the prefix cache."""
        _add(self._prompts, cost)

    def answer(self, num_tokens: int) -> None:
        """A request ended that had generated so many tokens."""
        _add(self._answers, num_tokens)

    def snapshot(self) -> MomentsSnapshot:
        prompts, answers = self._prompts, self._answers
        return MomentsSnapshot(
            tuple(self._decode_steps),
            tuple(self._prompt_steps),
            (prompts[0], prompts[1], prompts[2]),
            (answers[0], answers[1], answers[2]),
        )


def _add(sums: list[int], value: int) -> None:
    sums[0] += 1
    sums[1] += value
    sums[2] += value * value
