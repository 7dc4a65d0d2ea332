"""Answers while no replica is ready, where none is needed, so that a service that sleeps sleeps on.

A replica's words, for what it would say whatever its model: of paths and methods that there are not, and to
a browser that asks which requests a page may send (CORS). And what one said before, where it is known
(`last_answers.py`). All else waits for a replica, and brings one: what a client has not been told yet, too.
"""

import json

from aiohttp import web

from headway_gateway import paths, replies
from headway_gateway.last_answers import MODELS, LastAnswer, LastAnswers

# As a replica has it without flags, which is how the operator starts each: pages of every origin may.
_ALLOWED_METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT, QUERY"
_PREFLIGHT_SECONDS = 600
_PREFLIGHT_VARIES = (
    "Origin, Access-Control-Request-Method, Access-Control-Request-Headers, "
    "Access-Control-Request-Private-Network"
)


def answer_without_replica(request: web.BaseRequest, last_answers: LastAnswers) -> web.Response | None:
    """The answer to a request for a path of the replicas; None where it needs one."""
    if _is_preflight(request):
        return _preflight(request)
    response = _of_path(request, last_answers)
    if response is not None:
        replies.let_pages_read(response, request)
    return response


def _of_path(request: web.BaseRequest, last_answers: LastAnswers) -> web.Response | None:
    path = request.path
    methods = paths.methods_of(path)
    if not methods:
        return paths.no_such_path(path)
    method = "GET" if request.method == "HEAD" else request.method
    if method not in methods:
        return paths.no_such_method(request, *methods)
    if (kept := paths.kept_response_of(path)) is not None:
        return paths.no_such_response(kept)
    if method != "GET":
        return None
    if not path.startswith(f"{MODELS}/"):
        answer = last_answers.of(path, request)
        return None if answer is None else _again(answer)
    answer = last_answers.of(MODELS, request)
    return None if answer is None else _of_model(path.removeprefix(f"{MODELS}/"), answer)


def _of_model(name: str, answer: LastAnswer) -> web.Response | None:
    if answer.status != 200:
        return _again(answer)
    models = answer.models()
    if not models:
        return None
    # An adapter, which is listed behind the models, comes first where both have the name.
    for entry in reversed(models):
        if entry.get("id") == name:
            return _again(LastAnswer(200, json.dumps(entry).encode(), answer.content_type))
    return paths.no_such_model(name, [str(one.get("id")) for one in models])


def _again(answer: LastAnswer) -> web.Response:
    headers = {"Content-Type": answer.content_type}
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def _is_preflight(request: web.BaseRequest) -> bool:
    told = request.headers
    return request.method == "OPTIONS" and "Origin" in told and "Access-Control-Request-Method" in told


def _preflight(request: web.BaseRequest) -> web.Response:
    headers = {
        "Vary": _PREFLIGHT_VARIES,
        "Access-Control-Allow-Origin": "*",
        "Access-Control-Allow-Methods": _ALLOWED_METHODS,
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        "Content-Type": "text/plain; charset=utf-8",
    }
    if (wanted := request.headers.get("Access-Control-Request-Headers")) is not None:
        headers["Access-Control-Allow-Headers"] = wanted
    if request.headers["Access-Control-Request-Method"] not in _ALLOWED_METHODS.split(", "):
        return web.Response(status=400, body=b"Disallowed CORS method", headers=headers)
    return web.Response(status=200, body=b"OK", headers=headers)
