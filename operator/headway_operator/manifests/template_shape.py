"""The JSON types of a user's pod template, as far as the operator or the merge reads them.

The definition leaves a template open (`x-kubernetes-preserve-unknown-fields`), so the API server takes any
JSON for one. One table says what each field has to be that anything here reads, and one walk holds a template
against it; what the table does not name may be anything, and is the API server's to judge. A null deletes the
field it stands for, and so is allowed wherever a field is; in a list nothing is deleted so.

Types: https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway_operator.errors import SpecError
from headway_operator.manifests.strategic_merge import DIRECTIVE

MAX_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Leaf:
    """One of these types. name, remedy: of what it has to be."""

    types: tuple[type, ...]
    name: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Object:
    """fields: those that are known. others: what the rest of them are; None: anything.

    needs: those that have to be there once the template is merged.
    """

    fields: Mapping[str, "Shape"] = field(default_factory=dict)
    others: "Shape | None" = None
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Elements:
    """A list. key: what tells its elements apart, which every one of them has; "" where nothing does."""

    of: "Shape"
    key: str = ""


Shape = Leaf | Object | Elements

TEXT = Leaf((str,), "a string", "write one, in quotes where it looks like something else")
NUMBER = Leaf((int,), "a whole number", "write one, without quotes")
FLAG = Leaf((bool,), "a boolean", "write true or false")
QUANTITY = Leaf((str, int, float), "a quantity", "write one, for example 512Mi, 2G, 500m or 4")
MAP = Object()
TEXTS = Object(others=TEXT)

_CONTEXT: dict[str, Shape] = {
    "runAsNonRoot": FLAG,
    "runAsUser": NUMBER,
    "seccompProfile": Object({"type": TEXT}),
    "appArmorProfile": Object({"type": TEXT}),
    "seLinuxOptions": TEXTS,
    "windowsOptions": Object({"hostProcess": FLAG}),
}
_CAPABILITIES = Object({"add": Elements(TEXT), "drop": Elements(TEXT)})
_CONTAINER_CONTEXT = Object(
    _CONTEXT
    | {
        "privileged": FLAG,
        "allowPrivilegeEscalation": FLAG,
        "procMount": TEXT,
        "capabilities": _CAPABILITIES,
    }
)
_HANDLER: dict[str, Shape] = {
    "httpGet": Object({"host": TEXT, "path": TEXT}),
    "tcpSocket": Object({"host": TEXT}),
    "exec": MAP,
}
_PROBE = Object(
    _HANDLER
    | dict.fromkeys(("initialDelaySeconds", "periodSeconds", "timeoutSeconds", "failureThreshold"), NUMBER)
)
_KEY_OF_SECRET = Object({"name": TEXT, "key": TEXT, "optional": FLAG}, needs=("name", "key"))
_CONTAINER = Object(
    {
        "name": TEXT,
        "image": TEXT,
        "command": Elements(TEXT),
        "args": Elements(TEXT),
        "env": Elements(
            Object({"name": TEXT, "value": TEXT, "valueFrom": Object({"secretKeyRef": _KEY_OF_SECRET})}),
            "name",
        ),
        "envFrom": Elements(MAP),
        "ports": Elements(
            Object({"name": TEXT, "containerPort": NUMBER, "hostPort": NUMBER}), "containerPort"
        ),
        "resources": Object(
            {
                "limits": Object(others=QUANTITY),
                "requests": Object(others=QUANTITY),
                "claims": Elements(MAP),
            }
        ),
        "volumeMounts": Elements(
            Object({"name": TEXT, "mountPath": TEXT, "subPath": TEXT}, needs=("name",)), "mountPath"
        ),
        "volumeDevices": Elements(MAP, "devicePath"),
        **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe"), _PROBE),
        "lifecycle": Object({"postStart": Object(_HANDLER), "preStop": Object(_HANDLER)}),
        "securityContext": _CONTAINER_CONTEXT,
    }
)
_ITEMS = Elements(Object({"key": TEXT, "path": TEXT}, needs=("key", "path")))
_VOLUME = Object(
    {
        "name": TEXT,
        "configMap": Object({"name": TEXT, "items": _ITEMS}, needs=("name",)),
        "hostPath": Object({"path": TEXT}, needs=("path",)),
        "projected": Object({"sources": Elements(MAP)}),
        "secret": Object({"secretName": TEXT, "items": _ITEMS}, needs=("secretName",)),
    },
    others=MAP,
)
_POD = Object(
    {
        **dict.fromkeys(
            ("containers", "initContainers", "ephemeralContainers"), Elements(_CONTAINER, "name")
        ),
        "volumes": Elements(_VOLUME, "name"),
        "securityContext": Object(_CONTEXT | {"sysctls": Elements(MAP)}),
        **dict.fromkeys(
            ("hostNetwork", "hostPID", "hostIPC", "automountServiceAccountToken", "enableServiceLinks"), FLAG
        ),
        **dict.fromkeys(("serviceAccountName", "serviceAccount", "priorityClassName"), TEXT),
        "terminationGracePeriodSeconds": NUMBER,
        "nodeSelector": TEXTS,
        "affinity": MAP,
        **dict.fromkeys(("imagePullSecrets", "resourceClaims", "schedulingGates"), Elements(MAP, "name")),
        "hostAliases": Elements(MAP, "ip"),
        "tolerations": Elements(Object({"key": TEXT, "effect": TEXT})),
        "topologySpreadConstraints": Elements(
            Object({"topologyKey": TEXT, "whenUnsatisfiable": TEXT}), "topologyKey"
        ),
    }
)
TEMPLATE = Object({"metadata": Object({"labels": TEXTS, "annotations": TEXTS}), "spec": _POD})


def check_types(template: Any, path: str) -> None:
    """Raises SpecError for the first field of a user's template, as it is written, of another type."""
    _check(template, TEMPLATE, path, is_merged=False)


def check_merged(template: Any, path: str) -> None:
    """Raises SpecError for the first field that a merged template lacks. path: of the user's."""
    _check(template, TEMPLATE, path, is_merged=True)


def _check(value: Any, shape: Shape, path: str, *, is_merged: bool) -> None:
    match shape:
        case Leaf():
            is_right = isinstance(value, shape.types) and (shape is FLAG or not isinstance(value, bool))
            _expect(value, path, shape.name, shape.remedy, is_right=is_right)
        case Object():
            _expect(value, path, "an object", "write a map", is_right=isinstance(value, dict))
            _check_object(value, shape, path, is_merged=is_merged)
        case Elements():
            _expect(value, path, "a list", "write one", is_right=isinstance(value, list))
            for number, element in enumerate(value):
                is_known = is_merged and shape.key and isinstance(element, dict)
                which = f"{shape.key}={element.get(shape.key)}" if is_known else f"{number}"
                where = f"{path}[{which}]"
                _check(element, shape.of, where, is_merged=is_merged)
                if shape.key and not _is_told_apart(element, shape.key):
                    raise SpecError(f"{where}.{shape.key}", f"is missing in {_shown(element)}; write it")


def _check_object(value: dict[str, Any], shape: Object, path: str, *, is_merged: bool) -> None:
    for name, inner in value.items():
        wanted = shape.fields.get(name, shape.others)
        if wanted is not None and inner is not None and name != DIRECTIVE:
            _check(inner, wanted, f"{path}.{name}", is_merged=is_merged)
    for name in shape.needs if is_merged else ():
        if value.get(name) is None:
            raise SpecError(f"{path}.{name}", f"is missing in {_shown(value)}; write it")


def _is_told_apart(element: dict[str, Any], key: str) -> bool:
    """Directives of a list stand alone, and what `delete` lacks is told where it is carried out."""
    is_directive = set(element) == {DIRECTIVE} or element.get(DIRECTIVE) == "delete"
    return is_directive or element.get(key) not in (None, "")


def _expect(value: Any, path: str, name: str, remedy: str, *, is_right: bool) -> None:
    if not is_right:
        raise SpecError(path, f"{_shown(value)} is not {name}; {remedy}")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
