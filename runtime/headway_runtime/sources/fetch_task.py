"""What the process that fetches is told.

Imports nothing that takes time: who gives the task needs no more.
"""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """What to fetch. lifeline_fd: a pipe whose end is the end of the process, if there is one.

    is_adapter: whether a LoRA adapter, not a model. headers_only: whether weights are left where they are.
    """

    source: str
    revision: str | None = None
    download_dir: str | None = None
    is_offline: bool = False
    lifeline_fd: int | None = None
    is_adapter: bool = False
    headers_only: bool = False


def encoded(task: Task) -> str:
    return json.dumps(asdict(task))


def decoded(text: str) -> Task:
    return Task(**json.loads(text))
