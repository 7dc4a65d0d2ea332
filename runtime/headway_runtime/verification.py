"""Checks guessed tokens: lays out the rows that are sampled for them, and says which guesses came true.

A guess is not accepted or rejected by a draw of its own. The token after each guess is sampled from the
model's logits just as it would be without guessing, by the request's own parameters, seed and position, and
a guess came true if it is the token that was sampled in its place. So the answer is, token by token, the one
that would have been generated without guesses: whatever the temperature, the filters, the penalties and the
grammar are, and whether or not guessing is turned off in between. Its distribution is the model's.

For guesses that are certain (prompt lookup, or a draft model at temperature 0), that accepts them with the
model's probability of them, as rejection sampling does. A draft model at a temperature draws its guesses by
the same random numbers as the model, so that they agree more often than two draws would: two distributions
at a distance d (in total variation) agree with probability (1 - d) / (1 + d) at least, where rejection
sampling reaches 1 - d but changes the tokens. (Daliri, Musco and Suresh, arXiv 2408.07978.)
"""

from collections.abc import Sequence
from dataclasses import replace

from headway_runtime.batch import Batch, Chunk, Sample, Verified


def with_drafts(batch: Batch, drafts: dict[int, tuple[int, ...]]) -> Batch:
    """The batch that computes guesses, too. drafts: by index of the chunk."""
    if not drafts:
        return batch
    chunks = list(batch.chunks)
    for index, ahead in drafts.items():
        chunk, count = chunks[index], len(ahead)
        num_generated = chunk.num_generated + count
        chunks[index] = replace(chunk, num_tokens=1 + count, num_generated=num_generated, ahead=ahead)
    return replace(batch, chunks=tuple(chunks))


def possible(chunk: Chunk, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """Guesses up to the first that would end the answer or that its grammar does not allow, without it."""
    stops, matcher = chunk.sampling.stop_token_ids, chunk.matcher
    for index, token_id in enumerate(drafts):
        if token_id in stops:
            return drafts[:index]
        if matcher is not None:
            matcher = matcher.after(token_id)
            if matcher is None:
                return drafts[:index]
    return drafts


def sampled_rows(chunk: Chunk) -> list[Chunk]:
    """What the sampler is to see: the chunk as it is without its guesses, then after each of them."""
    drafts = chunk.ahead
    if not drafts:
        return [chunk]
    matcher = chunk.matcher
    num_generated = chunk.num_generated - len(drafts)
    rows = [replace(chunk, num_generated=num_generated, ahead=())]
    for index, token_id in enumerate(drafts):
        if matcher is not None:
            matcher = matcher.after(token_id)
            assert matcher is not None, "a guess that is not possible"
        rows.append(
            replace(
                chunk,
                num_generated=num_generated + index + 1,
                ahead=drafts[: index + 1],
                matcher=matcher,
            )
        )
    return rows


def verified(drafts: tuple[int, ...], samples: Sequence[Sample]) -> Verified:
    """Which guesses came true. samples: of `sampled_rows`, the first one being the chunk's own.

    A row that cannot be sampled ends them: what is wrong shows when it is the next token's turn.
    """
    following = []
    for draft, before, after in zip(drafts, samples, samples[1:], strict=False):
        if draft != before.token_id or after.token_id is None:
            break
        following.append(after)
    is_finite = all(one.token_id is not None or one.error is not None for one in samples)
    return Verified(len(drafts), tuple(following), is_finite)
