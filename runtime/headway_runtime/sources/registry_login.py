"""Logins of OCI registries: those that docker, podman and oras keep, and the tokens given for them.

Looks into DOCKER_CONFIG, then REGISTRY_AUTH_FILE, then where podman and docker keep theirs; credential
helpers are programs, and are run only where such a file names one for this registry. A login is sent to the
registry and to the token service that it names, nowhere else.
"""

import base64
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from headway_runtime.errors import ModelFetchError, SourceRefusedError
from headway_runtime.sources.http_answers import is_transient, retry_after, unreachable
from headway_runtime.sources.remote import TransientError

HELPER_SECONDS = 30.0
_PARAMETER = re.compile(r'([a-zA-Z_]+)\s*=\s*(?:"([^"]*)"|([^\s,]+))')


@dataclass(frozen=True, slots=True)
class Credentials:
    """token: an identity token, which a registry's token service takes instead of a password."""

    user: str
    password: str
    token: str = ""


class Login:
    """How this process is known to one repository of a registry; nobody at first."""

    def __init__(
        self,
        client: httpx2.Client,
        host: str,
        repository: str,
        environment: Mapping[str, str],
        *,
        is_plain: bool,
    ) -> None:
        """is_plain: the registry is asked without TLS, so its token service may be, too."""
        self._client = client
        self._schemes = ("https://", "http://") if is_plain else ("https://",)
        self._host = host
        self._repository = repository
        self._environment = environment
        self.headers: dict[str, str] = {}
        self.description = "no login"

    def answer(self, challenges: Sequence[str]) -> None:
        """Have `headers` hold what a 401's WWW-Authenticate asks for."""
        credentials = find_credentials(self._host, self._environment)
        self.description = (
            "no login" if credentials is None else f"the login of {credentials.user or 'a token'!r}"
        )
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "bearer":
                parameters = {name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(rest)}
                self.headers = {"authorization": f"Bearer {self._token(parameters, credentials)}"}
                return
            if scheme.lower() == "basic" and credentials is not None and credentials.password:
                self.headers = _basic(credentials)
                return
        self.headers = {}

    def _token(self, parameters: Mapping[str, str], credentials: Credentials | None) -> str:
        """From the token service: "Token Authentication Specification" of the distribution project."""
        realm = parameters.get("realm", "")
        if not realm.startswith(self._schemes):
            raise ModelFetchError(
                f"oci://{self._host}/{self._repository}: the registry names {realm!r} as its token service, "
                "where a login may not be sent; want an address that begins with "
                f"{' or '.join(self._schemes)}"
            )
        scope = parameters.get("scope") or f"repository:{self._repository}:pull"
        wanted = {"service": parameters["service"]} if "service" in parameters else {}
        try:
            if credentials is not None and credentials.token:
                form = {
                    "grant_type": "refresh_token",
                    "refresh_token": credentials.token,
                    "client_id": "headway",
                }
                response = self._client.post(realm, data={**form, **wanted, "scope": scope})
            else:
                headers = _basic(credentials) if credentials is not None else {}
                response = self._client.get(realm, params={**wanted, "scope": scope}, headers=headers)
        except httpx2.HTTPError as error:
            raise unreachable(error, realm) from error
        if is_transient(response.status_code):
            raise TransientError(f"{realm} answers {response.status_code}", retry_after(response.headers))
        try:
            body: Any = response.json() if response.status_code == 200 else {}
            token = body.get("token") or body.get("access_token")
        except (ValueError, AttributeError):
            token = None
        if not token:
            raise SourceRefusedError(
                f"oci://{self._host}/{self._repository}: its token service answers {response.status_code} to "
                f"{self.description}; give a login that may pull it: `docker login {self._host}` (or podman, "
                "oras), or DOCKER_CONFIG with a config.json"
            )
        return str(token)


def find_credentials(host: str, environment: Mapping[str, str]) -> Credentials | None:
    """The login that this user has for a registry, if any. ModelFetchError for a file that cannot be read."""
    keys = (host, f"https://{host}", f"http://{host}")
    for path in _files(environment):
        try:
            content: Any = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ModelFetchError(f"{path}: cannot be read ({error}); log in again, or remove it") from error
        found = _in_file(content, keys) if isinstance(content, dict) else None
        if found is not None:
            return found
    return None


def _files(environment: Mapping[str, str]) -> list[Path]:
    if environment.get("DOCKER_CONFIG"):
        return [Path(environment["DOCKER_CONFIG"]) / "config.json"]
    if environment.get("REGISTRY_AUTH_FILE"):
        return [Path(environment["REGISTRY_AUTH_FILE"])]
    home = Path(environment.get("HOME") or Path.home())
    runtime = environment.get("XDG_RUNTIME_DIR")
    podman = [Path(runtime) / "containers" / "auth.json"] if runtime else []
    return [*podman, home / ".config" / "containers" / "auth.json", home / ".docker" / "config.json"]


def _in_file(content: Mapping[str, Any], keys: Sequence[str]) -> Credentials | None:
    helpers = content.get("credHelpers") or {}
    for key in keys:
        if key in helpers:
            return _ask_helper(str(helpers[key]), key)
    entries = content.get("auths") or {}
    for key in keys:
        entry = entries.get(key) or entries.get(f"{key}/")
        if entry:
            return _credentials(entry)
    if content.get("credsStore"):
        for key in keys:
            if (found := _ask_helper(str(content["credsStore"]), key)) is not None:
                return found
    return None


def _credentials(entry: Mapping[str, Any]) -> Credentials | None:
    user, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if entry.get("auth"):
        try:
            user, _, password = base64.b64decode(str(entry["auth"])).decode().partition(":")
        except ValueError:
            return None
    token = str(entry.get("identitytoken") or "")
    return Credentials(user, password.rstrip("\0"), token) if password or token else None


def _ask_helper(name: str, server: str) -> Credentials | None:
    """Through the protocol of docker-credential-helpers: the server on standard input, JSON on the output."""
    if not re.fullmatch(r"[\w.-]+", name):
        return None
    try:
        done = subprocess.run(
            [f"docker-credential-{name}", "get"],
            input=server.encode(),
            capture_output=True,
            timeout=HELPER_SECONDS,
            env=os.environ.copy(),
        )
        answer: Any = json.loads(done.stdout) if done.returncode == 0 else {}
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ModelFetchError(
            f"docker-credential-{name}, which keeps the login of {server}, gave none ({error}); "
            "log in again, or name a config.json without it by DOCKER_CONFIG"
        ) from error
    user, secret = str(answer.get("Username") or ""), str(answer.get("Secret") or "")
    if not secret:
        return None
    return Credentials("", "", secret) if user == "<token>" else Credentials(user, secret)


def _basic(credentials: Credentials) -> dict[str, str]:
    text = f"{credentials.user}:{credentials.password}"
    return {"authorization": f"Basic {base64.b64encode(text.encode()).decode()}"}
