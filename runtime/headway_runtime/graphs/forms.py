"""Kinds of recorded steps, and which of them an engine records when. Arithmetic only; no torch.

A step's sequences have one token each, or some have several: guesses that are checked. It ends in tokens,
chosen by temperature and filters, or in logits, where a request wants more than that of them. So there are
four kinds, each in several sizes. The one of plain decodes has many: it is most of an engine's time. The
others have as many as are powers of two; a row of nobody costs little, and a recording some megabytes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headway_runtime.config import EngineConfig
from headway_runtime.graphs.sizes import MOST_ROWS, doubling, first_of, ladder, within

# That a draft model lacks, at most, of a sequence that it guessed for in the step before: it has not computed
# its last guess.
DRAFT_TOKENS = 2


@dataclass(frozen=True, slots=True)
class StepForm:
    """What one recording is of.

    num_rows: tokens that it computes, those of nobody included. has_several: whether a sequence may have
    several of them. draws: whether it ends in tokens; else in logits.
    """

    num_rows: int
    has_several: bool = False
    draws: bool = True

    @property
    def told(self) -> str:
        """For people."""
        of_what = "tokens, several of a sequence" if self.has_several else "sequences"
        what = f"{self.num_rows} {of_what}"
        return what if self.draws else f"{what}, up to the logits"


@dataclass(frozen=True, slots=True)
class FormPlan:
    """What is recorded of one model, in order. first: before the first request; later: while idle."""

    first: tuple[StepForm, ...] = ()
    later: tuple[StepForm, ...] = ()

    @property
    def forms(self) -> tuple[StepForm, ...]:
        return (*self.first, *self.later)

    @property
    def most_rows(self) -> int:
        return max((form.num_rows for form in self.forms), default=0)

    @property
    def most_logit_rows(self) -> int:
        """Of steps that end in logits."""
        return max((form.num_rows for form in self.forms if not form.draws), default=0)


NOTHING = FormPlan()


def model_forms(config: EngineConfig) -> FormPlan:
    """Of the model that answers."""
    sizes = _doubled if config.cuda_graph_sizes is None else _named
    plain = ladder(_most_rows(config, 1)) if sizes is _doubled else sizes(config, 1)
    each = 1 + config.envelope.num_speculative_tokens
    checking = sizes(config, each) if each > 1 else ()
    edited = sizes(config, 1)
    return _planned(
        [_kind(plain), _kind(checking, has_several=True)],
        [_kind(edited, draws=False), _kind(checking, has_several=True, draws=False)],
    )


def draft_forms(config: EngineConfig) -> FormPlan:
    """Of the model that guesses: passes of a token each, and the first, which may have to make up for one."""
    sizes = _doubled if config.cuda_graph_sizes is None else _named
    return _planned(
        [_kind(sizes(config, 1)), _kind(sizes(config, DRAFT_TOKENS), has_several=True)],
        [],
    )


def _doubled(config: EngineConfig, each: int) -> tuple[int, ...]:
    """Rows of steps of up to `each` tokens a sequence."""
    return doubling(min(_most_rows(config, each), MOST_ROWS))


def _named(config: EngineConfig, each: int) -> tuple[int, ...]:
    """The same for numbers of sequences that a user named."""
    assert config.cuda_graph_sizes is not None
    return within([each * size for size in config.cuda_graph_sizes], _most_rows(config, each))


def _most_rows(config: EngineConfig, each: int) -> int:
    return min(config.envelope.max_num_seqs * each, config.envelope.max_num_batched_tokens)


def _kind(sizes: Iterable[int], *, has_several: bool = False, draws: bool = True) -> list[StepForm]:
    """A single row is no step of several tokens a sequence."""
    return [StepForm(size, has_several, draws) for size in sizes if size > 1 or not has_several]


def _planned(early: Sequence[Sequence[StepForm]], late: Sequence[Sequence[StepForm]]) -> FormPlan:
    """early: kinds of which some sizes are recorded first, the largest of all before the others."""
    first: list[StepForm] = []
    for kind in early:
        sizes = first_of([form.num_rows for form in kind])
        first += [form for form in kind if form.num_rows in sizes]
    taken = set(first)
    later = [form for kind in (*early, *late) for form in _largest_first(kind) if form not in taken]
    return FormPlan(tuple(_largest_first(first)), tuple(later))


def _largest_first(forms: Iterable[StepForm]) -> list[StepForm]:
    return sorted(forms, key=lambda form: -form.num_rows)
