"""How a replica comes to its model: what it is told to serve, what is mounted, and with which credentials.

A claim is mounted as a whole and read-only: links inside it, as the Hub's cache has them, stay whole. The
Secret of a remote source is what its own tools make: a token, an access key, a docker login.
"""

from typing import Any

from headway_operator.spec import InferenceServiceSpec
from headway_operator.spec.source import REMOTE_SCHEMES, scheme_of

CLAIM_VOLUME = "model"
CLAIM_PATH = "/mnt/models"
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


def served_source(spec: InferenceServiceSpec) -> str:
    """What `headway serve` is told: the source, or where its claim is mounted."""
    source = spec.model.source
    if scheme_of(source) != "pvc":
        return source
    _, path = _claim_and_path(source)
    return f"{CLAIM_PATH}/{path}".rstrip("/")


def has_to_be_fetched(spec: InferenceServiceSpec) -> bool:
    """Whether a replica downloads its model before it can load it."""
    return scheme_of(spec.model.source) in REMOTE_SCHEMES


def volumes(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """The claim, and a docker login."""
    result: list[dict[str, Any]] = []
    if scheme_of(spec.model.source) == "pvc":
        claim, _ = _claim_and_path(spec.model.source)
        result.append({"name": CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    if spec.model.credentials_secret_ref is not None and scheme_of(spec.model.source) == "oci":
        items = [{"key": DOCKER_LOGIN_KEY, "path": "config.json"}]
        secret = {"secretName": spec.model.credentials_secret_ref.name, "items": items}
        result.append({"name": LOGIN_VOLUME, "secret": secret})
    return result


def volume_mounts(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Where `volumes` appear."""
    paths = {CLAIM_VOLUME: CLAIM_PATH, LOGIN_VOLUME: LOGIN_FOLDER}
    return [
        {"name": volume["name"], "mountPath": paths[volume["name"]], "readOnly": True}
        for volume in volumes(spec)
    ]


def environment(spec: InferenceServiceSpec) -> list[dict[str, Any]]:
    """Variables from which the libraries of the source take their credentials."""
    if spec.model.credentials_secret_ref is None:
        return []
    scheme, secret = scheme_of(spec.model.source), spec.model.credentials_secret_ref.name
    if scheme == "oci":
        return [{"name": "DOCKER_CONFIG", "value": LOGIN_FOLDER}]
    return [
        {"name": name, "valueFrom": {"secretKeyRef": _key(secret, name, is_optional=is_optional)}}
        for name, is_optional in SECRET_VARIABLES[scheme].items()
    ]


def _key(secret: str, key: str, *, is_optional: bool) -> dict[str, Any]:
    reference: dict[str, Any] = {"name": secret, "key": key}
    return {**reference, "optional": True} if is_optional else reference


def _claim_and_path(source: str) -> tuple[str, str]:
    claim, _, path = source.removeprefix("pvc://").partition("/")
    return claim, path.strip("/")
