"""What tests of rendered manifests share: specs, and how to find a child among what is rendered."""

from typing import Any

from headway_operator import names
from headway_operator.manifests import render
from headway_operator.spec import parse
from headway_operator.state import ChildKey, Manifest, Rendered, Site

PUBLIC_KEY = "-----BEGIN PUBLIC KEY-----\nnot a key\n-----END PUBLIC KEY-----\n"
NOTHING: frozenset[ChildKey] = frozenset()
FULL_SPEC = {
    "model": {"source": "file:///models/llama", "maxModelLen": 4096, "servedName": "llama"},
    "dtype": "bfloat16",
    "quantization": "fp8",
    "weightCompression": "none",
    "memoryCheck": "Warn",
    "slo": {"ttftMilliseconds": 300, "tpotMilliseconds": 40, "percentile": 90},
    "batching": {
        "maxNumSeqs": {"max": 128, "initial": 8},
        "maxNumBatchedTokens": {"max": 4096, "initial": 256},
    },
    "kvCacheMemory": "1Gi",
    "kvCacheDtype": "fp8",
    "kvOffload": {"hostMemory": "8Gi"},
    "tensorParallelSize": 2,
    "device": "cuda",
    "resources": {"limits": {"nvidia.com/gpu": 2, "cpu": "4"}, "requests": {"memory": "8Gi"}},
    "auth": {"apiKeysSecretRef": {"name": "keys"}},
    "drainTimeoutSeconds": 120,
    "speculative": {"method": "ngram", "numSpeculativeTokens": 6, "promptLookupMax": 8, "promptLookupMin": 3},
    "lora": {
        "adapters": [{"name": "sql", "source": "hf://org/sql"}, {"name": "law=2", "source": "file:///law"}],
        "maxLoras": 4,
        "maxCpuLoras": 6,
        "maxLoraRank": 64,
    },
    "template": {
        "metadata": {"labels": {"team": "a", names.SERVICE_LABEL: "stolen"}, "annotations": {"note": "x"}},
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "volumes": [{"name": "models", "hostPath": {"path": "/models"}}],
            "containers": [
                {
                    "name": "runtime",
                    "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
                    "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
                },
                {"name": "sidecar", "image": "example.test/sidecar:2"},
            ],
        },
    },
}
SEVERAL_NODES = {
    "model": {"source": "pvc://weights/llama/405b"},
    "tensorParallelSize": 16,
    "nodesPerReplica": 2,
    "device": "cuda",
    "gpu": {"product": "NVIDIA-H200"},
    "scheduling": {"topologySpreadConstraints": [{"topologyKey": "topology.kubernetes.io/zone"}]},
    "monitoring": {"enabled": False},
}
GATEWAY = {
    "replicas": 3,
    "resources": {"requests": {"cpu": "500m"}, "limits": {"memory": "2Gi"}},
    "scheduling": {
        "nodeSelector": {"pool": "front"},
        "tolerations": [{"key": "front", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"}
        ],
        "priorityClassName": "front",
    },
    "template": {
        "metadata": {"annotations": {"team": "search"}},
        "spec": {"containers": [{"name": "gateway", "env": [{"name": "LANG", "value": "C.UTF-8"}]}]},
    },
}


def rendered(
    build: Any,
    spec: dict[str, Any] | None = None,
    site: Site | None = None,
    status: dict[str, Any] | None = None,
    existing: frozenset[ChildKey] = NOTHING,
) -> Rendered:
    service = parse({**build.manifest(spec), "status": status or {}})
    return render(service, site or build.site(), PUBLIC_KEY, existing)


def child(result: Rendered, kind: str, name: str) -> Manifest:
    return next(m for m in result.manifests if (m["kind"], m["metadata"]["name"]) == (kind, name))


def runtime(result: Rendered) -> Any:
    pod = child(result, "Deployment", result.revision.name)["spec"]["template"]["spec"]
    return next(container for container in pod["containers"] if container["name"] == "runtime")


def status_of(result: Rendered) -> dict[str, Any]:
    """The pin as status holds it."""
    pin = result.revision
    return {
        "revision": {
            "name": pin.name,
            "hash": pin.hash,
            "runtimeImage": pin.runtime_image,
            "gatewayImage": pin.gateway_image,
            "gatewayHash": pin.gateway_hash,
            "specHash": pin.spec_hash,
            "gatewaySpecHash": pin.gateway_spec_hash,
        }
    }


def keys(result: Rendered) -> frozenset[ChildKey]:
    return frozenset(ChildKey(m["kind"], m["metadata"]["name"]) for m in result.manifests)
