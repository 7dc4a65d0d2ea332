"""docs/metrics.md and the gateway's page agree, both ways: names, types, labels, and what a reason may be."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.gateway.pools import pool_of

from headway_gateway import metrics
from headway_gateway.connections import Connections
from headway_gateway.counters import Counters
from headway_gateway.held_bodies import BodyBudget
from headway_gateway.routing import Routing

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"
OF_HISTOGRAMS = {"le"}


def rows() -> dict[str, tuple[str, dict[str, set[str]]]]:
    """By name: the type, and what each label may be; nothing where it may be anything."""
    section = TABLE.read_text(encoding="utf-8").partition("## The gateway's page")[2].partition("\n## ")[0]
    found: dict[str, tuple[str, dict[str, set[str]]]] = {}
    for line in section.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not cells or not cells[0].startswith("`headway_"):
            continue
        name, kind, labels, meaning = cells
        assert meaning
        assert name not in found, f"{name} stands twice in the table"
        known = re.findall(r"`(\w+)(?:=([^`]+))?`", labels)
        found[name.strip("`")] = (
            kind,
            {label: set(filter(None, values.split("|"))) for label, values in known},
        )
    return found


async def test_the_table_and_the_page_say_the_same() -> None:
    counters, pool = Counters(), pool_of("demo-a-0")
    pool.route(Routing(1, 1.0, ("demo-a",), {"demo-a": 1}))
    counters.count_accepted("demo-a", is_error=False)
    table = rows()
    for reason in table["headway_gateway_requests_rejected"][1]["reason"]:
        counters.rejected[reason] += 1
    for reason in table["headway_gateway_requests_failed"][1]["reason"]:
        counters.failed[reason] += 1
    for reason in table["headway_gateway_requests_retried"][1]["reason"]:
        counters.retried[reason] += 1
    state = metrics.StateCollector(counters, pool, BodyBudget(1), Connections(1), version="1", instance="2")
    made = metrics.Metrics(state)
    made.latencies.of_revision("demo-a").observe(1.0)

    page = {
        family.name: family
        for family in text_string_to_metric_families(made.page().decode())
        if family.name.startswith("headway_") and not family.name.endswith("_created")
    }

    # The text format knows no infos: each is a gauge of the name with its suffix.
    assert {f"{name}_info" if kind == "info" else name for name, (kind, _) in table.items()} == page.keys()
    for name, (kind, labels) in table.items():
        family = page[f"{name}_info" if kind == "info" else name]
        assert family.type == ("gauge" if kind == "info" else kind), name
        for sample in family.samples:
            assert sample.labels.keys() - OF_HISTOGRAMS == labels.keys(), sample
        for label, values in labels.items():
            assert not values or values == {sample.labels[label] for sample in family.samples}, name


def test_every_reason_of_the_table_is_given_somewhere() -> None:
    source = "".join(path.read_text() for path in Path(metrics.__file__).parent.glob("*.py"))
    named = {reason for _, labels in rows().values() for reason in labels.get("reason", set())}
    assert len(named) > 10
    assert [reason for reason in sorted(named) if f'"{reason}"' not in source] == []
