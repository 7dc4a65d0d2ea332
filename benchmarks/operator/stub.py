"""All pods' servers in one process: `/admin/sample` of replicas and gateways, `/metrics`, nothing else.

    python -m benchmarks.operator.stub PORT

Every address of 127.0.0.0/8 leads here, so that each pod has one of its own; who is asked is told by the Host
header. Speaks just enough HTTP for one client that keeps its connections, since what it costs is taken from
the machine that is measured. Gateways have an even last number, replicas an odd one. Requests are counted at
`/count`.
"""

import asyncio
import sys
import time

from benchmarks.operator.objects import LIMITS, TARGET_MILLISECONDS, is_gateway

COUNTERS = (
    *("aborted", "rejected", "errors", "ttft_missed", "tpot_met", "tpot_missed"),
    *("prompt_tokens", "cached_tokens", "generated_tokens", "preemptions", "steps"),
)
REQUESTS_PER_SECOND = 2.0
EDGE_OF_100_MILLISECONDS = 41
STARTED_AT = time.monotonic()
METRICS = b'headway_start_seconds{stage="read"} 6.0\nheadway_start_seconds{stage="graphs"} 4.0\n'


def replica_sample(host: str) -> bytes:
    """A replica with some traffic, well within its target."""
    uptime = time.monotonic() - STARTED_AT
    count = int(uptime * REQUESTS_PER_SECOND)
    zeros = ",".join(f'"{name}":0' for name in COUNTERS)
    empty = '{"first":0,"counts":[],"sum":0.0}'
    busy = (
        f'{{"first":{EDGE_OF_100_MILLISECONDS},"counts":[{count}],"sum":{count * 100.0}}}' if count else empty
    )
    limits = f'{{"max_num_seqs":{LIMITS[0]},"max_num_batched_tokens":{LIMITS[1]}}}'
    return (
        f'{{"version":1,"instance":"{host}","uptime_seconds":{uptime:.1f},"limits":{limits},'
        '"envelope":{"max_num_seqs":64,"max_num_batched_tokens":2048},'
        f'"targets":{{"epoch":1,"ttft_milliseconds":{TARGET_MILLISECONDS},"tpot_milliseconds":null}},'
        '"draining":false,"gauges":{"running":3,"waiting":0,"oldest_waiting_seconds":0.0,"kv_blocks_used":100,'
        f'"kv_blocks_total":1000}},"counters":{{{zeros},"received":{count},"finished":{count},"ttft_met":{count}}},'
        '"edges":{"first_milliseconds":1.0,"ratio":1.12,"count":105},'
        f'"histograms":{{"ttft":{busy},"queue":{empty},"prefill":{busy},"tpot":{empty},"step":{empty}}}}}'
    ).encode()


def gateway_sample(host: str) -> bytes:
    """A gateway with as many requests as its replicas."""
    count = int((time.monotonic() - STARTED_AT) * 2 * REQUESTS_PER_SECOND)
    return (
        f'{{"version":1,"kind":"gateway","instance":"{host}","uptime_seconds":1.0,'
        '"gauges":{"waiting":0,"oldest_waiting_seconds":0.0,"in_flight":0,"backends":2,"backends_ready":2},'
        f'"counters":{{"received":{count},"forwarded":{count},"finished":{count},"rejected":0,"retried":0,'
        '"failed":0,"client_aborted":0}}'
    ).encode()


class Stub(asyncio.Protocol):
    """One connection."""

    num_samples = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head, rest = self._received[:end].decode("latin-1"), self._received[end + 4 :]
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
            length = int(fields.get("content-length", "0"))
            if len(rest) < length:
                return
            self._received = rest[length:]
            self._answer(head.split(" ")[1], fields.get("host", "").partition(":")[0])

    def _answer(self, path: str, host: str) -> None:
        status, body = "200 OK", b"{}"
        if path == "/admin/sample":
            Stub.num_samples += 1
            body = gateway_sample(host) if is_gateway(host) else replica_sample(host)
        elif path == "/metrics":
            body = METRICS
        elif path == "/count":
            body = str(Stub.num_samples).encode()
        elif path != "/admin/limits":
            status = "404 Not Found"
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


async def serve(port: int) -> None:
    """Serve on every address until cancelled."""
    server = await asyncio.get_running_loop().create_server(Stub, "0.0.0.0", port, backlog=4096)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
