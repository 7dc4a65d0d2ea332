"""What replicas last said of what does not change while none is there: which models there are, the API.

Kept by the credentials that a client sent, of which there is a digest here and no more: one client's answer
is never another's. But what a replica has told somebody without any credentials, everybody may know. It is
forgotten when the operator tells of other revisions, which may serve another model.
"""

import hashlib
import json
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from aiohttp import web

MODELS, DOCUMENT = "/v1/models", "/openapi.json"
MOST_ANSWERS = 64
LARGEST_BYTES = 256 * 1024
_STATUSES = (200, 401)


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """One whole answer."""

    status: int
    body: bytes
    content_type: str

    def models(self) -> list[dict[str, Any]]:
        """The entries, where it lists models."""
        try:
            told = json.loads(self.body)
        except ValueError:
            return []
        entries = told.get("data") if isinstance(told, dict) else None
        return [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []


class LastAnswers:
    """The latest of each path and credentials; those that were asked for longest ago go first."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(16)
        self._answers: OrderedDict[tuple[str, bytes], LastAnswer] = OrderedDict()

    @staticmethod
    def is_wanted(request: web.BaseRequest) -> bool:
        """Whether its answer is to be kept."""
        return request.method == "GET" and request.path in (MODELS, DOCUMENT)

    def note(self, request: web.BaseRequest, status: int, response: web.StreamResponse) -> None:
        """A replica has answered so."""
        if status not in _STATUSES or not isinstance(response, web.Response):
            return
        body = response.body
        if not isinstance(body, bytes) or len(body) > LARGEST_BYTES:
            return
        key = self._key(request.path, request)
        self._answers[key] = LastAnswer(status, body, response.headers.get("Content-Type", ""))
        self._answers.move_to_end(key)
        if len(self._answers) > MOST_ANSWERS:
            self._answers.popitem(last=False)

    def of(self, path: str, request: web.BaseRequest) -> LastAnswer | None:
        """What whoever sends this request was last told of `path`."""
        key = self._key(path, request)
        found = self._answers.get(key)
        if found is not None:
            self._answers.move_to_end(key)
            return found
        open_to_all = self._answers.get((path, b""))
        return open_to_all if open_to_all is not None and open_to_all.status == 200 else None

    def forget(self) -> None:
        """Another model may be served from now on."""
        self._answers.clear()

    def _key(self, path: str, request: web.BaseRequest) -> tuple[str, bytes]:
        given = request.headers.get("Authorization", "")
        if not given:
            return path, b""
        secret = given.encode("utf-8", "surrogateescape")
        return path, hashlib.blake2b(secret, key=self._salt).digest()
