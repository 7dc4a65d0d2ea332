"""The CustomResourceDefinitions, generated from the models in `spec`.

pydantic's JSON schema is turned into a structural schema as the API server wants it: references inlined,
optional fields left out instead of null, ranges told in the descriptions, closed objects without
`additionalProperties: false` (the API server prunes what it does not know), defaults kept only where filling
them in says nothing more than the field's own description. Knows nothing of files.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from headway_operator import names
from headway_operator.ranges import with_range
from headway_operator.spec import (
    InferenceServiceSpec,
    InferenceServiceStatus,
    ModelCacheSpec,
    ModelCacheStatus,
)
from headway_operator.spec.base import rules
from headway_operator.spec.service import NAME_PATTERN

Schema = dict[str, Any]

_NAME_MESSAGE = (
    f"metadata.name must be at most {names.MAX_NAME_LENGTH} lower-case letters, digits and '-', "
    "starting with a letter and not ending with '-': children carry it in their own names"
)
_NAME_RULE = (
    f"size(self.metadata.name) <= {names.MAX_NAME_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')"
)
_ADAPTER_MESSAGE = (
    "an adapter's name must differ from what the model itself is served as (model.servedName, else "
    "metadata.name): rename it in lora.adapters, or set model.servedName"
)
_ADAPTER_RULE = (
    "!has(self.spec.lora) || !has(self.spec.lora.adapters) || self.spec.lora.adapters.all(one, one.name != "
    "(has(self.spec.model.servedName) ? self.spec.model.servedName : self.metadata.name))"
)
# JSON schema words with no meaning, or none allowed, in a structural schema.
_DROPPED = ("title", "$defs", "default")


@dataclass(frozen=True, slots=True)
class Definition:
    """One kind. columns: that `kubectl get` prints. rules: between its metadata and its spec."""

    kind: str
    plural: str
    singular: str
    short_name: str
    description: str
    spec: type[BaseModel]
    status: type[BaseModel]
    columns: tuple[Schema, ...]
    rules: tuple[tuple[str, str], ...]
    subresources: Schema


def _condition_column(name: str, part: str) -> Schema:
    path = f'.status.conditions[?(@.type=="Ready")].{part}'
    return _column(name, path, f"The {part} of condition Ready")


def _column(name: str, path: str, description: str, priority: int = 0) -> Schema:
    """priority: 0 is always printed, 1 with --output wide."""
    column: Schema = {"name": name, "type": "string", "jsonPath": path, "description": description}
    return column | ({"priority": priority} if priority else {})


_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}

INFERENCE_SERVICE = Definition(
    kind=names.KIND,
    plural=names.PLURAL,
    singular=names.SINGULAR,
    short_name=names.SHORT_NAME,
    description="A large language model to serve, with the latency that it is promised to have.",
    spec=InferenceServiceSpec,
    status=InferenceServiceStatus,
    columns=(
        _condition_column("Ready", "status"),
        _condition_column("Reason", "reason"),
        _column("Replicas", ".status.display.replicas", "Ready of wanted replicas"),
        _column("TTFT/target", ".status.display.ttft", "Time to first token against its target"),
        _column("TPOT/target", ".status.display.tpot", "Time per output token against its target"),
        _column("Quality", ".status.display.quality", "The verdict of spec.quality"),
        _column("Model", ".spec.model.source", "Where the weights lie", priority=1),
        _column("Revision", ".status.revision.name", "The current revision", priority=1),
        _AGE,
    ),
    rules=((_NAME_RULE, _NAME_MESSAGE), (_ADAPTER_RULE, _ADAPTER_MESSAGE)),
    subresources={
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    },
)
MODEL_CACHE = Definition(
    kind=names.CACHE_KIND,
    plural=names.CACHE_PLURAL,
    singular=names.CACHE_SINGULAR,
    short_name=names.CACHE_SHORT_NAME,
    description="A model that is fetched once onto a claim, for every service that names it as cache://NAME.",
    spec=ModelCacheSpec,
    status=ModelCacheStatus,
    columns=(
        _condition_column("Ready", "status"),
        _condition_column("Reason", "reason"),
        _column("Size", ".status.display.size", "Size of what is fetched, or of what is to come"),
        _column("Progress", ".status.display.progress", "How much of it is there"),
        _column("Source", ".spec.source", "What is fetched", priority=1),
        _column("Claim", ".status.claimName", "The claim on which it lies", priority=1),
        _column("Identity", ".status.fetched.identity", "The commit or digest that is there", priority=1),
        _AGE,
    ),
    rules=((_NAME_RULE, _NAME_MESSAGE),),
    subresources={"status": {}},
)
DEFINITIONS = (INFERENCE_SERVICE, MODEL_CACHE)


def generate(definition: Definition = INFERENCE_SERVICE) -> Schema:
    """The CustomResourceDefinition of one kind."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{definition.plural}.{names.GROUP}"},
        "spec": {
            "group": names.GROUP,
            "names": {
                "kind": definition.kind,
                "listKind": f"{definition.kind}List",
                "plural": definition.plural,
                "singular": definition.singular,
                "shortNames": [definition.short_name],
                "categories": [names.CATEGORY],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": names.VERSION,
                    "served": True,
                    "storage": True,
                    "additionalPrinterColumns": list(definition.columns),
                    "schema": {"openAPIV3Schema": _root_schema(definition)},
                    "subresources": definition.subresources,
                }
            ],
        },
    }


def _root_schema(definition: Definition) -> Schema:
    return {
        "description": definition.description,
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": structural(definition.spec),
            "status": structural(definition.status),
        },
        **rules(*definition.rules),
    }


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of a pydantic model."""
    schema = model.model_json_schema(by_alias=True)
    return _node(schema, schema.get("$defs", {}))


def _node(schema: Schema, definitions: Schema) -> Schema:
    schema = _flattened(schema, definitions)
    result = {key: value for key, value in schema.items() if key not in _DROPPED}
    if "properties" in schema:
        result["properties"] = {
            name: _node(child, definitions) for name, child in schema["properties"].items()
        }
    if isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = _node(schema["additionalProperties"], definitions)
    else:
        result.pop("additionalProperties", None)
    if "items" in schema:
        result["items"] = _node(schema["items"], definitions)
    if schema.get("default") == {}:
        # Written out in full: the API server checks the rules on a default before it fills in what is below.
        children = result["properties"].items()
        result["default"] = {name: child["default"] for name, child in children if "default" in child}
    elif schema.get("default") not in (None, []):
        result["default"] = schema["default"]
    if result.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    if "description" in result:
        result["description"] = with_range(" ".join(result["description"].split()), result)
    return result


def _flattened(schema: Schema, definitions: Schema) -> Schema:
    """`schema` with its reference inlined; a choice between something and null becomes that something."""
    choices = [choice for choice in schema.get("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        return _flattened(choices[0] | rest, definitions)
    if "$ref" not in schema:
        return schema
    inlined = dict(definitions[schema["$ref"].removeprefix("#/$defs/")])
    own = {key: value for key, value in schema.items() if key not in ("$ref", "default")}
    # An omitted object is filled in from its fields' defaults or not at all; its own class says which.
    return _flattened(inlined | own, definitions)
