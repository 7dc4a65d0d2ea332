"""The Job that fetches for a ModelCache: its arguments are the command's, and what that leaves is read."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway_operator.cluster import kubernetes_fetches
from headway_operator.manifests.fetch_job import CLAIM_MOUNT, FINAL_STATUS, TERMINATION_LOG, fetch_arguments
from headway_operator.model_cache.content import read_result
from headway_operator.model_cache.course import ERROR_REASONS
from headway_operator.spec import parse_cache
from headway_runtime import errors
from headway_runtime.sources import fetch_command
from headway_runtime.sources.fetch_result import ProgressLines, write_error, write_fetched


def arguments(**spec: Any) -> list[str]:
    manifest = {
        "apiVersion": "serving.headway.dev/v1alpha1",
        "kind": "ModelCache",
        "metadata": {"name": "llama"},
        "spec": {"source": "hf://org/name", "storage": {"size": "1Gi"}, **spec},
    }
    return fetch_arguments(parse_cache(manifest))


def test_the_command_takes_the_arguments() -> None:
    name, *told = arguments(revision="v1", adapter=True)
    assert name == "fetch"
    read = fetch_command.parser().parse_args(told)
    assert read.model == "hf://org/name@v1"
    assert (read.download_dir, read.result_file) == (CLAIM_MOUNT, Path(TERMINATION_LOG))
    assert read.adapter
    assert read.progress_seconds > 0


def test_what_was_fetched_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--name" / "snapshots" / "0a1b"
    (folder / "below").mkdir(parents=True)
    (tmp_path / "blob").write_bytes(b"12345")
    (folder / "config.json").symlink_to(tmp_path / "blob")
    (folder / "below" / "weights").write_bytes(b"123")
    result = tmp_path / "result"
    write_fetched(result, folder)
    read = read_result(result.read_text())
    assert read is not None
    assert (read.identity, read.bytes, read.files, read.error) == ("0a1b", 8, 2, "")
    told = json.loads(result.read_text())
    told["folder"] = f"{CLAIM_MOUNT}/models--org--name/snapshots/0a1b"
    read = read_result(json.dumps(told))
    assert read is not None
    assert read.path == "models--org--name/snapshots/0a1b"


@pytest.mark.parametrize("kind", [errors.SourceRefusedError, errors.NoRoomError, errors.ModelFetchError])
def test_an_error_is_told_apart_and_fits_a_termination_message(tmp_path: Path, kind: Any) -> None:
    result = tmp_path / "result"
    write_error(result, kind("words " * 2000))
    assert len(result.read_bytes()) <= 4096
    read = read_result(result.read_text())
    assert read is not None
    assert (read.error, read.message[:11]) == (kind.__name__, "words words")
    assert (read.error in ERROR_REASONS) == (kind is not errors.ModelFetchError)


def test_every_error_that_has_a_reason_is_one_of_the_runtime() -> None:
    for name in ERROR_REASONS:
        assert issubclass(getattr(errors, name), errors.ModelFetchError)
    # A source that refuses may be opened meanwhile: only what no other start helps ends the Job at once.
    assert errors.SourceRefusedError("x").exit_status != FINAL_STATUS
    assert errors.ConfigError("x").exit_status == errors.ModelLoadError("x").exit_status == FINAL_STATUS


def test_lines_of_progress_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = ProgressLines(5.0, lambda: now[0])
    for seconds, there in ((0.0, 1), (1.0, 2), (5.0, 3), (9.0, 4)):
        now[0] = seconds
        lines.told(there, 10)
    log = capsys.readouterr().err
    assert log.count("\n") == 2
    assert kubernetes_fetches.progress(log) == (3, 10)
