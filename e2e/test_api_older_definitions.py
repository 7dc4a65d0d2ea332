"""A real API server whose definition is older than the operator: the status is written all the same."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from e2e.conftest import CRD_PATH, eventually
from headway_operator.cluster.kubernetes_api import KubernetesApi
from headway_operator.passes import Outcome
from headway_operator.state import ServiceKey

DEFINITION = f"{CRD_PATH}/inferenceservices.serving.headway.dev"
# Not declared by a definition of before they came.
NEWER = ("lastDecision", "url")


@pytest.fixture
async def older_definition(api: KubernetesApi) -> AsyncIterator[None]:
    """Without those fields of the status, for the time of a test."""
    whole = await api._call("GET", DEFINITION)
    assert whole is not None
    [version] = whole["spec"]["versions"]
    declared: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    taken = {name: declared.pop(name) for name in NEWER}
    await api._call("PUT", DEFINITION, body=whole)
    yield
    whole = await api._call("GET", DEFINITION)
    assert whole is not None
    whole["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"] |= taken
    await api._call("PUT", DEFINITION, body=whole)


async def test_a_status_goes_without_what_an_older_definition_does_not_declare(
    api: KubernetesApi,
    key: ServiceKey,
    older_definition: None,
    take_pass: Callable[[], Awaitable[Outcome]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await asyncio.sleep(2.0)  # the API server takes a definition up a moment after it was written

    async def is_told() -> bool:
        await take_pass()
        found = await api.get("InferenceService", key.namespace, key.name)
        assert found is not None
        return "does not declare" in caplog.text and "conditions" in (found.get("status") or {})

    with caplog.at_level(logging.WARNING):
        await eventually(is_told)
    found = await api.get("InferenceService", key.namespace, key.name)
    assert found is not None
    assert not set(NEWER) & set(found["status"])
    outcome = await take_pass()
    assert outcome.problems == []
    assert not set(NEWER) & set(outcome.status), "what is compared with the last status is without them, too"
