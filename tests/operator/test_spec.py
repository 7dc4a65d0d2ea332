"""Manifests that are read, and manifests that are refused with the field, the value and the remedy."""

from typing import Any

import pytest
from pydantic import BaseModel

from headway_operator.errors import SpecError
from headway_operator.spec import InferenceServiceSpec, ModelCacheSpec, key_of, parse
from headway_operator.state import ServiceKey


def test_reads_identity_and_fills_in_defaults(build: Any) -> None:
    service = parse(build.manifest())
    assert service.key == ServiceKey("team", "demo")
    assert (service.uid, service.generation, service.status) == ("0000-uid", 3, {})
    spec = service.spec
    assert (spec.scaling.min_replicas, spec.scaling.max_replicas) == (1, 4)
    assert spec.initial_limits == spec.highest_limits == (64, 2048)
    assert (spec.replicas, spec.dtype, spec.device, spec.drain_timeout_seconds) == (None, "auto", "auto", 60)
    assert spec.slo is not None
    assert (spec.slo.ttft_milliseconds, spec.slo.tpot_milliseconds, spec.slo.percentile) == (300, None, 95)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ({}, 64),
        ({"device": "cpu", "resources": {"limits": {"nvidia.com/gpu": 1}}}, 64),
        ({"device": "cuda"}, 256),
        ({"resources": {"limits": {"nvidia.com/gpu": 1}}}, 256),
        ({"device": "cuda", "batching": {"maxNumSeqs": {"max": 64}}}, 64),
        ({"device": "cuda", "batching": {"maxNumBatchedTokens": {"max": 128}}}, 128),
        ({"batching": {"maxNumBatchedTokens": {"initial": 40}}}, 40),
        ({"batching": {"maxNumSeqs": {"initial": 90}}}, 90),
        ({"batching": {"maxNumSeqs": {"min": 80}}}, 80),
    ],
)
def test_more_sequences_run_at_once_on_a_gpu(build: Any, spec: dict[str, Any], want: int) -> None:
    found = parse(build.manifest(spec)).spec
    assert found.highest_limits[0] == want
    assert found.initial_limits[0] == want


def test_a_manifest_without_namespace_or_generation_gets_the_defaults(build: Any) -> None:
    manifest = build.manifest()
    manifest["metadata"] = {"name": "demo"}
    service = parse(manifest)
    assert (service.key.namespace, service.uid, service.generation) == ("default", "", 1)


@pytest.mark.parametrize(
    ("spec", "field", "words"),
    [
        pytest.param({"slo": {}}, "spec", "set slo.ttftMilliseconds", id="autoscaled without a target"),
        pytest.param({"slo": None}, "spec", "or set replicas", id="autoscaled without slo"),
        pytest.param(
            {"model": {"source": "http://x"}}, "spec.model.source", "'http://x'", id="unknown scheme"
        ),
        pytest.param({"model": {"source": "hf://"}}, "spec.model.source", "hf://", id="empty source"),
        pytest.param({"model": {}}, "spec.model.source", "is required", id="no source"),
        pytest.param(
            {"model": {"source": "hf://name"}},
            "spec.model.source",
            "hf://ORG/NAME@REVISION",
            id="source of no form",
        ),
        pytest.param(
            {"model": {"source": "hf://a/b..c"}},
            "spec.model.source",
            "got 'hf://a/b..c'",
            id="source with a way up",
        ),
        pytest.param(
            {"model": {"source": "pvc://claim/x", "credentialsSecretRef": {"name": "a"}}},
            "spec",
            "remove credentialsSecretRef or change a source; model.source is 'pvc://claim/x'",
            id="credentials of a claim",
        ),
        pytest.param({"modle": 1}, "spec.modle", "did you mean model?", id="misspelt field"),
        pytest.param({"height": 1}, "spec.height", "unknown field; remove it", id="unknown field"),
        pytest.param(
            {"slo": {"ttftMilisec": 1}}, "spec.slo.ttftMilisec", "did you mean ttft", id="misspelt deep down"
        ),
        pytest.param({"slo": {"ttft": 1}}, "spec.slo.ttft", "unknown field", id="unknown field deep down"),
        pytest.param(
            {"slo": {"ttftMilliseconds": 0}}, "spec.slo.ttftMilliseconds", "got 0", id="target below range"
        ),
        pytest.param(
            {"slo": {"ttftMilliseconds": "300"}},
            "spec.slo.ttftMilliseconds",
            "got '300'",
            id="text for number",
        ),
        pytest.param(
            {"scaling": {"minReplicas": 5}}, "spec.scaling", "raise scaling.maxReplicas", id="min above max"
        ),
        pytest.param(
            {"batching": {"maxNumSeqs": {"min": 9, "max": 8}}},
            "spec.batching.maxNumSeqs",
            "raise maxNumSeqs.max",
            id="limit range upside down",
        ),
        pytest.param(
            {"batching": {"maxNumSeqs": {"initial": 65, "max": 64}}},
            "spec.batching.maxNumSeqs",
            "initial 65 must lie between min 1 and max 64",
            id="initial outside",
        ),
        pytest.param(
            {"batching": {"maxNumSeqs": {"max": 64}, "maxNumBatchedTokens": {"max": 63}}},
            "spec.batching",
            "raise maxNumBatchedTokens.max or lower maxNumSeqs.max",
            id="tokens do not cover sequences",
        ),
        pytest.param(
            {"batching": {"maxNumSeqs": {"max": 64}, "maxNumBatchedTokens": {"initial": 63}}},
            "spec.batching",
            "raise maxNumBatchedTokens.initial or lower maxNumSeqs.max",
            id="initial tokens do not cover initial sequences",
        ),
        pytest.param(
            {"batching": {"maxNumSeqs": {"min": 64}, "maxNumBatchedTokens": {"max": 63}}},
            "spec.batching",
            "raise maxNumBatchedTokens.max or lower maxNumSeqs.min",
            id="tokens do not cover the fewest sequences",
        ),
        pytest.param(
            {"kvCacheMemory": "12Q"}, "spec.kvCacheMemory", "'12Q' is not a Kubernetes", id="not a quantity"
        ),
        pytest.param({"kvCacheMemory": 0}, "spec.kvCacheMemory", "less than one byte", id="no memory"),
        pytest.param(
            {"kvOffload": {"disk": {"size": "1Gi"}}},
            "spec.kvOffload.hostMemory",
            "is required",
            id="a disk without the memory above it",
        ),
        pytest.param(
            {"kvOffload": {"hostMemory": "1Gi", "disk": {"size": "1Gib"}}},
            "spec.kvOffload.disk.size",
            "'1Gib' is not a Kubernetes",
            id="no size of a disk",
        ),
        pytest.param(
            {"kvOffload": {"hostMemory": "1Gi"}, "prefixCaching": False},
            "spec",
            "remove kvOffload, or set prefixCaching to true",
            id="no prefixes to keep",
        ),
        pytest.param(
            {"kvOffload": {"hostMemory": "2Gi"}, "resources": {"limits": {"memory": "2048Mi"}}},
            "spec",
            "raise resources.limits.memory; they are '2Gi' and '2048Mi'",
            id="all memory for prefixes",
        ),
        pytest.param({"replicas": -1}, "spec.replicas", "got -1", id="negative replicas"),
        pytest.param(
            {"monitoring": {"labels": {"re lease": "stack"}}},
            "spec.monitoring.labels",
            "'re lease' is not a label's key; write NAME or PREFIX/NAME",
            id="no key of a label",
        ),
        pytest.param(
            {"monitoring": {"labels": {"release": "a stack"}}},
            "spec.monitoring.labels.release",
            "got 'a stack'",
            id="no value of a label",
        ),
        pytest.param(
            {"monitoring": {"labels": {"serving.headway.dev/service": "other"}}},
            "spec.monitoring.labels",
            "'serving.headway.dev/service' is set by Headway; remove it",
            id="a label of Headway's own",
        ),
        pytest.param(
            {"speculative": {}}, "spec.speculative", "set speculative.draft.source", id="nobody guesses"
        ),
        pytest.param(
            {"speculative": {"method": "ngram", "draft": {"source": "bundled://headway-tiny-draft"}}},
            "spec.speculative",
            "remove speculative.draft",
            id="a draft for lookup",
        ),
        pytest.param(
            {"speculative": {"draft": {"source": "/draft"}, "promptLookupMax": 3}},
            "spec.speculative",
            "promptLookupMin and promptLookupMax are for method ngram",
            id="lookup by a draft",
        ),
        pytest.param(
            {"speculative": {"method": "ngram", "promptLookupMin": 6}},
            "spec.speculative",
            "must not exceed promptLookupMax, 5 where it is left out",
            id="shortest match above the longest",
        ),
        pytest.param(
            {"lora": {"adapters": [{"name": "a", "source": "bundled://x"}]}},
            "spec.lora.adapters[0]",
            "no adapters are bundled",
            id="a bundled adapter",
        ),
        pytest.param(
            {"lora": {"adapters": [{"name": "a", "source": "nowhere"}]}},
            "spec.lora.adapters[0].source",
            "source must be",
            id="an adapter's source of no form",
        ),
        pytest.param(
            {"lora": {"adapters": [{"name": "a b", "source": "hf://o/n"}]}},
            "spec.lora.adapters[0].name",
            "name",
            id="an adapter's name with a space",
        ),
        pytest.param(
            {"lora": {"adapters": [{"name": "a", "source": "hf://o/n"}] * 2}},
            "spec.lora",
            "name 'a' twice",
            id="two adapters of one name",
        ),
        pytest.param(
            {"lora": {"maxLoras": 4, "maxCpuLoras": 3}},
            "spec.lora",
            "raise lora.maxCpuLoras or lower lora.maxLoras",
            id="fewer adapters than in a step",
        ),
        pytest.param(
            {
                "lora": {
                    "maxCpuLoras": 1,
                    "adapters": [{"name": name, "source": "hf://o/n"} for name in "ab"],
                }
            },
            "spec.lora",
            "not be less than the number of adapters",
            id="no room for the adapters",
        ),
    ],
)
def test_refuses_with_field_value_and_remedy(
    build: Any, spec: dict[str, Any], field: str, words: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse(build.manifest(spec))
    assert caught.value.field == field
    assert caught.value.reason == "InvalidSpec"
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (
            {"tensorParallelSize": 4, "resources": {"limits": {"nvidia.com/gpu": "2"}}},
            "spec.resources.limits[nvidia.com/gpu]",
        ),
        (
            {"tensorParallelSize": 4, "quality": {"resources": {"limits": {"nvidia.com/gpu": "2"}}}},
            "spec.quality.resources.limits[nvidia.com/gpu]",
        ),
    ],
)
def test_fewer_gpus_than_processes_are_refused_by_name(build: Any, spec: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError, match=r"'2' is less than spec.tensorParallelSize=4") as caught:
        parse(build.manifest(spec))
    assert caught.value.field == field
    assert parse(build.manifest(spec | {"device": "cpu"})).spec.tensor_parallel_size == 4


def test_a_disk_for_several_processes_is_refused_as_the_engine_refuses_it(build: Any) -> None:
    spec = {"tensorParallelSize": 2, "kvOffload": {"hostMemory": "1Gi", "disk": {"size": "1Gi"}}}
    with pytest.raises(SpecError, match=r"the 2 processes .*; remove disk, or set") as caught:
        parse(build.manifest(spec))
    assert caught.value.field == "spec.kvOffload.disk"
    parse(build.manifest(spec | {"tensorParallelSize": 1}))
    parse(build.manifest(spec | {"kvOffload": {"hostMemory": "1Gi"}}))


@pytest.mark.parametrize(("model", "name"), [({}, "demo"), ({"servedName": "base"}, "base")])
def test_an_adapter_of_the_models_own_name_is_refused(build: Any, model: dict[str, str], name: str) -> None:
    spec = {
        "model": {"source": "/model"} | model,
        "lora": {"adapters": [{"name": "law", "source": "/law"}, {"name": name, "source": "/sql"}]},
    }
    with pytest.raises(SpecError, match=f"'{name}' is what the model itself is served as") as caught:
        parse(build.manifest(spec))
    assert caught.value.field == "spec.lora.adapters[1].name"


@pytest.mark.parametrize("name", ["", "9lives", "demo\n", "Demo", "demo-", "de.mo", "d" * 38])
def test_names_that_children_cannot_carry_are_refused(build: Any, name: str) -> None:
    with pytest.raises(SpecError, match=r"metadata\.name"):
        parse(build.manifest(name=name))


def test_another_kind_is_not_read(build: Any) -> None:
    with pytest.raises(SpecError, match="kind: 'Pod' is not served here; write InferenceService"):
        parse({**build.manifest(), "kind": "Pod"})


def test_key_needs_a_name() -> None:
    with pytest.raises(SpecError, match=r"metadata\.name"):
        key_of({"metadata": {}})


def test_fixed_replicas_need_no_target(build: Any) -> None:
    assert parse(build.manifest({"slo": None, "replicas": 0})).spec.replicas == 0


@pytest.mark.parametrize("spec", [InferenceServiceSpec, ModelCacheSpec])
def test_every_field_says_what_it_is_and_numbers_have_a_range(spec: type[BaseModel]) -> None:
    """Which of its words stand in `kubectl explain` is asked in test_crd."""
    schema = spec.model_json_schema()
    for name, part in {"spec": schema, **schema["$defs"]}.items():
        for field, child in part.get("properties", {}).items():
            text = child.get("description", "")
            assert text.endswith("."), f"{name}.{field} has no sentence"
            numbers = [c for c in (child, *child.get("anyOf", [])) if c.get("type") == "integer"]
            for number in numbers:
                if "x-kubernetes-int-or-string" in child:
                    continue
                assert {"minimum", "maximum"} <= set(number), f"{name}.{field} has no range"
            if "$ref" not in child and name != "Batching":
                assert "efault" in text, f"{name}.{field} does not state its default"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param({"rollout": {"maxSurge": "2"}}, "'2' is neither 0 to 1000 nor 0% to 100%", id="quoted"),
        pytest.param({"rollout": {"maxSurge": 1001}}, "1001 is neither", id="a large surge"),
        pytest.param(
            {"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, "no rollout could begin", id="nothing moves"
        ),
        pytest.param(
            {"scaling": {"minReplicas": 0}, "waiting": {"maxRequests": 0}},
            "wakes the service",
            id="no waiting",
        ),
        pytest.param(
            {"scaling": {"minReplicas": 0}, "waiting": {"timeoutSeconds": 0}},
            "wakes the service",
            id="no time",
        ),
    ],
)
def test_what_could_never_move_is_refused(build: Any, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(build.manifest(spec))
    assert words in str(caught.value)
