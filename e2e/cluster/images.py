"""Builds container images without a Docker engine and without an image registry, by buildah.

An image is kept as an archive named by the content of everything that goes into it, so that an unchanged one
is never built twice. The Dockerfiles are the ones that users build; only their `BASE` differs: a minimal
Debian with Python, made by debootstrap, in place of the official Python image.

Traps: where there is no container runtime buildah needs `--isolation chroot` and the host's network; a build
needs the machine's certificates and resolver mounted, and its pip settings where it has some; debootstrap
must be told the machine's own mirror.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import machine
from e2e.cluster.binaries import build, locked
from e2e.cluster.components import PAUSE_IMAGE
from e2e.cluster.settings import CHECKOUT, Settings, fingerprint

DEBIAN_RELEASE = "bookworm"
BASE_IMAGE = f"localhost/headway-e2e-python:{DEBIAN_RELEASE}-1"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
BUILD_TIMEOUT_SECONDS = 3600
BUILD_MOUNTS = ("/etc/ssl/certs", "/etc/resolv.conf", "/etc/pip.conf")
SOURCES = ("operator", "runtime", "requirements")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a reference that pods name and an archive that containerd imports."""

    reference: str
    archive: Path


def pause_image(settings: Settings) -> Image:
    """The image of the process that holds a pod's network: one static program and nothing else."""
    program = build(["pause"], settings.cache)["pause"]
    archive = settings.cache / "images" / f"pause-{fingerprint([program])}.tar"
    with _building(settings, archive) as is_needed, tempfile.TemporaryDirectory() as context:
        if is_needed:
            shutil.copy(program, context)
            dockerfile = Path(context) / "Dockerfile"
            dockerfile.write_text('FROM scratch\nCOPY pause /pause\nENTRYPOINT ["/pause"]\n')
            _build(settings, dockerfile, Path(context), PAUSE_IMAGE, archive, [])
    return Image(PAUSE_IMAGE, archive)


def project_image(settings: Settings, name: str, dockerfile: str) -> Image:
    """The image `name` of this checkout's `dockerfile` (a path in the checkout)."""
    recipe = [CHECKOUT / dockerfile, CHECKOUT / f"{dockerfile}.dockerignore"]
    digest = fingerprint([*recipe, *_project_sources()], BASE_IMAGE)
    reference = f"localhost/{name}:{digest}"
    archive = settings.cache / "images" / f"{name}-{digest}.tar"
    with _building(settings, archive) as is_needed:
        if not is_needed:
            return Image(reference, archive)
        _ensure_base(settings)
        dependencies = _dependencies(settings, name, dockerfile)
        print(f"building image {reference} (once; kept in {archive})", flush=True)
        options = [*_pip_options(), f"--build-arg=DEPENDENCIES={dependencies}"]
        _build(settings, CHECKOUT / dockerfile, CHECKOUT, reference, archive, options)
        for older in archive.parent.glob(f"{name}-*.tar"):
            if older != archive:
                older.unlink()
    return Image(reference, archive)


def _dependencies(settings: Settings, name: str, dockerfile: str) -> str:
    """The stage of a Dockerfile that installs other people's packages, kept until they are others."""
    files = [CHECKOUT / dockerfile, *(CHECKOUT / "requirements").glob("*.txt")]
    reference = f"localhost/{name}-dependencies:{fingerprint(files, BASE_IMAGE)}"
    if not _is_known(settings, reference):
        print(f"installing the dependencies of {name} (once; {reference})", flush=True)
        options = [*_pip_options(), "--target=dependencies"]
        _bud(settings, CHECKOUT / dockerfile, CHECKOUT, reference, options)
    return reference


def _pip_options() -> list[str]:
    """With this machine's certificates and package index."""
    mounts = [f"--volume={path}:{path}:ro" for path in BUILD_MOUNTS if Path(path).exists()]
    index = os.environ.get("PIP_INDEX_URL")
    return [
        *mounts,
        f"--build-arg=BASE={BASE_IMAGE}",
        *([f"--build-arg=PIP_INDEX_URL={index}"] if index else []),
    ]


def _is_known(settings: Settings, reference: str) -> bool:
    return _buildah(settings, "images", "--quiet", reference, check=False).returncode == 0


@contextmanager
def _building(settings: Settings, archive: Path) -> Iterator[bool]:
    """Hold the lock on all image building; the value says whether `archive` is still to be built."""
    with locked(settings.cache / "images" / "building.lock"):
        is_needed = not archive.exists()
        if is_needed:
            machine.require_programs(machine.IMAGE_PACKAGES)
        yield is_needed


def _project_sources() -> list[Path]:
    files = [CHECKOUT / name for name in PROJECT_FILES]
    for folder in SOURCES:
        files += [
            path
            for path in (CHECKOUT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        ]
    return files


def _ensure_base(settings: Settings) -> None:
    if _is_known(settings, BASE_IMAGE):
        return
    print(f"making the base image {BASE_IMAGE} (once)", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", DEBIAN_RELEASE]
        answer = subprocess.run(
            [*command, root, _mirror()], capture_output=True, text=True, timeout=BUILD_TIMEOUT_SECONDS
        )
        if answer.returncode != 0:
            raise machine.MachineError(f"debootstrap failed:\n{answer.stdout[-4000:]}{answer.stderr}")
        shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
        container = _buildah(settings, "from", "scratch").stdout.strip()
        _buildah(settings, "add", "--quiet", container, str(root), "/")
        _buildah(settings, "config", "--env=LANG=C.UTF-8", "--cmd=python3", container)
        _buildah(settings, "commit", "--quiet", "--rm", container, BASE_IMAGE)


def _mirror() -> str:
    """The Debian mirror that this machine's own packages come from."""
    answer = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Component: main"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    mirrors = [line for line in answer.stdout.split() if line.rstrip("/").endswith("/debian")]
    if not mirrors:
        raise machine.MachineError(
            "no Debian mirror is known to apt on this machine, and the test images' base is made from one; "
            "remedy: give apt a source of Debian's main component and run apt-get update"
        )
    return mirrors[0]


def _build(
    settings: Settings, dockerfile: Path, context: Path, reference: str, archive: Path, options: list[str]
) -> None:
    """Build and export under a temporary name, so that the cache never holds half an image.

    The caller holds the lock: one build at a time may clear away what a killed one left in the storage.
    """
    _bud(settings, dockerfile, context, reference, options)
    partial = archive.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    _buildah(settings, "push", "--quiet", reference, f"docker-archive:{partial}:{reference}")
    _buildah(settings, "rmi", "--force", reference)
    partial.rename(archive)


def _bud(settings: Settings, dockerfile: Path, context: Path, reference: str, options: list[str]) -> None:
    ignore = dockerfile.with_name(f"{dockerfile.name}.dockerignore")
    ignores = [f"--ignorefile={ignore}"] if ignore.exists() else []
    _buildah(settings, "rm", "--all")
    _buildah(settings, "rmi", "--prune")
    _buildah(
        settings, "bud", "--isolation=chroot", "--network=host", "--pull-never", "--quiet",
        "--format=docker", *ignores, *options, f"--file={dockerfile}", f"--tag={reference}", str(context),
    )  # fmt: skip


def _buildah(settings: Settings, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    storage = settings.cache / "images" / "storage"
    answer = subprocess.run(
        ["buildah", "--storage-driver=overlay", f"--root={storage}", f"--runroot={storage}-run", *arguments],
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_SECONDS,
    )
    if check and answer.returncode != 0:
        raise machine.MachineError(
            f"buildah {arguments[0]} failed:\n{answer.stdout[-4000:]}{answer.stderr[-8000:]}"
        )
    return answer
