"""The seed of each choice of a request, so that a server and an engine without one draw the same tokens."""

# Distance between the seeds of one request's choices: odd and large, so that neighbours of a client's seed
# (which clients count up by one) never meet.
SEED_STRIDE = 0x9E3779B97F4A7C15
SEED_MASK = 2**63 - 1


def choice_seed(seed: int, choice: int) -> int:
    """The seed of the `choice`-th answer, counted from 0, to one prompt."""
    return (seed + choice * SEED_STRIDE) & SEED_MASK
