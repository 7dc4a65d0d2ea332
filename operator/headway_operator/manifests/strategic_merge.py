"""Strategic merge of a user's pod template over ours, as Kubernetes merges pod templates.

Maps merge key by key; null deletes a key. A list whose elements Kubernetes tells apart by a key (containers,
volumes, env, ...) merges element by element: elements with the same key merge, new ones are added at the
end, `$patch: delete` removes one and `$patch: replace` replaces one. Every other list (command, args, ...) is
replaced whole.

Sources of the keys: patchMergeKey in https://kubernetes.io/docs/reference/generated/kubernetes-api/, for
topologySpreadConstraints the keys of its listType map there. Tolerations have none; they are told apart by
key and effect here, so that a user who adds one does not lose the others.

A volume has one source, and a variable one value or one place where it comes from: an element that names
another one than ours replaces ours whole (the strategy that Kubernetes calls retainKeys, which it has for
volumes).
"""

from typing import Any

MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "ports": ("containerPort",),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "imagePullSecrets": ("name",),
    "hostAliases": ("ip",),
    "resourceClaims": ("name",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "tolerations": ("key", "effect"),
}
# Of their elements only the keys stay that the patch has, too.
RETAIN_KEYS = frozenset(("volumes", "env"))
_DIRECTIVE = "$patch"

Element = dict[str, Any]


def merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """A new map: `base` with `patch` over it; neither is changed.

    Raises ValueError for an element of a merged list that is no map.
    """
    if patch.get(_DIRECTIVE) == "replace":
        return {key: value for key, value in patch.items() if key != _DIRECTIVE}
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inner = result.get(key)
            result[key] = merge(inner if isinstance(inner, dict) else {}, value)
        elif isinstance(value, list) and key in MERGE_KEYS:
            strangers = [element for element in value if not isinstance(element, dict)]
            if strangers:
                raise ValueError(f"{key}: {strangers[0]!r} is no map; write one with {MERGE_KEYS[key][0]}")
            result[key] = _merge_list(key, result.get(key) or [], value)
        else:
            result[key] = value
    return result


def _merge_list(name: str, base: list[Element], patch: list[Element]) -> list[Element]:
    """The user's own elements never merge with each other."""
    keys = MERGE_KEYS[name]
    result = list(base)
    for element in patch:
        if element.get(_DIRECTIVE) == "delete":
            # By what it names: a toleration without an effect means those of every effect.
            named = {key: element[key] for key in keys if key in element}
            result = [one for one in result if not named or not named.items() <= one.items()]
            continue
        identity = _identity(keys, element)
        is_known = identity[0] is not None and any(_identity(keys, one) == identity for one in base)
        place = next(
            (i for i, one in enumerate(result) if is_known and _identity(keys, one) == identity), None
        )
        if place is None:
            result.append(merge({}, element))
        else:
            ours = result[place]
            if name in RETAIN_KEYS and len(element) > len(keys):
                ours = {key: value for key, value in ours.items() if key in element}
            result[place] = merge(ours, element)
    return result


def _identity(keys: tuple[str, ...], element: Element) -> tuple[Any, ...]:
    return tuple(element.get(key) for key in keys)
