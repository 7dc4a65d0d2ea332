"""Two ranks, real processes with gloo between them, whose steps are replayed: the tokens of one rank."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway_runtime.config import Envelope, Limits, ParallelConfig, SpeculativeConfig
from headway_runtime.graphs import misses
from headway_runtime.graphs.forms import StepForm
from headway_runtime.graphs.recording import RecordedCollectives, Recorder
from headway_runtime.models.decoder import Decoder
from headway_runtime.parallel import spawn, tensor_group

RANK = Path(__file__).parents[1] / "recorded_rank.py"
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"seed": 5, "top_p": 0.9},
    "biased": {"seed": 7, "logit_bias": ((3, 2.0),)},
}
GUESSES = 2


@pytest.fixture
def start_pair(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """start_pair(**changes): an engine over two ranks that record."""
    started: list[Any] = []
    gloo = tensor_group._gloo

    def make(folder: Path, recorder: Recorder | None = None, **changes: Any) -> Any:
        recorder = recorder or Recorder()
        monkeypatch.setattr(tensor_group, "_gloo", lambda *asked: RecordedCollectives(gloo(*asked), recorder))
        monkeypatch.setattr(spawn, "RANK_COMMAND", (sys.executable, str(RANK)))
        # The rank imports a module of the benchmarks.
        monkeypatch.setenv("PYTHONPATH", str(RANK.parents[2]))
        parallel = ParallelConfig(size=2, timeout_seconds=120.0)
        driver = start(folder, recorder=recorder, parallel=parallel, **changes)
        started.append(driver)
        return driver

    yield make
    for driver in started:
        driver.engine.close()


def add_all(driver: Any, generator: torch.Generator) -> None:
    for number, (name, sampling) in enumerate(ASKED.items()):
        prompt = torch.randint(0, 330, (4 + 9 * number,), generator=generator).tolist()
        driver.add(name, prompt * 2, max_tokens=9 - 2 * number, **sampling)


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapping"])
def test_tokens_are_those_of_one_rank(
    *,
    overlaps: bool,
    start: Callable[..., Any],
    start_pair: Callable[..., Any],
    write_model: Callable[..., Path],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of plain decodes, of such as end in logits, and beside a late prompt that runs kernel by kernel."""
    folder = write_model()
    late = torch.randint(0, 330, (30,), generator=generator).tolist()
    state = generator.get_state()
    answers = []
    for make, changes in ((start, {"enforce_eager": True}), (start_pair, {"overlap": overlaps})):
        generator.set_state(state)
        driver = make(
            folder, envelope=Envelope(4, 48), limits=Limits(4, 48), cuda_graph_sizes=(4,), **changes
        )
        driver.record_all()
        add_all(driver, generator)
        for _ in range(5):
            driver.step()
        driver.add("late", late, max_tokens=4, temperature=0.0)
        answers.append(driver.run())

    assert answers[0] == answers[1]
    assert {StepForm(4), StepForm(4, draws=False)} <= driver.graphs.forms
    assert 6 <= driver.num_recorded_steps < driver.num_steps - 1
    # What is recorded is exchanged in each replay, and counted.
    names = [one.name for one in driver.graphs._graphs[StepForm(4)].graph.launches]
    # The embedding, two sums of a layer, logits, and tokens.
    assert [name for name in names if name in ("allreduce", "gather", "broadcast")] == [
        *["allreduce"] * 3,
        "gather",
        "broadcast",
    ]
    assert driver.graphs._graphs[StepForm(4)].traffic.num_exchanges == 5
    before = driver.engine._runner.traffic.snapshot()
    calls: list[int] = []
    forward = Decoder.forward

    def counted(*asked: Any) -> torch.Tensor:
        calls.append(1)
        return forward(*asked)

    monkeypatch.setattr(Decoder, "forward", counted)
    driver.add("last", [5, 6], max_tokens=4, temperature=0.0)
    driver.run()
    assert len(calls) == 1
    exchanged = driver.engine._runner.traffic.num_exchanges - before.num_exchanges
    assert exchanged >= 4 + 3 * 5


def test_guesses_are_checked_on_both_ranks_as_on_one(
    start: Callable[..., Any],
    start_pair: Callable[..., Any],
    write_model: Callable[..., Path],
    generator: torch.Generator,
) -> None:
    folder = write_model()
    state = generator.get_state()
    speculative = SpeculativeConfig("draft_model", str(folder), adaptive=False)
    limits = {"envelope": Envelope(4, 64, GUESSES), "limits": Limits(4, 64, GUESSES)}
    answers = []
    for make, changes in ((start, {"enforce_eager": True}), (start_pair, {})):
        generator.set_state(state)
        driver = make(folder, speculative=speculative, cuda_graph_sizes=(4,), **limits, **changes)
        driver.record_all()
        add_all(driver, generator)
        answers.append(driver.run())

    assert answers[0] == answers[1]
    drafts = driver.metrics.snapshot().drafts
    assert drafts.num_accepted > 0.5 * drafts.num_tokens > 0
    # All but those of prompts.
    assert driver.num_recorded_steps >= driver.num_steps - 3


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapping"])
def test_what_steps_lack_all_ranks_record_between_the_same_two(
    *,
    overlaps: bool,
    start: Callable[..., Any],
    start_pair: Callable[..., Any],
    write_model: Callable[..., Path],
    generator: torch.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the first one counts."""
    monkeypatch.setattr(misses, "MOST_MISSES", 2)
    folder = write_model()
    state = generator.get_state()
    answers = []
    for make, changes in ((start, {"enforce_eager": True}), (start_pair, {"overlap": overlaps})):
        generator.set_state(state)
        driver = make(folder, cuda_graph_sizes=(2, 3, 6), **changes)
        add_all(driver, generator)
        answers.append(driver.run())

    assert answers[0] == answers[1]
    # While one of three is biased; the start records none that end in logits.
    assert StepForm(3, draws=False) in driver.graphs.forms
    assert driver.num_recorded_steps > 0


class OnlyOnce(Recorder):
    """A device that records one form, and then no more."""

    def capture(self, work: Callable[[], None]) -> Any:
        recorded = super().capture(work)
        if len(self.works) > 1:
            raise RuntimeError("no more room on this one")
        return recorded


def test_what_one_rank_cannot_record_none_uses(
    start: Callable[..., Any],
    start_pair: Callable[..., Any],
    write_model: Callable[..., Path],
    generator: torch.Generator,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = write_model()
    state = generator.get_state()
    answers = []
    for make, changes in ((start, {"enforce_eager": True}), (start_pair, {"recorder": OnlyOnce()})):
        generator.set_state(state)
        driver = make(folder, cuda_graph_sizes=(2, 6), **changes)
        add_all(driver, generator)
        answers.append(driver.run())

    assert answers[0] == answers[1]
    assert driver.graphs.forms == {StepForm(6)}
    assert not driver.engine.has_idle_work
    assert driver.num_recorded_steps > 0
    assert "no more room on this one" in caplog.text
