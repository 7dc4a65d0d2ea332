"""Levers together on a real cluster: quantized weights, an 8-bit KV cache and speculation, answers judged."""

from typing import Any

import pytest
from openai import OpenAI

from bundled_model.corpus import is_right, sample_tasks
from e2e.kubernetes import Kubernetes, eventually
from e2e.observed_service import NAME, NAMESPACE, condition, manifest, runtime_pods

LEVERS: dict[str, Any] = {
    "quantization": "int8",
    "kvCacheDtype": "fp8",
    "speculative": {"draft": {"source": "bundled://headway-tiny-draft"}, "adaptive": False},
}
# Of tasks that the plain model answers right nearly always.
KINDS = ("sum", "json", "count", "fact", "recall")
TASKS_PER_KIND = 8
LEAST_RIGHT = 34

pytestmark = pytest.mark.timeout(300)


async def test_a_service_with_several_levers_gets_ready(installed: Kubernetes) -> None:
    wanted = manifest(installed)
    wanted["spec"] = {key: value for key, value in wanted["spec"].items() if key not in ("slo", "scaling")}
    wanted["spec"] |= LEVERS | {
        "replicas": 1,
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": "2Gi"},
        },
    }
    installed.apply(wanted)
    await eventually("the service is Ready", 120, lambda: condition(installed, "Ready").startswith("True"))


def test_its_answers_are_right_and_all_levers_work(installed: Kubernetes, client: OpenAI) -> None:
    tasks = [task for kind in KINDS for task in sample_tasks(kind, 11, TASKS_PER_KIND)]
    wrong = []
    for task in tasks:
        messages: Any = task.prompt_messages
        answer = client.chat.completions.create(model=NAME, messages=messages, temperature=0, max_tokens=160)
        text = answer.choices[0].message.content or ""
        if not is_right(task, text):
            wrong.append((task.kind, task.answer, text))
    print(wrong)
    assert len(tasks) - len(wrong) >= LEAST_RIGHT, wrong
    [pod] = runtime_pods(installed)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}:8000/proxy/metrics"
    page = installed.raw(path)
    config = next(line for line in page.splitlines() if line.startswith("headway_config_info{"))
    assert 'quantization="int8"' in config
    assert 'kv_cache_dtype="fp8"' in config
    accepted = next(
        float(line.rsplit(" ", 1)[1])
        for line in page.splitlines()
        if line.startswith("headway_spec_decode_accepted_tokens_total")
    )
    assert accepted > 100
