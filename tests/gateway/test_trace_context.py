"""A trace that a client began goes on behind the gateway."""

from multidict import CIMultiDict

from headway_gateway.headers import to_replica


def test_the_context_of_a_trace_reaches_the_replica_as_it_came() -> None:
    context = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "vendor=value",
        "Baggage": "user=5",
    }
    forwarded = to_replica(CIMultiDict(context, Connection="keep-alive"), request_id="r", peer="10.0.0.1")
    assert {name: forwarded[name] for name in context} == context
