"""The bar that shows how many prompts are answered. Knows nothing of prompts."""

import contextlib
from collections.abc import Iterator
from typing import Protocol


class Progress(Protocol):
    def update(self, n: float) -> object: ...


class _Hidden:
    def update(self, n: float) -> object:
        return None


@contextlib.contextmanager
def progress_bar(count: int, *, is_shown: bool) -> Iterator[Progress]:
    """A bar on standard error, one tick for each prompt that is answered."""
    if not is_shown:
        yield _Hidden()
        return
    import tqdm

    with tqdm.tqdm(total=count, desc="Answered prompts", dynamic_ncols=True) as bar:
        yield bar
