"""The whole path on a real cluster, in the order of a service's life: install, serve, scale, survive, vanish.

The tests share one installation and one service and build on each other.
"""

import contextlib
import json
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from openai import OpenAI

from e2e.conftest import OPERATOR_PODS
from e2e.installation import CHART, RELEASE, SYSTEM_NAMESPACE, WHERE
from e2e.kubernetes import CallFailedError, Kubernetes, Object, eventually
from e2e.load import Load, Outcome, ttft_milliseconds
from e2e.observed_service import (
    CHILD_KINDS,
    MAX_NUM_SEQS,
    MAX_REPLICAS,
    NAME,
    NAMESPACE,
    SERVICE_LABEL,
    TTFT_MILLISECONDS,
    condition,
    finished_requests,
    manifest,
    runtime_pods,
    status,
    workloads,
)

OPERATOR_KEY_SECRET = "headway-admin-key"
PROMPTS = ["Count from 1 to 40.", "Tell me a story.", "Count from 20 to 60.", "Count from 5 to 50."]
USERS = MAX_REPLICAS * MAX_NUM_SEQS  # as many as all replicas can run at once: one fewer makes requests wait
JUDGED_SECONDS = 15.0

pytestmark = pytest.mark.timeout(900)


def test_chart_installs_an_operator_that_meets_the_restricted_standard(installed: Kubernetes) -> None:
    deployment = installed.get("deployment", RELEASE, SYSTEM_NAMESPACE)
    assert deployment["status"]["availableReplicas"] == 1
    kinds = installed.kubectl("api-resources", "--categories=headway", "--output=name")
    assert sorted(kinds.split()) == [
        "inferenceservices.serving.headway.dev",
        "modelcaches.serving.headway.dev",
    ]


@pytest.mark.parametrize(
    ("change", "want"),
    [
        ({"slo": None}, "an autoscaled service needs a latency target"),
        ({"scaling": {"minReplicas": 3, "maxReplicas": 2}}, "minReplicas must not exceed maxReplicas"),
        ({"modle": {}}, r'unknown field "(spec\.)?modle"'),
    ],
    ids=["no target", "crossed bounds", "misspelt field"],
)
def test_invalid_manifest_is_refused_by_the_api_server(
    installed: Kubernetes, change: Object, want: str
) -> None:
    invalid = manifest(installed)
    invalid["metadata"]["name"] = "invalid"
    invalid["spec"] = {key: value for key, value in (invalid["spec"] | change).items() if value is not None}
    with pytest.raises(CallFailedError, match=want):
        installed.apply(invalid)
    assert installed.list("inferenceservices", NAMESPACE) == []


async def test_manifest_becomes_a_ready_service(installed: Kubernetes) -> None:
    installed.apply(manifest(installed))
    await eventually("the service is Ready", 120, lambda: condition(installed, "Ready").startswith("True"))
    [pod] = runtime_pods(installed)
    assert {entry["type"]: entry["status"] for entry in pod["status"]["conditions"]}["Ready"] == "True"
    table = installed.kubectl("get", "hisvc", NAME, f"--namespace={NAMESPACE}")
    print(table)
    assert "1/1" in table


def may(kubernetes: Kubernetes, account: str, verb: str, what: str, where: str) -> bool:
    """Whether the API server lets a ServiceAccount do it."""
    who = f"--as=system:serviceaccount:{account}"
    try:
        return kubernetes.kubectl("auth", "can-i", verb, what, where, who).strip() == "yes"
    except CallFailedError as refusal:
        if "no" not in str(refusal).split():
            raise
        return False


def test_accounts_may_read_no_secrets_and_replicas_have_no_token(installed: Kubernetes) -> None:
    operator, gateway = f"{SYSTEM_NAMESPACE}:{RELEASE}", f"{NAMESPACE}:{NAME}-gateway"
    own, everywhere = f"--namespace={SYSTEM_NAMESPACE}", "--all-namespaces"
    assert may(installed, operator, "get", f"secret/{OPERATOR_KEY_SECRET}", own)
    for account in (operator, gateway, f"{NAMESPACE}:default"):
        for verb in ("list", "watch", "delete", "update"):
            assert not may(installed, account, verb, "secrets", own), (account, verb)
        for verb in ("get", "list", "create"):
            assert not may(installed, account, verb, "secrets", everywhere), (account, verb)
        for what in ("pods", "pods/exec", "clusterroles"):
            assert not may(installed, account, "create", what, everywhere), (account, what)
    assert may(installed, gateway, "list", "endpointslices", f"--namespace={NAMESPACE}")
    assert not may(installed, gateway, "list", "endpointslices", everywhere)
    [pod] = runtime_pods(installed)
    assert pod["spec"]["automountServiceAccountToken"] is False
    mounts = [mount["mountPath"] for one in pod["spec"]["containers"] for mount in one["volumeMounts"]]
    assert not [path for path in mounts if "serviceaccount" in path]


def test_openai_client_gets_tokens_through_the_service(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    question: Any = [{"role": "user", "content": "What is 27 + 15?"}]
    answer = client.chat.completions.create(model=NAME, messages=question, temperature=0, max_tokens=32)
    text = answer.choices[0].message.content
    print(text)
    assert text
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 1
    stream = client.chat.completions.create(
        model=NAME, messages=question, temperature=0, max_tokens=32, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 1


@pytest.fixture
async def stack() -> AsyncIterator[contextlib.AsyncExitStack]:
    """Ends what a test began, also when it fails."""
    async with contextlib.AsyncExitStack() as found:
        yield found


async def test_promise_is_broken_repaired_and_kept_and_no_request_fails(
    installed: Kubernetes, url: str, stack: contextlib.AsyncExitStack
) -> None:
    """Load breaks the target; limits and replicas rise; the operator is replaced; the load ends; they go."""
    start_limit = status(installed)["limits"]["maxNumSeqs"]
    # Answers so long that those who wait for a place miss the target on a fast machine, too.
    load = Load(url, NAME, PROMPTS, max_tokens=600, ignore_eos=True)
    # So little that one replica on a slow machine is enough for it.
    trickle = Load(url, NAME, PROMPTS, max_tokens=16, pause_seconds=0.5)
    started_at = time.monotonic()

    def progress(what: str) -> None:
        print(f"{time.monotonic() - started_at:6.1f} s  {what}", flush=True)

    stack.push_async_callback(load.stop)
    stack.push_async_callback(trickle.stop)
    await load.start(USERS)
    await eventually(
        "the batch limits rise", 120, lambda: status(installed)["limits"]["maxNumSeqs"] > start_limit
    )
    progress(f"maxNumSeqs rose from {start_limit} to {status(installed)['limits']['maxNumSeqs']}")
    await eventually(
        "replicas are added", 240, lambda: status(installed).get("readyReplicas") == MAX_REPLICAS
    )
    progress(f"{MAX_REPLICAS} replicas ready")
    await eventually("every replica serves", 60, lambda: all_serve(installed))
    await assert_operator_restart_changes_nothing(installed)
    progress("the operator was replaced")
    kept = await eventually("clients see the promise kept", 120, lambda: kept_p95(load.outcomes))
    progress(f"P95 TTFT {kept:.0f} ms for clients, target {TTFT_MILLISECONDS} ms")
    await trickle.start(1)
    await load.stop()
    # Replicas are sized for answers as they were in the last five minutes, of which there were long ones.
    await eventually("replicas are removed", 480, lambda: len(runtime_pods(installed)) == 1)
    progress("1 replica left, still serving")
    await trickle.stop()

    outcomes = load.outcomes + trickle.outcomes
    broken = ttft_milliseconds(outcomes, started_at, started_at + JUDGED_SECONDS)
    progress(f"{len(outcomes)} requests; P95 TTFT in ms: {broken} at first, {kept} at last")
    assert [outcome.error for outcome in outcomes if outcome.error] == []
    assert len(outcomes) == load.sent + trickle.sent
    assert broken is not None
    assert broken > TTFT_MILLISECONDS, "the load did not break the target"
    table = installed.kubectl(
        "get", "events", f"--namespace={NAMESPACE}", f"--field-selector=involvedObject.name={NAME}"
    )
    print(table)
    assert {"RaisedBatchLimit", "AddedReplicas", "RemovedReplica"} <= set(table.split())


def kept_p95(outcomes: list[Outcome]) -> float | None:
    """The P95 TTFT of requests sent lately, once it is within the target; those just sent have none yet."""
    now = time.monotonic()
    found = ttft_milliseconds(outcomes, now - 5 - JUDGED_SECONDS, now - 5)
    return found if found is not None and found <= TTFT_MILLISECONDS else None


def all_serve(kubernetes: Kubernetes) -> bool:
    pods = runtime_pods(kubernetes)
    return len(pods) == MAX_REPLICAS and all(finished_requests(kubernetes, pod) > 0 for pod in pods)


async def assert_operator_restart_changes_nothing(kubernetes: Kubernetes) -> None:
    """Replace the operator's pod, wait until the new one has written a status, compare what it manages."""
    before = workloads(kubernetes)
    [old] = kubernetes.list("pods", SYSTEM_NAMESPACE, OPERATOR_PODS)
    kubernetes.kubectl("delete", "pod", old["metadata"]["name"], WHERE)
    replaced_at = status(kubernetes)["updatedAt"]
    await eventually(
        "the new operator writes a status", 120, lambda: status(kubernetes)["updatedAt"] > replaced_at
    )
    [new] = kubernetes.list("pods", SYSTEM_NAMESPACE, OPERATOR_PODS)
    assert new["metadata"]["uid"] != old["metadata"]["uid"]
    assert workloads(kubernetes) == before


def assert_was_refused_nothing(kubernetes: Kubernetes) -> None:
    """The chart's rights suffice for everything that the operator has done so far."""
    log = kubernetes.kubectl("logs", WHERE, f"--selector={OPERATOR_PODS}", "--tail=-1")
    assert [line for line in log.splitlines() if "forbidden" in line.lower()] == []


async def test_scale_subresource_fixes_the_replicas(installed: Kubernetes) -> None:
    where = f"--namespace={NAMESPACE}"
    installed.kubectl("scale", "inferenceservice", NAME, "--replicas=2", where)
    await eventually("two replicas are ready", 120, lambda: status(installed).get("readyReplicas") == 2)
    installed.kubectl("scale", "inferenceservice", NAME, "--replicas=1", where)
    await eventually("one replica is left", 120, lambda: len(runtime_pods(installed)) == 1)


async def test_new_target_restarts_no_pod(installed: Kubernetes) -> None:
    before = workloads(installed)
    await assert_target_is_judged(installed, 750)
    assert workloads(installed) == before


async def test_upgrade_to_rights_in_one_namespace_restarts_no_pod(installed: Kubernetes) -> None:
    assert_was_refused_nothing(installed)
    before = workloads(installed)
    watched = f"--set=watchNamespace={NAMESPACE}"
    installed.helm("upgrade", RELEASE, str(CHART), WHERE, "--reuse-values", watched, "--wait")
    await assert_target_is_judged(installed, 1000)
    assert workloads(installed) == before


async def test_a_template_that_leaves_the_restricted_standard_is_refused_unless_allowed(
    installed: Kubernetes, client: OpenAI
) -> None:
    """The replicas' template mounts folders of the host, which the administrator has allowed so far."""
    if not installed.has_pod_network:
        pytest.skip("replicas mount nothing from the host here")
    before = workloads(installed)
    for is_allowed in (False, True):
        setting = f"--set=allowUnrestrictedTemplates={str(is_allowed).lower()}"
        installed.helm("upgrade", RELEASE, str(CHART), WHERE, "--reuse-values", setting, "--wait")
        await eventually("that shows", 120, partial(is_refused, installed, want=not is_allowed))
        # What serves goes on.
        assert workloads(installed) == before
        question: Any = [{"role": "user", "content": "What is 27 + 15?"}]
        assert client.chat.completions.create(model=NAME, messages=question, max_tokens=8).choices


def is_refused(kubernetes: Kubernetes, *, want: bool) -> bool:
    reasons = {entry["reason"]: entry["message"] for entry in status(kubernetes)["conditions"]}
    message = reasons.get("TemplateNotAllowed", "")
    assert not message or "hostPath" in message, message
    return bool(message) == want


async def assert_target_is_judged(kubernetes: Kubernetes, milliseconds: int) -> None:
    patch = json.dumps({"spec": {"slo": {"ttftMilliseconds": milliseconds}}})
    where = f"--namespace={NAMESPACE}"
    kubernetes.kubectl("patch", "inferenceservice", NAME, where, "--type=merge", f"--patch={patch}")
    await eventually(
        "the new target is judged",
        60,
        lambda: status(kubernetes)["slo"]["ttftMilliseconds"].get("target") == milliseconds,
    )


async def test_deleted_service_leaves_nothing_behind(installed: Kubernetes) -> None:
    assert installed.list(CHILD_KINDS, NAMESPACE, SERVICE_LABEL)
    installed.kubectl("delete", "inferenceservice", NAME, f"--namespace={NAMESPACE}", "--timeout=30s")
    await eventually(
        "its children are gone", 120, lambda: not installed.list(CHILD_KINDS, NAMESPACE, SERVICE_LABEL)
    )
    left = [
        f"{item['kind']}/{item['metadata']['name']}"
        for item in installed.list(CHILD_KINDS, NAMESPACE)
        if item["metadata"]["name"].startswith(NAME)
    ]
    assert left == []
    assert_was_refused_nothing(installed)
