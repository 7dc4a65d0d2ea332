"""Strategic merge of a user's pod template over ours, as Kubernetes merges pod templates.

Maps merge key by key; null deletes a key. A list whose elements Kubernetes tells apart by a key (containers,
volumes, env, ...) merges element by element: elements with the same key merge, new ones are added at the
end. Every other list (command, args, ...) is replaced whole.

Directives, as the API server carries them out:

    in a map                  $patch: replace  the map is what stands beside it, nothing of ours stays
                              $patch: delete   the map is empty
    in a list that merges     $patch: replace  alone in an element: the list is its other elements
                              $patch: delete   beside a key: our elements of that key go, before any is merged
    in either                 $patch: merge    what would be done without it

Refused is what the API server would drop without a word (content beside `$patch: replace` in a list's
element), and the directives that tools write who compared two lists ($setElementOrder,
$deleteFromPrimitiveList, $retainKeys).

Sources of the keys: patchMergeKey in https://kubernetes.io/docs/reference/generated/kubernetes-api/, for
topologySpreadConstraints the keys of its listType map there. Tolerations have none; they are told apart by
key and effect here, so that a user who adds one does not lose the others. Of the directives:
https://github.com/kubernetes/apimachinery/blob/master/pkg/util/strategicpatch/patch.go; `merge`, which that
does not carry out, is in contributors/devel/sig-api-machinery/strategic-merge-patch.md of
https://github.com/kubernetes/community.

A volume has one source, and a variable one value or one place where it comes from: an element that names
another one than ours replaces ours whole (the strategy that Kubernetes calls retainKeys, which it has for
volumes).
"""

from typing import Any

from headway_operator.errors import SpecError

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
DIRECTIVE = "$patch"
ACTIONS = ("replace", "delete", "merge")
REFUSED_DIRECTIVES = ("$setElementOrder/", "$deleteFromPrimitiveList/", "$retainKeys")

Element = dict[str, Any]


def merge(base: dict[str, Any], patch: dict[str, Any], path: str) -> dict[str, Any]:
    """A new map: `base` with `patch` over it; neither is changed.

    path: of the patch in the manifest. Raises SpecError for a directive that is not carried out, and for an
    element of a merged list that is no map.
    """
    action = _action(patch, path)
    result = {} if action in ("replace", "delete") else dict(base)
    for key, value in {} if action == "delete" else patch.items():
        where = f"{path}.{key}"
        if key == DIRECTIVE:
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            inner = result.get(key)
            result[key] = merge(inner if isinstance(inner, dict) else {}, value, where)
        elif isinstance(value, list) and key in MERGE_KEYS:
            ours = result.get(key)
            result[key] = _merge_list(key, ours if isinstance(ours, list) else [], value, where)
        else:
            _refuse_directives(value, where)
            result[key] = value
    return result


def _merge_list(name: str, base: list[Element], patch: list[Any], path: str) -> list[Element]:
    """The user's own elements never merge with each other."""
    keys = MERGE_KEYS[name]
    actions = [_element_action(element, keys, f"{path}[{i}]") for i, element in enumerate(patch)]
    known = [] if "replace" in actions else base
    for element, action in zip(patch, actions, strict=True):
        if action == "delete":
            # By what it names: a toleration without an effect means those of every effect.
            named = {key: element[key] for key in keys if key in element}
            known = [one for one in known if not named.items() <= one.items()]
    result = list(known)
    for number, (element, action) in enumerate(zip(patch, actions, strict=True)):
        if action in ("replace", "delete") or set(element) == {DIRECTIVE}:
            continue
        identity = _identity(keys, element)
        is_known = identity[0] is not None and any(_identity(keys, one) == identity for one in known)
        place = next(
            (i for i, one in enumerate(result) if is_known and _identity(keys, one) == identity), None
        )
        ours = {} if place is None else result[place]
        if name in RETAIN_KEYS and set(element) - {DIRECTIVE, *keys}:
            ours = {key: value for key, value in ours.items() if key in element}
        merged = merge(ours, element, f"{path}[{number}]")
        if place is None:
            result.append(merged)
        else:
            result[place] = merged
    return result


def _identity(keys: tuple[str, ...], element: Element) -> tuple[Any, ...]:
    return tuple(element.get(key) for key in keys)


def _action(patch: dict[str, Any], path: str) -> str | None:
    """What its directive asks for; None without one."""
    for key in patch:
        if str(key).startswith(REFUSED_DIRECTIVES):
            raise SpecError(
                f"{path}.{key}", f"is a directive that is not carried out here; write `{DIRECTIVE}` instead"
            )
    if DIRECTIVE not in patch:
        return None
    action = patch[DIRECTIVE]
    if action not in ACTIONS:
        raise SpecError(f"{path}.{DIRECTIVE}", f"{action!r} is none of {', '.join(ACTIONS)}; write one")
    return str(action)


def _element_action(element: Any, keys: tuple[str, ...], path: str) -> str | None:
    if not isinstance(element, dict):
        raise SpecError(path, f"{element!r} is not an object; write one with {keys[0]}")
    action = _action(element, path)
    if action == "replace" and len(element) > 1:
        raise SpecError(
            f"{path}.{DIRECTIVE}",
            "'replace' in a list replaces the whole list and stands alone in an element; to replace one "
            f"element, write two: its {keys[0]} with `{DIRECTIVE}: delete`, and what takes its place",
        )
    if action == "delete" and not any(element.get(key) is not None for key in keys):
        raise SpecError(
            f"{path}.{DIRECTIVE}", f"'delete' does not say what to delete; write its {keys[0]} beside it"
        )
    return action


def _refuse_directives(value: Any, path: str) -> None:
    """In what is taken as it is: there a directive would reach the API server."""
    if isinstance(value, list):
        for number, element in enumerate(value):
            _refuse_directives(element, f"{path}[{number}]")
    elif isinstance(value, dict):
        if _action(value, path) is not None:
            raise SpecError(
                f"{path}.{DIRECTIVE}", "stands in a list that is replaced whole; write the whole list"
            )
        for key, inner in value.items():
            _refuse_directives(inner, f"{path}.{key}")
