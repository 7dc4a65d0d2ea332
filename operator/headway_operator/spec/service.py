"""A manifest becomes a frozen `Service`, or a `SpecError` that names the field, the value and the remedy."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

from pydantic import BaseModel, ValidationError

from headway_operator.errors import SpecError
from headway_operator.names import API_VERSION, KIND, MAX_NAME_LENGTH, ServiceKey
from headway_operator.spec.fields import InferenceServiceSpec
from headway_operator.spec.quantity import parse_quantity
from headway_operator.spec.resources import GPU_RESOURCE
from headway_operator.spec.scheduling import (
    GPU_COUNT_MESSAGE,
    GPU_DEVICE_MESSAGE,
    GPU_LABEL_MESSAGE,
    GPU_TWICE_MESSAGE,
)

Manifest = dict[str, Any]

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
_DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True, slots=True)
class Service:
    """One InferenceService as read: what is asked (`spec`) and what was last written about it (`status`)."""

    kind: ClassVar[str] = KIND
    key: ServiceKey
    uid: str
    generation: int
    spec: InferenceServiceSpec
    status: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Shorthand for `key.name`, from which every child's name is built."""
        return self.key.name


def key_of(manifest: Manifest) -> ServiceKey:
    """The name of the service in `manifest`; namespace `default` when none is written."""
    metadata = manifest.get("metadata") or {}
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str) or not name:
        raise SpecError("metadata.name", f"{name!r} is not a name; write metadata.name")
    return ServiceKey(metadata.get("namespace") or _DEFAULT_NAMESPACE, name)


def generation_of(manifest: Manifest) -> int:
    """metadata.generation; 1 for a manifest that no API server has numbered."""
    return int((manifest.get("metadata") or {}).get("generation") or 1)


def parse(manifest: Manifest) -> Service:
    """Read an InferenceService.

    Raises SpecError: reason `InvalidSpec` for what the schema refuses, `UnsupportedField` for what it accepts
    and the engine cannot do yet.
    """
    for field, want in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != want:
            raise SpecError(field, f"{manifest.get(field)!r} is not served here; write {want}")
    key = key_of(manifest)
    check_name(key)
    try:
        spec = InferenceServiceSpec.model_validate(manifest.get("spec") or {})
    except ValidationError as error:
        raise spec_error(error) from error
    _check_gpus(spec)
    _check_gpu(spec)
    _check_offload(spec)
    _check_adapter_names(key.name, spec)
    return Service(
        key=key,
        uid=str(manifest["metadata"].get("uid") or ""),
        generation=generation_of(manifest),
        spec=spec,
        status=manifest.get("status") or {},
    )


def check_name(key: ServiceKey) -> None:
    """SpecError for a name that children could not carry in their own."""
    if not re.fullmatch(NAME_PATTERN, key.name) or len(key.name) > MAX_NAME_LENGTH:
        raise SpecError(
            "metadata.name",
            f"{key.name!r} must be at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', "
            "starting with a letter and not ending with '-'",
        )


def spec_error(error: ValidationError, root: type[BaseModel] = InferenceServiceSpec) -> SpecError:
    """What pydantic says, in the words of this tree. root: of the spec that was read."""
    first, *others = error.errors(include_url=False)
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = f"unknown field; {_nearest(first['loc'], root)}remove it"
    elif first["type"] == "missing":
        message = "is required; write it"
    elif first["type"] != "value_error":
        message = f"{message}; got {first['input']!r}"
    more = f" (and {len(others)} more)" if others else ""
    return SpecError(f"spec{path}", message + more)


def _nearest(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    """A question after the field that the last name of `location` was meant to be, if one is near."""
    model: Any = root
    for part in location[:-1]:
        field = next((one for one in model.model_fields.values() if one.alias == part), None)
        inner = [] if field is None else [field.annotation, *get_args(field.annotation)]
        model = next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), None)
        if model is None:
            return ""
    known = [field.alias or name for name, field in model.model_fields.items()]
    near = difflib.get_close_matches(str(location[-1]), known, n=1)
    return f"did you mean {near[0]}? If not, " if near else ""


def _check_gpus(spec: InferenceServiceSpec) -> None:
    """Where GPUs are asked for, each process of a replica, or of its evaluation, must get one."""
    told = [("spec.resources", spec.resources)]
    if spec.quality is not None and spec.quality.resources is not None:
        told.append(("spec.quality.resources", spec.quality.resources))
    for field, resources in told:
        asked, wanted = resources.limits.get(GPU_RESOURCE), spec.processes_per_node
        if asked is not None and spec.device != "cpu" and parse_quantity(asked) < wanted:
            raise SpecError(
                f"{field}.limits[{GPU_RESOURCE}]",
                f"{asked!r} is less than {_processes(spec)}, and each process needs a GPU of its own; write "
                "as many, or leave it out",
            )


def _processes(spec: InferenceServiceSpec) -> str:
    told = f"spec.tensorParallelSize={spec.tensor_parallel_size}"
    return (
        f"{told} over spec.nodesPerReplica={spec.nodes_per_replica}" if spec.nodes_per_replica > 1 else told
    )


def _check_gpu(spec: InferenceServiceSpec) -> None:
    """The CRD's GPU_RULES, each with the field that is at fault."""
    gpu = spec.gpu
    if gpu is None:
        return
    if spec.device == "cpu":
        raise SpecError("spec.gpu", GPU_DEVICE_MESSAGE)
    if gpu.count is not None and gpu.count < spec.processes_per_node:
        raise SpecError("spec.gpu.count", f"{gpu.count} is less than {_processes(spec)}; {GPU_COUNT_MESSAGE}")
    for part in ("limits", "requests"):
        asked = getattr(spec.resources, part).get(gpu.resource_name)
        if asked is not None:
            raise SpecError(f"spec.resources.{part}[{gpu.resource_name}]", f"{asked!r}: {GPU_TWICE_MESSAGE}")
    selector = {} if spec.scheduling is None else spec.scheduling.node_selector
    if gpu.product is not None and gpu.product_label in selector:
        raise SpecError(
            f"spec.scheduling.nodeSelector[{gpu.product_label}]",
            f"{selector[gpu.product_label]!r}: {GPU_LABEL_MESSAGE}",
        )


def _check_offload(spec: InferenceServiceSpec) -> None:
    """Files of a disk are one process' alone."""
    if spec.tensor_parallel_size > 1 and spec.kv_offload is not None and spec.kv_offload.disk is not None:
        raise SpecError(
            "spec.kvOffload.disk",
            f"the {spec.tensor_parallel_size} processes of spec.tensorParallelSize could lose different "
            "files of one block; remove disk, or set tensorParallelSize to 1",
        )


def _check_adapter_names(service_name: str, spec: InferenceServiceSpec) -> None:
    """A request's `model` names the model or an adapter."""
    served_name = spec.model.served_name or service_name
    for index, adapter in enumerate(() if spec.lora is None else spec.lora.adapters):
        if adapter.name == served_name:
            raise SpecError(
                f"spec.lora.adapters[{index}].name",
                f"{adapter.name!r} is what the model itself is served as (spec.model.servedName, else "
                "metadata.name); choose another",
            )
