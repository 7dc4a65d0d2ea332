"""The loads of the proof: parts of published traces, and made-up ones; of each one to tune on, one to judge.

azure         Azure LLM inference, conversation, 2023; 8B on two A100
mooncake      Mooncake's conversation trace, with its prefixes; 8B on two A100
servegen      ServeGen m-large, the busiest minutes of the days below, Azure's lengths; 70B on eight H100
flash         a crowd of three times as much; 8B on two A100
own-step      a jump to twice as much, of short requests, on replicas with the step times of our own engine on
              a CPU (`make bench-slo-validate` fits them; until FITTED_FILE is there, there is no such load)
own-wave      a day's wave within the time of the excerpt, of the same requests, on the same replicas
step          a jump to twice as much; 8B on two A100 (a long run only)
diurnal       a day's wave; 70B on eight H100 (a long run only)

Rates are such that the oracle has at least eight replicas on average with the looser targets, and half as
high (`plan.TIGHT_RATE`) with the tighter ones, which need more. The first half of a trace is for tuning, the
second for the verdict; of a made-up load there are two, of different seeds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.slo.plan import Plan, Promise

from headway_simulator.generators import Course, Kind, before, generated
from headway_simulator.rates import Lengths, RateWindow, arrivals_of, scaled_to_mean
from headway_simulator.step_model import read_step_model
from headway_simulator.trace import Arrival, Trace, joined, part_of, scaled_rate
from headway_simulator.trace_files import read_trace
from headway_simulator.work import mean_replicas

DAY_SECONDS = 86400.0
FITTED_FILE = Path(__file__).with_name("fitted.json")
# Of the load with our own step times: prompts and answers as in the run that they are fitted on.
OWN_LENGTHS = ((64, 64), (200, 32), (500, 48), (1000, 24))
OWN_REPLICAS = 12.0
# Of ServeGen's fortnight: a Tuesday to tune on, the Tuesday a week later to judge.
TUNING_DAY, VERDICT_DAY = 1, 8


@dataclass(frozen=True, slots=True)
class Parts:
    """tuning and verdict begin with what only warms up. whole: of which targets are made. settled: the
    verdict and, before it, time for a controller to settle in."""

    whole: Trace
    tuning: Trace
    verdict: Trace
    settled: Trace

    @property
    def settling_seconds(self) -> float:
        return self.settled.duration_seconds - self.verdict.duration_seconds


class Halves:
    """The parts of a load that each promise is met on, made once for each rate."""

    def __init__(self, load: str, files: Mapping[str, Path], plan: Plan) -> None:
        self._load, self._files, self._plan = load, files, plan
        self._made: dict[Plan, Parts] = {}

    def of(self, promise: Promise) -> Parts:
        plan = self._plan.met(self._load, promise)
        if plan not in self._made:
            self._made[plan] = LOADS[self._load].make(self._files, plan)
        return self._made[plan]


@dataclass(frozen=True, slots=True)
class Load:
    """files: the traces that it needs, by the name of their flag."""

    name: str
    step_model: str
    files: tuple[str, ...]
    make: Callable[[Mapping[str, Path], Plan], Parts]


def _recorded(file: str, rate_scale: float) -> Callable[[Mapping[str, Path], Plan], Parts]:
    def make(files: Mapping[str, Path], plan: Plan) -> Parts:
        found = _requests(files[file])
        scaled = scaled_rate(found, rate_scale * plan.rate_scale, plan.seed)
        middle = scaled.duration_seconds / 2
        begin = max(0.0, middle - plan.warm_up_seconds)
        tuning_at = max(0.0, (middle - plan.tuning_seconds) / 2)
        settling_at = max(0.0, begin - plan.settling_seconds)
        return Parts(
            scaled,
            part_of(scaled, tuning_at, min(middle, tuning_at + plan.tuning_seconds)),
            part_of(scaled, begin, middle + plan.verdict_seconds),
            part_of(scaled, settling_at, middle + plan.verdict_seconds),
        )

    return make


def _requests(path: Path) -> Trace:
    found = read_trace(path)
    if not isinstance(found, Trace):
        raise SystemExit(f"{path} holds rates; give a trace of requests")
    return found


def _servegen(mean_rate: float) -> Callable[[Mapping[str, Path], Plan], Parts]:
    """mean_rate: over the fortnight; bursts are taken apart as a random choice of the requests would."""

    def make(files: Mapping[str, Path], plan: Plan) -> Parts:
        windows = read_trace(files["servegen"])
        if isinstance(windows, Trace):
            raise SystemExit(f"{files['servegen']} holds requests; give ServeGen's rates")
        windows = scaled_to_mean(windows, mean_rate * plan.rate_scale)
        lengths = Lengths(_requests(files["azure"]))
        settling = plan.settling_seconds
        tuning, before, verdict = (
            _busiest(windows, day, before, seconds, lengths, seed)
            for day, before, seconds, seed in (
                (TUNING_DAY, plan.tuning_warm_up_seconds, plan.tuning_seconds, plan.seed),
                (VERDICT_DAY, plan.warm_up_seconds + settling, settling, plan.seed + 1),
                (VERDICT_DAY, plan.warm_up_seconds, plan.warm_up_seconds + plan.verdict_seconds, plan.seed),
            )
        )
        return Parts(_requests(files["azure"]), tuning, verdict, joined(before, verdict))

    return make


def _busiest(
    windows: tuple[RateWindow, ...], day: int, before: float, seconds: float, lengths: Lengths, seed: int
) -> Trace:
    """`seconds` of a day, begun `before` its busiest window."""
    of_day = [one for one in windows if day * DAY_SECONDS <= one.start_seconds < (day + 1) * DAY_SECONDS]
    start = max(of_day, key=lambda one: one.requests_per_second).start_seconds - before
    cut = tuple(
        replace(
            one,
            start_seconds=max(one.start_seconds, start) - start,
            end_seconds=min(one.end_seconds, start + seconds) - start,
        )
        for one in windows
        if one.end_seconds > start and one.start_seconds < start + seconds
    )
    return arrivals_of(f"servegen day {day}", cut, lengths, seed + day)


def _generated(
    kind: Kind,
    rate: float,
    factor: float = 1.0,
    *,
    is_whole_wave: bool = False,
    lengths: Lengths | None = None,
) -> Callable[[Mapping[str, Path], Plan], Parts]:
    def make(files: Mapping[str, Path], plan: Plan) -> Parts:
        judged = plan.warm_up_seconds + plan.verdict_seconds
        tuning, verdict = (
            Course(
                kind,
                rate * plan.rate_scale,
                seconds,
                factor=factor,
                period_seconds=seconds if is_whole_wave else DAY_SECONDS,
            )
            for seconds in (plan.tuning_seconds, judged)
        )
        courses = (tuning, verdict, before(verdict, plan.settling_seconds))
        of_lengths = lengths or Lengths(None)
        tuned, judge, settling = (
            generated(course, of_lengths, seed) for seed, course in enumerate(courses, plan.seed)
        )
        return Parts(judge, tuned, judge, joined(settling, judge))

    return make


def _own(kind: Kind, factor: float, mean: float) -> Callable[[Mapping[str, Path], Plan], Parts]:
    """Of the lengths that the model was fitted on, so many that OWN_REPLICAS are busy on average. mean: of
    the load, as a multiple of the rate that it is made with."""

    def make(files: Mapping[str, Path], plan: Plan) -> Parts:
        arrivals = tuple(Arrival(float(at), *lengths) for at, lengths in enumerate(OWN_LENGTHS))
        shapes = Trace("own lengths", arrivals, float(len(arrivals)))
        rate = OWN_REPLICAS / mean_replicas(read_step_model(str(FITTED_FILE)), shapes) / mean
        is_whole_wave = kind == "diurnal"
        made = _generated(kind, rate, factor, is_whole_wave=is_whole_wave, lengths=Lengths(shapes))
        return made(files, plan)

    return make


_MADE = (
    Load("azure", "llama-3.1-8b-a100-tp2", ("azure",), _recorded("azure", 7.0)),
    Load("mooncake", "llama-3.1-8b-a100-tp2", ("mooncake",), _recorded("mooncake", 1.35)),
    Load("servegen", "llama-2-70b-h100-tp8", ("servegen", "azure"), _servegen(18.5)),
    Load("flash", "llama-3.1-8b-a100-tp2", (), _generated("flash", 30.0, 3.0)),
    # The jump comes after a third of the time.
    Load("own-step", str(FITTED_FILE), (), _own("step", 2.0, mean=5 / 3)),
    Load("own-wave", str(FITTED_FILE), (), _own("diurnal", 4.0, mean=1.0)),
    Load("step", "llama-3.1-8b-a100-tp2", (), _generated("step", 23.0, 2.0)),
    Load("diurnal", "llama-2-70b-h100-tp8", (), _generated("diurnal", 40.0, 4.0, is_whole_wave=True)),
)
ALL_LOADS = tuple(one.name for one in _MADE)
# Together they take half as long as all others; each is like one of them but for the replicas that serve it.
LONG_ONLY = ("step", "diurnal")
# A load of our own step times is there once they are.
LOADS: Mapping[str, Load] = {
    one.name: one for one in _MADE if one.step_model != str(FITTED_FILE) or FITTED_FILE.is_file()
}
