"""Runs a command where it reaches pods and Services, with the environment that tells it which cluster it has.

The command finds kubectl and helm on `PATH`, `KUBECONFIG`, and the images of this checkout under
`HEADWAY_E2E_OPERATOR_IMAGE` and `HEADWAY_E2E_RUNTIME_IMAGE`. The runtime image of the cluster made here is
the small operator image: replicas mount the interpreter and its packages from the host instead of torch.
"""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from e2e.cluster import definitions, images, lifecycle, processes
from e2e.cluster.binaries import build
from e2e.cluster.settings import Settings

CONTEXT_VARIABLE = "HEADWAY_E2E_CONTEXT"
OPERATOR_IMAGE_VARIABLE = "HEADWAY_E2E_OPERATOR_IMAGE"
RUNTIME_IMAGE_VARIABLE = "HEADWAY_E2E_RUNTIME_IMAGE"
HOST_MOUNTS_VARIABLE = "HEADWAY_E2E_HOST_MOUNTS"


def run(settings: Settings, command: list[str]) -> int:
    """Run `command` with a fresh cluster that is gone afterwards, or with the one that the user names."""
    if os.environ.get(CONTEXT_VARIABLE):
        return run_elsewhere(settings, command)
    with lifecycle.exclusive(settings):
        # A runner that stops a job sends SIGTERM; it must not leave a cluster behind.
        signal.signal(signal.SIGTERM, _interrupt)
        try:
            lifecycle.up(settings)
            return execute(settings, command)
        finally:
            lifecycle.down(settings)


def execute(settings: Settings, command: list[str]) -> int:
    """Run `command` with the cluster that `up` started; this checkout's image is loaded first."""
    programs = build(lifecycle.PROGRAM_GROUPS, settings.cache)
    for published in (definitions.LEADER_WORKER_SET, definitions.MONITORING):
        definitions.files_of(published, settings.cache)  # the tests cannot reach the network
    image = images.project_image(settings, "headway-operator", "operator/Dockerfile")
    lifecycle.load_image(settings, programs, image)
    environment = {
        "KUBECONFIG": str(settings.kubeconfig),
        "PATH": _search_path(programs),
        OPERATOR_IMAGE_VARIABLE: image.reference,
        RUNTIME_IMAGE_VARIABLE: image.reference,
        HOST_MOUNTS_VARIABLE: "1",
    }
    return _call([*processes.inside(settings), *command], environment)


def run_elsewhere(settings: Settings, command: list[str]) -> int:
    """Run `command` against the user's own cluster; images come from where its nodes can pull them."""
    missing = [name for name in (OPERATOR_IMAGE_VARIABLE, RUNTIME_IMAGE_VARIABLE) if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"{CONTEXT_VARIABLE} is set; set {' and '.join(missing)} to images its nodes can pull"
        )
    programs = {} if shutil.which("helm") else build(["helm"], settings.cache)
    return _call(command, {"PATH": _search_path(programs)})


def _call(command: list[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen(command, env=os.environ | environment)
    try:
        return process.wait()
    except KeyboardInterrupt:
        # The terminal's interrupt reached the command too; one sent to this process alone did not.
        process.terminate()
        process.wait(timeout=60)
        raise


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _search_path(programs: dict[str, Path]) -> str:
    folders = dict.fromkeys(str(path.parent) for path in programs.values())
    return os.pathsep.join([*folders, os.environ["PATH"]])
