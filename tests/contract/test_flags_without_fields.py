"""Every flag of a replica is set by a field of the spec, or docs/serving.md says why it is not."""

import fnmatch
import re
from pathlib import Path
from typing import Any

from headway_operator.manifests.runtime_template import runtime_arguments
from headway_operator.spec import parse
from headway_operator.state import Site
from headway_runtime.server.options import build_parser
from headway_runtime.server.vllm_flags import ANYWAY, REFUSED

PAGE = Path(__file__).parents[2] / "docs/serving.md"
TITLE = "## Flags without a field in an `InferenceService`"
SITE = Site("kubernetes", "runtime:1", "gateway:1", "/etc/headway/admin/public.pem", (), 8000)
ADAPTERS = {"adapters": [{"name": "one", "source": "/one"}], "maxLoras": 1, "maxCpuLoras": 2}
SPECS: tuple[dict[str, Any], ...] = (
    {
        "model": {"source": "/m", "maxModelLen": 512},
        "quantization": "int8",
        "weightCompression": "none",
        "memoryCheck": "Warn",
        "kvCacheMemory": "1Gi",
        "kvCacheDtype": "int8",
        "kvOffload": {"hostMemory": "1Gi", "disk": {"size": "1Gi"}},
        "speculative": {"method": "ngram"},
        "lora": {**ADAPTERS, "maxLoraRank": 8},
        "auth": {"apiKeysSecretRef": {"name": "keys"}},
    },
    {"model": {"source": "/m"}, "tensorParallelSize": 2, "nodesPerReplica": 2, "prefixCaching": False},
)


def rendered_flags() -> set[str]:
    found: set[str] = set()
    for spec in SPECS:
        manifest = {
            "metadata": {"name": "demo", "namespace": "team", "uid": "1"},
            "spec": {**spec, "replicas": 1},
        }
        kind = {"apiVersion": "serving.headway.dev/v1alpha1", "kind": "InferenceService"}
        found |= {one for one in runtime_arguments(parse(kind | manifest), SITE) if one.startswith("--")}
    return {one.replace("--no-", "--") for one in found}


def explained_flags() -> list[str]:
    """Patterns, as `--ssl-*`."""
    section = PAGE.read_text().partition(TITLE)[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return re.findall(r"`(--[a-z*-]+)`", " ".join(rows))


def test_every_flag_has_a_field_or_a_reason() -> None:
    actions = [action for action in build_parser()._actions if action.option_strings]
    long = (next(one for one in action.option_strings if one.startswith("--")) for action in actions)
    # Those of `vllm serve` alone change nothing; they have a table of their own.
    flags = set(long) - {"--help"} - ANYWAY.keys() - REFUSED.keys()
    rendered, explained = rendered_flags(), explained_flags()
    assert rendered <= flags
    assert len(rendered) > 20
    reasons = {flag: [one for one in explained if fnmatch.fnmatch(flag, one)] for flag in flags}
    assert sorted(flag for flag, found in reasons.items() if not found and flag not in rendered) == []
    used = {one for found in reasons.values() for one in found}
    assert sorted(set(explained) - used) == [], "explained, and no flag"
