"""From flags and a manifest to the simulated service, and from a manifest to flags of `headway plan`."""

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway_operator.errors import SpecError
from headway_operator.manifests.runtime_template import runtime_arguments
from headway_operator.names import API_VERSION, KIND
from headway_operator.spec import InferenceServiceSpec, Service, parse
from headway_operator.spec.batching import MaxNumBatchedTokens, MaxNumSeqs
from headway_operator.spec.fields import TARGET_MESSAGE
from headway_operator.state import Site
from headway_operator.yaml_file import read_documents
from headway_runtime.adapters.options import DEFAULT_MAX_LORAS
from headway_simulator.errors import OptionsError
from headway_simulator.flags import (
    DEFAULT_MAX_REPLICAS,
    DEFAULT_PERCENTILE,
    DEFAULT_SLO_FACTOR,
    LONGEST_TPOT_MILLISECONDS,
    LONGEST_TTFT_MILLISECONDS,
)
from headway_simulator.step_model import StepModel, idle_tpot_milliseconds, idle_ttft_milliseconds
from headway_simulator.trace import Trace, percentile_of

PROMPT_PERCENTILE = 99
# Where a flag's value stands in a manifest.
PLACES = {
    "ttft_milliseconds": ("slo", "ttftMilliseconds"),
    "tpot_milliseconds": ("slo", "tpotMilliseconds"),
    "percentile": ("slo", "percentile"),
    "min_replicas": ("scaling", "minReplicas"),
    "max_replicas": ("scaling", "maxReplicas"),
}
TARGETS = ("ttft_milliseconds", "tpot_milliseconds")
MOST_MILLISECONDS = (LONGEST_TTFT_MILLISECONDS, LONGEST_TPOT_MILLISECONDS)
# Flags of `headway serve` that a plan has, too: the most that the controller may set. Where they stand.
LIMITS = {
    "max_num_seqs": ("maxNumSeqs", MaxNumSeqs),
    "max_num_batched_tokens": ("maxNumBatchedTokens", MaxNumBatchedTokens),
}
TARGETS_REMEDY = "or give --slo ttft=500,tpot=50 or --slo-factor 3"
# What of a replica's flags a plan asks for. Limits of its batch are left to what fits.
PLANNED_FLAGS = (
    *("--dtype", "--quantization", "--weight-compression", "--max-model-len", "--max-num-batched-tokens"),
    *("--tensor-parallel-size", "--kv-cache-dtype", "--speculative-config", "--kv-offloading-size"),
    *("--max-loras", "--max-cpu-loras", "--max-lora-rank"),
)
PLANNED_SWITCHES = ("--enable-lora",)
_ANYWHERE = Site("kubernetes", "", "", "", (), 0)


def service_of(options: argparse.Namespace, trace: Trace, model: StepModel) -> Service:
    """That of `--service`, or one of the spec's own defaults; what flags say goes before either.

    Targets that neither gives are made of idle latencies; those of a manifest stay as they are, unless
    `--slo-factor` asks for others. Raises OptionsError.
    """
    is_made = options.service is None
    manifest = _default_manifest() if is_made else _read_manifest(options.service)
    where = "the flags" if is_made else f"--service={str(options.service)!r}"
    given = {name: value for name in PLACES if (value := getattr(options, name)) is not None}
    if all(name in given for name in TARGETS) and options.slo_factor is not None:
        raise OptionsError(
            f"--slo-factor={options.slo_factor:g} makes targets, and both are given; leave one of the three "
            "out"
        )
    _check_bounds(options, is_made=is_made)
    _put_limits(manifest, options)
    if is_made or options.slo_factor is not None:
        factor = DEFAULT_SLO_FACTOR if options.slo_factor is None else options.slo_factor
        # Any targets do for what targets are made of.
        _put(manifest, {**dict.fromkeys(TARGETS, 1), **given})
        budget = _parsed(manifest, where).spec.batching.max_num_batched_tokens.max
        made = _idle_targets(trace, model, budget, factor)
        for name, most in zip(TARGETS, MOST_MILLISECONDS, strict=True):
            if name not in given and made[name] > most:
                raise OptionsError(
                    f"--slo-factor={factor:g} makes a target of {made[name]} ms, more than {most}; lower "
                    f"it, or give --{name.replace('_', '-')}"
                )
        given = {**made, **given}
    _put(manifest, given)
    service = _parsed(manifest, where)
    if service.spec.suspend:
        raise OptionsError(f"{where}: spec.suspend=true: nothing would be served; leave it out")
    return service


def _check_bounds(options: argparse.Namespace, *, is_made: bool) -> None:
    """What the spec would refuse by names of fields that nobody has written."""
    least, most = options.min_replicas, options.max_replicas
    if is_made and most is None:
        most = DEFAULT_MAX_REPLICAS
    if least is not None and most is not None and least > most:
        raise OptionsError(
            f"--min-replicas={least} is more than --max-replicas={most}; lower the one or raise the other"
        )


def _put(manifest: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Flags' values into their places; a group that is no mapping is left for the spec to refuse."""
    for name, value in values.items():
        group, field = PLACES[name]
        part = _group(manifest["spec"], group)
        if part is not None:
            part[field] = value


def _put_limits(manifest: dict[str, Any], options: argparse.Namespace) -> None:
    """A limit as `headway serve` has it: the highest, to which the others of its range come down."""
    for name, (field, limits) in LIMITS.items():
        value = getattr(options, name, None)
        batching = None if value is None else _group(manifest["spec"], "batching")
        part = None if batching is None else _group(batching, field)
        if part is None:
            continue
        part["max"] = value
        part.setdefault("min", limits.model_fields["min"].default)
        for other in ("min", "initial"):
            if isinstance(part.get(other), int):
                part[other] = min(part[other], value)


def _group(parent: dict[str, Any], name: str) -> dict[str, Any] | None:
    if parent.get(name) is None:
        parent[name] = {}
    found = parent[name]
    return found if isinstance(found, dict) else None


def max_model_len_of(path: Path | None) -> int | None:
    """What a manifest says of its replicas' context. Raises OptionsError."""
    if path is None:
        return None
    return _with_any_targets(path).spec.model.max_model_len


def planned_arguments(path: Path) -> list[str]:
    """MODEL and flags of `headway plan` for the replicas of a manifest. Raises OptionsError."""
    service = _with_any_targets(path)
    serving = runtime_arguments(service, _ANYWHERE)
    flags = [one for one in serving if one in PLANNED_SWITCHES]
    for flag, value in itertools.pairwise(serving):
        if flag in PLANNED_FLAGS:
            flags += [flag, value]
    return [service.spec.model.revised_source, *flags, *_room_for_adapters(service.spec)]


def _with_any_targets(path: Path) -> Service:
    """The service of a manifest for what hangs on no target, since flags may bring those."""
    manifest = _read_manifest(path)
    slo = _group(manifest["spec"], "slo")
    if slo is not None and all(slo.get(PLACES[name][1]) is None for name in TARGETS):
        _put(manifest, dict.fromkeys(TARGETS, 1))
    return _parsed(manifest, f"--service={str(path)!r}")


def _room_for_adapters(spec: InferenceServiceSpec) -> list[str]:
    """Of a manifest that lists more adapters than it says room for: a plan is told of no adapter by name."""
    lora = spec.lora
    if lora is None or lora.max_cpu_loras is not None:
        return []
    listed = len(lora.adapters)
    # With fewer the plan's own default is the same, and goes with a `--max-loras` that is given beside it.
    return ["--max-cpu-loras", str(listed)] if listed > (lora.max_loras or DEFAULT_MAX_LORAS) else []


def _default_manifest() -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "simulated"},
        "spec": {
            "model": {"source": "/simulated"},
            "device": "cuda",
            "slo": {"percentile": DEFAULT_PERCENTILE, "ttftMilliseconds": 1, "tpotMilliseconds": 1},
            "scaling": {"minReplicas": 1, "maxReplicas": DEFAULT_MAX_REPLICAS},
        },
    }


def _read_manifest(path: Path) -> dict[str, Any]:
    """Its one document, with a spec that fields can be put into."""
    try:
        documents = read_documents(path)
    except SpecError as error:
        raise OptionsError(f"--service={error}") from error
    if len(documents) != 1 or not isinstance(documents[0], dict):
        raise OptionsError(f"--service={str(path)!r} is no manifest; write one InferenceService")
    manifest: dict[str, Any] = documents[0]
    if not isinstance(manifest.get("spec"), dict):
        _parsed(manifest, f"--service={str(path)!r}")
    return manifest


def _idle_targets(trace: Trace, model: StepModel, budget: int, factor: float) -> dict[str, int]:
    """Multiples of what a request of the P99 prompt's length takes where no other is; a millisecond at least,
    since a small model on a large GPU takes less."""
    prompt = round(percentile_of((one.prompt_tokens for one in trace.arrivals), PROMPT_PERCENTILE))
    idle = (idle_ttft_milliseconds(model, prompt, budget), idle_tpot_milliseconds(model, prompt))
    return {name: max(1, round(factor * one)) for name, one in zip(TARGETS, idle, strict=True)}


def _parsed(manifest: dict[str, Any], where: str) -> Service:
    try:
        return parse(manifest)
    except SpecError as error:
        told = str(error)
        for name, (field, _) in LIMITS.items():
            told = told.replace(f"spec.batching.{field}.max:", f"--{name.replace('_', '-')}:")
        remedy = f", {TARGETS_REMEDY}" if TARGET_MESSAGE in told else ""
        raise OptionsError(f"{where}: {told}{remedy}") from error
