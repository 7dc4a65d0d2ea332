"""The operator's routes: the live limits, the SLO targets, and the sample that the controller reads."""

import json
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from headway_runtime.sampling_params import shown
from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.messages import EngineState, PatchRefused
from headway_runtime.server.serving import Serving, json_response

LIMIT_FIELDS = ("max_num_seqs", "max_num_batched_tokens", "num_speculative_tokens")
TARGET_FIELDS = ("ttft_milliseconds", "tpot_milliseconds", "e2e_milliseconds")
LONGEST_TARGET_MILLISECONDS = 3_600_000.0


def admin_routes(serving: Serving) -> APIRouter:
    """All of them want a token signed by the operator."""
    router = APIRouter(prefix="/admin", dependencies=[Depends(serving.require_operator)])

    @router.get("/limits")
    async def get_limits() -> Response:
        serving.require_engine()
        return json_response(_limits(await serving.client.state()))

    @router.patch("/limits")
    async def patch_limits(request: Request) -> Response:
        serving.require_engine()
        changes = check_changes(await serving.read_body(request))
        answer = await serving.client.patch(**changes)
        if isinstance(answer, PatchRefused):
            raise _out_of_range(answer.field, answer.value, answer.low, answer.high, answer.message)
        return json_response(_limits(answer))

    @router.get("/sample")
    async def get_sample() -> Response:
        serving.require_engine()
        body = await serving.client.sample(is_draining=serving.lifecycle.is_draining)
        return Response(body, media_type="application/json")

    return router


def cache_routes(serving: Serving) -> APIRouter:
    """vLLM's route, at vLLM's place."""
    router = APIRouter(dependencies=[Depends(serving.require_sole_user)])

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        serving.require_engine()
        await serving.client.reset_prefix_cache()
        return json_response({"status": "ok"})

    return router


def check_changes(raw: bytes) -> dict[str, Any]:
    """The fields of a PATCH, with types and the targets' range checked; the limits' range is the engine's."""
    try:
        changes = json.loads(raw)
    except (ValueError, RecursionError) as error:
        message = f"the body is not valid JSON ({error}); send a JSON object"
        raise HttpError(400, message, code="invalid_json") from error
    if not isinstance(changes, dict):
        message = f"the body is {shown(changes)}; send a JSON object with the fields to change"
        raise HttpError(400, message, code="invalid_type")
    for field, value in changes.items():
        if field in LIMIT_FIELDS:
            if isinstance(value, float) and value.is_integer():
                value = changes[field] = int(value)
            if not isinstance(value, int) or isinstance(value, bool) or abs(value) > 2**31:
                raise _invalid(field, value, "want an integer")
        elif field in TARGET_FIELDS:
            if value is None:
                continue
            # What JSON cannot say back is no value to be told of a range.
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not abs(value) < 2**63:
                raise _invalid(field, value, "want milliseconds, or null for no target")
            if not 0 < value <= LONGEST_TARGET_MILLISECONDS:
                most = LONGEST_TARGET_MILLISECONDS
                message = f"{field}={shown(value)} is outside (0, {most:g}]; choose a value inside that range"
                raise _out_of_range(field, value, 0, most, message)
            changes[field] = float(value)
        else:
            raise _invalid(field, value, f"known are {', '.join((*LIMIT_FIELDS, *TARGET_FIELDS))}")
    return changes


def _limits(state: EngineState) -> dict[str, object]:
    targets = state.metrics.targets
    return {
        "limits": state.limits,
        "envelope": {
            "max_num_seqs": [1, state.envelope.max_num_seqs],
            "max_num_batched_tokens": [1, state.envelope.max_num_batched_tokens],
            "num_speculative_tokens": [0, state.envelope.num_speculative_tokens],
        },
        "targets": {
            "ttft_milliseconds": targets.ttft_milliseconds,
            "tpot_milliseconds": targets.tpot_milliseconds,
            "e2e_milliseconds": targets.e2e_milliseconds,
        },
    }


def _invalid(field: str, value: object, remedy: str) -> HttpError:
    return HttpError(422, f"{field}={shown(value)} is not valid; {remedy}", param=field, code="invalid_value")


def _out_of_range(field: str, value: float, low: float, high: float, message: str) -> HttpError:
    return HttpError(
        422, message, param=field, code="out_of_range", more={"value": value, "range": [low, high]}
    )
