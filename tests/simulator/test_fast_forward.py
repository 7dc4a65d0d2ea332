"""Uneventful steps taken over at once change nothing: held against the engine's own loop, step by step."""

import math
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headway_runtime.config import Limits, Targets
from headway_simulator.engine import EngineSettings, SimulatedEngine
from headway_simulator.prompts import Prompts
from headway_simulator.simulated_runner import Speculation
from headway_simulator.trace import Arrival


@dataclass
class Lived:
    """What one engine did under a script. wakes: how often it was woken."""

    firsts: dict[str, float] = field(default_factory=dict)
    ends: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    samples: list[Any] = field(default_factory=list)
    wakes: int = 0
    engine: SimulatedEngine | None = None


@dataclass(frozen=True)
class Script:
    """Arrivals by time, and what else happens: limits set, samples taken."""

    arrivals: tuple[Arrival, ...]
    limits: tuple[tuple[float, Limits], ...] = ()
    samples: tuple[float, ...] = ()


def live(settings: EngineSettings, script: Script, *, checks: bool = False) -> Lived:
    """Play a script to its end."""
    lived, prompts = Lived(), Prompts()
    engine = lived.engine = SimulatedEngine(settings, 0.0, "seed")
    engine.set_targets(Targets(500.0, 30.0), 0.0)
    events: list[tuple[float, Any]] = [(one.at_seconds, one) for one in script.arrivals]
    events += [*script.limits, *((at, None) for at in script.samples), (math.inf, None)]
    number = 0
    for at, event in sorted(events, key=lambda one: one[0]):
        while engine.wakes_at < min(at, 1e9):
            now = engine.wakes_at
            emitted = engine.wake()
            lived.wakes += 1
            lived.firsts.update(emitted.first)
            lived.ends.update({name: (now, tpot) for name, tpot in emitted.ended})
            if checks:
                engine.scheduler.check_integrity()
        if isinstance(event, Arrival):
            request = prompts.request(str(number), event, at)
            engine.add(request, prompts.answer_token(), at)
            number += 1
        elif isinstance(event, Limits):
            engine.set_limits(event, at)
        elif at < math.inf:
            engine.catch_up(at)
            lived.samples.append((gauges(engine), shown(engine)))
    assert engine.num_running == engine.num_waiting == 0
    return lived


def gauges(engine: SimulatedEngine) -> tuple[int, ...]:
    scheduler = engine.scheduler
    return engine.num_running, engine.num_waiting, scheduler.pool.num_used, scheduler.cache.num_reusable


def shown(engine: SimulatedEngine) -> Any:
    """All that the metrics hold; several first gaps at once are multiplied, not added up, so rounded."""
    snapshot = engine.metrics.snapshot()
    histograms = {name: one.counts for name, one in snapshot.histograms.items()}
    sums = {
        name: round(one.sum_milliseconds, 6) if name == "first_decode" else one.sum_milliseconds
        for name, one in snapshot.histograms.items()
    }
    return snapshot.counters, histograms, sums, snapshot.sizes, snapshot.rates, snapshot.moments


def random_script(seed: int, count: int = 60) -> Script:
    """Bursts and pauses, short and long answers, some shared prefixes, limits that move, samples."""
    chance = random.Random(seed)
    at, arrivals = 0.0, []
    for _ in range(count):
        at += chance.choice([0.0, 0.01, 0.1, 0.5, 3.0]) * chance.random()
        hash_ids = tuple(chance.choice([(), (1,), (1, 2), (1, 2, 3 + chance.randrange(4))]))
        tokens = chance.choice([1, 16, 17, 120, 700, 1500])
        arrivals.append(Arrival(at, tokens, chance.choice([1, 2, 3, 20, 80, 300]), hash_ids, 64))
    limits = tuple(
        (at * chance.random(), Limits(chance.choice([2, 8, 32]), chance.choice([64, 256, 1024])))
        for _ in range(4)
    )
    return Script(tuple(arrivals), limits, tuple(at * chance.random() for _ in range(15)))


def crowding_script(seed: int) -> Script:
    """Short prompts that come close together, with answers that need much more room than they do."""
    chance = random.Random(seed)
    arrivals = tuple(
        Arrival(0.3 * i * chance.random(), chance.choice([5, 17, 64, 120]), chance.choice([20, 200, 500]))
        for i in range(40)
    )
    return Script(tuple(sorted(arrivals, key=lambda one: one.at_seconds)), samples=(3.0, 7.7, 11.0))


def long_script(seed: int) -> Script:
    """Prompts of hundreds of chunks among short ones, of which some begin like others, more than can be
    served, limits that move, samples."""
    chance = random.Random(seed)
    at, arrivals = 0.0, []
    for _ in range(30):
        at += chance.choice([0.0, 0.5, 4.0]) * chance.random()
        tokens = chance.choice([40, 700, 3_000, 3_001, 9_000, 12_000])
        hash_ids = tuple(range(chance.choice([0, 0, 5, 40, 100])))
        if hash_ids and chance.random() < 0.5:
            hash_ids = (*hash_ids, 1000 + chance.randrange(100))
        arrivals.append(Arrival(at, tokens, chance.choice([1, 2, 40, 400]), hash_ids, 64))
    limits = tuple(
        (2 * at * chance.random(), Limits(chance.choice([2, 8, 32]), chance.choice([16, 64, 256, 1024])))
        for _ in range(5)
    )
    return Script(tuple(arrivals), limits, tuple(3 * at * chance.random() for _ in range(15)))


def pressed_script(chance: random.Random) -> Script:
    """Prompts of all lengths, most of which begin alike, in steps so small that a chunk may be a token."""
    at, arrivals = 0.0, []
    for _ in range(30):
        at += chance.choice([0, 0.2, 2.0]) * chance.random()
        tokens = chance.choice([30, 200, 700, 3_000, 9_000, 12_000])
        hash_ids = tuple(range(chance.choice([0, 5, 40, 100, 180])))
        if hash_ids and chance.random() < 0.5:
            hash_ids = (*hash_ids, 1000 + chance.randrange(100))
        arrivals.append(Arrival(at, tokens, chance.choice([1, 40, 400]), hash_ids, 64))
    budgets = (8, 16, 17, 33, 64, 256)
    limits = tuple(
        (2 * at * chance.random(), Limits(chance.choice([2, 8, 32]), chance.choice(budgets)))
        for _ in range(5)
    )
    return Script(tuple(arrivals), limits, tuple(3 * at * chance.random() for _ in range(8)))


def assert_same(fast: Lived, slow: Lived) -> None:
    assert fast.firsts == slow.firsts
    assert fast.ends == slow.ends
    assert fast.samples == slow.samples
    assert fast.engine is not None
    assert slow.engine is not None
    assert shown(fast.engine) == shown(slow.engine)
    assert gauges(fast.engine) == gauges(slow.engine)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_random_loads_end_at_the_same_times_with_the_same_metrics(
    build: Any, seed: int, *, overlaps: bool
) -> None:
    script = random_script(seed)
    fast = live(build.engine(overlaps=overlaps), script)
    slow = live(build.engine(overlaps=overlaps, fast_forwards=False), script)
    assert len(fast.ends) == len(script.arrivals)
    assert_same(fast, slow)
    assert fast.wakes < slow.wakes


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_with_too_little_memory_the_same_requests_are_preempted(
    build: Any, seed: int, *, overlaps: bool
) -> None:
    """A cache of 2,000 tokens, of which a single request takes up to 620."""
    model = replace(build.model, kv_cache_tokens=2_000)
    settings = {"model": model, "max_model_len": 1_900, "overlaps": overlaps}
    script = crowding_script(seed)
    fast = live(build.engine(**settings), script, checks=True)
    slow = live(build.engine(**settings, fast_forwards=False), script)
    assert slow.engine is not None
    assert slow.engine.metrics.snapshot().counters["preemptions"] > 0
    assert_same(fast, slow)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("tokens", [15_000, 64_000])
@pytest.mark.parametrize("seed", range(6))
def test_long_prompts_end_at_the_same_times_with_the_same_metrics(
    build: Any, seed: int, tokens: int, *, overlaps: bool
) -> None:
    """In a cache that holds all, or little more than the longest; targets that many miss."""
    model = replace(build.model, kv_cache_tokens=tokens, prefill_context_milliseconds=2e-5)
    settings = {"model": model, "max_model_len": 12_500, "overlaps": overlaps}
    script = long_script(seed)
    fast = live(build.engine(**settings), script, checks=True)
    slow = live(build.engine(**settings, fast_forwards=False), script)
    assert_same(fast, slow)
    assert len(fast.ends) == len(script.arrivals)
    assert fast.wakes < slow.wakes / 3


# Among hundreds, those that met what is rare: chunks of a single token, one that waits for blocks while so
# much of its beginning is overwritten that it becomes a long prompt.
@pytest.mark.parametrize("seed", [27, 28, 30, 54, 108, 137, 165, 183])
def test_where_memory_is_short_and_chunks_are_tiny_nothing_changes_either(build: Any, seed: int) -> None:
    chance = random.Random(seed)
    model = replace(
        build.model,
        kv_cache_tokens=chance.choice([12_800, 13_500, 15_000, 20_000]),
        prefill_context_milliseconds=chance.choice([0, 2e-5, 1e-4]),
    )
    settings = {
        "model": model,
        "max_model_len": 12_500,
        "overlaps": chance.random() < 0.7,
        "long_prefill_share": chance.choice([0.2, 0.5, 1.0]),
    }
    script = pressed_script(random.Random(seed))
    fast, slow = (live(build.engine(**settings, fast_forwards=one), script) for one in (True, False))
    assert_same(fast, slow)
    assert fast.wakes < slow.wakes / 2


def test_blocks_of_a_prompt_that_are_in_the_cache_without_its_beginning_are_overwritten_in_time(
    build: Any,
) -> None:
    """Two with the same first blocks are computed together, of which those of one are entered. They are
    overwritten, and what follows them in the other prompt is left; it comes again, beside decodes that
    overwrite more and more of that."""
    first, second = (0, 900, 901), tuple(range(65))
    arrivals = (
        Arrival(0.0, 96, 1, first, 48),
        Arrival(0.0, 3_000, 1, second, 48),
        Arrival(20.0, 9_900, 1),
        *(Arrival(40.0, 40, 1_200) for _ in range(3)),
        Arrival(40.5, 1_600, 1, second, 48),
    )
    samples = tuple(39.0 + second for second in range(9))
    script = Script(arrivals, ((30.0, Limits(8, 24)),), samples)
    settings = {"model": replace(build.model, kv_cache_tokens=12_800), "max_model_len": 12_500}
    fast, slow = (live(build.engine(**settings, fast_forwards=one), script) for one in (True, False))
    assert slow.engine is not None
    assert slow.engine.metrics.snapshot().counters["cached_tokens"] == 0
    assert_same(fast, slow)


def test_one_that_waits_for_a_beginning_under_way_keeps_nobody_out_for_want_of_blocks(build: Any) -> None:
    """The second begins like the long prompt and has no room; the third, which has, comes a step later."""
    beginning = tuple(range(8))
    arrivals = (
        Arrival(0.0, 380, 600),
        Arrival(1.0, 12_000, 1, beginning, 64),
        Arrival(1.0, 400, 1, beginning, 64),
        Arrival(1.0115, 40, 1),
    )
    settings = {"model": replace(build.model, kv_cache_tokens=12_800), "max_model_len": 12_500}
    script = Script(arrivals)
    fast, slow = (live(build.engine(**settings, fast_forwards=one), script) for one in (True, False))
    assert_same(fast, slow)
    assert slow.firsts["3"] < 0.3 < slow.firsts["2"]


@pytest.mark.parametrize("seed", range(6))
def test_who_becomes_late_while_a_prompt_is_computed_yields_at_the_same_moment(build: Any, seed: int) -> None:
    """All wait for one prompt of ten seconds; the order in which they follow it changes meanwhile."""
    chance = random.Random(seed)
    arrivals = [Arrival(0.0, 10, 900), Arrival(0.1, 12_000, 5)]
    arrivals += [Arrival(0.2 + chance.random(), chance.choice([200, 2_000]), 5) for _ in range(40)]
    script = Script(tuple(sorted(arrivals, key=lambda one: one.at_seconds)), ((0.05, Limits(32, 64)),))
    model = replace(build.model, kv_cache_tokens=13_000)
    settings = {"model": model, "max_model_len": 12_500, "targets": Targets(500.0, 30.0)}
    fast, slow = (live(build.engine(**settings, fast_forwards=one), script) for one in (True, False))
    assert_same(fast, slow)
    assert fast.wakes < slow.wakes / 3


def test_a_long_prompt_alone_takes_few_wakes(build: Any) -> None:
    script = Script((Arrival(0.0, 16_000, 2),), limits=((0.0, Limits(4, 16)),))
    fast = live(build.engine(), script)
    slow = live(build.engine(fast_forwards=False), script)
    assert_same(fast, slow)
    assert slow.wakes > 1_000
    assert fast.wakes < slow.wakes / 40


@pytest.mark.parametrize("seed", range(3))
def test_the_cache_stays_whole_after_every_jump(build: Any, seed: int) -> None:
    live(build.engine(), random_script(200 + seed, count=25), checks=True)


def test_a_long_answer_alone_takes_few_wakes(build: Any) -> None:
    script = Script((Arrival(0.0, 100, 6401),))
    fast = live(build.engine(), script)
    slow = live(build.engine(fast_forwards=False), script)
    assert_same(fast, slow)
    assert slow.wakes > 6400
    assert fast.wakes < 6400 / 50


def test_a_full_batch_goes_on_at_once_while_others_wait(build: Any) -> None:
    """Those who wait for a place change nothing for those who run."""
    script = Script(tuple(Arrival(0.1 * i, 50, 400) for i in range(12)), limits=((0.0, Limits(4, 1024)),))
    fast = live(build.engine(), script)
    slow = live(build.engine(fast_forwards=False), script)
    assert_same(fast, slow)
    assert fast.wakes < slow.wakes / 5


def test_times_are_those_of_the_model(build: Any) -> None:
    """One prompt of two chunks, then one token after another."""
    lived = live(build.engine(overlaps=False), Script((Arrival(1.0, 1500, 3),)))
    model = build.model
    prefill = model.seconds(1024, 1024 * 1025 // 2, 0, 0) + model.seconds(
        476, 476 * 1024 + 476 * 477 // 2, 0, 0
    )
    decodes = [model.seconds(0, 0, 1, 1501), model.seconds(0, 0, 1, 1502)]
    assert lived.firsts["0"] == pytest.approx(prefill)
    end, tpot = lived.ends["0"]
    assert end == pytest.approx(1.0 + prefill + sum(decodes))
    assert tpot == pytest.approx(sum(decodes) / 2)


def test_overlapping_steps_cost_a_lone_request_nothing(build: Any) -> None:
    script = Script((Arrival(1.0, 1500, 30),))
    one, other = (live(build.engine(overlaps=overlaps), script) for overlaps in (True, False))
    assert one.firsts["0"] == pytest.approx(other.firsts["0"])
    assert one.ends["0"][0] == pytest.approx(other.ends["0"][0])


def test_a_shared_prefix_is_computed_once(build: Any) -> None:
    script = Script(
        (
            Arrival(0.0, 1024, 2, (5, 6), 512),
            Arrival(5.0, 1100, 2, (5, 6, 7), 512),
            Arrival(9.0, 1024, 2, (6, 5), 512),
        )
    )
    lived = live(build.engine(), script)
    assert lived.engine is not None
    assert lived.engine.metrics.snapshot().counters["cached_tokens"] == 1024
    assert lived.firsts["1"] < lived.firsts["0"] / 3
    assert lived.firsts["2"] == pytest.approx(lived.firsts["0"])


def test_without_prefix_caching_nothing_is_found(build: Any) -> None:
    script = Script((Arrival(0.0, 1024, 2, (5, 6), 512), Arrival(5.0, 1024, 2, (5, 6), 512)))
    lived = live(build.engine(enable_prefix_caching=False), script)
    assert lived.firsts["1"] == pytest.approx(lived.firsts["0"])


def test_guesses_that_come_true_make_answers_shorter_and_wrong_ones_do_not(build: Any) -> None:
    script = Script((Arrival(0.0, 50, 400),))
    plain = live(build.engine(), script).ends["0"][0]
    right = live(build.engine(speculation=Speculation(4, 1.0)), script)
    wrong = live(build.engine(speculation=Speculation(4, 0.0)), script)
    assert right.ends["0"][0] < 0.5 * plain
    # The policy learns to guess nothing.
    assert plain < wrong.ends["0"][0] < 1.2 * plain
    assert right.engine is not None
    assert right.engine.metrics.snapshot().counters["generated_tokens"] == 400


def test_a_full_queue_refuses_and_counts_it(build: Any) -> None:
    engine = SimulatedEngine(build.engine(max_waiting=2), 0.0, "seed")
    prompts = Prompts()
    taken = [
        engine.add(prompts.request(str(i), Arrival(0.0, 10, 5), 0.0), prompts.answer_token(), 0.0)
        for i in range(4)
    ]
    assert taken == [True, True, False, False]
    assert engine.metrics.snapshot().counters["rejected"] == 2


def test_what_comes_during_a_step_counts_from_its_end(build: Any) -> None:
    """A step of 10 + 100 ms is under way when the second request comes."""
    lived = live(build.engine(overlaps=False), Script((Arrival(0.0, 1000, 1), Arrival(0.05, 1000, 1))))
    step = build.model.seconds(1000, 1000 * 1001 // 2, 0, 0)
    assert lived.firsts["0"] == pytest.approx(step)
    assert lived.firsts["1"] == pytest.approx(2 * step - 0.05)
