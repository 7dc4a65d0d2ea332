"""What a manifest sets and a process of one machine is not held to."""

from typing import Any

import pytest

from headway_operator.local_left_aside import IN_SPEC, left_aside, warning
from headway_operator.spec.fields import InferenceServiceSpec
from headway_operator.spec.safeguards import SAFEGUARDS


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"resources": {"limits": {"cpu": "1"}}}, [], id="threads-are-honoured"),
        pytest.param({"gateway": {"replicas": 1}, "rollout": {}, "waiting": {}}, [], id="as-it-is-here"),
        pytest.param(
            {
                "gateway": {
                    "resources": {"limits": {"cpu": 1, "memory": "1Gi"}},
                    "scheduling": {"priorityClassName": "front"},
                    "template": {
                        "spec": {"affinity": {}, "containers": [{"name": "gateway", "image": "own"}]}
                    },
                }
            },
            [
                "gateway.resources.limits.memory",
                "gateway.scheduling",
                "gateway.template.spec.affinity",
                "gateway.template.spec.containers[0].image",
            ],
            id="of-the-gateway",
        ),
        pytest.param(
            {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"cpu": 1, "memory": "2Gi"}}},
            ["resources.requests.cpu", "resources.requests.memory", "resources.limits.memory"],
            id="bounds",
        ),
        pytest.param(
            {"resources": {"limits": {"nvidia.com/gpu": 1}}, "gpu": {}},
            ["resources.limits.nvidia.com/gpu", "gpu"],
            id="gpus",
        ),
        pytest.param(
            {"scheduling": {"nodeSelector": {"a": "b"}}, "gateway": {"replicas": 2}, "monitoring": {}},
            ["scheduling", "monitoring", "gateway.replicas"],
            id="of-a-cluster",
        ),
        pytest.param(
            {"quality": {"resources": {"limits": {"memory": "1Gi"}}}},
            ["quality.resources.limits.memory"],
            id="a-judges-bounds",
        ),
        pytest.param(
            {
                "template": {
                    "spec": {
                        "tolerations": [{"operator": "Exists"}],
                        "containers": [
                            {"name": "runtime", "image": "a", "env": [], "lifecycle": {"preStop": {}}},
                        ],
                    }
                }
            },
            [
                "template.spec.tolerations",
                "template.spec.containers[0].image",
                "template.spec.containers[0].lifecycle.preStop",
            ],
            id="a-template",
        ),
    ],
)
def test_fields_without_effect_are_named(spec: dict[str, Any], want: list[str]) -> None:
    assert [field for field, _ in left_aside({"spec": spec})] == want


def test_they_are_told_in_one_line_with_the_reason() -> None:
    assert warning({"spec": {}}) == ""
    spec = {"resources": {"limits": {"memory": "1Gi"}}, "networkPolicy": {"enabled": True}, "monitoring": {}}
    assert warning({"spec": spec}) == (
        "set in the manifest, without effect on this machine: resources.limits.memory (a process is not held "
        "to it); networkPolicy, monitoring (for a cluster alone)"
    )


def test_the_names_are_fields_of_the_spec() -> None:
    aliases = {field.alias or name for name, field in InferenceServiceSpec.model_fields.items()}
    assert IN_SPEC.keys() <= aliases
    safeguards = {InferenceServiceSpec.model_fields[name].alias or name for name in SAFEGUARDS}
    assert safeguards <= IN_SPEC.keys()
