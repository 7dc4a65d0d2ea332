"""Makes sure that the system programs the cluster stands on are there, from Debian's packages if need be."""

import os
import shutil
import subprocess
from pathlib import Path

# Program -> Debian package. containerd is not among them: kubelet needs a newer one than Debian's.
RUN_PACKAGES = {
    "runc": "runc",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
}
IMAGE_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}
NETWORK_PLUGINS_PACKAGE = "containernetworking-plugins"
NETWORK_PLUGIN_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
APT_TIMEOUT_SECONDS = 600


class MachineError(RuntimeError):
    """This machine cannot run the cluster; the message says what is missing."""


def require_root() -> None:
    if os.geteuid() != 0:
        raise MachineError(
            "the test cluster needs root (network namespaces, containers); run as root, "
            "or name another cluster in HEADWAY_E2E_CONTEXT"
        )


def require_programs(packages: dict[str, str]) -> None:
    """Install what is missing of `packages` (program -> package) with apt-get, or say what to install."""
    require_root()
    missing = {package for program, package in packages.items() if shutil.which(program) is None}
    if packages is RUN_PACKAGES and network_plugins_folder() is None:
        missing.add(NETWORK_PLUGINS_PACKAGE)
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise MachineError(f"missing programs; install (Debian's names): {' '.join(sorted(missing))}")
    print(f"installing {' '.join(sorted(missing))}", flush=True)
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *sorted(missing)]):
        answer = subprocess.run(
            ["apt-get", "-qq", *command],
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
            capture_output=True,
            text=True,
            timeout=APT_TIMEOUT_SECONDS,
        )
        if answer.returncode != 0:
            raise MachineError(f"apt-get {command[0]} failed:\n{answer.stdout}{answer.stderr}")


def network_plugins_folder() -> Path | None:
    """The folder of the CNI plugins, None where they are not installed."""
    return next((folder for folder in NETWORK_PLUGIN_FOLDERS if (folder / "bridge").exists()), None)
