"""A manifest becomes a frozen `ModelCache`, or a `SpecError` that names field, value and remedy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import ValidationError

from headway_operator.errors import SpecError
from headway_operator.names import API_VERSION, CACHE_KIND, CacheKey
from headway_operator.spec.model_cache import ModelCacheSpec
from headway_operator.spec.service import Manifest, check_name, generation_of, key_of, spec_error


@dataclass(frozen=True, slots=True)
class ModelCache:
    """One ModelCache as read: what is asked (`spec`) and what was last written about it (`status`)."""

    kind: ClassVar[str] = CACHE_KIND
    key: CacheKey
    uid: str
    generation: int
    spec: ModelCacheSpec
    status: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Shorthand for `key.name`, from which every child's name is built."""
        return self.key.name


def parse_cache(manifest: Manifest) -> ModelCache:
    """Read a ModelCache. Raises SpecError, reason `InvalidSpec`, for what the schema refuses."""
    for field, want in (("apiVersion", API_VERSION), ("kind", CACHE_KIND)):
        if manifest.get(field) != want:
            raise SpecError(field, f"{manifest.get(field)!r} is not read here; write {want}")
    named = key_of(manifest)
    check_name(named)
    try:
        spec = ModelCacheSpec.model_validate(manifest.get("spec") or {})
    except ValidationError as error:
        raise spec_error(error, ModelCacheSpec) from error
    return ModelCache(
        key=CacheKey(named.namespace, named.name),
        uid=str(manifest["metadata"].get("uid") or ""),
        generation=generation_of(manifest),
        spec=spec,
        status=manifest.get("status") or {},
    )
