"""Where the test cluster keeps its things and what it calls them; knows nothing about how they are used."""

import hashlib
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
MODULES = Path(__file__).resolve().parent / "go"

NODE_NAME = "node1"
NODE_IP = "10.99.0.2"
NODE_PREFIX_LENGTH = 24
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"
DNS_IP = "10.96.0.10"
POD_RANGE = "10.244.0.0/24"
CLUSTER_DOMAIN = "cluster.local"


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything the environment decides, read once by `read_settings`.

    `name` is that of the network namespace, of the control group and of the folder for state and logs, so
    clusters of different names live side by side.
    """

    name: str
    cache: Path
    work: Path

    @property
    def logs(self) -> Path:
        return self.work / "log"

    @property
    def kubeconfig(self) -> Path:
        return self.work / "admin.kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        return self.work / "containerd.sock"

    @property
    def audit_log(self) -> Path:
        """What service accounts asked of the API server, an object a line."""
        return self.work / "audit.jsonl"

    @property
    def network_namespace(self) -> Path:
        return Path("/run/netns") / self.name


def read_settings() -> Settings:
    """The settings of this run; `HEADWAY_CACHE` moves the cache, `HEADWAY_E2E_NAME` names another cluster."""
    environment = os.environ
    user_cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(environment.get("HEADWAY_CACHE") or Path(user_cache) / "headway").absolute()
    if cache.is_relative_to(CHECKOUT):
        raise ValueError(f"HEADWAY_CACHE={str(cache)!r} lies inside the checkout; name a folder outside it")
    name = environment.get("HEADWAY_E2E_NAME") or "headway-e2e"
    return Settings(name=name, cache=cache, work=Path(tempfile.gettempdir()) / name)


def fingerprint(files: Iterable[Path], *words: str) -> str:
    """Sixteen hex digits that change whenever the place or content of a file or one of the words does."""
    digest = hashlib.sha256("\0".join(words).encode())
    for file in sorted(files):
        digest.update(f"\0{os.path.relpath(file, CHECKOUT)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]
