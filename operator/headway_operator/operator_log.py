"""The operator's log: one line per record, as text or as JSON, with the service and generation that it is
about.

`about` names both for everything that is logged within it, in whatever module; who logs need not know them.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

from headway_operator.names import ServiceKey

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
JSON_NAMES = {"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "traceback"}
LogFormat = Literal["text", "json"]

_SUBJECT: ContextVar[tuple[ServiceKey, int] | None] = ContextVar("subject", default=None)


@contextlib.contextmanager
def about(key: ServiceKey, generation: int) -> Iterator[None]:
    """What is logged meanwhile by this task is about this generation of this service."""
    token = _SUBJECT.set((key, generation))
    try:
        yield
    finally:
        _SUBJECT.reset(token)


def configure(level: str, log_format: LogFormat) -> None:
    """Log to stderr from now on. level: as logging names it."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_add_subject)
    handler.setFormatter(make_formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "info":
        logging.getLogger("kopf").setLevel("WARNING")  # it tells of every event that it passes on


def make_formatter(log_format: LogFormat) -> logging.Formatter:
    """Text for people, or an object of `time`, `level`, `logger`, `message`, `service`, `generation`."""
    if log_format == "text":
        return logging.Formatter(TEXT_FORMAT)
    return JsonFormatter("{asctime}{levelname}{name}{message}", style="{", rename_fields=JSON_NAMES)


def _add_subject(record: logging.LogRecord) -> bool:
    subject = _SUBJECT.get()
    if subject is not None:
        record.service, record.generation = str(subject[0]), subject[1]
    return True
