"""What answers say of how busy a replica is: gateways send new requests by it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

if TYPE_CHECKING:
    from tests.runtime_server.conftest import RunningServer, StartServer

HEADER = "x-headway-late-share"
PLACES_HEADER = "x-headway-max-num-seqs"


@pytest.fixture(scope="module")
def server(start_shared_server: StartServer) -> RunningServer:
    """20 ms per token, one request at a time; all that wait are late."""
    return start_shared_server(
        "--max-num-seqs=1",
        environment={"HEADWAY_FAKE_STEP_SECONDS": "0.02"},
    )


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_says_what_share_waits_too_late(server: RunningServer, *, is_streamed: bool) -> None:
    async def share(session: aiohttp.ClientSession, **fields: Any) -> str:
        body = {"model": "tiny", "prompt": [50], "stream": is_streamed, **fields}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            assert response.status == 200
            await response.read()
            return response.headers[HEADER]

    async with aiohttp.ClientSession() as session:
        assert await share(session, max_tokens=2) == "0.000"
        holder = asyncio.ensure_future(share(session, max_tokens=50))
        await asyncio.to_thread(server.sample_until, lambda sample: sample["gauges"]["running"] == 1)
        late = await asyncio.gather(*(share(session, max_tokens=20) for _ in range(4)))
        # Of a stream the head goes with its first token, of a whole answer with its last one.
        assert await holder == ("0.000" if is_streamed else "0.800")
    # The last one leaves nobody behind; before it one, two and three wait, beside the one that is answered.
    assert sorted(late) == ["0.000", "0.500", "0.667", "0.750"]


async def test_a_whole_answer_that_a_stop_string_ended_says_nothing(server: RunningServer) -> None:
    """The engine has ended it by then, and its first token's share is old."""
    async with aiohttp.ClientSession() as session:

        async def answer(**fields: Any) -> tuple[str | None, Any]:
            body = {"model": "tiny", "prompt": [50], **fields}
            async with session.post(f"{server.url}/v1/completions", json=body) as response:
                assert (HEADER in response.headers) == (PLACES_HEADER in response.headers)
                return response.headers.get(HEADER), (await response.json())["choices"][0]

        said, choice = await answer(max_tokens=2)
        assert (said, choice["finish_reason"]) == ("0.000", "length")
        said, choice = await answer(max_tokens=20, stop=choice["text"])
        assert (said, choice["finish_reason"]) == (None, "stop")


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_an_answer_says_how_many_the_replica_computes_at_once(
    start_shared_server: StartServer, *, is_streamed: bool
) -> None:
    server = start_shared_server("--max-num-seqs=8")

    async def said(session: aiohttp.ClientSession) -> str:
        body = {"model": "tiny", "prompt": [50], "stream": is_streamed, "max_tokens": 2}
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            await response.read()
            return response.headers[PLACES_HEADER]

    async with aiohttp.ClientSession() as session:
        for number in (8, 3):
            answer = await asyncio.to_thread(server.admin, "PATCH", "limits", {"max_num_seqs": number})
            assert answer.status_code == 200
            assert await said(session) == str(number)
