"""Who of the queue waits for less than a block or a place, and is overtaken meanwhile; see `scheduler`, 3."""

from headway_runtime.prefix_cache import PrefixCache
from headway_runtime.sequence import Sequence
from headway_runtime.step_draft import StepDraft

# A sequence waits a step for another one's blocks only if they spare it so many tokens, by cost.
LEAST_TOKENS_WORTH_WAITING = 64
# How many sequences of the queue may be overtaken in a step; bounds the time that looking at them takes.
MAX_OVERTAKEN = 64


def has_no_part(sequence: Sequence, cache: PrefixCache, draft: StepDraft) -> bool:
    """Whether it is a long prompt for certain, of which the share is spent: `find` would look at all of its
    blocks, in each step anew."""
    if draft.long_budget > 0:
        return False
    most = cache.most_found(sequence)
    return draft.part_for(most, len(sequence.token_ids) - most) == 0


def is_overtaken(
    sequence: Sequence, found: list[int], under_way: set[bytes], cache: PrefixCache, draft: StepDraft
) -> bool:
    """Of a sequence of which `found` is what the cache has: whether nothing of the step is left for it, or
    too much of what it wants is under way for another one. under_way: keys of such blocks."""
    num_found = len(found) * cache.block_size
    num_tokens = draft.part_for(num_found, len(sequence.token_ids) - num_found)
    if num_tokens == 0:
        return True
    cost = draft.cost.of(num_found, num_tokens)
    if not under_way or cost < LEAST_TOKENS_WORTH_WAITING:
        return False
    spared = draft.cost.of(num_found, cache.num_tokens_under_way(sequence, found, under_way))
    return spared >= max(LEAST_TOKENS_WORTH_WAITING, cost / 2)
