"""Fields that we write and the definition on the API server does not declare, since it is an older one.

Server-side apply refuses an object whole for one such field. Chart and operator are upgraded together, but
the definitions may be somebody else's to change, or an administrator has gone back by one version: what is
known must be told all the same. So those fields are left out, said once, and tried again after RETRY_SECONDS.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

logger = logging.getLogger(__name__)

RETRY_SECONDS = 600.0
# `.status.revision.note: field not declared in schema`; of lists `.status.conditions[type="A"].note: ...`
_UNDECLARED = re.compile(r"\.(\w+(?:\.\w+|\[[^]]*\])*): field not declared in schema")
_SELECTOR = re.compile(r"\[[^]]*\]")


def undeclared(message: str) -> frozenset[str]:
    """Paths (`status.revision.note`) in the API server's words, of all items of a list; none elsewhere."""
    return frozenset(_SELECTOR.sub("", path) for path in _UNDECLARED.findall(message))


def without(body: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The object without these fields; the object itself stays as it is."""
    result = dict(body)
    for path in paths:
        _drop(result, path.split("."))
    return result


def _drop(inside: dict[str, Any], names: list[str]) -> None:
    """Copies what it changes."""
    first, *rest = names
    value = inside.get(first)
    if not rest:
        inside.pop(first, None)
    elif isinstance(value, Mapping):
        inside[first] = copy = dict(value)
        _drop(copy, rest)
    elif isinstance(value, list | tuple):
        inside[first] = copies = [dict(one) if isinstance(one, Mapping) else one for one in value]
        for one in copies:
            if isinstance(one, dict):
                _drop(one, rest)


class Undeclared:
    """What the API server was found not to declare of one kind."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._paths: frozenset[str] = frozenset()
        self._since = 0.0

    def left_out(self, now: float) -> frozenset[str]:
        """What to leave out of a write; nothing once it is time to try again."""
        return self._paths if now - self._since < RETRY_SECONDS else frozenset()

    def learn(self, paths: frozenset[str], now: float) -> None:
        """The API server has just refused these."""
        if new := paths - self._paths:
            logger.warning(
                "the API server's definition of %s is older than this operator and does not declare %s, "
                "which is left out; remedy: apply the definitions of this version (crds/, or the chart's)",
                self._kind,
                ", ".join(sorted(new)),
            )
        self._paths, self._since = self.left_out(now) | paths, now
