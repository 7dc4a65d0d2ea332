"""Starts and removes the cluster: the order of things, and nothing about what each of them is.

A start begins by removing whatever an earlier cluster of the same name left, killed or not, so it always
gives a fresh cluster. Nothing here is worth a graceful stop: `down` kills the control group and deletes the
work folder.
"""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import certificates, components, images, machine, processes
from e2e.cluster.binaries import build
from e2e.cluster.settings import NODE_NAME, NODE_PREFIX_LENGTH, Settings

START_TIMEOUT_SECONDS = 120.0
LOG_TAIL_LINES = 12
PROGRAM_GROUPS = ["kubernetes", "etcd", "containerd", "coredns", "helm"]


@contextmanager
def exclusive(settings: Settings) -> Iterator[None]:
    """Hold the cluster's name for this process, so that two runs on one machine never share a cluster."""
    with settings.work.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise machine.MachineError(
                f"another run uses the cluster {settings.name!r}; wait for it, or set HEADWAY_E2E_NAME"
            ) from None
        yield


def up(settings: Settings) -> dict[str, Path]:
    """Start a fresh cluster and return its programs by name once the node is Ready."""
    machine.require_programs(machine.RUN_PACKAGES)
    programs = build(PROGRAM_GROUPS, settings.cache)
    pause = images.pause_image(settings)
    down(settings)
    settings.work.mkdir()
    processes.mount_memory(settings.work)
    settings.logs.mkdir()
    processes.create_control_group(settings)
    processes.create_network(settings, components.node_addresses(NODE_PREFIX_LENGTH))
    certificates.create(settings)

    search_path = _search_path(programs)

    def start(name: str, command: list[str]) -> None:
        processes.start(settings, name, command, search_path)

    plugins = machine.network_plugins_folder()
    assert plugins is not None, "require_programs has installed them"
    start("etcd", components.etcd(settings))
    start("apiserver", components.api_server(settings))
    start("containerd", components.containerd(settings, plugins))
    kubectl = [*processes.inside(settings), str(programs["kubectl"]), f"--kubeconfig={settings.kubeconfig}"]
    _wait(settings, "the API server", lambda: _succeeds([*kubectl, "get", "--raw=/readyz"]))
    start("controller-manager", components.controller_manager(settings))
    start("scheduler", components.scheduler(settings))
    ctr = [str(programs["ctr"]), f"--address={settings.containerd_socket}"]
    _wait(settings, "containerd", lambda: _succeeds([*ctr, "version"]))
    load_image(settings, programs, pause)
    start("coredns", components.dns(settings))
    start("kubelet", components.kubelet(settings))
    start("kube-proxy", components.proxy(settings))
    ready = [*kubectl, "wait", "--for=condition=Ready", f"node/{NODE_NAME}", "--timeout=1s"]
    _wait(settings, "the node", lambda: _succeeds(ready))
    account = [*kubectl, "get", "serviceaccount", "default"]
    _wait(settings, "the default service account", lambda: _succeeds(account))
    return programs


def restart(settings: Settings, name: str) -> None:
    """Start etcd or containerd again after `processes.kill`, with what it had on its disk."""
    plugins = machine.network_plugins_folder()
    assert plugins is not None, "the cluster runs with them"
    command = components.etcd(settings) if name == "etcd" else components.containerd(settings, plugins)
    assert command[0] == name
    processes.start(settings, name, command, _search_path(build(PROGRAM_GROUPS, settings.cache)))


def down(settings: Settings) -> None:
    """Remove the cluster, running or left over; absent is success."""
    processes.stop_all(settings)
    processes.unmount_all(settings.work)
    processes.remove_network(settings)
    if settings.work.exists():
        shutil.rmtree(settings.work)


def load_image(settings: Settings, programs: dict[str, Path], image: images.Image) -> None:
    """Make an image known to containerd under its reference, so that pods need pull nothing."""
    subprocess.run(
        [
            programs["ctr"], f"--address={settings.containerd_socket}", "--namespace=k8s.io",
            "images", "import", image.archive,
        ],
        check=True, timeout=600, capture_output=True,
    )  # fmt: skip


def tag_image(settings: Settings, reference: str, other: str) -> None:
    """Make an image known under another reference, too."""
    ctr = build(["containerd"], settings.cache)["ctr"]
    command = [str(ctr), f"--address={settings.containerd_socket}", "--namespace=k8s.io", "images", "tag"]
    subprocess.run([*command, "--force", reference, other], check=True, timeout=60, capture_output=True)


def log_tails(settings: Settings) -> str:
    """The last lines of every component's log, for the report of a failure."""
    parts = []
    for log in sorted(settings.logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        parts.append(f"--- {log.name}\n" + "\n".join(lines))
    return "\n".join(parts)


def _search_path(programs: dict[str, Path]) -> str:
    folders = dict.fromkeys(str(path.parent) for path in programs.values())
    return os.pathsep.join([*folders, os.environ["PATH"], "/usr/sbin", "/sbin"])


def _wait(settings: Settings, what: str, is_ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while not is_ready():
        if time.monotonic() > deadline:
            raise machine.MachineError(
                f"{what} not ready after {START_TIMEOUT_SECONDS:.0f} s\n{log_tails(settings)}"
            )
        time.sleep(0.2)


def _succeeds(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False
