"""The cluster that the tests talk to, and what stands there when one of them fails."""

import asyncio
import contextlib
import gc
import inspect
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import OpenAI

from e2e.api_server import running_api_server
from e2e.cluster.binaries import build
from e2e.cluster.lifecycle import log_tails
from e2e.cluster.settings import read_settings
from e2e.fault_proxy import FaultProxy
from e2e.installation import (
    CHECKOUT,
    SYSTEM_NAMESPACE,
    has_cluster,
    installed_chart,
    the_cluster,
)
from e2e.kubernetes import Kubernetes
from e2e.observed_service import NAME, NAMESPACE
from headway_operator.cluster.kubernetes import KubernetesCluster
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.errors import ClusterError
from headway_operator.keys import AdminKeys
from headway_operator.names import API_VERSION, CACHE_KIND, KIND
from headway_operator.passes import Carried, Outcome, World
from headway_operator.reconcile import reconcile
from headway_operator.scrape import Scraper
from headway_operator.state import ServiceKey

CRDS = sorted((CHECKOUT / "crds").glob("*.yaml"))
OPERATOR_PODS = "app.kubernetes.io/name=headway-operator"

LAST = "test_rights.py"
REPORTS = [
    [
        "get",
        "all,inferenceservices,modelcaches,pvc,endpointslices,configmaps",
        "--all-namespaces",
        "--output=wide",
    ],
    ["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"],
    ["get", "inferenceservices,modelcaches", "--all-namespaces", "--output=yaml"],
    ["describe", "pods", "--all-namespaces"],
    *(
        ["logs", f"--namespace={namespace}", f"--selector={labels}", "--tail=100", "--prefix"]
        for namespace, labels in (
            (SYSTEM_NAMESPACE, "app.kubernetes.io/name=headway-operator"),
            (NAMESPACE, "serving.headway.dev/component=gateway"),
            (NAMESPACE, "serving.headway.dev/component=runtime"),
        )
    ),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is said about the whole run comes at its end."""
    items.sort(key=lambda item: item.path.name == LAST)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What a test leaves open fails that test, and not whichever comes later."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def kubernetes() -> Kubernetes:
    """The cluster of `python -m e2e.cluster run`, or the one that HEADWAY_E2E_CONTEXT names."""
    if not has_cluster():
        pytest.exit(
            "the cluster tests run as `python -m e2e.cluster run -- python -m pytest e2e` (make e2e)", 2
        )
    return the_cluster()


@pytest.fixture(scope="module")
def installed(kubernetes: Kubernetes) -> Iterator[Kubernetes]:
    """The chart, installed by helm."""
    with installed_chart(kubernetes, "intervalSeconds=2") as found:
        yield found


@pytest.fixture(scope="module")
def url(installed: Kubernetes) -> Iterator[str]:
    """The base URL of the service, which an earlier test has made."""
    with installed.service_url(NAME, NAMESPACE) as found:
        yield f"{found}/v1"


@pytest.fixture
def client(url: str) -> Iterator[OpenAI]:
    """Of that service. It sends nothing twice."""
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture(scope="session")
def api_kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An API server without a node, which has our kinds."""
    with running_api_server(tmp_path_factory.mktemp("api")) as kubeconfig:
        kubectl = (build(["kubernetes"], read_settings().cache)["kubectl"], f"--kubeconfig={kubeconfig}")
        files = [word for path in CRDS for word in ("--filename", path)]
        for arguments in (
            ("create", *files),
            ("wait", "--for=condition=Established", "--timeout=30s", *files),
        ):
            subprocess.run([*kubectl, *arguments], check=True, capture_output=True, timeout=60)
        yield kubeconfig


@pytest.fixture
async def bare_api(api_kubeconfig: Path) -> AsyncIterator[KubernetesApi]:
    """Calls to that server, with every right."""
    async with await KubernetesApi.connect(api_kubeconfig) as connected:
        yield connected


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure carries the cluster's own account of what happened."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("kubernetes")
    if report.failed and isinstance(cluster, Kubernetes):
        account = [_account(cluster, arguments) for arguments in REPORTS]
        if cluster.has_pod_network:
            account.append(log_tails(read_settings()))
        report.sections.append(("cluster", "\n".join(account)))
    return report


def _account(cluster: Kubernetes, arguments: list[str]) -> str:
    try:
        output = cluster.kubectl(*arguments)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        output = str(error)
    return f"$ kubectl {' '.join(arguments)}\n{output}"


CRD_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
FACT_SECONDS = 60.0


async def eventually(fact: Callable[[], Any], seconds: float = FACT_SECONDS) -> Any:
    """Wait until what `fact` returns, or returns when awaited, is true; and return that."""
    deadline = time.monotonic() + seconds
    while True:
        value = fact()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, f"not so within {seconds:g} s"
        await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def kubeconfig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of an API server without nodes."""
    with running_api_server(tmp_path_factory.mktemp("api")) as path:
        yield path


@pytest.fixture
async def api(kubeconfig: Path) -> AsyncIterator[KubernetesApi]:
    """That API server, which knows our kinds."""
    async with await KubernetesApi.connect(kubeconfig) as connected:
        for definition in (yaml.safe_load(path.read_text()) for path in CRDS):
            path = f"{CRD_PATH}/{definition['metadata']['name']}"
            if not await connected._call("GET", path, absent_is_none=True):
                await connected._call("POST", CRD_PATH, body=definition)

        async def is_served() -> bool:
            with contextlib.suppress(ClusterError):
                await connected.list(KIND, "default")
                await connected.list(CACHE_KIND, "default")
                return True
            return False

        await eventually(is_served)
        yield connected


@pytest.fixture
async def proxy(kubeconfig: Path) -> AsyncIterator[FaultProxy]:
    """The API server behind something that can fail, and that tells what was written."""
    async with FaultProxy(kubeconfig) as running:
        yield running


@pytest.fixture
async def key(api: KubernetesApi, request: pytest.FixtureRequest) -> ServiceKey:
    """A service in a namespace of the test's own."""
    namespace_name = f"t{abs(hash(request.node.name)) % 10**9}"
    await api._call("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace_name}})
    await api.create(
        {
            "apiVersion": API_VERSION,
            "kind": "InferenceService",
            "metadata": {"name": "demo", "namespace": namespace_name},
            "spec": {
                "model": {"source": "bundled://headway-tiny"},
                "slo": {"ttftMilliseconds": 300},
                "scaling": {"minReplicas": 2, "maxReplicas": 4},
            },
        }
    )
    return ServiceKey(namespace_name, "demo")


@pytest.fixture
def cluster(api: KubernetesApi) -> KubernetesCluster:
    """What the operator does on that API server."""
    return KubernetesCluster(api, runtime_image="runtime:1", gateway_image="gateway:1")


@pytest.fixture
async def take_pass(
    cluster: KubernetesCluster, key: ServiceKey
) -> AsyncIterator[Callable[[], Awaitable[Outcome]]]:
    """One pass of the operator over the service as the API server has it now."""
    keys, carried = AdminKeys.generate(), Carried()
    async with Scraper(keys, time.time) as scraper:

        async def step() -> Outcome:
            manifest = await cluster.fetch(key)
            assert manifest is not None
            return await reconcile(World(cluster, scraper, keys, time.time), manifest, carried)

        yield step
