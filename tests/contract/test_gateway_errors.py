"""The gateway and the server say the same of the same thing, and the guide has every code of the gateway."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from starlette.requests import Request

from headway_gateway import paths
from headway_gateway.error_codes import GatewayCode
from headway_gateway.headers import WAITED
from headway_runtime.server import wrong_paths
from headway_runtime.server.error_codes import HttpCode

GUIDE = Path(__file__).parents[2] / "docs" / "api.md"
# What only a gateway can say.
OWN = {
    "body_memory_full",
    "invalid_routing",
    "of_one_replica",
    "replica_answer",
    "replica_died",
    "replica_timeout",
    "replicas_refused",
    "suspended",
    "waiting_queue_full",
    "waiting_timeout",
}


def asked(path: str, *, through_a_gateway: bool) -> Request:
    headers = [(WAITED.lower().encode(), b"0.1")] if through_a_gateway else []
    return Request(
        {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b"", "app": None}
    )


def test_the_guide_lists_every_code_of_the_gateway_and_no_other() -> None:
    text = GUIDE.read_text(encoding="utf-8").partition("## Errors of the gateway")[2].partition("\n## ")[0]
    listed = [code for line in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for code in line.split(", ")]
    assert sorted(one.strip("`") for one in listed) == sorted(get_args(GatewayCode))


def test_every_code_of_the_gateway_is_given_somewhere() -> None:
    folder = Path(paths.__file__).parent
    source = "".join(one.read_text() for one in folder.glob("*.py") if one.name != "error_codes.py")
    assert [code for code in get_args(GatewayCode) if f'"{code}"' not in source] == []


def test_what_is_not_the_gateways_alone_has_the_servers_code() -> None:
    of_the_server = {code for one in get_args(HttpCode) for code in (get_args(one) or (one,))}
    assert set(get_args(GatewayCode)) - of_the_server == OWN


def test_the_gateway_lists_the_paths_that_a_replica_lists_behind_it() -> None:
    assert sorted(paths.OFFERED) == sorted(wrong_paths.offered_paths(behind_a_gateway=True))
    assert set(paths.OF_ONE_REPLICA) == wrong_paths.OF_ONE_REPLICA
    assert set(wrong_paths.offered_paths(behind_a_gateway=False)) > wrong_paths.OF_ONE_REPLICA


@pytest.mark.parametrize("path", ["/chat/completions", "/healt", "/metrics/", "/v1", "/nothing/like/it"])
def test_both_say_the_same_of_a_path_that_is_not_there(path: str) -> None:
    of_a_replica = wrong_paths.no_such_path(asked(path, through_a_gateway=True)).response().body
    of_the_gateway = paths.no_such_path(path).body
    assert isinstance(of_the_gateway, bytes)
    assert json.loads(of_the_gateway) == json.loads(bytes(of_a_replica))


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/reset_prefix_cache"])
def test_behind_a_gateway_a_replica_offers_nothing_that_the_gateway_has_not(path: str) -> None:
    alone = str(wrong_paths.no_such_path(asked(path, through_a_gateway=False)))
    behind = str(wrong_paths.no_such_path(asked(path, through_a_gateway=True)))
    assert "/reset_prefix_cache" in alone.partition(";")[2]
    assert "/reset_prefix_cache" not in behind.partition(";")[2]
    assert "lora_adapter" not in behind
