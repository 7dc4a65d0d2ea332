"""Each command runs with what its extra installs, and says in one line what it misses.

What a command needs is computed from its imports, lazy ones too; what an extra installs, from pyproject.toml
and the metadata of what is installed here.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, distribution, entry_points, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from headway import cli
from headway.needs import NEEDED_MODULES

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "operator", ROOT / "runtime")
OWN = {path.parent.name for folder in FOLDERS for path in folder.glob("*/__init__.py")}
COMMANDS = {entry.name: entry.module for entry in entry_points(group=cli.GROUP)}
# Processes that a command starts by the names of their modules.
STARTED = {
    "serve": (
        "headway_runtime.server.engine_process",
        "headway_runtime.server.front_process",
        "headway_runtime.sources.fetch_process",
    ),
    "fetch": ("headway_runtime.sources.fetch_process",),
    "plan": ("headway_runtime.sources.fetch_process",),
    "eval": ("headway_runtime.sources.fetch_process",),
}
# Used where it is there: compilers of kernels, and traces, which have an extra of their own.
OPTIONAL = {"llvmlite", "triton", "opentelemetry"}


def file_of(module: str) -> Path | None:
    for folder in FOLDERS:
        path = folder.joinpath(*module.split("."))
        for one in (path / "__init__.py", path.with_suffix(".py")):
            if one.is_file():
                return one
    return None


def imports(node: ast.AST) -> Iterator[str]:
    """Names of modules that are imported below `node`, but for types' sake or where one may be missing."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.Try) and any(
            handler.type is not None and ast.unparse(handler.type) in ("ImportError", "ModuleNotFoundError")
            for handler in child.handlers
        ):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module is not None:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imports(child)


@cache
def imported_by(module: str) -> tuple[str, ...]:
    path = file_of(module)
    return () if path is None else tuple(imports(ast.parse(path.read_text(encoding="utf-8"))))


def needed(command: str) -> set[str]:
    """The top-level modules of others that the command's processes import."""
    seen: set[str] = set()
    others: set[str] = set()
    to_see = [COMMANDS[command], *STARTED.get(command, ())]
    while to_see:
        module = to_see.pop()
        if module in seen or file_of(module) is None:
            continue
        seen.add(module)
        to_see += [module.rpartition(".")[0]]
        for name in imported_by(module):
            top = name.partition(".")[0]
            if top in OWN:
                to_see.append(name)
            elif top not in sys.stdlib_module_names:
                others.add(top)
    return others - OPTIONAL


def installed_by(extra: str) -> set[str]:
    """The distributions that come with an extra, and what they need in their turn."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    to_see = [Requirement(one) for one in project["optional-dependencies"][extra]]
    while to_see:
        requirement = to_see.pop()
        name = canonicalize_name(requirement.name)
        key = f"{name}{sorted(requirement.extras)}"
        if key in found or (
            requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
        ):
            continue
        found |= {key, name}
        for text in distribution(name).requires or ():
            below = Requirement(text)
            if below.marker is None or any(
                below.marker.evaluate({"extra": one}) for one in ("", *requirement.extras)
            ):
                below.marker = None
                to_see.append(below)
    return found


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_extra_brings_all_that_its_command_imports(command: str) -> None:
    installed = installed_by(cli.EXTRA_OF_PACKAGE[COMMANDS[command].partition(".")[0]])
    distributions = packages_distributions()
    missing = {
        module
        for module in needed(command)
        if not installed & {canonicalize_name(name) for name in distributions.get(module, ())}
    }
    assert not missing


@pytest.mark.parametrize("command", sorted(NEEDED_MODULES))
def test_the_table_of_needed_modules_is_what_is_imported(command: str) -> None:
    assert NEEDED_MODULES[command] == tuple(sorted(needed(command)))


HIDING = """
import sys
from importlib.machinery import PathFinder

hidden = set()

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding if one is PathFinder else one for one in sys.meta_path]
from headway.cli import main
"""


def run_hiding(code: str) -> "subprocess.CompletedProcess[str]":
    """A process that can hide modules as if they were not installed."""
    return subprocess.run(
        [sys.executable, "-c", HIDING + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )


def test_serve_says_in_a_line_which_module_it_misses_whichever_it_is() -> None:
    done = run_hiding(
        "from headway.needs import NEEDED_MODULES\n"
        "for name in NEEDED_MODULES['serve']:\n"
        "    hidden.clear()\n"
        "    hidden.add(name)\n"
        "    assert main(['serve', 'bundled://headway-tiny']) == 2\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        f"headway serve needs {name!r}, which is not installed; remedy: pip install -e '.[runtime]' in the "
        "checkout"
        for name in NEEDED_MODULES["serve"]
    ]


def test_a_module_that_is_missed_while_a_command_runs_is_told_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'rich.live'", name="rich.live")

    monkeypatch.setattr(EntryPoint, "load", lambda entry: run)
    assert cli.main(["operator"]) == 2
    assert "needs 'rich', which is not installed; remedy: pip install -e '.[operator]'" in (
        capsys.readouterr().err
    )

    def broken(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'headway_operator.x'", name="headway_operator.x")

    monkeypatch.setattr(EntryPoint, "load", lambda entry: broken)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["operator"])


def test_up_says_before_it_starts_what_its_replicas_miss(tmp_path: Path) -> None:
    file = tmp_path / "service.yaml"
    file.write_text((ROOT / "e2e" / "manifests" / "quickstart.yaml").read_text())
    done = run_hiding(
        f"hidden.update(['torch', 'uvicorn'])\nsys.exit(main(['up', '-f', {str(file)!r}, '--port', '0']))"
    )
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr == (
        "headway up: its replicas and its gateway run on this machine, which needs 'torch', 'uvicorn', which "
        "are not installed; remedy: pip install -e '.[operator,gateway,runtime]' in the checkout\n"
    )


def test_simulate_runs_with_its_extra_alone(tmp_path: Path) -> None:
    """All that the extra does not bring is hidden."""
    installed = installed_by("simulate")
    hidden = {
        module
        for module, names in packages_distributions().items()
        if not installed & {canonicalize_name(name) for name in names} and module not in OWN
    }
    flags = ["--generate", "poisson", "--duration-seconds", "20", "--rate", "1", "--no-oracle", "--quiet"]
    flags += ["--plot", str(tmp_path / "timeline.svg")]
    done = run_hiding(f"hidden.update({sorted(hidden)!r})\nsys.exit(main(['simulate', *{flags!r}]))")
    assert done.returncode == 0, done.stderr
