"""docs/metrics.md and the page agree, both ways: names, types, units and every value of every label."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2 as httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from headway_runtime.server.options import parse_options

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from tests.runtime_server.conftest import RunningServer

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
UNITS = {"", "seconds", "tokens", "requests", "sequences", "blocks", "bytes", "ratio", "steps"}
OWN_LABELS = {"le", "quantile"}


@dataclass(frozen=True)
class Row:
    type: str
    unit: str
    labels: dict[str, set[str] | None]  # None: any value, given at the start
    labels_text: str
    meaning: str
    others: tuple[str, ...]


def rows() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 6 or not cells[0].startswith("`headway_"):
            continue
        labels: dict[str, set[str] | None] = {}
        for name, allowed in re.findall(r"`(\w+)=([^`]+)`", cells[3]):
            labels[name] = None if allowed == "..." else set(allowed.split("|"))
        name = cells[0].strip("`")
        assert name not in found, f"{name} stands twice in the table"
        found[name] = Row(
            cells[1], cells[2], labels, cells[3], cells[4], tuple(re.findall(r"`([^`]+)`", cells[5]))
        )
    return found


@pytest.fixture(scope="module")
def page(real_server: RunningServer, model_folder: Path) -> dict[str, Metric]:
    """Everything that a server with targets, after some work and some refusals, has to say."""
    targets = {"ttft_milliseconds": 1000.0, "tpot_milliseconds": 100.0, "e2e_milliseconds": 9000.0}
    assert real_server.admin("PATCH", "limits", targets).is_success
    for body in ({"prompt": "abc", "max_tokens": 5, "ignore_eos": True}, {"prompt": ""}):
        httpx.post(f"{real_server.url}/v1/completions", json=body, timeout=30)
    text = httpx.get(f"{real_server.url}/metrics").text
    assert real_server.admin("PATCH", "limits", dict.fromkeys(targets)).is_success
    return {family.name: family for family in text_string_to_metric_families(text)}


def page_name(name: str, row: Row) -> str:
    """How the text format's parser calls a family: an info is a gauge of the name with its suffix."""
    return f"{name}_info" if row.type == "info" else name


def test_the_table_and_the_page_name_the_same_metrics(page: dict[str, Metric]) -> None:
    table = {page_name(name, row) for name, row in rows().items()}
    assert sorted(page.keys() - table) == [], "on the page, not in docs/metrics.md"
    assert sorted(table - page.keys()) == [], "in docs/metrics.md, not on the page"


@pytest.mark.parametrize("name", sorted(rows()))
def test_type_unit_and_labels_are_those_of_the_table(
    name: str, page: dict[str, Metric], model_folder: Path
) -> None:
    row = rows()[name]
    family = page[page_name(name, row)]
    assert family.type == ("gauge" if row.type == "info" else row.type)
    assert family.documentation
    assert row.meaning
    assert row.unit in UNITS
    if row.unit == "seconds":
        assert name.endswith("_seconds")
    elif name.endswith("_seconds"):
        raise AssertionError(f"{name} says seconds, the table says {row.unit!r}")
    wanted = dict(row.labels)
    if name == "headway_config":
        assert row.labels_text == "one per option of the engine"
        options = parse_options([str(model_folder)]).engine
        plain = (one.name for one in fields(options) if not is_dataclass(getattr(options, one.name)))
        wanted = dict.fromkeys((one for one in plain if one != "model_path"), None)
    seen: dict[str, set[str]] = {}
    for sample in family.samples:
        assert sample.labels.keys() - OWN_LABELS == wanted.keys(), sample
        for label, value in sample.labels.items():
            seen.setdefault(label, set()).add(value)
    for label, allowed in wanted.items():
        if allowed is not None:
            assert seen[label] == allowed, label


def test_openmetrics_agrees_on_names_and_types(real_server: RunningServer) -> None:
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    text = httpx.get(f"{real_server.url}/metrics", headers=headers).text
    parse: Callable[[str], list[Metric]] = lambda text: list(parse_openmetrics(text))  # type: ignore[no-untyped-call]  # noqa: E731
    types = {family.name: family.type for family in parse(text)}
    assert types == {name: row.type for name, row in rows().items()}


def test_names_of_others_are_those_of_their_page() -> None:
    """vLLM's names all have its prefix, and each stands for one metric of ours."""
    named = [other for row in rows().values() for other in row.others]
    assert len(named) == len(set(named)) >= 15
    assert all(re.fullmatch(r"vllm:[a-z0-9_]+", other) for other in named)
