"""The loads that are measured."""

from dataclasses import dataclass

NUM_STREAMS = 256


@dataclass(frozen=True, slots=True)
class Row:
    """One load.

    tokens_per_second: 0 means as fast as it goes. num_tokens: of each answer. num_servers: HTTP processes, 0
    for the floor. long_prompts: so many are kept on their way all the time.
    """

    name: str
    tokens_per_second: int
    num_tokens: int
    num_servers: int = 1
    long_prompts: int = 0


ROWS = (
    Row("20,000 tokens/s, floor", 20_000, 400, num_servers=0),
    Row("as fast as it goes, floor", 0, 2000, num_servers=0),
    Row("10,000 tokens/s", 10_000, 200),
    Row("20,000 tokens/s", 20_000, 400),
    Row("20,000 tokens/s, answers of 64 tokens", 20_000, 64),
    Row("20,000 tokens/s, two HTTP processes", 20_000, 400, num_servers=2),
    Row("30,000 tokens/s", 30_000, 600),
    Row("as fast as it goes", 0, 1000),
    Row("as fast as it goes, two HTTP processes", 0, 1000, num_servers=2),
    Row("10,000 tokens/s, 4 prompts of 100,000 characters at a time", 10_000, 200, long_prompts=4),
)
