"""Following a headless Service: against an API server of our own that speaks list and watch over real HTTP.

The real API server is asked in the end-to-end tests; here are the faults that it shows too seldom.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from headway_gateway import endpoint_slices
from headway_gateway.backend import BackendEntry
from headway_gateway.config import ServiceReference
from headway_gateway.endpoint_slices import EndpointSliceWatch, to_entries

if TYPE_CHECKING:
    from tests.gateway.conftest import StartCommand, StartReplica

pytestmark = pytest.mark.timeout(120)


def endpoint(name: str, address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


def slice_of(
    *endpoints: dict[str, Any], name: str = "one", port: int = 8000, **fields: Any
) -> dict[str, Any]:
    ports = [{"name": "http", "port": port, "protocol": "TCP"}]
    return {
        "metadata": {"name": name},
        "addressType": "IPv4",
        "endpoints": list(endpoints),
        "ports": ports,
        **fields,
    }


SERVING = {"ready": True, "serving": True, "terminating": False}


@pytest.mark.parametrize(
    ("conditions", "want"),
    [
        (SERVING, "ready"),
        ({}, "ready"),
        ({"ready": None, "serving": None, "terminating": None}, "ready"),
        ({"ready": True}, "ready"),
        ({"ready": False}, "unready"),
        ({"ready": False, "serving": False, "terminating": False}, "unready"),
        ({"ready": True, "serving": False, "terminating": False}, "unready"),
        ({"ready": False, "serving": True, "terminating": True}, "draining"),
        ({"ready": False, "serving": False, "terminating": True}, "draining"),
        ({"ready": True, "serving": True, "terminating": True}, "draining"),
    ],
    ids=str,
)
def test_conditions_decide_whether_an_endpoint_gets_requests(conditions: dict[str, Any], want: str) -> None:
    (entry,) = to_entries([slice_of(endpoint("a", "10.0.0.1", **conditions))])
    assert entry.state == want


def test_endpoints_of_all_slices_become_backends() -> None:
    v6 = slice_of(endpoint("c", "fd00::1", **SERVING), name="v6", addressType="IPv6")
    no_endpoints = slice_of(name="empty", endpoints=None)
    other_port = slice_of(
        endpoint("d", "10.0.0.4"), name="z", ports=[{"name": "grpc", "port": 1}, {"name": "http", "port": 9}]
    )
    no_port = slice_of(
        endpoint("e", "10.0.0.5"), name="y", ports=[{"name": "a", "port": 1}, {"name": "b", "port": 2}]
    )
    only_port = slice_of(endpoint("f", "10.0.0.6"), name="x", ports=[{"name": "", "port": 7}])
    nameless = slice_of({"addresses": ["10.0.0.9"], "conditions": {}}, name="w")
    first = slice_of(endpoint("a", "10.0.0.1"), endpoint("b", "10.0.0.2", ready=False))
    got = to_entries([v6, first, no_endpoints, other_port, no_port, only_port, nameless])
    assert sorted(got, key=lambda entry: entry.id) == [
        BackendEntry("a", "http://10.0.0.1:8000", "ready"),
        BackendEntry("b", "http://10.0.0.2:8000", "unready"),
        BackendEntry("c", "http://[fd00::1]:8000", "ready"),
        BackendEntry("d", "http://10.0.0.4:9", "ready"),
        BackendEntry("f", "http://10.0.0.6:7", "ready"),
        BackendEntry("http://10.0.0.9:8000", "http://10.0.0.9:8000", "ready"),
    ]


def test_a_pod_in_two_slices_counts_once_at_its_best() -> None:
    old = slice_of(endpoint("a", "10.0.0.1", ready=False), name="a-old")
    new = slice_of(endpoint("a", "10.0.0.1", **SERVING), name="b-new")
    want = [BackendEntry("a", "http://10.0.0.1:8000", "ready")]
    assert to_entries([old, new]) == to_entries([new, old]) == want


class ApiServer:
    """Lists and watches one kind; the test changes the objects and causes the faults."""

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[str, dict[str, Any]] = {}
        self.lists: list[dict[str, str]] = []
        self.watches: list[dict[str, str]] = []
        self.fault: int | None = None
        self.is_next_watch_expired = False
        self._history: list[tuple[int, Any]] = []
        self._watching: list[tuple[web.BaseRequest, asyncio.Queue[Any]]] = []
        self._port = 0
        self._runner: web.ServerRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._runner = web.ServerRunner(
            web.Server(self._handle, handler_cancellation=True), shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            self.cut()
            await self._runner.cleanup()
            self._runner = None

    def cut(self) -> None:
        """Cut every watch as a dying server does."""
        for request, _ in self._watching:
            if request.transport is not None:
                request.transport.abort()

    def put(self, item: dict[str, Any], kind: str = "MODIFIED") -> None:
        self.version += 1
        item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        if kind == "DELETED":
            self.objects.pop(item["metadata"]["name"])
        else:
            self.objects[item["metadata"]["name"]] = item
        self.emit({"type": kind, "object": item})

    def bookmark(self, version: int) -> None:
        self.version = version
        self.emit({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}})

    def emit(self, event: Any) -> None:
        """Send an event on every watch, and to those that start from an older version.

        None ends the watches, as the server does when their time is up.
        """
        if event is not None:
            self._history.append((self.version, event))
        for _, events in self._watching:
            events.put_nowait(event)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        query = dict(request.query)
        assert request.path == "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
        assert query["labelSelector"] == "kubernetes.io/service-name=demo-replicas"
        is_watch = query.get("watch") in ("true", "True", "1")
        (self.watches if is_watch else self.lists).append(query)
        if self.fault is not None:
            return web.json_response({"kind": "Status", "code": self.fault}, status=self.fault)
        if not is_watch:
            metadata = {"resourceVersion": str(self.version)}
            return web.json_response({"metadata": metadata, "items": list(self.objects.values())})
        return await self._watch(request, int(query["resourceVersion"]))

    async def _watch(self, request: web.BaseRequest, since: int) -> web.StreamResponse:
        events: asyncio.Queue[Any] = asyncio.Queue()
        if self.is_next_watch_expired:
            self.is_next_watch_expired = False
            status = {
                "kind": "Status",
                "code": 410,
                "reason": "Expired",
                "message": "too old resource version",
            }
            events.put_nowait({"type": "ERROR", "object": status})
            events.put_nowait(None)
        for version, event in self._history:
            if version > since:
                events.put_nowait(event)
        watching = (request, events)
        self._watching.append(watching)
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            while (event := await events.get()) is not None:
                await response.write(json.dumps(event).encode() + b"\n")
        finally:
            self._watching.remove(watching)
        return response


class Followed:
    """A watch running against an API server, and the lists that it published."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []
        self.num_errors = 0

    def on_list(self, entries: Any) -> None:
        self.lists.append([f"{entry.id}:{entry.state}" for entry in entries])

    def on_error(self) -> None:
        self.num_errors += 1

    async def until(self, *want: str) -> None:
        await self.until_true(lambda: bool(self.lists) and self.lists[-1] == list(want))

    async def until_true(self, condition: Any) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - any state can be waited for
                await asyncio.sleep(0.005)


def write_kubeconfig(path: Path, url: str) -> None:
    named = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }
    contexts = [{"name": "x", "context": {"cluster": "c", "user": "u"}}]
    path.write_text(
        json.dumps(
            {"apiVersion": "v1", "kind": "Config", "current-context": "x", "contexts": contexts, **named}
        )
    )


@pytest.fixture
async def api_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiServer]:
    server = ApiServer()
    await server.start()
    write_kubeconfig(tmp_path / "kubeconfig", server.url)
    monkeypatch.setattr(
        "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig")
    )
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(endpoint_slices, "FIRST_PAUSE_SECONDS", 0.01)
    yield server
    await server.stop()


@pytest.fixture
async def followed(api_server: ApiServer) -> AsyncIterator[Followed]:
    followed = Followed()
    service = ServiceReference("default", "demo-replicas")
    task = asyncio.create_task(EndpointSliceWatch(service, followed.on_list, followed.on_error).run())
    yield followed
    assert not task.done(), task.exception()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_the_list_is_followed_by_its_changes(api_server: ApiServer, followed: Followed) -> None:
    await followed.until()
    await followed.until_true(lambda: len(api_server.watches) == 1)
    assert api_server.watches[0]["resourceVersion"] == "100"
    api_server.put(slice_of(endpoint("a", "10.0.0.1", **SERVING)), "ADDED")
    await followed.until("a:ready")
    api_server.put(slice_of(endpoint("b", "10.0.0.2", ready=False), name="two"), "ADDED")
    await followed.until("a:ready", "b:unready")
    terminating = {"ready": False, "serving": True, "terminating": True}
    api_server.put(slice_of(endpoint("a", "10.0.0.1", **terminating)))
    await followed.until("a:draining", "b:unready")
    api_server.put(slice_of(name="one"), "DELETED")
    await followed.until("b:unready")
    assert (len(api_server.lists), len(api_server.watches), followed.num_errors) == (1, 1, 0)


async def test_a_watch_whose_time_is_up_goes_on_from_the_last_version(
    api_server: ApiServer, followed: Followed
) -> None:
    await followed.until_true(lambda: len(api_server.watches) == 1)
    api_server.put(slice_of(endpoint("a", "10.0.0.1")), "ADDED")
    await followed.until("a:ready")
    api_server.bookmark(250)
    api_server.emit(None)
    await followed.until_true(lambda: len(api_server.watches) == 2)
    assert api_server.watches[1]["resourceVersion"] == "250"
    assert (len(api_server.lists), followed.num_errors) == (1, 0)


@pytest.mark.parametrize("is_event", [True, False], ids=["as an event", "as a status"])
async def test_gone_is_answered_with_a_new_list(
    *, is_event: bool, api_server: ApiServer, followed: Followed
) -> None:
    await followed.until_true(lambda: len(api_server.watches) == 1)
    api_server.objects["one"] = slice_of(endpoint("missed", "10.0.0.1"))
    if is_event:
        api_server.is_next_watch_expired = True
    else:
        api_server.fault = 410
    api_server.emit(None)
    await followed.until_true(lambda: len(api_server.watches) >= 2)
    api_server.fault = None
    await followed.until("missed:ready")
    assert len(api_server.lists) >= 2


async def test_the_last_list_stays_while_the_api_server_is_away(
    api_server: ApiServer, followed: Followed
) -> None:
    api_server.put(slice_of(endpoint("a", "10.0.0.1")), "ADDED")
    await followed.until("a:ready")
    await followed.until_true(lambda: len(api_server.watches) == 1)
    num_lists = len(followed.lists)
    await api_server.stop()
    await followed.until_true(lambda: followed.num_errors >= 3)
    assert len(followed.lists) == num_lists
    api_server.objects["one"] = slice_of(endpoint("b", "10.0.0.2"))
    await api_server.start()
    await followed.until("b:ready")


@pytest.mark.parametrize("fault", [403, 429, 500])
async def test_an_api_server_that_refuses_is_asked_again(
    fault: int, api_server: ApiServer, followed: Followed
) -> None:
    await followed.until_true(lambda: len(api_server.watches) == 1)
    api_server.fault = fault
    api_server.emit(None)
    await followed.until_true(lambda: followed.num_errors >= 2)
    api_server.fault = None
    api_server.objects["one"] = slice_of(endpoint("a", "10.0.0.1"))
    await followed.until("a:ready")


@pytest.mark.parametrize(
    "event",
    [
        {"type": "ERROR", "object": {"kind": "Status", "code": 500, "reason": "InternalError"}},
        {"type": "MODIFIED", "object": None},
        {"type": "MODIFIED", "object": {"metadata": {}}},
        ["not", "an", "event"],
    ],
    ids=str,
)
async def test_an_event_that_makes_no_sense_is_answered_with_a_new_list(
    event: Any, api_server: ApiServer, followed: Followed
) -> None:
    await followed.until_true(lambda: len(api_server.watches) == 1)
    api_server.emit(event)
    await followed.until_true(lambda: len(api_server.lists) == 2)
    api_server.put(slice_of(endpoint("a", "10.0.0.1")), "ADDED")
    await followed.until("a:ready")


async def test_the_command_serves_the_endpoints_of_a_service(
    api_server: ApiServer,
    start_replica: StartReplica,
    start_command: StartCommand,
    client: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    replica = await start_replica("a")
    gateway = await start_command(
        *("--kubernetes-service", "default/demo-replicas"),
        environment={"KUBECONFIG": str(tmp_path / "kubeconfig")},
    )
    held = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={}))
    api_server.put(slice_of(endpoint("a", "127.0.0.1", **SERVING), port=replica.port), "ADDED")
    async with await held as response:
        assert await response.json() == {"replica": "a"}
    await api_server.stop()
    await gateway.until_logged("kept the last list of backends")
    async with client.post(f"{gateway.url}/v1/completions", json={}) as response:
        assert await response.json() == {"replica": "a"}


async def test_without_any_way_to_an_api_server_the_start_says_so(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "headway",
            "gateway",
            "--port",
            "0",
            "--kubernetes-service",
            "default/demo-replicas",
        ),
        stderr=asyncio.subprocess.PIPE,
        env={"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)},
    )
    _, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert b"--kubernetes-service" in errors
    assert b"Traceback" not in errors
