"""The routes that load and unload LoRA adapters; paths, bodies and answers as vLLM has them."""

import asyncio

from fastapi import APIRouter, Depends, Request, Response

from headway_runtime.adapters.options import check_name, lora_module
from headway_runtime.errors import ConfigError, ModelFetchError, ModelLoadError
from headway_runtime.server.adapter_bodies import LoadAdapterBody, UnloadAdapterBody
from headway_runtime.server.body import parse_body
from headway_runtime.server.http_errors import HttpError
from headway_runtime.server.messages import AdapterAnswer
from headway_runtime.server.serving import Serving, body_of


def adapter_routes(serving: Serving) -> APIRouter:
    """Off but for the operator, unless the server was started otherwise."""
    router = APIRouter(dependencies=[Depends(serving.require_adapter_manager)])

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        serving.require_engine()
        body = parse_body(await body_of(serving, request), LoadAdapterBody)
        if body.lora_name in serving.options.served_model_names:
            raise _not_usable(f"lora_name={body.lora_name!r} is the model's own; choose another", "lora_name")
        download_dir = serving.options.download_dir
        try:
            check_name(body.lora_name)
        except ConfigError as error:
            raise _not_usable(str(error), "lora_name") from error
        try:
            module = await asyncio.to_thread(
                lora_module, body.lora_name, body.lora_path, download_dir=download_dir
            )
        except ModelLoadError as error:
            raise _not_usable(str(error), "lora_path") from error
        except (ConfigError, ModelFetchError) as error:
            raise HttpError(404, str(error), param="lora_path", code="adapter_not_found") from error
        _check(await serving.client.load_adapter(module, in_place=bool(body.load_inplace)), "lora_path")
        return Response(
            f"Success: LoRA adapter {body.lora_name!r} added successfully.", media_type="text/plain"
        )

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        serving.require_engine()
        body = parse_body(await body_of(serving, request), UnloadAdapterBody)
        _check(await serving.client.unload_adapter(body.lora_name), "lora_name")
        return Response(
            f"Success: LoRA adapter {body.lora_name!r} removed successfully.", media_type="text/plain"
        )

    return router


def _check(answer: AdapterAnswer, param: str) -> None:
    """HttpError if the engine has refused."""
    if answer.error is None:
        return
    if answer.is_unknown:
        raise HttpError(404, answer.error, param=param, code="adapter_not_found")
    raise _not_usable(answer.error, "lora_name" if answer.is_name else param)


def _not_usable(message: str, param: str) -> HttpError:
    return HttpError(400, message, param=param, code="adapter_not_usable")
