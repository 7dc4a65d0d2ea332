"""The house rules that no linter knows: one command, no shadowed module, documents that say what is so."""

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest
import yaml

from headway import __version__, cli
from headway_gateway.config import parse_config
from headway_runtime.server.options import build_parser
from headway_runtime.sources import fetch_command

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(entry.name for entry in entry_points(group=cli.GROUP))


def test_no_package_shadows_the_standard_librarys_operator() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()


def test_the_command_lists_what_the_packages_contribute(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"serve", "gateway", "operator", "up", "crds"} <= set(COMMANDS)
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    rows = dict(
        line.split(maxsplit=1) for line in listed.split("commands:\n")[1].split("\n\n")[0].splitlines()
    )
    assert rows.keys() == set(COMMANDS)
    assert all(len(text) > 20 and not text.startswith("`") for text in rows.values()), rows
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"headway {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"headway {name}" in capsys.readouterr().out


def test_a_reader_that_has_had_enough_is_no_fault() -> None:
    """As `headway plan ... | head` has it."""
    command = [
        sys.executable,
        "-m",
        "headway",
        "plan",
        str(ROOT / "tests/fit/fixtures/llama-3.1-8b"),
        "--gpu",
        "l4",
    ]
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as nobody:
        done = subprocess.run(
            command, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (141, "")


def test_an_unknown_subcommand_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fly"]) == 2
    assert "unknown command 'fly'" in capsys.readouterr().err


def test_a_missing_extra_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_kopf(entry: EntryPoint) -> None:
        raise ModuleNotFoundError("No module named 'kopf'", name="kopf")

    monkeypatch.setattr(EntryPoint, "load", without_kopf)
    assert cli.main(["operator"]) == 2
    assert "needs 'kopf', which is not installed; remedy: pip install -e '.[operator]' in the checkout" in (
        capsys.readouterr().err
    )


def test_make_help_is_a_table() -> None:
    # Within `make test`, make would say which directory it enters.
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    rows = [re.fullmatch(r"([a-z0-9-]+ +)\S.*", line) for line in done.stdout.splitlines()]
    assert len(rows) > 10
    assert len({len(row[1]) for row in rows if row}) == 1
    assert all(rows), done.stdout


def test_the_readme_shows_the_manifest_that_the_quickstart_serves() -> None:
    (shown,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    served = (ROOT / "e2e" / "manifests" / "quickstart.yaml").read_text()
    assert yaml.safe_load(shown) == yaml.safe_load(served)


def test_every_flag_that_the_contract_names_exists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(["--help"])
    helps = [capsys.readouterr().out, build_parser().format_help(), fetch_command.parser().format_help()]
    known = set(re.findall(r"--[a-z-]+", " ".join(helps)))
    named = set(re.findall(r"`(--[a-z-]+)", (ROOT / "docs" / "contract.md").read_text()))
    assert len(named) > 5
    assert named - known == set()
