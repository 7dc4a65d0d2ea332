"""The pod template of a runtime revision.

SLO targets and live limits are not in it: they reach a replica by PATCH, so that editing them never restarts
a pod. What is in it decides the revision's hash.
"""

import json
from typing import Any

from headway_operator import names
from headway_operator.manifests import kv_offload, model_source, pod
from headway_operator.manifests.operator_key import refuse_key
from headway_operator.manifests.placement import placement, with_gpus
from headway_operator.manifests.runtime_leader_worker_set import node_arguments
from headway_operator.manifests.user_template import REPLICAS, with_template
from headway_operator.spec import (
    InferenceServiceSpec,
    Lora,
    Service,
    Speculative,
    parse_quantity,
)
from headway_operator.state import Site

API_KEYS_VOLUME = "api-keys"
API_KEYS_FOLDER = "/etc/headway/api-keys"
SHARED_MEMORY_VOLUME = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
SHARED_MEMORY_MOUNT = {"name": "shared-memory", "mountPath": "/dev/shm"}
# A replica may load its model for half an hour before it counts as failed.
STARTUP_PERIOD_SECONDS = 1
STARTUP_FAILURE_THRESHOLD = 1800
# For two hours where it has to be fetched first: the one that is started then goes on with what has come.
FETCHING_FAILURE_THRESHOLD = 7200


def startup_seconds(*, is_fetching: bool) -> int:
    """How long a replica may take to start."""
    return STARTUP_PERIOD_SECONDS * _startup_failures(is_fetching=is_fetching)


def _startup_failures(*, is_fetching: bool) -> int:
    return FETCHING_FAILURE_THRESHOLD if is_fetching else STARTUP_FAILURE_THRESHOLD


def runtime_template(service: Service, site: Site, image: str) -> dict[str, Any]:
    """The pod template without its revision label, the user's template merged in. Raises SpecError."""
    spec = service.spec
    _refuse_operator_key(spec)
    labels = names.component_labels(service.name, names.RUNTIME_COMPONENT)
    ours = {
        "metadata": {"labels": labels},
        "spec": {
            **placement(service, site),
            **pod.image_pull_secrets(site),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod.POD_SECURITY,
            "terminationGracePeriodSeconds": spec.drain_timeout_seconds + pod.GRACE_MARGIN_SECONDS,
            "containers": [pod.with_image(_container(service, site), image)],
            "volumes": [
                *pod.volumes(service),
                *_api_key_volumes(spec),
                *model_source.volumes(spec),
                *kv_offload.volumes(spec),
                *([SHARED_MEMORY_VOLUME] if _shares_memory(spec, site) else []),
            ],
        },
    }
    return ours if spec.template is None else with_template(ours, spec.template, site, REPLICAS)


def _refuse_operator_key(spec: InferenceServiceSpec) -> None:
    if spec.auth is not None:
        refuse_key("spec.auth.apiKeysSecretRef.name", spec.auth.api_keys_secret_ref.name)
    if spec.model.credentials_secret_ref is not None:
        refuse_key("spec.model.credentialsSecretRef.name", spec.model.credentials_secret_ref.name)


def image_of(template: dict[str, Any]) -> str:
    """The image the runtime container ended up with."""
    containers = template["spec"]["containers"]
    return next(str(c.get("image", "")) for c in containers if c["name"] == names.RUNTIME_CONTAINER)


def _container(service: Service, site: Site) -> dict[str, Any]:
    spec = service.spec
    api_key_mounts = [{"name": API_KEYS_VOLUME, "mountPath": API_KEYS_FOLDER, "readOnly": True}]
    container: dict[str, Any] = {
        "name": names.RUNTIME_CONTAINER,
        "args": runtime_arguments(service, site),
        "ports": pod.ports(),
        "startupProbe": pod.probe(
            "/ready",
            period_seconds=STARTUP_PERIOD_SECONDS,
            timeout_seconds=5,
            failure_threshold=_startup_failures(is_fetching=model_source.has_to_be_fetched(spec)),
        ),
        "readinessProbe": pod.probe("/ready", period_seconds=2, timeout_seconds=5, failure_threshold=3),
        "livenessProbe": pod.probe("/health", period_seconds=10, timeout_seconds=5, failure_threshold=6),
        "terminationMessagePolicy": pod.TERMINATION_MESSAGE_POLICY,
        "securityContext": pod.CONTAINER_SECURITY,
        "volumeMounts": [
            *pod.volume_mounts(site),
            *(api_key_mounts if spec.auth else []),
            *model_source.volume_mounts(spec),
            *kv_offload.volume_mounts(spec),
            *([SHARED_MEMORY_MOUNT] if _shares_memory(spec, site) else []),
        ],
    }
    environment = model_source.environment(spec)
    if site.kind == "kubernetes":
        # Caches that libraries keep below the home folder go where writing is allowed.
        environment = [{"name": "HOME", "value": pod.TEMPORARY_PATH}, *environment]
    if environment:
        container["env"] = environment
    resources = with_gpus(spec.resources, spec, site)
    return container | ({"resources": resources} if resources else {})


def _shares_memory(spec: InferenceServiceSpec, site: Site) -> bool:
    """Processes of a pod exchange tensors through shared memory; containers have 64 MiB of it by default."""
    return site.kind == "kubernetes" and spec.tensor_parallel_size > 1


def runtime_arguments(service: Service, site: Site) -> list[str]:
    """The arguments of `headway serve`."""
    spec = service.spec
    seqs, tokens = spec.highest_limits
    initial_seqs, initial_tokens = spec.initial_limits
    arguments = ["serve", model_source.served_source(spec, spec.model.revised_source)]
    arguments += ["--host", pod.host(site), "--port", str(site.bind_port)]
    arguments += ["--served-model-name", spec.model.served_name or service.name]
    arguments += ["--dtype", spec.dtype, "--device", spec.device]
    if spec.quantization != "auto":
        arguments += ["--quantization", spec.quantization]
    if spec.weight_compression != "auto":
        arguments += ["--weight-compression", spec.weight_compression]
    if spec.model.max_model_len is not None:
        arguments += ["--max-model-len", str(spec.model.max_model_len)]
    arguments += ["--max-num-seqs", str(seqs), "--max-num-batched-tokens", str(tokens)]
    arguments += ["--initial-max-num-seqs", str(initial_seqs)]
    arguments += ["--initial-max-num-batched-tokens", str(initial_tokens)]
    if spec.tensor_parallel_size > 1:
        arguments += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.nodes_per_replica > 1:
        arguments += node_arguments(spec.nodes_per_replica)
    arguments += _memory_arguments(spec)
    if spec.speculative is not None:
        arguments += ["--speculative-config", _speculative_config(spec, spec.speculative)]
    if spec.lora is not None:
        arguments += _lora_arguments(spec, spec.lora)
    if spec.auth is not None:
        arguments += ["--api-key-file", f"{API_KEYS_FOLDER}/{spec.auth.api_keys_secret_ref.key}"]
    arguments += ["--drain-timeout-seconds", str(spec.drain_timeout_seconds)]
    return arguments + pod.admin_arguments(service, site)


def _memory_arguments(spec: InferenceServiceSpec) -> list[str]:
    """What the KV cache is, and what is done where it does not fit beside the weights."""
    arguments = [] if spec.kv_cache_dtype == "auto" else ["--kv-cache-dtype", spec.kv_cache_dtype]
    if spec.kv_cache_memory is not None:
        arguments += ["--kv-cache-memory-bytes", str(int(parse_quantity(spec.kv_cache_memory)))]
    if spec.memory_check != "Enforce":
        arguments += ["--memory-check", spec.memory_check.lower()]
    if not spec.prefix_caching:
        arguments.append("--no-enable-prefix-caching")
    return arguments + kv_offload.arguments(spec)


def _speculative_config(spec: InferenceServiceSpec, speculative: Speculative) -> str:
    """The flag's JSON, by the names that the engine and vLLM have for the fields."""
    config: dict[str, Any] = {"method": speculative.method}
    if speculative.draft is not None:
        config["model"] = model_source.served_source(spec, speculative.draft.source)
    config["num_speculative_tokens"] = speculative.num_speculative_tokens
    for name in ("prompt_lookup_max", "prompt_lookup_min"):
        value = getattr(speculative, name)
        if value is not None:
            config[name] = value
    if not speculative.adaptive:
        config["adaptive"] = False
    return json.dumps(config)


def _lora_arguments(spec: InferenceServiceSpec, lora: Lora) -> list[str]:
    """Adapters as JSON, which any name fits into."""
    arguments = ["--enable-lora"]
    for flag, value in (
        ("--max-loras", lora.max_loras),
        ("--max-cpu-loras", lora.max_cpu_loras),
        ("--max-lora-rank", lora.max_lora_rank),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    for adapter in lora.adapters:
        source = model_source.served_source(spec, adapter.source)
        arguments += ["--lora-modules", json.dumps({"name": adapter.name, "path": source})]
    return arguments


def _api_key_volumes(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    if spec.auth is None:
        return []
    reference = spec.auth.api_keys_secret_ref
    items = [{"key": reference.key, "path": reference.key}]
    return [{"name": API_KEYS_VOLUME, "secret": {"secretName": reference.name, "items": items}}]
