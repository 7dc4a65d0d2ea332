"""That no pod gets the operator's own key, with which it commands all replicas and gateways.

Its Secret is refused by name, whatever a template is otherwise allowed, and in every namespace: which one the
operator keeps it in is not known here, several installations have one each, and nothing else is called so.
"""

from collections.abc import Iterator
from typing import Any

from headway_operator.errors import SpecError
from headway_operator.names import OPERATOR_KEY_SECRET


def refuse_key(field: str, secret: str) -> None:
    """Raises SpecError where a field of the spec names that Secret."""
    if secret == OPERATOR_KEY_SECRET:
        raise SpecError(
            field,
            f"{secret!r} holds the key with which the operator commands every replica and gateway, and no "
            "pod may have it; name another Secret",
        )


def refuse_key_in(template: dict[str, Any], field: str) -> None:
    """Raises SpecError where a pod template names it. field: of the manifest, where the template stands."""
    for path in _places(template["spec"], f"{field}.spec"):
        refuse_key(path, OPERATOR_KEY_SECRET)


def _places(value: Any, path: str, *, is_secret: bool = False) -> Iterator[str]:
    """Where it is named: by a field that has "secret" in its own name, or by the `name` inside of one.

    So Kubernetes calls them all (`secretName`, `secretRef`, `secretKeyRef`, `imagePullSecrets`, ...); a list
    would lack those of the volumes of tomorrow.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            is_named = "secret" in name.lower() or (is_secret and name == "name")
            yield from _places(inner, f"{path}.{name}", is_secret=is_named)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            name = inner.get("name") if isinstance(inner, dict) else None
            which = f"name={name}" if name else f"{number}"
            yield from _places(inner, f"{path}[{which}]", is_secret=is_secret)
    elif is_secret and value == OPERATOR_KEY_SECRET:
        yield path
