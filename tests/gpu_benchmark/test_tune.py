"""What tuning takes and leaves: right, fast, remembered."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu import timing
from benchmarks.gpu.cases.case import Case, Work
from benchmarks.gpu.compile_ahead import Helpers
from benchmarks.gpu.costs import Cost
from benchmarks.gpu.timing import Timing
from benchmarks.gpu.tuner import Pair, Target, Tuner, best_of, last_faster, spilled_bytes, targets
from benchmarks.gpu.tuning_state import State, key_of

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


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Tuner]]:
    """start(seconds=1000): a run that ends with the next one, or with the test."""
    runs = ExitStack()

    def begin(seconds: float = 1000.0) -> Tuner:
        runs.close()
        state = State.opened(tmp_path / "state.json", CONDITIONS)
        own = Tuner(GPU, "cpu", tmp_path / "table.json", state, seconds, Helpers(0))
        return runs.enter_context(own)

    yield begin
    runs.close()


def test_the_fastest_that_is_right_is_taken(fake: Fake, tmp_path: Path, start: Callable[..., Tuner]) -> None:
    (target,) = targets([fake.case("a"), fake.case("b")], GPU, ["norm"])

    assert start().tune(target)

    assert target.candidates[0] == {"num_warps": 8}
    assert sorted(fake.launched) == [4, 4, 8, 8]
    assert json.loads((tmp_path / "table.json").read_text()) == {"norm": {"4096": {"num_warps": 4}}}
    kept = json.loads((tmp_path / "state.json").read_text())["found"]["norm"]["4096"]
    assert kept[key_of({"num_warps": 4})] == {"microseconds": [9.0, 9.0]}
    assert "differs by" in kept[key_of({"num_warps": WRONG})]["out"]
    assert "shared memory" in kept[key_of({"num_warps": REFUSED})]["out"]


def test_what_is_much_slower_at_the_first_shape_is_not_tried_at_others(
    fake: Fake, tmp_path: Path, start: Callable[..., Tuner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MICROSECONDS, 4, 13.0)
    (target,) = targets([fake.case("a"), fake.case("b")], GPU, ["norm"])

    assert start().tune(target)

    assert sorted(fake.launched) == [4, 8, 8]
    kept = json.loads((tmp_path / "state.json").read_text())["found"]["norm"]["4096"]
    assert "a: 1.30 times the present entry's time so far" in kept[key_of({"num_warps": 4})]["out"]


def test_nothing_is_measured_twice(fake: Fake, tmp_path: Path, start: Callable[..., Tuner]) -> None:
    (target,) = targets([fake.case("a")], GPU, ["norm"])
    start().tune(target)
    (tmp_path / "table.json").unlink()
    fake.launched.clear()

    assert start().tune(target)

    assert fake.launched == []
    assert json.loads((tmp_path / "table.json").read_text()) == {"norm": {"4096": {"num_warps": 4}}}


def test_other_conditions_begin_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = State.opened(tmp_path / "state.json", CONDITIONS)
    state.found["norm"] = {"4096": {"{}": {"microseconds": [1.0]}}}
    state.crossover("int4", {"a/b": {"c": 1}})["64"] = {"microseconds": [1.0, 2.0]}
    state.keep()
    before = state.file.read_text()

    again = State.opened(tmp_path / "state.json", CONDITIONS)
    assert (again.found, again.crossovers) == (state.found, state.crossovers)
    assert State.opened(tmp_path / "state.json", {**CONDITIONS, "torch": "2.12"}).found == {}
    assert "measured under other conditions" in capsys.readouterr().out
    assert (tmp_path / "state.aside-1.json").read_text() == before


def test_a_state_that_cannot_be_read_is_set_aside(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text('{"conditions": {"dev')

    assert State.opened(file, CONDITIONS).found == {}
    assert (tmp_path / "state.aside-1.json").read_text() == '{"conditions": {"dev'


def test_a_run_without_time_left_says_so_and_changes_nothing(
    fake: Fake, tmp_path: Path, start: Callable[..., Tuner]
) -> None:
    (target,) = targets([fake.case("a")], GPU, ["norm"])

    assert not start(seconds=5.0).tune(target)
    assert not (tmp_path / "table.json").exists()


def test_what_stops_the_device_is_not_tried_again(
    fake: Fake, tmp_path: Path, start: Callable[..., Tuner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    (target,) = targets([fake.case("a")], GPU, ["norm"])
    own = start()
    own._device = "cuda"
    monkeypatch.setattr("benchmarks.gpu.cases.case.generator_on", lambda device, seed: None)
    monkeypatch.setattr(timing, "num_sets", lambda num_bytes, device: 1)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        own.tune(target)

    kept = json.loads((tmp_path / "state.json").read_text())["found"]["norm"]["4096"]
    assert [name for name, one in kept.items() if "out" in one] == [key_of({"num_warps": WRONG})]


def test_what_is_changed_is_launched_until_the_run_ends(
    fake: Fake, tmp_path: Path, start: Callable[..., Tuner]
) -> None:
    (target,) = targets([fake.case("a")], GPU, ["norm"])
    first = start()
    first.tune(target)
    assert configuration("norm", "4096", GPU) == {"num_warps": 4}

    first.__exit__(None, None, None)
    assert configuration("norm", "4096", GPU) == {"num_warps": 8}

    again = start()
    assert configuration("norm", "4096", GPU) == {"num_warps": 4}
    again.tune(target)
    assert (first.num_changed, again.num_changed) == (1, 0)


@dataclass
class Crossing:
    """Two ways of which plain numbers are faster from 256 rows on, with blocks of 128 outputs. measured: rows
    and the block of outputs of each way that was timed."""

    measured: list[tuple[int, int]] = field(default_factory=list)

    def pairs(self) -> list[Pair]:
        return [
            (
                rows,
                Case(f"codes {rows}", "coded_product_int4", "rows_many", self._make(rows), Cost(1.0)),
                Case(f"plain {rows}", "plain_product", None, self._make(rows), Cost(1.0)),
            )
            for rows in (64, 256, 512)
        ]

    def _make(self, rows: int) -> Callable[[torch.Generator], Work]:
        return lambda _: Work(lambda: rows)

    def timed(self, calls: Sequence[Callable[[], Any]], device: str) -> Timing:
        rows = calls[0]()
        outputs = configuration("coded_plain", "int4", GPU)["block_outputs"]
        is_plain = len(self.measured) % 2 == 1
        self.measured.append((rows, outputs))
        slow = 300 if outputs == 128 else 1000
        return Timing(float(slow if is_plain else rows), 0.0, is_captured=True)


@pytest.fixture
def crossing(monkeypatch: pytest.MonkeyPatch) -> Crossing:
    found = Crossing()
    monkeypatch.setattr(timing, "timed", found.timed)
    return found


def test_crossovers_are_kept_and_measured_once(
    crossing: Crossing, tmp_path: Path, start: Callable[..., Tuner]
) -> None:
    entry = configuration("coded_plain", "int4", GPU) | {"block_outputs": 128}
    first = start()
    first.change("coded_plain", "int4", entry)

    assert first.tune_crossover("int4", crossing.pairs())

    assert crossing.measured == [(64, 128), (64, 128), (256, 128), (256, 128), (512, 128), (512, 128)]
    want = {"coded_plain": {"int4": {**entry, "most_product_rows": 256}}}
    assert json.loads((tmp_path / "table.json").read_text()) == want
    (tmp_path / "table.json").write_text(json.dumps({"coded_plain": {"int4": entry}}))
    crossing.measured.clear()

    assert start().tune_crossover("int4", crossing.pairs())

    assert crossing.measured == []
    assert json.loads((tmp_path / "table.json").read_text()) == want


def test_a_crossover_of_other_block_sizes_does_not_count(
    crossing: Crossing, start: Callable[..., Tuner]
) -> None:
    first = start()
    present = configuration("coded_plain", "int4", GPU)["block_outputs"]
    first.tune_crossover("int4", crossing.pairs())
    crossing.measured.clear()

    first.change("coded_plain", "int4", configuration("coded_plain", "int4", GPU) | {"block_outputs": 16})
    first.tune_crossover("int4", crossing.pairs())

    assert present != 16
    assert [outputs for _, outputs in crossing.measured] == [16] * 6


def test_a_crossover_for_which_there_is_no_time_is_gone_on_with(
    crossing: Crossing, tmp_path: Path, start: Callable[..., Tuner], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("benchmarks.gpu.tuner.time", SimpleNamespace(monotonic=lambda: now[0]))

    def timed(calls: Sequence[Callable[[], Any]], device: str) -> Timing:
        now[0] += 4.0
        return crossing.timed(calls, device)

    monkeypatch.setattr(timing, "timed", timed)

    assert not start(seconds=24.0).tune_crossover("int4", crossing.pairs())
    assert [rows for rows, _ in crossing.measured] == [64, 64, 256, 256]
    assert not (tmp_path / "table.json").exists()
    crossing.measured.clear()

    assert start(seconds=24.0).tune_crossover("int4", crossing.pairs())
    assert [rows for rows, _ in crossing.measured] == [512, 512]


def test_rows_that_do_not_fit_are_no_crossover(
    crossing: Crossing, start: Callable[..., Tuner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(calls: Sequence[Callable[[], Any]], device: str) -> Timing:
        if calls[0]() == 512:
            raise torch.OutOfMemoryError("out of memory")
        return crossing.timed(calls, device)

    monkeypatch.setattr(timing, "timed", timed)
    own = start()

    assert own.tune_crossover("int4", crossing.pairs())
    assert own.tune_crossover("int4", crossing.pairs())
    assert len(crossing.measured) == 4


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
    target = Target("norm", "4096", (), ({"num_warps": 8}, {"num_warps": 4}))
    measured = {
        key_of({"num_warps": 8}): {"microseconds": [10.0, 10.0]},
        key_of({"num_warps": 4}): {"microseconds": microseconds},
    }

    found = best_of(target, measured)

    assert (None if found is None else found[0]["num_warps"]) == want


def test_without_the_present_entry_nothing_is_known() -> None:
    target = Target("norm", "4096", (), ({"num_warps": 8}, {"num_warps": 4}))

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
    with spilled_bytes() as spilled:
        for _ in range(3):
            JITFunction.run(None)
        assert spilled() == 24
    assert JITFunction.run is run
