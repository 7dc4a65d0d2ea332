"""ModelCaches as their tests see them: what is asked for, what is there, what is done and said of it."""

import dataclasses
import json
from typing import Any

from headway_operator import model_cache, names
from headway_operator.manifests.fetch_job import CLAIM_MOUNT
from headway_operator.model_cache import Claim, Course, Fetch, ObservedCache
from headway_operator.model_cache.content import job_hash
from headway_operator.spec import ModelCache, parse_cache

NOW = 1_800_000_000.0
SMALLEST: dict[str, Any] = {"source": "s3://models/llama", "storage": {"size": "200Gi"}}
SHARED: dict[str, Any] = {
    "source": "hf://org/name",
    "revision": "v1",
    "credentialsSecretRef": {"name": "token"},
    "storage": {"claimName": "shelf"},
    "networkPolicy": {"enabled": False},
}
BOUND = Claim("llama-model-cache", "claim-1", "Bound")
RESULT = {
    "schema_version": 1,
    "folder": f"{CLAIM_MOUNT}/s3--models--1/snapshots/0a1b",
    "identity": "0a1b",
    "bytes": 140_000_000_000,
    "files": 30,
}


def manifest(spec: dict[str, Any] = SMALLEST, status: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "ModelCache",
        "metadata": {"name": "llama", "namespace": "team", "uid": "0000-uid", "generation": 2},
        "spec": spec,
        "status": status or {},
    }


def cache(
    spec: dict[str, Any] = SMALLEST, status: dict[str, Any] | None = None, **changes: Any
) -> ModelCache:
    return parse_cache(manifest({**spec, **changes}, status))


def fetch_of(one: ModelCache, phase: Any, **facts: Any) -> Fetch:
    name = names.fetch_job(one.name, job_hash(one, BOUND.uid))
    return Fetch(name, phase, NOW - 600, **facts)


def course(one: ModelCache, observed: ObservedCache, build: Any, now: float = NOW) -> Course:
    return model_cache.course_of(one, observed, build.site(), now)


def told(one: ModelCache, found: Course, observed: ObservedCache) -> dict[str, Any]:
    return model_cache.status(found, one.status, one.generation, NOW, observed, one)


def filled(spec: dict[str, Any], build: Any) -> dict[str, Any]:
    """The status of a cache that has fetched what this spec asks for."""
    one = cache(spec)
    claim = dataclasses.replace(BOUND, name=spec["storage"].get("claimName", BOUND.name))
    observed = ObservedCache(claim, (fetch_of(one, "done", output=json.dumps(RESULT), ended_at=NOW),))
    return told(one, course(one, observed, build), observed)
