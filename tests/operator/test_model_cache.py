"""What is rendered of a ModelCache, against golden YAML, what of a spec is refused, what makes other content.

After a wanted change: HEADWAY_UPDATE_GOLDEN=1 pytest tests/operator/test_model_cache.py, then read the diff.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.operator.model_caches import SHARED, SMALLEST, cache

from headway_operator import names
from headway_operator.errors import SpecError
from headway_operator.manifests.cache_claim import cache_claim
from headway_operator.manifests.fetch_job import fetch_job
from headway_operator.manifests.fetch_policy import fetch_policy
from headway_operator.manifests.restricted import faults
from headway_operator.model_cache.content import content_key, job_hash
from headway_operator.spec import ModelCache

GOLDEN = Path(__file__).parent / "golden"
FULL: dict[str, Any] = {
    "source": "oci://r.example:5000/llama:8b",
    "credentialsSecretRef": {"name": "login"},
    "refresh": "2026-11",
    "adapter": True,
    "storage": {"size": "1Ti", "storageClassName": "", "accessModes": ["ReadWriteMany"]},
    "scheduling": {
        "nodeSelector": {"pool": "large"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "low",
    },
    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
    "template": {
        "metadata": {"labels": {names.CACHE_LABEL: "stolen"}, "annotations": {"note": "x"}},
        "spec": {"containers": [{"name": "runtime", "env": [{"name": "HTTPS_PROXY", "value": "http://p"}]}]},
    },
}


def children(one: ModelCache, site: Any) -> list[dict[str, Any]]:
    job = fetch_job(one, site, "the-claim", names.fetch_job(one.name, "1a2b3c4d"))
    return [child for child in (cache_claim(one), fetch_policy(one), job) if child is not None]


@pytest.mark.parametrize(("name", "spec"), [("smallest", SMALLEST), ("full", FULL), ("shared", SHARED)])
def test_renders_the_golden_manifests(build: Any, name: str, spec: dict[str, Any]) -> None:
    site = build.site(image_pull_secrets=("mirror",), allows_unrestricted=False)
    got = yaml.safe_dump_all(json.loads(json.dumps(children(cache(spec), site))), sort_keys=True)
    path = GOLDEN / f"model-cache-{name}.yaml"
    if os.environ.get("HEADWAY_UPDATE_GOLDEN"):
        path.write_text(got)
    assert list(yaml.safe_load_all(got)) == list(yaml.safe_load_all(path.read_text()))


@pytest.mark.parametrize("spec", [SMALLEST, FULL, SHARED], ids=["smallest", "full", "shared"])
def test_every_child_is_owned_and_its_pod_restricted(build: Any, spec: dict[str, Any]) -> None:
    made = children(cache(spec), build.site())
    for child in made:
        assert names.cache_labels("llama").items() <= child["metadata"]["labels"].items()
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("ModelCache", "llama", "0000-uid")
    template = made[-1]["spec"]["template"]
    assert faults(template) == []
    assert names.fetch_selector("llama").items() <= template["metadata"]["labels"].items()


def test_a_template_that_leaves_the_standard_is_refused(build: Any) -> None:
    escaping = {"spec": {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]}}
    with pytest.raises(SpecError, match="allow-unrestricted-templates"):
        children(cache(template=escaping), build.site(allows_unrestricted=False))


def test_the_longest_name_leaves_room_for_its_pods() -> None:
    longest = names.fetch_job("a" * names.MAX_NAME_LENGTH, "1" * names.HASH_LENGTH)
    assert len(longest) + len("-x1y2z") <= 63


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"source": "pvc://claim/a"}, "must be one that is fetched"),
        ({"source": "bundled://headway-tiny"}, "must be one that is fetched"),
        ({"source": "hf://name"}, "must be one that is fetched: hf://ORG/NAME or"),
        ({"source": "hf://a/b", "revision": "x..y"}, "^spec.revision: revision must be a branch"),
        ({"revision": "v1"}, "remove revision"),
        ({"source": "hf://a/b@x", "revision": "y"}, "remove revision"),
        ({"storage": {}}, "set either claimName or size"),
        ({"storage": {"claimName": "a", "size": "1Gi"}}, "set either claimName or size"),
        ({"storage": {"claimName": "a", "accessModes": ["ReadWriteMany"]}}, "set size in place of"),
        ({"storage": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}}, "set ReadWriteOnce"),
        ({"storage": {"size": "500m"}}, "less than one byte"),
        ({"storage": {"size": "lots"}}, "spec.storage.size"),
        ({"scheduling": {"topology": {}}}, "unknown field"),
        ({"suspended": True}, "did you mean suspend"),
    ],
)
def test_what_cannot_be_honoured_is_named_with_its_remedy(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        cache(**changes)


def test_only_what_is_fetched_makes_another_content_and_only_how_another_job() -> None:
    before = cache(SHARED)
    for change, is_other_content, is_other_job in (
        ({"revision": "v2"}, True, True),
        ({"refresh": "again"}, True, True),
        ({"adapter": True}, True, True),
        ({"credentialsSecretRef": {"name": "other"}}, False, True),
        ({"template": {"metadata": {"annotations": {"a": "b"}}}}, False, True),
        ({"suspend": True}, False, False),
        ({"networkPolicy": {"enabled": True}}, False, False),
    ):
        after = cache(SHARED, **change)
        assert (content_key(before, "u") != content_key(after, "u")) == is_other_content, change
        assert (job_hash(before, "u") != job_hash(after, "u")) == is_other_job, change
    assert content_key(before, "u") != content_key(before, "another life of the claim")
