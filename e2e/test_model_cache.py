"""A ModelCache on the real cluster: fetched once from an S3 server onto a claim, served by two replicas."""

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from e2e.host_runtime import CHECKOUT, with_host_runtime
from e2e.kubernetes import Kubernetes, Object, eventually
from e2e.observed_service import NAME, NAMESPACE, condition, manifest, runtime_pods, status
from e2e.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, BucketServer, running_s3

CACHE = "tiny"
CLAIM = "tiny-model-cache"
BUNDLED = CHECKOUT / "runtime" / "headway_runtime" / "bundled" / "headway-tiny"
# So slow that a fetch of 7 MB is seen on its way; the relay is let go once it was.
SLOW_BYTES_PER_SECOND = 300_000.0
FETCH_SECONDS, START_SECONDS = 180.0, 120.0

pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def s3(installed: Kubernetes) -> Iterator[BucketServer]:
    """The model in a bucket, and the keys to it in a Secret; a wrong key in another."""
    if not installed.has_pod_network:
        pytest.skip("the server is on this machine, which the cluster's nodes do not reach")
    folder = Path(tempfile.mkdtemp(prefix="headway-s3-"))
    with running_s3(folder) as server:
        installed.apply(
            secret("s3-keys", server.url, ACCESS_KEY, SECRET_KEY),
            secret("wrong-keys", server.url, ACCESS_KEY, "another-secret"),
        )
        yield server
    shutil.rmtree(folder)


def secret(name: str, url: str, access_key: str, secret_key: str) -> Object:
    values = {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_ENDPOINT_URL_S3": url,
    }
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": values}


@pytest.fixture(scope="module")
def volume(installed: Kubernetes, s3: BucketServer) -> Iterator[Path]:
    """A folder of the node, as the volume that the claim of the cache is to be bound to."""
    folder = Path(tempfile.mkdtemp(prefix="headway-volume-"))
    folder.chmod(0o777)  # pods run as nobody in particular
    installed.apply(
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": CLAIM},
            "spec": {
                "storageClassName": "",
                "accessModes": ["ReadWriteOnce"],
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"name": CLAIM, "namespace": NAMESPACE},
                "hostPath": {"path": str(folder), "type": "Directory"},
            },
        }
    )
    yield folder
    installed.kubectl("delete", "inferenceservices", "--all", f"--namespace={NAMESPACE}")
    installed.kubectl("delete", "modelcaches", "--all", f"--namespace={NAMESPACE}")
    installed.kubectl("delete", "pv", CLAIM, "--wait=false")
    shutil.rmtree(folder)


def cache(name: str = CACHE, *, keys: str = "s3-keys", storage: Any = None, **spec: Any) -> Object:
    made = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "ModelCache",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "spec": {
            "source": f"s3://{BUCKET}/{CACHE}",
            "credentialsSecretRef": {"name": keys},
            "storage": storage or {"size": "1Gi", "storageClassName": ""},
            **spec,
        },
    }
    return with_host_runtime(made)


def cache_status(kubernetes: Kubernetes, name: str = CACHE) -> dict[str, Any]:
    return dict(kubernetes.get("modelcache", name, NAMESPACE).get("status") or {})


def ready(kubernetes: Kubernetes, name: str = CACHE) -> tuple[str, str]:
    """Reason and message of its condition Ready."""
    conditions = cache_status(kubernetes, name).get("conditions") or ()
    return next(((one["reason"], one["message"]) for one in conditions if one["type"] == "Ready"), ("", ""))


def served_from_cache(kubernetes: Kubernetes, source: str, replicas: int) -> Object:
    wanted = manifest(kubernetes)
    wanted["spec"] = {key: value for key, value in wanted["spec"].items() if key not in ("slo", "scaling")}
    wanted["spec"] |= {
        "replicas": replicas,
        "model": {"source": source},
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": "2Gi"},
        },
    }
    return wanted


async def test_a_service_waits_for_its_cache_which_tells_how_far_it_is(
    installed: Kubernetes, s3: BucketServer, volume: Path
) -> None:
    num_bytes = s3.upload(BUNDLED, CACHE)
    s3.relay.bytes_per_second = SLOW_BYTES_PER_SECOND
    installed.apply(served_from_cache(installed, f"cache://{CACHE}", 2))
    await eventually(
        "the cache is missed",
        30,
        lambda: condition(installed, "ModelAvailable") == "False ModelCacheMissing",
    )
    installed.apply(cache())
    await eventually(
        "the cache is waited for",
        60,
        lambda: condition(installed, "ModelAvailable") == "False ModelCacheFetching",
    )
    assert runtime_pods(installed) == []
    progress = await eventually(
        "a part of it is there",
        FETCH_SECONDS,
        lambda: (told := cache_status(installed).get("progress") or {}).get("percent") and told,
    )
    assert 0 < progress["bytes"] <= progress["totalBytes"] <= num_bytes
    printed = installed.kubectl("get", "hmc", CACHE, f"--namespace={NAMESPACE}")
    assert "Fetching" in printed
    s3.relay.bytes_per_second = None
    await eventually("it is fetched", FETCH_SECONDS, lambda: ready(installed)[0] == "Fetched")
    fetched = cache_status(installed)["fetched"]
    files = [path for path in (volume / fetched["path"]).iterdir() if path.is_file()]
    assert (fetched["bytes"], fetched["files"]) == (sum(path.stat().st_size for path in files), len(files))
    assert (volume / fetched["path"] / "model.safetensors").stat().st_size > 7_000_000


async def test_two_replicas_serve_it_and_fetch_nothing(installed: Kubernetes, s3: BucketServer) -> None:
    await eventually(
        "the service is Ready", START_SECONDS, lambda: condition(installed, "Ready").startswith("True")
    )
    num_connections = s3.relay.num_connections
    assert cache_status(installed)["services"] == [NAME]
    pods = runtime_pods(installed)
    assert len(pods) == 2
    for pod in pods:
        [volume] = [one for one in pod["spec"]["volumes"] if "persistentVolumeClaim" in one]
        assert volume["persistentVolumeClaim"] == {"claimName": CLAIM, "readOnly": True}
    # Another one starts from what is there as well.
    where = f"--namespace={NAMESPACE}"
    installed.kubectl("scale", "hisvc", NAME, where, "--replicas=3")
    await eventually(
        "a third replica serves", START_SECONDS, lambda: status(installed).get("readyReplicas") == 3
    )
    assert s3.relay.num_connections == num_connections
    starts = status(installed)["startup"]["recent"]
    print("starts from the cache:", [(one["fetchedSeconds"], one["totalSeconds"]) for one in starts])
    assert all(one["fetchedSeconds"] == 0 for one in starts)


def test_its_answers_are_a_models(installed: Kubernetes, client: OpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is 2 + 3?"}]
    answer = client.chat.completions.create(model=NAME, messages=question, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content


async def test_what_keeps_a_cache_from_being_filled_is_named(
    installed: Kubernetes, s3: BucketServer, volume: Path
) -> None:
    # Beside the other one, on the same claim.
    shared = {"claimName": CLAIM}
    installed.apply(
        cache("locked", keys="wrong-keys", storage=shared),
        cache("keyless", keys="no-keys", storage=shared),
        cache("nowhere", storage={"claimName": "no-claim"}),
    )
    for name, reason, words in (
        ("locked", "SourceRefused", "403"),
        ("keyless", "CredentialsMissing", 'secret "no-keys" not found'),
        ("nowhere", "ClaimMissing", "make it, or change spec.storage.claimName"),
    ):
        await eventually(f"{name}: {reason}", 120, partial(has_reason, installed, name, reason))
        assert words in ready(installed, name)[1]


def has_reason(kubernetes: Kubernetes, name: str, reason: str) -> bool:
    return ready(kubernetes, name)[0] == reason


async def test_what_serves_goes_on_when_another_cache_is_asked_for_that_is_not_there(
    installed: Kubernetes, volume: Path
) -> None:
    before = {pod["metadata"]["uid"] for pod in runtime_pods(installed)}
    installed.apply(served_from_cache(installed, "cache://none", 3))
    await eventually(
        "the cache is missed",
        60,
        lambda: condition(installed, "ModelAvailable") == "False ModelCacheMissing",
    )
    assert condition(installed, "Ready").startswith("True")
    assert {pod["metadata"]["uid"] for pod in runtime_pods(installed)} == before
