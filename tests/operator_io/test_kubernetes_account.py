import base64
import json
from pathlib import Path

import pytest

from headway_operator.cluster.kubernetes_account import owners


def token(payload: bytes) -> str:
    return ".".join(("header", base64.urlsafe_b64encode(payload).decode().rstrip("="), "signature"))


def test_the_account_of_the_token_owns_what_is_made(tmp_path: Path) -> None:
    claims = {"kubernetes.io": {"namespace": "system", "serviceaccount": {"name": "headway", "uid": "0-1"}}}
    file = tmp_path / "token"
    file.write_text(token(json.dumps(claims).encode()))
    assert owners(file) == [{"apiVersion": "v1", "kind": "ServiceAccount", "name": "headway", "uid": "0-1"}]


@pytest.mark.parametrize("content", ["", "one part", token(b"rubbish"), token(b"[]"), token(b'{"sub": "a"}')])
def test_where_there_is_no_such_token_nobody_owns_it(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    assert owners(file) == []
    file.write_text(content)
    assert owners(file) == []
