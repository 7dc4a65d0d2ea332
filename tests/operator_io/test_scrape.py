import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from headway_operator.errors import NotLeadingError, ScrapeError
from headway_operator.keys import AdminKeys
from headway_operator.sample_wire import parse_gateway_sample, parse_replica_sample
from headway_operator.samples import Limits, RevisionTotals, Targets
from headway_operator.scrape import MAX_START_QUESTIONS, Scraper, parse_start_stages
from headway_operator.state import Gateway, Observed, Replica, ReplicaPhase, Start

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
COUNTERS = [
    *("received", "finished", "aborted", "rejected", "errors"),
    *("ttft_met", "ttft_missed", "tpot_met", "tpot_missed"),
    *("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps"),
]


def replica_body(**changes: Any) -> dict[str, Any]:
    empty = {"first": 0, "counts": [], "sum": 0.0}
    body: dict[str, Any] = {
        "version": 1,
        "instance": "a1",
        "uptime_seconds": 12.5,
        "limits": {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        "envelope": {"max_num_seqs": 64, "max_num_batched_tokens": 2048},
        "targets": {"ttft_milliseconds": 300, "tpot_milliseconds": None, "epoch": 2},
        "draining": False,
        "gauges": {
            "running": 3,
            "waiting": 2,
            "oldest_waiting_seconds": 0.25,
            "kv_blocks_used": 10,
            "kv_blocks_total": 512,
        },
        "counters": dict.fromkeys(COUNTERS, 7),
        "edges": {"first_milliseconds": 1.0, "ratio": 1.12, "count": 105},
        "histograms": {
            **dict.fromkeys(("queue", "prefill", "tpot", "step"), empty),
            "ttft": {"first": 40, "counts": [1, 0, 3], "sum": 812.5},
        },
    }
    return body | changes


def gateway_body(**changes: Any) -> dict[str, Any]:
    counters = ("received", "forwarded", "finished", "rejected", "retried", "failed", "client_aborted")
    body: dict[str, Any] = {
        "version": 1,
        "kind": "gateway",
        "instance": "g1",
        "uptime_seconds": 3.0,
        "gauges": {
            "waiting": 4,
            "oldest_waiting_seconds": 1.5,
            "in_flight": 6,
            "backends": 2,
            "backends_ready": 1,
        },
        "counters": dict.fromkeys(counters, 5),
    }
    return body | changes


def encode(body: object) -> bytes:
    return json.dumps(body).encode()


def test_whole_answers_are_read_of_replicas_that_judge_them() -> None:
    old = parse_replica_sample(encode(replica_body()), taken_at=0.0)
    assert (old.judges_end_to_end, old.targets.e2e_milliseconds) == (False, None)
    body = replica_body()
    body["targets"]["e2e_milliseconds"] = None
    with pytest.raises(ScrapeError, match="counters lacks e2e_met, e2e_missed"):
        parse_replica_sample(encode(body), taken_at=0.0)
    body["counters"] |= {"e2e_met": 3, "e2e_missed": 1}
    with pytest.raises(ScrapeError, match="histograms lacks e2e"):
        parse_replica_sample(encode(body), taken_at=0.0)
    body["histograms"]["e2e"] = {"first": 60, "counts": [3, 1], "sum": 4000.0}
    new = parse_replica_sample(encode(body), taken_at=0.0)
    assert (new.judges_end_to_end, new.targets.e2e_milliseconds) == (True, None)
    assert (new.counters["e2e_missed"], sum(new.histograms["e2e"].counts)) == (1, 4)
    body["targets"]["e2e_milliseconds"] = 9000
    assert parse_replica_sample(encode(body), taken_at=0.0).targets.e2e_milliseconds == 9000.0


def test_moments_are_read_and_gaps_only_from_who_tells_them() -> None:
    told = {
        "decode_steps": [float(i) for i in range(15)],
        "prompt_steps": [0.0] * 15,
        "prompts": [2, 30, 500],
        "answers": [1, 20, 400],
    }
    old = parse_replica_sample(encode(replica_body() | {"moments": told}), taken_at=0.0).moments
    assert old is not None
    assert old.decode_steps == tuple(range(15))
    assert (old.prompts, old.answers, old.gaps) == ((2, 30, 500), (1, 20, 400), (0, 0))
    new = parse_replica_sample(
        encode(replica_body() | {"moments": {**told, "gaps": [19, 380.5]}}), taken_at=0.0
    ).moments
    assert new == replace(old, gaps=(19, 380.5))
    with pytest.raises(ScrapeError, match="gaps"):
        parse_replica_sample(encode(replica_body() | {"moments": {**told, "gaps": [19]}}), taken_at=0.0)


def test_a_replicas_sample_is_read_whole() -> None:
    sample = parse_replica_sample(encode(replica_body()), taken_at=99.0)
    assert (sample.instance, sample.taken_at) == ("a1", 99.0)
    assert sample.limits == Limits(8, 512)
    assert sample.envelope == Limits(64, 2048)
    assert sample.targets == Targets(300.0, None)
    assert (sample.running, sample.waiting, sample.oldest_waiting_seconds) == (3, 2, 0.25)
    ttft = sample.histograms["ttft"]
    assert len(ttft.edges) == 105
    assert ttft.edges[1] == pytest.approx(1.12)
    assert len(ttft.counts) == 106
    assert ttft.counts[39:44] == (0, 1, 0, 3, 0)
    assert sum(sample.histograms["queue"].counts) == 0


def test_what_a_newer_replica_adds_to_version_1_is_passed_over() -> None:
    body = replica_body(speculation={"accepted": 3})
    body["counters"] = {**body["counters"], "speculated": 3}
    sample = parse_replica_sample(encode(body), taken_at=0.0)
    assert sample.counters["speculated"] == 3


def test_the_highest_bucket_is_the_one_above_every_edge() -> None:
    body = replica_body()
    body["histograms"]["ttft"] = {"first": 105, "counts": [2], "sum": 300000.0}
    sample = parse_replica_sample(encode(body), taken_at=0.0)
    assert sample.histograms["ttft"].counts[105] == 2


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        pytest.param({"version": 2}, "version is 2, this operator reads 1", id="unknown-version"),
        pytest.param(
            {"limits": {"max_num_seqs": 65, "max_num_batched_tokens": 512}},
            "limits.max_num_seqs is 65, above its envelope's 64",
            id="limit-above-envelope",
        ),
        pytest.param(
            {"counters": dict.fromkeys(COUNTERS[1:], 0)}, "counters lacks received", id="counter-missing"
        ),
        pytest.param({"counters": dict.fromkeys(COUNTERS, -1)}, "Expected `int` >= 0", id="negative-counter"),
        pytest.param({"histograms": {}}, "histograms lacks prefill, queue, step", id="histograms-missing"),
        pytest.param({"instance": ""}, "length >= 1", id="no-instance"),
        pytest.param(
            {
                "histograms": {
                    name: {"first": 104, "counts": [1, 1, 1], "sum": 1.0}
                    for name in ("ttft", "queue", "prefill", "tpot", "step")
                }
            },
            "reaches bucket 107, its edges allow 106",
            id="bucket-beyond-the-last",
        ),
        pytest.param(
            {
                "histograms": {
                    name: {"first": 0, "counts": [], "sum": 5.0}
                    for name in ("ttft", "queue", "prefill", "tpot", "step")
                }
            },
            "sum is 5.0 over no observation",
            id="sum-of-nothing",
        ),
        pytest.param(
            {
                "gauges": {
                    "running": 0,
                    "waiting": 0,
                    "oldest_waiting_seconds": 0.0,
                    "kv_blocks_used": 513,
                    "kv_blocks_total": 512,
                }
            },
            "kv_blocks_used is 513, more than kv_blocks_total 512",
            id="more-blocks-than-there-are",
        ),
    ],
)
def test_a_sample_that_contradicts_itself_is_refused_by_name(changes: dict[str, Any], want: str) -> None:
    with pytest.raises(ScrapeError, match=want):
        parse_replica_sample(encode(replica_body(**changes)), taken_at=0.0)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"version": "1"}'])
def test_what_is_no_sample_at_all_is_a_scrape_error(body: bytes) -> None:
    with pytest.raises(ScrapeError):
        parse_replica_sample(body, taken_at=0.0)


def test_what_a_gateway_counted_of_each_revision_is_read_with_or_without_the_clients_that_left() -> None:
    earlier, now = {"requests": 9, "errors": 2}, {"requests": 9, "errors": 2, "client_aborted": 3}
    body = gateway_body(revisions={"demo-old": earlier, "demo-new": now})
    assert parse_gateway_sample(encode(body), taken_at=5.0).revisions == {
        "demo-old": RevisionTotals(9, 2),
        "demo-new": RevisionTotals(9, 2, 3),
    }


def test_a_gateways_sample_is_read_and_a_replicas_is_not_mistaken_for_one() -> None:
    sample = parse_gateway_sample(encode(gateway_body()), taken_at=5.0)
    assert (sample.waiting, sample.oldest_waiting_seconds, sample.in_flight) == (4, 1.5, 6)
    with pytest.raises(ScrapeError):
        parse_gateway_sample(encode(replica_body()), taken_at=5.0)


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    """Start a server whose every path is answered by one handler; returns its base URL."""
    runners = []

    async def start(handler: Handler) -> str:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application, shutdown_timeout=0)
        await runner.setup()
        runners.append(runner)
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


def replica(name: str, address: str, phase: ReplicaPhase = "ready") -> Replica:
    return Replica(name, "1a2b", phase, address, created_at=0.0)


async def test_a_pass_samples_everyone_at_once_and_names_who_failed(
    serve: Any, key: Any, admin_keys: AdminKeys, free_port: int
) -> None:
    async def good(request: web.Request) -> web.Response:
        assert request.path == "/admin/sample"
        assert request.headers["Authorization"].startswith("Bearer ey")
        return web.Response(body=encode(replica_body()))

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silenced.append(writer)

    async def refusing(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "token has expired"}}, status=401)

    async def endless(_: web.Request) -> web.Response:
        return web.Response(body=b" " * 100_000)

    async def gateway(_: web.Request) -> web.Response:
        return web.Response(body=encode(gateway_body()))

    silenced: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    slow = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    gateway_url = await serve(gateway)
    observed = Observed(
        replicas=(
            replica("good", await serve(good)),
            replica("silent-1", slow),
            replica("silent-2", slow),
            replica("refusing", await serve(refusing)),
            replica("endless", await serve(endless)),
            replica("gone", f"http://127.0.0.1:{free_port}"),
            replica("leaving", await serve(good), "draining"),
            replica("left", f"http://127.0.0.1:{free_port}", "draining"),
            replica("starting", slow, "starting"),
        ),
        gateway=Gateway(ready=True, addresses=(gateway_url,)),
    )
    async with Scraper(admin_keys, time.time, timeout_seconds=0.5) as scraper:
        started_at = time.monotonic()
        sample = await scraper.sample(key, observed)
        assert time.monotonic() - started_at < 5
    assert {name for name, one in sample.replicas.items() if one is not None} == {"good", "leaving"}
    assert set(sample.replicas) == {
        "good",
        "silent-1",
        "silent-2",
        "refusing",
        "endless",
        "gone",
        "leaving",
    }
    assert sample.errors["silent-1"].endswith("no answer within 0.5 s")
    assert "answered 401" in sample.errors["refusing"]
    assert "token has expired" in sample.errors["refusing"]
    assert "more than 65536 bytes" in sample.errors["endless"]
    assert str(free_port) in sample.errors["gone"]
    assert set(sample.errors) == {"silent-1", "silent-2", "refusing", "endless", "gone"}
    measured = sample.gateways[gateway_url]
    assert measured is not None
    assert measured.waiting == 4
    assert len(silenced) == 2
    server.close()
    for writer in silenced:
        writer.close()


async def test_patching_limits_sends_the_body_and_passes_on_the_replicas_refusal(
    serve: Any, key: Any, admin_keys: AdminKeys
) -> None:
    received = []

    async def handler(request: web.Request) -> web.Response:
        received.append((request.method, request.path, await request.json()))
        if len(received) > 1:
            return web.json_response({"error": {"message": "max_num_seqs is 99"}}, status=422)
        return web.json_response({})

    url = await serve(handler)
    async with Scraper(admin_keys, time.time) as scraper:
        await scraper.patch_limits(key, url, {"max_num_seqs": 4, "ttft_milliseconds": None})
        with pytest.raises(ScrapeError, match=r"answered 422.*max_num_seqs is 99"):
            await scraper.patch_limits(key, url, {"max_num_seqs": 99})
    assert received[0] == ("PATCH", "/admin/limits", {"max_num_seqs": 4, "ttft_milliseconds": None})


async def test_limits_are_patched_only_while_this_operator_leads(
    serve: Any, key: Any, admin_keys: AdminKeys
) -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({})

    leads = [True, False]
    async with Scraper(admin_keys, time.time, may_write=lambda: leads.pop(0)) as scraper:
        url = await serve(handler)
        await scraper.patch_limits(key, url, {"max_num_seqs": 4})
        with pytest.raises(NotLeadingError, match="does not hold the Lease"):
            await scraper.patch_limits(key, url, {"max_num_seqs": 5})
    assert asked == ["/admin/limits"]


METRICS = (
    b"# HELP headway_start_seconds What the start took.\n"
    b"# TYPE headway_start_seconds gauge\n"
    b'headway_start_seconds{stage="imports"} 2.25\n'
    b'headway_start_seconds{stage="read"} 6.0\n'
    b"# TYPE headway_uptime_seconds gauge\n"
    b"headway_uptime_seconds 12.0\n"
)


async def test_the_stages_of_a_start_are_asked_for_once_and_without_an_answer_not_for_ever(
    serve: Any, key: Any, admin_keys: AdminKeys, free_port: int
) -> None:
    asked: list[str] = []

    async def told(request: web.Request) -> web.Response:
        if request.path == "/metrics":
            assert "Authorization" not in request.headers
            asked.append("told")
            return web.Response(body=METRICS)
        return web.Response(body=encode(replica_body()))

    async def untold(request: web.Request) -> web.Response:
        asked.extend(["untold"] if request.path == "/metrics" else [])
        return web.Response(status=404)

    start = Start(1.0, 2.0, 0.0, 20.0)
    replicas = (
        replace(replica("told", await serve(told)), start=start),
        replace(replica("untold", await serve(untold)), start=start),
        replica("restarted", f"http://127.0.0.1:{free_port}"),
    )
    observed = Observed(replicas=replicas)
    async with Scraper(admin_keys, time.time, timeout_seconds=0.5) as scraper:
        sample = await scraper.sample(key, observed)
        assert sample.start_stages == {"told": {"imports": 2.25, "read": 6.0}}
        for _ in range(MAX_START_QUESTIONS + 2):
            sample = await scraper.sample(key, observed)
        assert sample.start_stages == {"told": {"imports": 2.25, "read": 6.0}, "untold": {}}
        assert asked.count("told") == 1
        assert asked.count("untold") == MAX_START_QUESTIONS
        assert (await scraper.sample(key, Observed())).start_stages == {}
        scraper.forget(key)
        assert (await scraper.sample(key, observed)).start_stages == {"told": {"imports": 2.25, "read": 6.0}}


@pytest.mark.parametrize("page", [b"headway_start_seconds{stage=\n", b"headway_start_seconds 3.0\n"])
def test_a_page_that_is_none_is_a_scrape_error(page: bytes) -> None:
    assert parse_start_stages(METRICS) == {"imports": 2.25, "read": 6.0}
    assert parse_start_stages(b"") == {}
    with pytest.raises(ScrapeError, match="headway_start_seconds"):
        parse_start_stages(page)
