"""What tuning takes and leaves: right, fast, remembered."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import timing, tune
from benchmarks.gpu.cases.case import Case, Work
from benchmarks.gpu.compile_ahead import Helpers
from benchmarks.gpu.costs import Cost
from benchmarks.gpu.timing import Timing
from benchmarks.gpu.tune import State, Tuner, best_of, key_of, last_faster, targets

from headway_runtime.kernels.triton.launch import Gpu, configuration

GPU = Gpu("none_such", 90, 4)
CONDITIONS = {"device": "none", "torch": "2.11"}
# By warps: of a candidate that is right, of one that computes something else, of one that is refused.
MICROSECONDS = {2: 1.0, 4: 9.0, 8: 10.0, 16: 1.0}
WRONG, REFUSED = 2, 16


@dataclass
class Fake:
    """Two norms whose time hangs on their warps. launched: warps of all that was launched for its time."""

    launched: list[int] = field(default_factory=list)

    def case(self, name: str) -> Case:
        def run() -> torch.Tensor:
            warps = configuration("norm", "4096", GPU)["num_warps"]
            if warps == REFUSED:
                raise RuntimeError("out of resources: shared memory")
            return torch.full((3,), 2.0 if warps == WRONG else 1.0)

        return Case(name, "norm", "4096", lambda _: Work(run), Cost(1.0))

    def timed(self, calls: Sequence[Callable[[], object]], device: str) -> Timing:
        warps = configuration("norm", "4096", GPU)["num_warps"]
        self.launched.append(warps)
        return Timing(MICROSECONDS[warps], 0.0, is_captured=True)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    monkeypatch.setattr(timing, "timed", found.timed)
    return found


def tuner(folder: Path, seconds: float = 1000.0) -> Tuner:
    state = State.opened(folder / "state.json", CONDITIONS)
    return Tuner(GPU, "cpu", folder / "table.json", state, seconds, Helpers(0))


def test_the_fastest_that_is_right_is_taken(fake: Fake, tmp_path: Path) -> None:
    (target,) = targets([fake.case("a"), fake.case("b")], GPU, ["norm"])

    assert tuner(tmp_path).tune(target)

    assert target.candidates[0] == {"num_warps": 8}
    assert sorted(fake.launched) == [4, 4, 8, 8]
    assert json.loads((tmp_path / "table.json").read_text()) == {"norm": {"4096": {"num_warps": 4}}}
    kept = json.loads((tmp_path / "state.json").read_text())["found"]["norm"]["4096"]
    assert kept[key_of({"num_warps": 4})] == {"microseconds": [9.0, 9.0]}
    assert "differs by" in kept[key_of({"num_warps": WRONG})]["out"]
    assert "shared memory" in kept[key_of({"num_warps": REFUSED})]["out"]


def test_nothing_is_measured_twice(fake: Fake, tmp_path: Path) -> None:
    (target,) = targets([fake.case("a")], GPU, ["norm"])
    tuner(tmp_path).tune(target)
    (tmp_path / "table.json").unlink()
    fake.launched.clear()

    assert tuner(tmp_path).tune(target)

    assert fake.launched == []
    assert json.loads((tmp_path / "table.json").read_text()) == {"norm": {"4096": {"num_warps": 4}}}


def test_other_conditions_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = State.opened(tmp_path / "state.json", CONDITIONS)
    state.found["norm"] = {"4096": {"{}": {"microseconds": [1.0]}}}
    state.keep()

    assert State.opened(tmp_path / "state.json", CONDITIONS).found == state.found
    assert State.opened(tmp_path / "state.json", {**CONDITIONS, "torch": "2.12"}).found == {}
    assert "begun anew" in capsys.readouterr().out


def test_a_run_without_time_left_says_so_and_changes_nothing(fake: Fake, tmp_path: Path) -> None:
    (target,) = targets([fake.case("a")], GPU, ["norm"])

    assert not tuner(tmp_path, seconds=5.0).tune(target)
    assert not (tmp_path / "table.json").exists()


@pytest.mark.parametrize(
    ("microseconds", "want"),
    [
        ([9.9, 9.9], None),
        ([9.0, 9.0], 4),
        # Geometric: twice as slow at one shape is not made good by twice as fast at another, and a bit.
        ([5.0, 19.9], None),
        ([5.0, 18.0], 4),
    ],
)
def test_less_than_noise_is_no_gain(microseconds: list[float], want: int | None) -> None:
    target = tune.Target("norm", "4096", (), ({"num_warps": 8}, {"num_warps": 4}))
    measured = {
        key_of({"num_warps": 8}): {"microseconds": [10.0, 10.0]},
        key_of({"num_warps": 4}): {"microseconds": microseconds},
    }

    found = best_of(target, measured)

    assert (None if found is None else found[0]["num_warps"]) == want


def test_without_the_present_entry_nothing_is_known() -> None:
    target = tune.Target("norm", "4096", (), ({"num_warps": 8}, {"num_warps": 4}))

    assert best_of(target, {key_of({"num_warps": 4}): {"microseconds": [1.0]}}) is None


@pytest.mark.parametrize(
    ("found", "want"),
    [
        ({64: (1.0, 2.0), 128: (2.0, 3.0), 256: (5.0, 4.0), 512: (5.0, 6.0)}, 128),
        ({64: (3.0, 2.0)}, 0),
        ({512: (1.0, 2.0), 64: (1.0, 2.0)}, 512),
    ],
    ids=["until it is slower", "never", "always"],
)
def test_codes_are_read_for_as_many_rows_as_they_are_faster(
    found: dict[int, tuple[float, float]], want: int
) -> None:
    assert last_faster(found) == want


def test_a_kernel_without_candidates_is_refused(fake: Fake) -> None:
    with pytest.raises(ValueError, match="--kernel='nrom' has no candidates; use some of paged_decode"):
        targets([fake.case("a")], GPU, ["nrom"])


def test_what_layers_go_by_is_not_tried_with_every_block_size() -> None:
    plain = Case("plain", "coded_plain", "fp8", lambda _: Work(lambda: None), Cost(1.0))

    (target,) = targets([plain], Gpu("nvidia_h200", 90, 132), [])

    assert {one["most_product_rows"] for one in target.candidates} == {64}
    assert sorted(one["block_outputs"] for one in target.candidates) == [32, 64, 128]


def test_spills_of_what_is_launched_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    class Compiled:
        def __init__(self, n_spills: int) -> None:
            self.n_spills = n_spills

    spills = iter([0, 6, 2])
    run: Any = lambda self, *args, **kwargs: Compiled(next(spills))  # noqa: E731
    monkeypatch.setattr(JITFunction, "run", run)
    with tune.spilled_bytes() as spilled:
        for _ in range(3):
            JITFunction.run(None)
        assert spilled() == 24
    assert JITFunction.run is run
