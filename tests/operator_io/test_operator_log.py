"""A log line says which service and generation it is about, whoever logs it."""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterator
from io import StringIO

import pytest

from headway_operator import operator_log
from headway_operator.names import ServiceKey
from headway_operator.operator_log import LogFormat

KEY = ServiceKey("team", "demo")


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LogFormat], StringIO]]:
    """Configure the log; what then goes to stderr."""
    before, level = logging.root.handlers[:], logging.root.level

    def configure(log_format: LogFormat) -> StringIO:
        stream = StringIO()
        monkeypatch.setattr(sys, "stderr", stream)
        for handler in logging.root.handlers[:]:
            logging.root.removeHandler(handler)  # pytest's own: they would be closed
        operator_log.configure("info", log_format)
        return stream

    yield configure
    logging.root.handlers[:] = before
    logging.root.setLevel(level)
    logging.getLogger("kopf").setLevel(logging.NOTSET)


def test_json_has_the_service_and_what_was_raised(configured: Callable[[LogFormat], StringIO]) -> None:
    output = configured("json")
    logger = logging.getLogger("headway_operator.any")
    with operator_log.about(KEY, 7):
        logger.warning("%s: no", "apply")
    try:
        raise ValueError("a defect")
    except ValueError:
        logger.exception("failed")
    first, second = (json.loads(line) for line in output.getvalue().splitlines())
    assert (first["service"], first["generation"]) == ("team/demo", 7)
    assert (first["level"], first["logger"]) == ("WARNING", "headway_operator.any")
    assert first["message"] == "apply: no"
    assert first["time"]
    assert "service" not in second
    assert "ValueError: a defect" in second["traceback"]


async def test_tasks_do_not_mix_their_subjects(configured: Callable[[LogFormat], StringIO]) -> None:
    output = configured("json")

    async def one(name: str) -> None:
        with operator_log.about(ServiceKey("team", name), 1):
            await asyncio.sleep(0)
            logging.getLogger("any").info("about %s", name)

    await asyncio.gather(*(one(name) for name in ("a", "b", "c")))
    records = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [(r["service"], r["message"]) for r in records] == [(f"team/{n}", f"about {n}") for n in "abc"]


def test_text_is_a_line_for_people(configured: Callable[[LogFormat], StringIO]) -> None:
    output = configured("text")
    logging.getLogger("any").info("hello")
    logging.getLogger("any").debug("not told")
    logging.getLogger("kopf.activities").info("not told either")
    assert output.getvalue().endswith("INFO any: hello\n")
    assert output.getvalue().count("\n") == 1
