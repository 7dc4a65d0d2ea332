"""The control group and the network namespace that hold every process of one cluster.

All that the cluster starts, containers included, lives in one control group, so that stopping it is exact and
complete even after its starter was killed: whatever is in the group dies, nothing else is touched.

Traps: `ip netns exec` mounts a new /sys and hides the control groups from kubelet, hence `nsenter`. Under
control groups v1 a new cpuset is empty and admits no process until its parent's values are copied.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from e2e.cluster.settings import Settings

CONTROL_GROUPS = Path("/sys/fs/cgroup")
COMPONENTS = "components"
STOP_TIMEOUT_SECONDS = 30.0


def _hierarchies() -> list[Path]:
    """The mounted hierarchies: one under v2, one per controller under v1."""
    if (CONTROL_GROUPS / "cgroup.controllers").exists():
        return [CONTROL_GROUPS]
    return [path for path in sorted(CONTROL_GROUPS.iterdir()) if (path / "cgroup.procs").exists()]


def _tracking_group(settings: Settings) -> Path:
    """The group whose members are the cluster's processes (under v1 one hierarchy of several)."""
    hierarchies = _hierarchies()
    return next((path for path in hierarchies if path.name == "pids"), hierarchies[0]) / settings.name


def create_control_group(settings: Settings) -> None:
    for hierarchy in _hierarchies():
        group = hierarchy / settings.name
        group.mkdir(exist_ok=True)
        for file in ("cpuset.cpus", "cpuset.mems"):
            if hierarchy.name == "cpuset":
                (group / file).write_text((hierarchy / file).read_text())
    (_tracking_group(settings) / COMPONENTS).mkdir(exist_ok=True)


def inside(settings: Settings) -> list[str]:
    """The prefix of a command that is to run in the cluster's network."""
    return ["nsenter", f"--net={settings.network_namespace}"]


def start(settings: Settings, name: str, command: list[str], search_path: str) -> None:
    """Start one component in the cluster's control group and network, its output in its own log file."""
    group = _tracking_group(settings) / COMPONENTS / "cgroup.procs"
    with (settings.logs / f"{name}.log").open("a") as log:
        # A session of its own and no child of ours: it outlives this process, which need not wait for it.
        detached = ["setsid", "--fork", "sh", "-c", f'echo $$ >"{group}" && exec "$@"', name]
        subprocess.run(
            [*detached, *inside(settings), *command],
            cwd=settings.work,
            env=os.environ | {"PATH": search_path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=True,
            timeout=30,
        )


def kill(settings: Settings, program: str) -> list[int]:
    """SIGKILL a component by the name of its program; its processes' numbers. What it started lives on."""
    group = _tracking_group(settings) / COMPONENTS
    found = [process for process in _members(group) if _program_of(process) == program]
    for process in found:
        os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while any(process in _members(group) for process in found):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{program} {found} survived SIGKILL for {STOP_TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.02)
    return found


def kill_pod(settings: Settings, uid: str) -> list[int]:
    """SIGKILL every process of a pod's containers at once; the pod itself, which `pause` holds, stays."""
    root = _tracking_group(settings)
    # The driver writes the uid as it is, or with underscores.
    groups = {path for name in (uid, uid.replace("-", "_")) for path in root.glob(f"**/*pod{name}*")}
    found = {process for group in groups for process in _members(group) if _program_of(process) != "pause"}
    for process in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return sorted(found)


def _program_of(process: int) -> str:
    """The file name of what a process runs; "" once it has gone."""
    try:
        first = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return Path(first.decode(errors="replace")).name


def stop_all(settings: Settings) -> None:
    """Kill every process of the control group, wait until none is left, and remove the group."""
    group = _tracking_group(settings)
    deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
    while members := _members(group):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"processes {members} of {group} survived SIGKILL for {STOP_TIMEOUT_SECONDS:.0f} s"
            )
        for process in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / settings.name, topdown=False):
            os.rmdir(folder)


def _members(group: Path) -> list[int]:
    return [int(line) for file in group.glob("**/cgroup.procs") for line in file.read_text().split()]


def create_network(settings: Settings, addresses: dict[str, str]) -> None:
    """Create the namespace with a bridge `node0` as the node's interface; `addresses`: address -> interface.

    The kernel may lack the dummy device, a bridge with an address does the same. The default route through it
    leads nowhere, but components refuse to start without one.
    """
    _ip("netns", "add", settings.name)
    _ip("-n", settings.name, "link", "add", "node0", "type", "bridge")
    for device in ("lo", "node0"):
        _ip("-n", settings.name, "link", "set", device, "up")
    for address, device in addresses.items():
        _ip("-n", settings.name, "address", "add", address, "dev", device)
    _ip("-n", settings.name, "route", "add", "default", "dev", "node0")
    if shutil.which("modprobe"):
        subprocess.run(["modprobe", "--quiet", "br_netfilter"], check=False, timeout=30)
    for key in ("net.ipv4.ip_forward", "net.bridge.bridge-nf-call-iptables"):
        subprocess.run([*inside(settings), "sysctl", "-qw", f"{key}=1"], check=True, timeout=30)


def remove_network(settings: Settings) -> None:
    if settings.network_namespace.exists():
        _ip("netns", "delete", settings.name)


def mount_memory(folder: Path) -> None:
    """Put `folder` into memory: unpacked images are very many files, slow to delete from a disk."""
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=755", "headway-e2e", str(folder)], check=True, timeout=30
    )


def unmount_all(folder: Path) -> None:
    """Unmount `folder` and what lies under it, last mounted first: killed containers leave mounts behind."""
    points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in reversed([point for point in points if f"{point}/".startswith(f"{folder}/")]):
        subprocess.run(["umount", "--lazy", point], check=False, timeout=30)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)
