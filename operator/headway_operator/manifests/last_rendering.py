"""`render` for one service, which a pass asks for the same as the one before nearly always.

What was rendered last is kept packed: an operator looks after a thousand services, and unpacking takes a tenth
of rendering. Nobody may change what is handed out for another pass by changing it, either.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from headway_operator.spec import Service
from headway_operator.state import ChildKey, Rendered, Site

Render = Callable[[Service, Site, str, frozenset[ChildKey]], Rendered]
# What rendering goes by: the images and hashes of the revision, and whether there are several replicas.
STATUS_FIELDS = ("revision", "desiredReplicas")
COMPRESSION_LEVEL = 1


class LastRendering:
    """Of one service."""

    __slots__ = ("_asked", "_packed", "_rendered")

    def __init__(self) -> None:
        self._asked: tuple[Any, ...] | None = None
        self._rendered: Rendered | None = None  # without its manifests
        self._packed = b""

    def of(
        self, render: Render, service: Service, site: Site, public_key_pem: str, existing: frozenset[ChildKey]
    ) -> Rendered:
        """What `render` returns for these. Raises what it raises, each time."""
        # Nothing else of a status is there to be read: what it says of requests moves with each pass.
        told = {name: service.status[name] for name in STATUS_FIELDS if name in service.status}
        service = replace(service, status=told)
        spec = service.spec.model_dump_json(by_alias=True)
        asked = (service.key, service.uid, service.generation, spec, told, site, public_key_pem, existing)
        if self._rendered is None or asked != self._asked:
            rendered = render(service, site, public_key_pem, existing)
            packed = zlib.compress(msgspec.json.encode(rendered.manifests), COMPRESSION_LEVEL)
            self._asked, self._packed = asked, packed
            self._rendered = replace(rendered, manifests=())
            return rendered
        manifests = msgspec.json.decode(zlib.decompress(self._packed))
        return replace(self._rendered, manifests=tuple(manifests))
