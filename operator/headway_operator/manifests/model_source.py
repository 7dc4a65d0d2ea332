"""How a replica comes to its models: what it is told to serve, what is mounted, and with which credentials.

A claim is mounted as a whole and read-only: links inside it, as the Hub's cache has them, stay whole. The
Secret of a remote source is what its own tools make: a token, an access key, a docker login.
"""

from typing import Any

from headway_operator.spec import InferenceServiceSpec
from headway_operator.spec.fields import sources_of
from headway_operator.spec.source import REMOTE_SCHEMES, Scheme, scheme_of

# Of the model's claim; those of a draft and of adapters, if they have other ones, are mounted beside it.
MODEL_MOUNT = ("model", "/mnt/models")
DRAFT_MOUNT = ("draft-model", "/mnt/draft-models")
ADAPTERS_MOUNT = ("lora-adapters-{}", "/mnt/lora-adapters/{}")
LOGIN_VOLUME = "model-credentials"
LOGIN_FOLDER = "/etc/headway/model-credentials"
DOCKER_LOGIN_KEY = ".dockerconfigjson"
# By scheme: keys of the Secret that become variables of the same names, and whether the Secret may lack them.
SECRET_VARIABLES: dict[str, dict[str, bool]] = {
    "hf": {"HF_TOKEN": False},
    "s3": {
        "AWS_ACCESS_KEY_ID": False,
        "AWS_SECRET_ACCESS_KEY": False,
        "AWS_SESSION_TOKEN": True,
        "AWS_REGION": True,
        "AWS_ENDPOINT_URL_S3": True,
    },
}


def served_source(spec: InferenceServiceSpec, source: str) -> str:
    """What the engine is told for one of the spec's sources: itself, or where its claim is mounted."""
    if scheme_of(source) != "pvc":
        return source
    claim, path = _claim_and_path(source)
    return f"{_claims(spec)[claim][1]}/{path}".rstrip("/")


def has_to_be_fetched(spec: InferenceServiceSpec) -> bool:
    """Whether a replica downloads a model before it can load it."""
    return any(scheme_of(source) in REMOTE_SCHEMES for source, _ in _sources(spec))


def volumes(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Claims, and a docker login."""
    result: list[dict[str, Any]] = [
        {"name": volume, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for claim, (volume, _) in _claims(spec).items()
    ]
    schemes = _schemes_of_secret(spec)
    if spec.model.credentials_secret_ref is not None and "oci" in schemes:
        secret = spec.model.credentials_secret_ref.name
        result.append(login_volume(secret, is_optional=schemes[0] != "oci"))
    return result


def login_volume(secret: str, *, is_optional: bool = False) -> dict[str, Any]:
    """A docker login, as LOGIN_FOLDER is to have it."""
    items = [{"key": DOCKER_LOGIN_KEY, "path": "config.json"}]
    source: dict[str, Any] = {"secretName": secret, "items": items}
    return {"name": LOGIN_VOLUME, "secret": {**source, "optional": True} if is_optional else source}


def volume_mounts(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Where `volumes` appear."""
    paths = {LOGIN_VOLUME: LOGIN_FOLDER, **dict(_claims(spec).values())}
    return [
        {"name": volume["name"], "mountPath": paths[volume["name"]], "readOnly": True}
        for volume in volumes(spec)
    ]


def environment(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Variables from which the libraries of the sources take their credentials.

    Of sources of several kinds, the Secret must have what the first one's takes: the others may be public.
    """
    if spec.model.credentials_secret_ref is None:
        return []
    return secret_variables(spec.model.credentials_secret_ref.name, _schemes_of_secret(spec))


def secret_variables(secret: str, schemes: list[Scheme]) -> list[dict[str, Any]]:
    """What of a Secret opens sources of these kinds, the first of which it must."""
    found: list[dict[str, Any]] = []
    for index, scheme in enumerate(schemes):
        if scheme == "oci":
            found.append({"name": "DOCKER_CONFIG", "value": LOGIN_FOLDER})
        for name, is_optional in SECRET_VARIABLES.get(scheme, {}).items():
            key = _key(secret, name, is_optional=is_optional or index > 0)
            found.append({"name": name, "valueFrom": {"secretKeyRef": key}})
    return found


def _schemes_of_secret(spec: InferenceServiceSpec) -> list[Scheme]:
    """The kinds of sources that are fetched, the model's own first."""
    schemes = dict.fromkeys(scheme_of(source) for source in sources_of(spec))
    return [scheme for scheme in schemes if scheme in REMOTE_SCHEMES]


def _key(secret: str, key: str, *, is_optional: bool) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": secret, "key": key}
    return {**reference, "optional": True} if is_optional else reference


def _sources(spec: InferenceServiceSpec) -> list[tuple[str, tuple[str, str]]]:
    """Each source, and how its claim would be mounted."""
    found = [(spec.model.revised_source, MODEL_MOUNT)]
    if spec.speculative is not None and spec.speculative.draft is not None:
        found.append((spec.speculative.draft.source, DRAFT_MOUNT))
    for index, adapter in enumerate(spec.lora.adapters if spec.lora is not None else ()):
        volume, path = (text.format(index) for text in ADAPTERS_MOUNT)
        found.append((adapter.source, (volume, path)))
    return found


def _claims(spec: InferenceServiceSpec) -> dict[str, tuple[str, str]]:
    """Claim -> the names of its volume and mount, for every claim that a source names."""
    claims: dict[str, tuple[str, str]] = {}
    for source, mount in _sources(spec):
        if scheme_of(source) == "pvc":
            claims.setdefault(_claim_and_path(source)[0], mount)
    return claims


def _claim_and_path(source: str) -> tuple[str, str]:
    claim, _, path = source.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")
