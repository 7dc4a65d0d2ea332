"""What a replica says of requests that it did not accept: whether another one may be asked."""

from types import SimpleNamespace
from typing import Any

import pytest

from headway_runtime.errors import EngineDeadError
from headway_runtime.server.http_errors import HttpError, http_error_of
from headway_runtime.server.serving import Serving


def test_a_request_that_found_no_engine_may_be_sent_to_another_replica() -> None:
    dead: Any = SimpleNamespace(client=SimpleNamespace(is_alive=False))
    with pytest.raises(HttpError) as caught:
        Serving.require_engine(dead)
    for error in (caught.value, http_error_of(EngineDeadError("the engine process ended"))):
        assert (error.status, error.code, error.headers) == (503, "engine_dead", {"Retry-After": "1"})
