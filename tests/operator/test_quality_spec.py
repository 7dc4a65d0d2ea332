"""`spec.quality` as it is read, and what is refused with the field, the value and the remedy."""

import re
from decimal import Decimal
from typing import Any

import pytest

from headway_operator.errors import SpecError
from headway_operator.spec import parse
from headway_operator.spec.quality import EXCEPT_PATTERN, MATERIAL_PATTERN, Quality, config_map_key


def read(build: Any, quality: dict[str, Any]) -> Quality:
    result = parse(build.manifest({"quality": quality})).spec.quality
    assert result is not None
    return result


def test_everything_has_a_default(build: Any) -> None:
    quality = read(build, {})
    assert quality.materials() == ()
    assert quality.thresholds.given() == {}
    assert (quality.timeout_seconds, quality.resources, quality.baseline.source) == (3600, None, None)


def test_limits_are_quantities(build: Any) -> None:
    limits = {"maxKl": "20m", "maxPerplexityIncrease": "0.03", "maxAccuracyDrop": 1}
    assert read(build, {"thresholds": limits}).thresholds.given() == {
        "max_kl": Decimal("0.02"),
        "max_perplexity_increase": Decimal("0.03"),
        "max_accuracy_drop": Decimal(1),
    }


def test_files_are_named_once_each(build: Any) -> None:
    text, tasks = "configmap://judge/a.jsonl", "pvc://data/b.jsonl"
    quality = read(build, {"text": text, "tasks": [tasks, "bundled", text]})
    assert quality.materials() == (text, tasks)
    assert [config_map_key(one) for one in quality.materials()] == [("judge", "a.jsonl"), None]


@pytest.mark.parametrize(
    ("quality", "field", "words"),
    [
        pytest.param({"text": "a.jsonl"}, "text", "configmap://NAME/KEY", id="a path that begins nowhere"),
        pytest.param({"text": "configmap://judge"}, "text", "got 'configmap://judge'", id="no key"),
        pytest.param(
            {"text": "configmap://judge/.."}, "text", "must be bundled", id="a key that is a way up"
        ),
        pytest.param({"tasks": ["pvc://a/../b"]}, "tasks[0]", "must be bundled", id="a way out of the claim"),
        pytest.param({"tasks": []}, "tasks", "at least 1", id="no file at all"),
        pytest.param({"tasks": ["none", "/a"]}, "", "none must stand alone", id="none beside a file"),
        pytest.param({"text": "none", "tasks": ["none"]}, "", "something to judge by", id="nothing"),
        pytest.param(
            {"thresholds": {"maxKl": 0.02}},
            "thresholds.maxKl",
            "write it as a text, as in '0.02'",
            id="a fraction that is no text",
        ),
        pytest.param(
            {"thresholds": {"maxKl": "-1"}},
            "thresholds.maxKl",
            "not a Kubernetes quantity",
            id="below nothing",
        ),
        pytest.param({"thresholds": {"maxKL": 1}}, "thresholds.maxKL", "did you mean maxKl?", id="misspelt"),
        pytest.param({"timeoutSeconds": 59}, "timeoutSeconds", "60", id="no time"),
        pytest.param({"baseline": {"source": "here"}}, "baseline.source", "source must be", id="no source"),
    ],
)
def test_a_gate_that_cannot_be_is_refused(
    build: Any, quality: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        read(build, quality)
    assert caught.value.field == f"spec.quality{'.' if field else ''}{field}"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "good", ["bundled", "none", "/a b", "configmap://a-b.c/x_Y.z-1", "pvc://c/d/e.jsonl"]
)
def test_forms_are_told_by_patterns_that_cel_reads_alike(good: str) -> None:
    assert re.search(MATERIAL_PATTERN, good)
    assert not re.search(EXCEPT_PATTERN, good)
    # Nothing that RE2, which CEL uses, reads in another way.
    assert not re.search(r"\(\?|\\[1-9]", MATERIAL_PATTERN + EXCEPT_PATTERN)
