"""Forms of sources and rules of levers, held by a real API server while no operator runs: dry runs."""

from typing import Any

import pytest

from e2e.api_objects import Json, created_dry
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ({"source": "hf://Org-1/Name_2.5@refs/pr/3", "credentialsSecretRef": {"name": "token"}}, None),
        ({"source": "s3://my.bucket-1/a/b c/"}, None),
        ({"source": "oci://registry:5000/team/name:v1@sha256:" + "0a" * 32}, None),
        ({"source": "pvc://claim-1/llama/8b"}, None),
        ({"source": "hf://name"}, "source must be bundled://NAME"),
        ({"source": "hf://a/b@../x"}, "source must be bundled://NAME"),
        ({"source": "oci://org/name"}, "source must be bundled://NAME"),
        ({"source": "pvc://claim/../x"}, "source must be bundled://NAME"),
        ({"source": "/model", "credentialsSecretRef": {"name": "token"}}, "remove credentialsSecretRef"),
    ],
)
async def test_the_api_server_holds_sources_to_their_forms(
    api: KubernetesApi, model: dict[str, Any], complaint: str | None
) -> None:
    create = created_dry(api, {"model": model, "replicas": 1})
    if complaint is None:
        await create
        return
    with pytest.raises(ClusterError, match=complaint):
        await create


DRAFT = {"draft": {"source": "bundled://headway-tiny-draft"}}
NGRAM = {"method": "ngram"}
DISK = {"hostMemory": "1Gi", "disk": {"size": "5Gi"}}


def adapters(*names: str, source: str = "pvc://claim/adapter") -> list[Json]:
    return [{"name": name, "source": source} for name in names]


def gpus(count: int | str) -> Json:
    return {"limits": {"nvidia.com/gpu": count}}


@pytest.mark.parametrize(
    ("levers", "complaint"),
    [
        pytest.param({"lora": {"adapters": adapters("a", "b"), "maxLoras": 2, "maxCpuLoras": 4}}, None),
        pytest.param({"lora": {"adapters": adapters("a", source="bundled://a")}}, "no adapters are bundled"),
        pytest.param({"lora": {"adapters": adapters("a", "a")}}, "Duplicate value"),
        pytest.param({"lora": {"adapters": adapters("a b")}}, "adapters\\[0\\].name"),
        pytest.param({"lora": {"adapters": adapters("a", "b"), "maxCpuLoras": 1}}, "the number of adapters"),
        pytest.param({"lora": {"maxLoras": 4, "maxCpuLoras": 2}}, "must not be less than maxLoras"),
        pytest.param({"lora": {"maxLoraRank": 513}}, "maxLoraRank"),
        pytest.param({"kvOffload": DISK}, None),
        pytest.param({"kvOffload": {"disk": {"size": "5Gi"}}}, "hostMemory"),
        pytest.param({"kvOffload": {"hostMemory": "much"}}, "hostMemory"),
        pytest.param({"kvOffload": {"hostMemory": "1Gi"}, "tensorParallelSize": 2}, None),
        pytest.param({"kvOffload": DISK, "tensorParallelSize": 2}, "kvOffload.disk is for one process"),
        pytest.param({"tensorParallelSize": 64}, None),
        pytest.param({"tensorParallelSize": 65}, "tensorParallelSize"),
        pytest.param({"tensorParallelSize": 4, "resources": gpus("4")}, None),
        pytest.param({"tensorParallelSize": 4, "resources": gpus(8)}, None),
        pytest.param({"tensorParallelSize": 4, "resources": gpus(2), "device": "cpu"}, None),
        pytest.param({"tensorParallelSize": 4, "resources": gpus(2)}, "resources.limits must give each of"),
        pytest.param({"tensorParallelSize": 4, "resources": gpus("3")}, "raise nvidia.com/gpu there"),
        pytest.param(
            {"tensorParallelSize": 2, "resources": gpus(2), "quality": {"resources": gpus(1)}},
            "quality.resources.limits must give each",
        ),
        pytest.param({"tensorParallelSize": 2, "quality": {"resources": gpus(2)}}, None),
        pytest.param({"speculative": DRAFT | {"numSpeculativeTokens": 16, "adaptive": False}}, None),
        pytest.param({"speculative": NGRAM}, None),
        pytest.param({"speculative": NGRAM | {"promptLookupMax": 7, "promptLookupMin": 7}}, None),
        pytest.param({"speculative": NGRAM | {"promptLookupMin": 5}}, None),
        pytest.param({"speculative": NGRAM | {"promptLookupMin": 6}}, "must not exceed promptLookupMax"),
        pytest.param({"speculative": NGRAM | {"promptLookupMax": 33}}, "promptLookupMax"),
        pytest.param({"speculative": DRAFT | {"promptLookupMax": 3}}, "are for method ngram"),
        pytest.param({"speculative": {}}, "method draft_model needs a draft"),
        pytest.param({"speculative": NGRAM | DRAFT}, "method ngram has none"),
        pytest.param({"speculative": {"method": "eagle"}}, "Unsupported value"),
        pytest.param({"speculative": DRAFT | {"numSpeculativeTokens": 17}}, "numSpeculativeTokens"),
        pytest.param({"speculative": {"draft": {"source": "hf://name"}}}, "source must be bundled://NAME"),
    ],
)
async def test_the_api_server_holds_levers_to_their_rules(
    api: KubernetesApi, levers: Json, complaint: str | None
) -> None:
    create = created_dry(api, {"model": {"source": "bundled://headway-tiny"}, "replicas": 1} | levers)
    if complaint is None:
        await create
        return
    with pytest.raises(ClusterError, match=complaint):
        await create
