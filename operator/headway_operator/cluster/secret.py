"""Reads a Secret's values as a pod would see them."""

import base64

from headway_operator.errors import ClusterError
from headway_operator.state import Manifest


def secret_values(manifest: Manifest) -> dict[str, bytes]:
    """Key -> value of a Secret manifest, `stringData` first. Raises ClusterError for bad base64."""
    values = {key: str(value).encode() for key, value in (manifest.get("stringData") or {}).items()}
    for key, encoded in (manifest.get("data") or {}).items():
        try:
            values.setdefault(key, base64.b64decode(encoded, validate=True))
        except ValueError as error:
            name = manifest["metadata"]["name"]
            raise ClusterError(f"Secret {name!r}: data.{key} is not base64: {error}") from error
    return values
