"""All stages and the tuning, run whole on a CPU with tiny shapes, kernels interpreted: ready for a first GPU.

Each is a process of its own, as Triton decides whether it interprets when it is imported.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_SECONDS = 840
pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT_SECONDS + 20)]
ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str, want: int = 0) -> str:
    """What it printed. want: its exit status."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "runtime"), "OMP_NUM_THREADS": "1"}
    for name in ("TRITON_INTERPRET", "HEADWAY_KERNELS"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.gpu.{module}", "--smoke", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == want, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


def rows_of(stage: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    out = tmp_path / "results.json"
    printed = run("run", "--out", str(out), "--stage", stage)
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert {name: row for name, row in rows.items() if "error" in row} == {}
    assert all(name in printed for name in rows)
    (own,) = found["runs"]
    assert own["left_out"] == []
    assert own["ceilings"]["copy_gigabytes_per_second"] > 0
    return rows


def test_checks(tmp_path: Path) -> None:
    rows = rows_of("checks", tmp_path)

    kernels = {name: row for name, row in rows.items() if name.startswith("kernel ")}
    assert len(kernels) > 20
    assert sum(row["num_checks"] for row in kernels.values()) > 100
    for name, row in kernels.items():
        assert row["is_right"], (name, row)
        assert 0 <= row["worst_share_of_tolerance"] < 1, name
    tokens = [row for row in rows.values() if "largest_gap" in row]
    assert len(tokens) == 6
    assert all(row["is_right"] and row["num_tokens"] == 2 * 4 for row in tokens)
    assert all(row["num_launches"] > 0 for row in tokens)
    assert rows["compiled after ready"]["num_compiled"] == 0
    recorded = [row for name, row in rows.items() if name.startswith("recorded and not")]
    assert len(recorded) == 3
    assert all(row["is_right"] and row["num_tokens"] == 3 * 3 for row in recorded)


def test_kernels(tmp_path: Path) -> None:
    rows = rows_of("kernels", tmp_path)
    rows.pop("ceilings")
    (by_class,) = (row for name, row in rows.items() if name.endswith("by default.json's classes"))
    assert set(by_class["over_own"]) == {"rows_1", "rows_8", "rows_16", "rows_32", "default"}
    assert by_class["over_own"]["rows_1"] == 1

    assert len(rows) > 80
    for name, row in rows.items():
        # Which is greater says nothing here: a processor's ceilings, measured for a moment, are no bound.
        assert row["floor_microseconds"] > 0, name
        assert row["microseconds"] > 0, name
        assert row.get("is_right", True), (name, row)
        assert not [field for field in row if field.endswith("_failed")], row
    assert sum("error_of_result" in row for row in rows.values()) > 80
    assert {field for row in rows.values() for field in row if field.endswith("_over_ours")} >= {
        "sdpa_over_ours",
        "flash_over_ours",
        "cublas_over_ours",
        "torch_over_ours",
        "argmax_over_ours",
    }


def test_engine(tmp_path: Path) -> None:
    """By Triton's kernels, in recorded steps."""
    rows = rows_of("engine", tmp_path)

    for weights in ("none", "fp8", "int4"):
        for batch in (1, 2):
            row = rows[f"llama {weights}, decode {batch} at 8"]
            assert row["floor_milliseconds"] > 0
            assert row["step_milliseconds"] > 0
            assert row["recorded_share"] == 1
        use = rows[f"llama {weights}, GPU use of decode 2 at 8"]
        assert use["launches_per_step"] > 5
        assert use["host_milliseconds"] > 0
    assert rows["llama none, prompt of 12"]["ttft_milliseconds"] > 0
    assert rows["llama none, prefix of 32"]["ratio"] > 0
    assert rows["mixture, decode 2 at 8"]["recorded_share"] == 1
    assert rows["qwen3, 3 requests, 8 in, 4 out"]["is_whole"]
    assert rows["llama, prompt lookup at 1"]["ratio"] > 0


def test_the_first_run_on_a_gpu(tmp_path: Path) -> None:
    """Some rows of each stage, in the order of their worth, then tuning; what other runs found stays."""
    out = tmp_path / "results.json"
    run("run", "--out", str(out), "--stage", "peers", "--seconds", "0", want=1)
    kept = {"stage": "kernels", "name": "gate, 1 x 256", "run": 0, "share_of_floor": 1e-12}
    found = json.loads(out.read_text())
    out.write_text(json.dumps(found | {"rows": [kept]}))

    run("run", "--out", str(out), "--stage", "first")

    rows = json.loads(out.read_text())["rows"]
    assert [row for row in rows if "error" in row] == []
    assert kept in rows
    own = [row for row in rows if row["run"] == 1]
    assert list(dict.fromkeys(row["stage"] for row in own)) == [
        "machine",
        "checks",
        "kernels",
        "engine",
        "tuning",
    ]
    timed = [row for row in own if row["stage"] == "kernels"]
    assert {row["kernel"] for row in timed} == {"norm", "place_step"}
    assert [field for row in timed for field in row if field.endswith("_over_ours")] == []
    assert sum("decode 2 at 8" in row["name"] for row in own) == 2
    tuning = own[-1]
    assert set(tuning["name"].split()) == {"norm", "place_step"}
    assert tuning["is_whole"]
    assert set(json.loads((tmp_path / "gpu-tuning.json").read_text())["found"]) == {"norm", "place_step"}


def test_a_run_that_measured_nothing_says_so_and_fails(tmp_path: Path) -> None:
    printed = run("run", "--out", str(tmp_path / "results.json"), "--seconds", "15", want=1)

    assert "nothing was measured: --seconds=15 may be too few" in printed


def test_peers(tmp_path: Path) -> None:
    rows = rows_of("peers", tmp_path)

    assert rows["transformers generate, decode 2 at 8"]["tokens_per_second"] > 0
    assert rows["transformers generate_batch, decode 2 at 8"]["tokens_per_second"] > 0
    assert rows["transformers compiled with a static cache, decode 2 at 8"]["tokens_per_second"] > 0


def test_tuning_is_gone_on_with(tmp_path: Path) -> None:
    table, state = tmp_path / "table.json", tmp_path / "state.json"
    files = ("--out", str(table), "--state", str(state))

    first = run("tune", "--kernel", "norm", "gated_product", "coded_plain", *files)

    kept = json.loads(state.read_text())
    assert set(kept["found"]) == {"norm", "gated_product", "coded_plain"}
    for classes in kept["found"].values():
        for measured in classes.values():
            assert len(measured) == 2
            # Of interpreted kernels any may look hopeless.
            assert all(
                min(one["microseconds"]) > 0 if "out" not in one else "times the present" in one["out"]
                for one in measured.values()
            ), measured
    assert set(kept["crossovers"]) == {"int4", "fp8", "int8"}
    for crossover in kept["crossovers"].values():
        assert set(crossover["rows"]) == {"2", "5"}
    assert "most_product_rows" in first
    run("tune", "--kernel", "norm", *files)
    after = json.loads(state.read_text())
    assert after["crossovers"] == kept["crossovers"]
    for kernel, classes in kept["found"].items():
        for shape_class, measured in classes.items():
            # An entry that was changed stands first now, before another candidate.
            assert measured.items() <= after["found"][kernel][shape_class].items()
