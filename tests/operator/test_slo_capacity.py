"""What a replica is predicted to do, and the most it is trusted with."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf, log
from typing import Any

import pytest

from headway_operator.samples import Limits, Targets
from headway_operator.slo.best_limits import best_capacity, highest_rate
from headway_operator.slo.capacity import Replica
from headway_operator.slo.memory import Memory
from headway_operator.slo.predictions import Capacity, Factors, Workload
from headway_operator.slo.sizing import Sizing, by_turns, lead_seconds, sizing, with_learning, workload
from headway_operator.slo.slices import Slice
from headway_operator.slo.step_fit import StepFit, StepModel
from headway_operator.slo.target import Target
from headway_operator.slo.window import Recent
from headway_operator.state import Observed, Start

MODEL = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=0.0)
WORK = Workload(prompt=1000.0, prompt_square=2e6, answer=200.0, context=1200.0, kv_share=0.002)
REPLICA = Replica(MODEL, WORK, 95.0)
PLAIN = Factors()
LIMITS = Limits(64, 2048)
UNSEEN = Recent(())


@pytest.fixture
def target(build: Any) -> Target:
    target: Target = build.target(targets=Targets(700.0, 26.0), initial=LIMITS)
    return target


def test_an_idle_replica_takes_the_base_and_one_sequence() -> None:
    found = REPLICA.latencies(1e-6, LIMITS, PLAIN)
    assert found.tpot == pytest.approx(8.55, rel=0.01)
    assert REPLICA.idle(LIMITS).tpot == pytest.approx(8.55)


def test_latencies_grow_with_the_rate_up_to_overload() -> None:
    rates = [0.5 * k for k in range(1, 20)]
    found = [REPLICA.latencies(rate, LIMITS, PLAIN) for rate in rates]
    for name in ("ttft", "tpot"):
        values = [getattr(one, name) for one in found]
        assert values == sorted(values)
        assert values[-1] <= inf
    assert REPLICA.latencies(REPLICA.most_per_second, LIMITS, PLAIN).tpot == inf


def test_places_for_a_crowd_hang_on_no_percent_of_a_step(build: Any) -> None:
    """Long prompts in steps that take just as long as a token may: what a sequence costs is known to a few
    hundredths of a millisecond, and whether all places fit the longest step hangs on these."""
    target = build.target(targets=Targets(64_000.0, 26.0), initial=LIMITS)
    work = Workload(prompt=10_400.0, prompt_square=2.5e8, answer=360.0, context=12_000.0, kv_share=0.013)
    places = []
    for hundredth in range(5, 21):
        model = StepModel(base=8.6, prefill=0.1, sequence=hundredth / 100.0, kv=0.0)
        found = best_capacity(Replica(model, work, 99.0, 13), target, PLAIN)
        places.append(found.full_num_seqs)
        budget = found.limits.max_num_batched_tokens
        longest = [
            model.base + model.sequence * taken + model.prefill * max(0, budget - taken)
            for taken in range(1, found.full_num_seqs + 1)
        ]
        assert max(longest) <= 26.0, (hundredth, found)
    assert places == sorted(places, reverse=True)
    assert all(later >= 0.5 * earlier for earlier, later in pairwise(places)), places


@pytest.mark.parametrize("prefill", [0.0342, 0.0345])
def test_places_fit_the_longest_step_only_where_one_sequence_does(build: Any, prefill: float) -> None:
    """A sequence costs less than a prompt token, so that the longest step is that beside one."""
    highest = Limits(256, 256)
    target = build.target(
        targets=Targets(5000.0, 20.0), initial=highest, highest=highest, lowest=Limits(1, 256)
    )
    model = StepModel(base=15.0, prefill=prefill, sequence=0.005, kv=0.0)
    work = Workload(prompt=300.0, prompt_square=1.8e5, answer=150.0, context=400.0, kv_share=0.0)
    places = best_capacity(Replica(model, work, 95.0), target, PLAIN).full_num_seqs
    assert model.base + prefill * 255 > 20.0
    assert places < 64


def test_the_mean_of_tpot_is_what_processor_sharing_says() -> None:
    """Without variance the quantile is the mean: (base + sequence) / (1 - rate * work)."""
    steady = Replica(MODEL, replace(WORK, prompt_square=0.0), 50.0)
    found = steady.latencies(4.0, LIMITS, PLAIN)
    mean = 8.55 / (1 - 0.004 * (1000 * 0.05 + 200 * 0.25))
    assert found.tpot == pytest.approx(mean, rel=0.03)
    assert found.running == pytest.approx(0.004 * 200 * mean, rel=1e-6)


def test_capacity_is_the_highest_rate_that_keeps_the_promise(target: Target) -> None:
    found = best_capacity(REPLICA, target, PLAIN)
    assert REPLICA.is_kept(REPLICA.latencies(found.per_second, found.limits, PLAIN), target)
    assert not REPLICA.is_kept(REPLICA.latencies(1.05 * found.per_second, found.limits, PLAIN), target)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"targets": Targets(700.0, 18.0)}, id="tighter TPOT"),
        pytest.param({"targets": Targets(250.0, 26.0)}, id="tighter TTFT"),
    ],
)
def test_a_tighter_target_costs_capacity(target: Target, changes: dict[str, Any]) -> None:
    loose, tight = (
        best_capacity(REPLICA, one, PLAIN).per_second for one in (target, replace(target, **changes))
    )
    assert tight < loose


def test_memory_bounds_capacity(target: Target) -> None:
    heavy = best_capacity(Replica(MODEL, replace(WORK, kv_share=0.1), 95.0), target, PLAIN)
    assert heavy.per_second < best_capacity(REPLICA, target, PLAIN).per_second
    assert Replica(MODEL, replace(WORK, kv_share=0.1), 95.0).latencies(
        heavy.per_second, heavy.limits, PLAIN
    ).kv_use == pytest.approx(0.85, rel=0.01)


def test_latencies_measured_above_the_prediction_cost_capacity(target: Target) -> None:
    found = best_capacity(REPLICA, target, Factors(ttft=1.0, tpot=1.3))
    assert found.per_second < best_capacity(REPLICA, target, PLAIN).per_second


def test_the_best_limits_do_not_depend_on_those_applied_and_never_starve_prompts(target: Target) -> None:
    """A missed TPOT lowers the rate that a replica is trusted with, not the tokens that prompts may take."""
    bursty = Replica(MODEL, replace(WORK, prompt_square=2e7, answer=20.0), 99.0)
    found = best_capacity(bursty, target, Factors(tpot=1.5))
    assert found.limits.max_num_batched_tokens >= 256


def test_sequences_are_limited_where_more_would_break_tpot(target: Target) -> None:
    tight = replace(target, targets=Targets(700.0, 13.0))
    limits = best_capacity(REPLICA, tight, PLAIN).limits
    assert limits.max_num_seqs < 25
    loose = replace(target, targets=Targets(700.0, 100.0))
    assert best_capacity(REPLICA, loose, PLAIN).limits.max_num_seqs == 64


def test_with_all_places_taken_all_the_time_so_many_keep_tpot(target: Target) -> None:
    """Against many answers: each meets the prompts of all that take a place while it is written."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    source = random.Random(seed)
    long = Replica(MODEL, replace(WORK, prompt_square=2e6, kv_share=0.0), 95.0, fleet=20)
    places = best_capacity(long, target, PLAIN).full_num_seqs
    assert 10 < places < 64
    token = MODEL.sequence + MODEL.kv * WORK.context
    met = []
    for _ in range(4000):
        prompts = sum(source.random() < (places - 1) / WORK.answer for _ in range(round(WORK.answer)))
        # Lognormal prompts with the mean and the mean square.
        spread = log(2e6 / WORK.prompt**2)
        tokens = sum(
            source.lognormvariate(log(WORK.prompt) - spread / 2, spread**0.5) for _ in range(prompts)
        )
        met.append(MODEL.base + places * token + MODEL.prefill * tokens / WORK.answer)
    share = sum(one <= 26.0 for one in met) / len(met)
    assert share == pytest.approx(0.95, abs=0.03)


def test_a_batch_of_the_best_size_keeps_tpot_with_all_places_taken(target: Target) -> None:
    """A crowd fills every place for minutes. Then each of 200 steps of an answer holds n / 200 prompts."""
    long = Replica(MODEL, replace(WORK, prompt_square=1e6), 95.0, fleet=20)
    capacity = best_capacity(long, target, PLAIN)
    places = capacity.limits.max_num_seqs
    running = long.latencies(capacity.per_second, capacity.limits, PLAIN).running
    full = MODEL.base + places * (MODEL.sequence + MODEL.prefill * WORK.prompt / WORK.answer)
    assert full <= 26.0 or places <= running + running**0.5 + 1.0
    assert places >= running + running**0.5


def test_a_replica_alone_has_places_for_the_percentile(target: Target) -> None:
    """Nobody evens out how many run on it."""
    few, many = (best_capacity(replace(REPLICA, fleet=number), target, PLAIN) for number in (1, 20))
    running = REPLICA.latencies(few.per_second, target.highest, PLAIN).running
    assert few.limits.max_num_seqs > running + 1.6 * running**0.5
    assert few.limits.max_num_seqs > many.limits.max_num_seqs


def test_a_request_meets_nobody_where_a_gateway_finds_idle_replicas() -> None:
    """Long prompts between answers: on twenty replicas that are mostly idle none shares its steps."""
    long = replace(WORK, prompt=10_000.0, prompt_square=3e8)
    alone, many = (Replica(MODEL, long, 95.0, fleet=number) for number in (1, 20))
    idle = alone.idle(LIMITS).tpot
    assert alone.latencies(0.2, LIMITS, PLAIN).tpot > 1.4 * idle
    assert many.latencies(0.2, LIMITS, PLAIN).tpot < 1.1 * idle
    # Where each has one request at least, a gateway can do no better than chance.
    busy = 1001.0 / (10_000 * 0.05 + 5 * 8.3 + 200 * 8.55)
    assert many.latencies(busy, LIMITS, PLAIN).tpot == pytest.approx(
        alone.latencies(busy, LIMITS, PLAIN).tpot
    )


def test_the_percentiles_request_finds_a_place(target: Target) -> None:
    """Of 30 places so many are taken on average that 95 in 100 requests find one; of a pool, more."""
    free = replace(target, targets=Targets())
    few = Limits(30, 2048)
    bound = replace(free, highest=few, initial=few)
    running = {
        fleet: one.latencies(best_capacity(one, bound, PLAIN).per_second, few, PLAIN).running
        for fleet in (1, 16)
        for one in (replace(REPLICA, fleet=fleet),)
    }
    for fleet, mean in running.items():
        assert mean + 1.645 * (mean / fleet) ** 0.5 == pytest.approx(30.0, rel=0.02)


def test_places_memory_and_device_bound_what_latencies_allow(target: Target) -> None:
    assert best_capacity(REPLICA, target, PLAIN).bound > best_capacity(REPLICA, target, PLAIN).per_second
    free = best_capacity(REPLICA, replace(target, targets=Targets()), PLAIN)
    assert free.bound == free.per_second


def test_without_a_target_the_other_one_decides(target: Target) -> None:
    both = best_capacity(REPLICA, target, PLAIN).per_second
    assert best_capacity(REPLICA, replace(target, targets=Targets(None, 26.0)), PLAIN).per_second >= both
    assert best_capacity(REPLICA, replace(target, targets=Targets(700.0, None)), PLAIN).per_second >= both


def test_trust_makes_no_places() -> None:
    found = [
        Sizing(REPLICA, Capacity(5.0, LIMITS, bound=5.5, full_num_seqs=8), PLAIN, kappa).per_second
        for kappa in (0.9, 1.0, 1.05, 1.2)
    ]
    assert found == pytest.approx([4.5, 5.0, 5.25, 5.5])


def test_what_came_again_says_nothing_of_how_long_a_start_takes(build: Any) -> None:
    """Nor does one of which only a sidecar was restarted: it is ready anew, hours after it was made."""
    first = build.replica("a", created_at=1000.0, ready_at=1045.0, start=Start(1.0, 11.0, 0.0, 33.0))
    again = build.replica("b", created_at=1000.0, ready_at=9000.0, num_restarts=1)
    beside = build.replica("c", created_at=1000.0, ready_at=9500.0)
    memory = with_learning(
        Memory(began_at=1.0), {}, UNSEEN, Observed(replicas=(first, again, beside)), 9999.0
    )
    assert memory.starts == ((1045.0, 45.0),)


def test_what_starts_took_is_known_from_the_last_twenty(build: Any) -> None:
    """All live, and each pass sees all of them again."""
    old = [build.replica(f"o{k}", created_at=1000.0, ready_at=1300.0 + k) for k in range(20)]
    new = [build.replica(f"n{k}", created_at=2000.0, ready_at=2020.0 + k) for k in range(20)]
    replicas = tuple(replace(one, start=Start(1.0, 11.0, 0.0, 8.0)) for one in (*old, *new))
    memory, seen = Memory(began_at=1.0), []
    for number in range(3):
        memory = with_learning(memory, {}, UNSEEN, Observed(replicas=replicas), 9000.0 + 5.0 * number)
        seen.append(lead_seconds(memory))
    assert seen == [37.0] * 3, "nine in ten took no longer"
    assert [at for at, _ in memory.starts] == [one.ready_at for one in new]


def test_a_start_that_is_yet_to_come_hides_no_other(build: Any) -> None:
    """A node's clock is an hour ahead."""
    start = Start(1.0, 11.0, 0.0, 8.0)
    odd = replace(build.replica("odd", created_at=5000.0, ready_at=8600.0), start=start)
    new = replace(build.replica("new", created_at=5000.0, ready_at=5030.0), start=start)
    memory = with_learning(Memory(began_at=1.0), {}, UNSEEN, Observed(replicas=(odd,)), 5010.0)
    memory = with_learning(memory, {}, UNSEEN, Observed(replicas=(odd, new)), 5040.0)
    assert memory.starts == ((5030.0, 30.0),)


# Prompts that a batch of answers waits for, and a first token that may take long.
LONG = Replica(
    replace(MODEL, prefill=0.12), replace(WORK, prompt=10_000.0, prompt_square=3e8, answer=100.0), 95.0
)


def test_no_token_comes_later_than_the_longest_step() -> None:
    found = LONG.latencies(0.28, Limits(64, 146), PLAIN)
    crowd = found.running + 1.645 * found.running**0.5
    assert found.tpot == pytest.approx(8.3 + 0.25 * crowd + 0.12 * (146 - crowd), rel=0.01)
    assert LONG.latencies(0.28, Limits(64, 2048), PLAIN).tpot > found.tpot


def test_a_budget_of_even_steps_serves_more_where_ttft_has_time(target: Target) -> None:
    """TPOT of 26 ms is kept by any number of prompts that come in pieces of 26 ms."""
    patient = replace(target, targets=Targets(60_000.0, 26.0))
    found = best_capacity(LONG, patient, PLAIN)
    limits = found.limits
    assert limits.max_num_batched_tokens == pytest.approx((0.95 * 26.0 - 8.3) / 0.12, rel=0.03)
    whole = Limits(64, limits.max_num_batched_tokens)
    assert LONG.latencies(found.per_second, whole, PLAIN).tpot <= 0.96 * 26.0
    halved = max(highest_rate(LONG, patient, Limits(64, 2048 >> k), PLAIN) for k in range(4))
    assert found.per_second > 1.5 * halved


def test_even_steps_are_left_where_ttft_would_pay_for_them(target: Target) -> None:
    """Prompts of a thousand tokens, which pieces of two hundred would hold up."""
    assert best_capacity(REPLICA, target, PLAIN).limits.max_num_batched_tokens >= 256
    hasty = replace(target, targets=Targets(250.0, 26.0))
    assert best_capacity(REPLICA, hasty, PLAIN).limits.max_num_batched_tokens >= 1024


@pytest.mark.parametrize(
    ("lately", "want"),
    [
        pytest.param(1000, 500.0, id="a minute is enough"),
        pytest.param(500, 800.0, id="two minutes are"),
        pytest.param(100, 4700.0 / 5, id="five are all there is"),
    ],
)
def test_what_requests_bring_is_known_from_the_latest_that_are_enough(lately: int, want: float) -> None:
    """Each minute has so many requests: of 500 tokens in the last one, 1,100 before, 1,033 before that."""
    prompts = [500.0, 1100.0, *[3100.0 / 3] * 3]
    slices = [
        Slice(
            300.0 - 60.0 * (index + 1),
            300.0 - 60.0 * index,
            {"prompts": lately, "prompt_sum": tokens * lately, "answers": lately, "answer_sum": lately},
        )
        for index, tokens in enumerate(prompts)
    ]
    found = workload(Recent(slices[::-1]), 300.0)
    assert found is not None
    assert found.prompt == pytest.approx(want)


@pytest.mark.parametrize("number", [24, 25, 30, 60, 100])
@pytest.mark.parametrize("seconds", [1.0, 5.0, 10.0, 15.0, 60.0, 300.0])
def test_each_replica_of_a_large_fleet_teaches_in_its_turn(number: int, seconds: float) -> None:
    """However far apart passes are."""
    names = [f"r{index}" for index in range(number)]
    taught = [by_turns(names, 1_700_000_000.0 + seconds * passes) for passes in range(100)]
    assert max(map(len, taught)) <= 24
    times = Counter(name for some in taught for name in some)
    fair = 100 * len(taught[0]) / number
    assert all(0.6 * fair <= times[name] <= 1.5 * fair for name in names)


def test_a_replica_has_the_places_for_what_it_is_taken_to_do(build: Any, target: Target) -> None:
    """TTFT is thought to be missed at any rate, which is not believed: a fifth of what the device could."""
    tight = replace(target, targets=Targets(120.0, 13.0))
    each = {"prompts": 1.0, "prompt_sum": 1000.0, "prompt_squares": 2e6, "decoded": 200.0}
    each |= {"answers": 1.0, "answer_sum": 200.0, "attended": 2e5}
    told = {name: 1000.0 * value for name, value in each.items()}
    memory = Memory(fit=StepFit(model=MODEL))
    found = sizing(tight, memory, Recent([Slice(40.0, 100.0, told)]), 1, 100.0, is_routed=False)
    assert found is not None
    assert found.least_per_second == found.capacity.per_second > 0.0
    running = found.replica.latencies(found.per_second, LIMITS, PLAIN).running
    assert found.capacity.limits.max_num_seqs >= running + running**0.5


def test_more_places_than_are_needed_change_no_token_budget(target: Target) -> None:
    """Long prompts, and tokens that may take little longer than a step: only small steps are even. A budget
    has room for a token of each sequence, so those that nobody needs must not make it larger."""
    work = Workload(prompt=7000.0, prompt_square=1.2e8, answer=300.0, context=8000.0, kv_share=0.0)
    replica = Replica(StepModel(base=8.3, prefill=0.02, sequence=0.05, kv=0.0), work, 95.0, 8)
    target = replace(target, targets=Targets(32_000.0, 13.0))
    few, many = (
        best_capacity(replica, replace(target, highest=Limits(seqs, 2048)), PLAIN) for seqs in (64, 256)
    )
    assert few.limits.max_num_batched_tokens < 256
    assert (many.limits, many.per_second) == (few.limits, few.per_second)


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        pytest.param(100, Limits(100, 100), id="room for so many"),
        pytest.param(512, Limits(256, 512), id="room for all"),
        pytest.param(9000, Limits(256, 2048), id="more than there may be"),
        pytest.param(4, Limits(4, 16), id="less than there must be"),
    ],
)
def test_a_token_budget_has_as_many_sequences_as_it_has_room_for(
    target: Target, tokens: int, want: Limits
) -> None:
    bounded = replace(target, lowest=Limits(1, 16), highest=Limits(256, 2048))
    assert bounded.with_token_budget(tokens) == want


def test_a_wait_for_room_is_no_start(build: Any) -> None:
    """A cluster takes ten minutes at most to add a node; who waits for hours waits until somebody goes."""
    took = []
    for waited in (1.0, 400.0, 6 * 3600.0):
        start = Start(waited, 5.0, 0.0, 34.0)
        one = build.replica("a", created_at=1000.0, ready_at=1040.0 + waited, start=start)
        memory = with_learning(Memory(began_at=1.0), {}, UNSEEN, Observed(replicas=(one,)), 99_999.0)
        took.append(lead_seconds(memory))
    assert took == [41.0, 440.0, 640.0]
