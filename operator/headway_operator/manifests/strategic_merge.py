"""Strategic merge of a user's pod template over ours, as Kubernetes merges pod templates.

Maps merge key by key; null deletes a key. A list whose elements Kubernetes tells apart by a key (containers,
volumes, env, ...) merges element by element: elements with the same key merge, new ones are added at the end,
`$patch: delete` removes one and `$patch: replace` replaces one. Every other list (command, args, ...) is
replaced whole.

Source of the keys: patchMergeKey in https://kubernetes.io/docs/reference/generated/kubernetes-api/
(tolerations have none there; they are joined by `key` here, which is what a user who adds one means).
"""

from typing import Any

MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "resourceClaims": "name",
    "topologySpreadConstraints": "topologyKey",
    "tolerations": "key",
}
_DIRECTIVE = "$patch"


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
                raise ValueError(f"{key}: {strangers[0]!r} is no map; write one with {MERGE_KEYS[key]}")
            result[key] = _merge_list(result.get(key) or [], value, MERGE_KEYS[key])
        else:
            result[key] = value
    return result


def _merge_list(base: list[Any], patch: list[Any], merge_key: str) -> list[Any]:
    result = list(base)
    for element in patch:
        key = element.get(merge_key)
        places = [i for i, present in enumerate(base) if key is not None and present.get(merge_key) == key]
        if element.get(_DIRECTIVE) == "delete":
            result = [present for present in result if present.get(merge_key) != key]
        elif places:
            place = next(i for i, present in enumerate(result) if present.get(merge_key) == key)
            result[place] = merge(result[place], element)
        else:
            result.append(merge({}, element))
    return result
