"""What the operator renders is what the runtime and the gateway read, in both worlds."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headway_eval.options import parse_options as parse_eval_options
from headway_eval.verdict import DEFAULTS, Thresholds
from headway_gateway.config import parse_config
from headway_operator.errors import SpecError
from headway_operator.manifests import render
from headway_operator.manifests.evaluation_job import evaluation_job
from headway_operator.manifests.gateway_template import DEFAULT_MEMORY, HELD_DIVISOR
from headway_operator.spec import InferenceServiceSpec, parse, parse_quantity
from headway_operator.state import Site
from headway_runtime.config import Envelope, Limits, LoraConfig, LoraModule, SpeculativeConfig
from headway_runtime.errors import ConfigError
from headway_runtime.server.options import parse_options
from headway_runtime.sources import resolve
from headway_runtime.sources.reference import FolderModel
from headway_runtime.sources.reference import parse as parse_source
from headway_runtime.speculative_options import speculative_options

QUANTIZED = Path(__file__).parents[1] / "quantization/fixtures"
BARE: dict[str, Any] = {"model": {"source": "bundled://headway-tiny"}, "replicas": 1}
FULL: dict[str, Any] = {
    "model": {"source": "bundled://headway-tiny", "maxModelLen": 512, "servedName": "tiny"},
    "dtype": "float32",
    "quantization": "int4",
    "weightCompression": "none",
    "memoryCheck": "Warn",
    "device": "cpu",
    "slo": {"ttftMilliseconds": 300, "tpotMilliseconds": 50, "percentile": 90},
    "scaling": {"minReplicas": 1, "maxReplicas": 3},
    "batching": {
        "maxNumSeqs": {"min": 2, "initial": 4, "max": 16},
        "maxNumBatchedTokens": {"min": 32, "initial": 128, "max": 1024},
    },
    "kvCacheMemory": "64Mi",
    "kvCacheDtype": "int8",
    "kvOffload": {"hostMemory": "1500Mi", "disk": {"size": 10**9}},
    "resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": 1, "memory": "2Gi"}},
    "drainTimeoutSeconds": 45,
    "speculative": {"draft": {"source": "bundled://headway-tiny-draft"}, "numSpeculativeTokens": 3},
}
SITES = {
    "kubernetes": Site("kubernetes", "runtime:1", "gateway:1", "/etc/headway/admin/public.pem", (), 8000),
    "local": Site("local", "", "", "/srv/admin/public.pem", ("--backends-file", "/srv/backends.json"), 0),
}


def arguments(spec: dict[str, Any], site: Site) -> dict[str, list[str]]:
    """Subcommand -> the arguments after it, of every container that is rendered."""
    manifest = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo", "namespace": "team", "uid": "u1"},
        "spec": spec,
    }
    rendered = render(parse(manifest), site, "PEM", frozenset())
    containers = [
        container
        for child in rendered.manifests
        if child["kind"] == "Deployment"
        for container in child["spec"]["template"]["spec"]["containers"]
    ]
    return {container["args"][0]: container["args"][1:] for container in containers}


@pytest.mark.parametrize("site", SITES.values(), ids=SITES)
@pytest.mark.parametrize("spec", [BARE, FULL], ids=["bare", "full"])
def test_both_parsers_take_what_is_rendered(site: Site, spec: dict[str, Any]) -> None:
    made = arguments(spec, site)
    assert set(made) == {"serve", "gateway"}
    options, config = parse_options(made["serve"], environment={}), parse_config(made["gateway"])
    assert options.port == config.port == site.bind_port
    assert options.admin_audience == config.admin_audience == "team/demo"
    assert options.admin_public_key_file == str(config.admin_public_key_file) == site.admin_public_key_path


def test_every_field_of_the_spec_arrives_at_the_engine() -> None:
    options = parse_options(arguments(FULL, SITES["kubernetes"])["serve"], environment={})
    assert options.model == "bundled://headway-tiny"
    assert options.served_model_names == ("tiny",)
    assert options.host == "0.0.0.0"
    assert options.drain_timeout_seconds == 45
    engine = options.engine
    assert (engine.dtype, engine.device, engine.max_model_len) == ("float32", "cpu", 512)
    assert (engine.quantization, engine.weight_compression) == ("int4", "none")
    assert engine.memory_check == "warn"
    assert engine.envelope == Envelope(16, 1024, 3)
    assert engine.limits == Limits(4, 128, 3)
    assert engine.speculative == SpeculativeConfig(
        "draft_model", str(resolve("bundled://headway-tiny-draft"))
    )
    assert engine.kv_cache_memory_bytes == 64 * 2**20
    assert engine.kv_cache_dtype == "int8"
    assert engine.offload is not None
    assert (engine.offload.host_memory_bytes, engine.offload.disk_bytes) == (1500 * 2**20, 10**9)
    assert engine.offload.disk_path == "/var/cache/headway/kv-offload"


def test_several_processes_arrive_at_the_engine_and_at_what_judges_it() -> None:
    spec = FULL | {"tensorParallelSize": 2, "kvOffload": {"hostMemory": "1Gi"}, "quality": {}}
    engine = parse_options(arguments(spec, SITES["kubernetes"])["serve"], environment={}).engine
    assert (engine.parallel.size, engine.parallel.num_nodes) == (2, 1)
    judged = parse_eval_options(evaluation_arguments(spec))
    assert judged.model.options.parallel.size == judged.baseline.options.parallel.size == 2


@pytest.mark.parametrize("index", [0, 1])
def test_each_pod_of_a_group_is_told_which_node_it_is(index: int) -> None:
    """With the variables that LeaderWorkerSet gives it in their places, as the kubelet puts them."""
    site = replace(SITES["kubernetes"], optional_kinds=frozenset(("LeaderWorkerSet",)))
    manifest = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo", "namespace": "team", "uid": "u1"},
        "spec": {**BARE, "tensorParallelSize": 4, "nodesPerReplica": 2},
    }
    rendered = render(parse(manifest), site, "PEM", frozenset())
    made = next(one for one in rendered.manifests if one["kind"] == "LeaderWorkerSet")
    group = made["spec"]["leaderWorkerTemplate"]
    template = group["workerTemplate" if index else "leaderTemplate"]
    given = {"$(LWS_WORKER_INDEX)": str(index), "$(LWS_LEADER_ADDRESS)": "demo-1-0.demo-1.team"}
    args = [given.get(word, word) for word in template["spec"]["containers"][0]["args"]]
    parallel = parse_options(args[1:], environment={}).engine.parallel
    assert (parallel.size, parallel.num_nodes, parallel.node_rank) == (4, group["size"], index)
    assert parallel.master_addr == "demo-1-0.demo-1.team"


def test_prompt_lookup_needs_no_draft() -> None:
    spec = BARE | {"speculative": {"method": "ngram", "adaptive": False}}
    engine = parse_options(arguments(spec, SITES["local"])["serve"], environment={}).engine
    assert engine.speculative == SpeculativeConfig("ngram", adaptive=False)
    assert engine.limits.num_speculative_tokens == 4
    spec = BARE | {"speculative": {"method": "ngram", "promptLookupMin": 3, "promptLookupMax": 7}}
    engine = parse_options(arguments(spec, SITES["local"])["serve"], environment={}).engine
    assert engine.speculative == SpeculativeConfig("ngram", None, 3, 7)


@pytest.mark.parametrize(
    ("lookup", "is_good"),
    [((1, None), True), ((5, None), True), ((6, None), False), ((6, 6), True), ((7, 6), False)],
)
def test_both_sides_hold_lookups_to_the_same_bounds(lookup: tuple[int, int | None], is_good: bool) -> None:  # noqa: FBT001 - a row of a table
    shortest, longest = lookup
    asked: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": shortest}
    spec: dict[str, Any] = {"method": "ngram", "promptLookupMin": shortest}
    if longest is not None:
        asked["prompt_lookup_max"] = spec["promptLookupMax"] = longest
    refused = contextlib.nullcontext() if is_good else pytest.raises(SpecError)
    with refused:
        arguments(BARE | {"speculative": spec}, SITES["local"])
    wrong = contextlib.nullcontext() if is_good else pytest.raises(ConfigError)
    with wrong:
        speculative_options(asked, resolve("bundled://headway-tiny"))


def test_adapters_arrive_at_the_engine(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 32}')
    adapters = [{"name": name, "source": f"file://{tmp_path}"} for name in ("sql", "a=b")]
    spec = BARE | {"lora": {"adapters": adapters, "maxLoras": 3, "maxCpuLoras": 5, "maxLoraRank": 32}}
    lora = parse_options(arguments(spec, SITES["kubernetes"])["serve"], environment={}).engine.lora
    modules = tuple(LoraModule(name, f"file://{tmp_path}", str(tmp_path)) for name in ("sql", "a=b"))
    assert lora == LoraConfig(3, 5, 32, modules)
    bare = parse_options(arguments(BARE | {"lora": {}}, SITES["local"])["serve"], environment={}).engine.lora
    assert bare == LoraConfig(8, 8, 16)


def test_the_service_name_is_the_model_name_where_none_is_given() -> None:
    options = parse_options(arguments(BARE, SITES["local"])["serve"], environment={})
    assert options.served_model_names == ("demo",)


def test_the_gateway_holds_what_half_of_its_memory_has_room_for() -> None:
    """The flag is left out where the limit is the default one: the gateway's own default is for that."""
    half = int(parse_quantity(DEFAULT_MEMORY)) // HELD_DIVISOR
    assert parse_config(arguments(BARE, SITES["kubernetes"])["gateway"]).max_waiting_bytes == half
    told = BARE | {"gateway": {"resources": {"limits": {"memory": "2Gi"}}}}
    assert parse_config(arguments(told, SITES["kubernetes"])["gateway"]).max_waiting_bytes == 2**30


def test_the_gateway_finds_replicas_by_each_worlds_means() -> None:
    on_kubernetes = parse_config(arguments(FULL, SITES["kubernetes"])["gateway"])
    assert on_kubernetes.kubernetes_service is not None
    service = on_kubernetes.kubernetes_service
    assert (service.namespace, service.name) == ("team", "demo-replicas")
    local = parse_config(arguments(FULL, SITES["local"])["gateway"])
    assert local.backends_file == Path("/srv/backends.json")
    assert local.drain_timeout_seconds == 45


def evaluation_arguments(spec: dict[str, Any]) -> list[str]:
    manifest = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": "demo", "namespace": "team", "uid": "u1"},
        "spec": spec,
    }
    job = evaluation_job(parse(manifest), SITES["kubernetes"], "runtime:1", "demo-quality-1")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "eval"
    return [str(argument) for argument in container["args"][1:]]


def test_the_evaluation_judges_what_the_engine_would_be() -> None:
    spec = FULL | {"quality": {}}
    judged = parse_eval_options(evaluation_arguments(spec))
    served = parse_options(arguments(spec, SITES["kubernetes"])["serve"], environment={}).engine
    of_model, of_baseline = judged.model.options, judged.baseline.options
    same = ("dtype", "device", "quantization", "weight_compression", "max_model_len", "kv_cache_dtype")
    for name in (*same, "speculative"):
        assert getattr(of_model, name) == getattr(served, name), name
    assert (of_baseline.quantization, of_baseline.kv_cache_dtype) == ("none", "plain")
    assert (of_baseline.dtype, of_baseline.speculative) == ("auto", None)
    assert (of_baseline.max_model_len, of_baseline.device) == (512, "cpu")
    assert [suite.name for suite in judged.suites] == ["bundled tasks"]
    assert judged.verdict_path == Path("/dev/termination-log")


def test_every_field_of_quality_arrives_at_the_evaluation(tmp_path: Path) -> None:
    text, tasks = tmp_path / "text.txt", tmp_path / "tasks.jsonl"
    text.write_text("12 + 34 = 46. What else is there to say?")
    tasks.write_text('{"prompt": "1+1=", "answer": "2"}')
    quality = {
        "baseline": {
            "source": f"file://{QUANTIZED.parents[2] / 'runtime/headway_runtime/bundled/headway-tiny'}",
            "dtype": "float16",
            "quantization": "fp8",
            "kvCacheDtype": "int8",
        },
        "text": str(text),
        "tasks": [str(tasks), "bundled"],
        "maxTokens": 7,
        "thresholds": {"maxKl": "500u", "maxPerplexityIncrease": "0.5", "maxAccuracyDrop": 3},
    }
    judged = parse_eval_options(evaluation_arguments(BARE | {"quality": quality}))
    assert judged.baseline.source.endswith("/headway-tiny")
    assert judged.baseline.source != judged.model.source
    baseline = judged.baseline.options
    assert (baseline.dtype, baseline.quantization, baseline.kv_cache_dtype) == ("float16", "fp8", "int8")
    assert judged.text is not None
    assert judged.text.name == "text.txt"
    assert [suite.name for suite in judged.suites] == ["tasks.jsonl", "bundled tasks"]
    assert judged.max_tokens == 7
    assert judged.thresholds == Thresholds(0.0005, 0.5, 3.0)


def test_what_quality_leaves_out_is_the_evaluations_own_default() -> None:
    judged = parse_eval_options(evaluation_arguments(BARE | {"quality": {"tasks": ["none"]}}))
    assert (judged.thresholds, judged.max_tokens, judged.suites) == (DEFAULTS, 256, ())


@pytest.mark.parametrize("quantization", ["auto", "none", "fp8", "int8", "int4"])
def test_every_quantization_of_a_plain_model_is_one_of_the_engine(quantization: str) -> None:
    made = arguments(BARE | {"quantization": quantization}, SITES["local"])["serve"]
    assert ("--quantization" in made) == (quantization != "auto")
    want = "none" if quantization == "auto" else quantization
    assert parse_options(made, environment={}).engine.quantization == want


@pytest.mark.parametrize(
    ("quantization", "folder"),
    [("awq", "awq-group32"), ("gptq", "gptq-v2-zeros"), ("compressed-tensors", "fp8-block")],
)
def test_every_name_of_a_quantized_checkpoint_is_one_of_the_engine(quantization: str, folder: str) -> None:
    source = f"file://{QUANTIZED / folder}"
    for asked in (quantization, "auto"):
        spec = BARE | {"quantization": asked, "model": {"source": source}}
        made = arguments(spec, SITES["local"])["serve"]
        assert parse_options(made, environment={}).engine.quantization == quantization


@pytest.mark.parametrize("is_cached", [False, True])
def test_whether_prefixes_are_cached_arrives_at_the_engine(is_cached: bool) -> None:  # noqa: FBT001
    made = arguments(BARE | {"prefixCaching": is_cached}, SITES["local"])["serve"]
    assert parse_options(made, environment={}).engine.enable_prefix_caching is is_cached


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "fp8", "fp8_e4m3", "int8"])
def test_every_kv_cache_dtype_of_the_spec_is_one_of_the_engine(kv_dtype: str) -> None:
    made = arguments(BARE | {"kvCacheDtype": kv_dtype}, SITES["local"])["serve"]
    assert ("--kv-cache-dtype" in made) == (kv_dtype != "auto")
    assert parse_options(made, environment={}).engine.kv_cache_dtype == kv_dtype


# What both sides read alike: the operator's rule for the CRD, and the runtime that is told the source.
GOOD_SOURCES = (
    "bundled://headway-tiny",
    "/models/a",
    "file:///models/a%20b",
    "file://localhost/models",
    "hf://Org-1/Name_2.5-1B",
    "hf://org/name@v1.0",
    "hf://org/name@refs/pr/3",
    "s3://bucket",
    "s3://my.bucket-1/a/b c/",
    "oci://registry.example.com/org/name:v1",
    "oci://registry:5000/name",
    "oci://localhost/name",
    "oci://r.example/a/b-c_d@sha256:" + "0a" * 32,
    "oci://r.example:443/a:tag@sha256:" + "0a" * 32,
    "pvc://claim-1/a/b",
    "pvc://claim.x",
    "cache://llama-8b",
)
BAD_SOURCES = (
    "ftp://a/b",
    "hf://name",
    "hf://a/b/c",
    "hf://a/b@",
    "hf://a/b@../x",
    "hf://a/b@x..y",
    "hf://a--b/c",
    "hf://../c",
    "hf://a/b.git",
    "hf://a/b.git@main",
    "hf://a/b-",
    "s3://",
    "s3://b/x",
    "s3://bucket/a\nb",
    "oci://name",
    "oci://org/name:v1",
    "oci://r.example/Name",
    "oci://r.example/a@sha256:12",
    "oci://r.example/a:-x",
    "oci://r.example:5000",
    "pvc://Claim/x",
    "pvc://claim/../x",
    "pvc://claim/a/..",
    "cache://",
    "cache://Llama",
    "cache://llama/sub",
    "cache://llama-",
    "cache://" + "a" * 38,
    "file://models",
    "file:///a?b",
)


def is_read_by_the_operator(source: str) -> bool:
    try:
        InferenceServiceSpec.model_validate({"model": {"source": source}, "replicas": 1})
    except ValidationError:
        return False
    return True


def is_read_by_the_runtime(source: str) -> bool:
    try:
        parse_source(source)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("source", GOOD_SOURCES)
def test_a_good_source_is_one_to_both(source: str) -> None:
    assert is_read_by_the_operator(source)
    assert is_read_by_the_runtime(source)


@pytest.mark.parametrize("source", BAD_SOURCES)
def test_a_bad_source_is_none_to_either(source: str) -> None:
    assert not is_read_by_the_operator(source)
    assert not is_read_by_the_runtime(source)


def test_a_claim_is_served_from_where_it_is_mounted() -> None:
    spec = {**BARE, "model": {"source": "pvc://weights/llama/8b"}}
    (source, *_) = arguments(spec, SITES["kubernetes"])["serve"]
    assert parse_source(source) == FolderModel(Path("/mnt/models/llama/8b"))
