"""The reference page says of every field what the schema says."""

from collections.abc import Iterator
from typing import Any

import pytest

from headway_operator import crd, reference


def fields(path: str, node: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, child in node.get("properties", {}).items():
        yield path, name, child
        yield from fields(f"{path}.{name}", child)
    for word in ("items", "additionalProperties"):
        if isinstance(node.get(word), dict):
            yield from fields(f"{path}[]", node[word])


@pytest.mark.parametrize(("kind", "least"), [(crd.INFERENCE_SERVICE, 150), (crd.MODEL_CACHE, 40)])
def test_every_field_has_a_row_with_its_sentence_default_and_range(kind: crd.Definition, least: int) -> None:
    definition = crd.generate(kind)
    root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    sections = {part.partition("\n")[0]: part for part in reference.page(definition).split("\n## ")}
    found = 0
    for part in ("spec", "status"):
        for path, name, node in fields(part, root["properties"][part]):
            [row] = [line for line in sections[path].splitlines() if line.startswith(f"| `{name}` |")]
            assert node.get("description", "").replace("|", "\\|") in row, (path, name)
            if isinstance(node.get("default"), (int, str)) and not isinstance(node["default"], bool):
                assert f"| `{node['default']}` |" in row, (path, name)
            for word in ("minimum", "maximum", "maxLength", "maxItems", "maxProperties"):
                assert str(node.get(word, "")) in row, (path, name, word)
            found += 1
    assert found > least


def test_rules_and_required_fields_are_told() -> None:
    page = reference.page(crd.generate())
    assert "\n- An autoscaled service needs a latency target: set slo.ttftMilliseconds" in page
    assert "\n- Operator Exists compares no value: remove value" in page
    assert "| `source` | string | required | 1 to 1024 characters | Where the weights lie" in page
    assert "| `whenUnsatisfiable` | `ScheduleAnyway` or `DoNotSchedule` | `ScheduleAnyway` |" in page
    assert "| `limits` | map to quantity |" in page
    assert "prints Ready, Reason, Replicas" in page
