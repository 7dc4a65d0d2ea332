"""How many tokens a step may guess for whom: what `DraftPolicy` finds worth it, and there is room for."""

from headway_runtime.draft_policy import DraftPolicy
from headway_runtime.prefix_cache import PrefixCache
from headway_runtime.step_draft import StepDraft


def give_guesses(
    draft: StepDraft,
    policy: DraftPolicy,
    most: int,
    cache: PrefixCache,
    num_free: int,
    block_size: int,
    *,
    is_blind: bool,
) -> None:
    """Let at most `most` tokens be guessed for each of the step's decodes.

    num_free: blocks that may be taken for it. is_blind: a step is under way that is not read yet.
    """
    decodes = [
        one for one, share in draft.shares.items() if share == 1 and one.num_computed >= one.num_prompt
    ]
    lengths = policy.lengths([one.acceptance for one in decodes], most, draft.budget, is_blind=is_blind)
    for sequence, length in zip(decodes, lengths, strict=True):
        num_known = len(sequence.token_ids)
        # One token more than is guessed is sampled.
        count = min(length, draft.budget, sequence.most_tokens - num_known - 1)
        in_blocks = len(sequence.block_table) * block_size - num_known
        if count > in_blocks and num_free > 0:
            num_blocks = min(-(-(count - in_blocks) // block_size), num_free)
            cache.allocate(sequence, num_blocks)
            num_free -= num_blocks
            in_blocks += num_blocks * block_size
        count = min(count, in_blocks)
        if count > 0:
            draft.drafts[sequence] = count
            draft.budget -= count
