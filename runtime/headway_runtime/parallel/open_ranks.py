"""The ranks of an engine, opened where nobody has started them before."""

from headway_runtime.config import EngineConfig
from headway_runtime.parallel.agreement import agreed_words
from headway_runtime.parallel.leader import Leader
from headway_runtime.parallel.ranks import OnlyRank, Ranks
from headway_runtime.parallel.started import StartedRanks, start_ranks


def open_ranks(config: EngineConfig, started: StartedRanks | None = None) -> Ranks:
    """As rank 0; waits until the others have come. RankDiedError if one of them does not."""
    parallel = config.parallel
    if parallel.size == 1:
        return OnlyRank()
    if started is None:
        started = start_ranks(parallel, config.num_threads, agreed_words(config))
    return Leader(started, config)
