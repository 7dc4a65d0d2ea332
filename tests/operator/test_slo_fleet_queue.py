"""How long a prompt waits for others, on one replica and on a fleet whose gateway looks for the fewest."""

import heapq
import random
from dataclasses import replace

import pytest

from headway_operator.samples import Limits
from headway_operator.slo.capacity import Replica
from headway_operator.slo.memory import Memory
from headway_operator.slo.predictions import Factors, Workload
from headway_operator.slo.sizing import with_work, workload
from headway_operator.slo.slices import Slice
from headway_operator.slo.step_fit import StepModel
from headway_operator.slo.window import Recent

PLAIN, LIMITS = Factors(), Limits(64, 2048)
# Prompts of a second each, of which a step's base is next to nothing; answers of one token.
PROMPTS = Replica(
    StepModel(base=0.1, prefill=0.1, sequence=1e-6, kv=0.0), Workload(1e4, 2e8, 1.0, 1e4, 0.0), 95.0
)


def ninety_fifth(fleet: int, per_second: float, service: float, answer: float) -> float:
    """Milliseconds until a prompt is computed, where each goes to the replica with the fewest requests, be
    they prompts or answers, which are not streamed: simulated, with exponential times of so many seconds."""
    chance, now, latencies = random.Random(fleet), 0.0, []
    free_at = [0.0] * fleet
    ends: list[list[float]] = [[] for _ in range(fleet)]
    for _ in range(60_000):
        now += chance.expovariate(per_second)
        for own in ends:
            while own and own[0] <= now:
                heapq.heappop(own)
        one = min(range(fleet), key=lambda place: (len(ends[place]), chance.random()))
        free_at[one] = max(free_at[one], now) + chance.expovariate(1.0 / service)
        decoded = chance.expovariate(1.0 / answer) if answer else 0.0
        heapq.heappush(ends[one], free_at[one] + decoded)
        latencies.append(1000.0 * (free_at[one] - now))
    return sorted(latencies)[int(0.95 * len(latencies))]


@pytest.mark.parametrize("fleet", [1, 2, 4, 12])
@pytest.mark.parametrize("use", [0.3, 0.6, 0.8])
def test_prompts_alone_wait_as_long_as_they_do_behind_a_gateway(fleet: int, use: float) -> None:
    seconds = 1e-3 * (1e4 * (0.1 + 0.1 / 2048))
    simulated = ninety_fifth(fleet, use * fleet / seconds, seconds, 0.0)
    found = replace(PROMPTS, fleet=fleet).latencies(use / seconds, LIMITS, PLAIN)
    assert 0.8 <= found.ttft / simulated <= 1.15, (found.ttft, simulated)


@pytest.mark.parametrize(("use", "running"), [(0.4, 1.0), (0.4, 5.0), (0.4, 15.0), (0.7, 1.0), (0.7, 5.0)])
def test_beside_answers_they_wait_the_longer_the_less_a_gateway_sees_of_them(
    use: float, running: float
) -> None:
    """Between one queue for ten replicas and one for each."""
    seconds = 1e-3 * (1e4 * (0.1 + 0.1 / 2048))
    rate = use / seconds
    # Tokens of an answer, each of which takes a step's base and its share of prompts.
    answer = running / (rate / 1000.0) / 0.1 * (1.0 - 1e-3 * rate * 1e4 * 0.1)
    replica = with_work(replace(PROMPTS, fleet=10), answer=answer)
    found = replica.latencies(rate, LIMITS, PLAIN)
    assert found.running == pytest.approx(running, rel=0.1)
    simulated = ninety_fifth(10, 10.0 * rate, seconds, running / rate)
    assert 0.7 <= found.ttft / simulated <= 1.3, (found.ttft, simulated)


def test_a_prompt_alone_takes_as_many_steps_as_it_has_tokens_for() -> None:
    """Its last tokens cost several times as much as the first ones, which a budget heeds only
    where somebody decodes."""
    model = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=0.0)
    unknown = Replica(model, Workload(26_000.0, 1.4e9, 20.0, 11_000.0, 0.0), 95.0)
    known, limits = with_work(unknown, tokens=11_000.0), Limits(64, 64)
    by_cost, by_number = (one.latencies(0.02, limits, PLAIN).ttft for one in (unknown, known))
    assert 0.5 < by_number / by_cost < 0.75
    # Where somebody decodes nearly all the time, it is all the same.
    by_cost, by_number = (
        with_work(one, answer=4000.0, prompt=2600.0, prompt_square=1.4e7, tokens=tokens)
        .latencies(0.12, Limits(64, 512), PLAIN)
        .ttft
        for one, tokens in ((unknown, 0.0), (known, 1100.0))
    )
    assert by_number / by_cost > 0.98


def test_an_idle_replica_takes_the_steps_that_its_first_token_takes() -> None:
    """Else a promise that it can keep would be called infeasible."""
    model = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=0.0)
    even = Replica(model, Workload(26_000.0, 26_000.0**2, 20.0, 11_000.0, 0.0, 11_000.0), 95.0)
    limits = Limits(16, 256)
    served = even.latencies(1e-6, limits, PLAIN).ttft
    assert even.idle(limits).ttft <= served <= 1.05 * even.idle(limits).ttft
    assert with_work(even, tokens=0.0).idle(limits).ttft > 1.2 * served


def test_a_checkpoint_keeps_them_and_those_of_earlier_versions_have_none() -> None:
    work = Workload(2e4, 5e8, 200.0, 9e3, 0.01, 9e3)
    written = Memory(began_at=1.0, workload=work).to_dict()
    assert Memory.from_dict(written, 2.0).workload == work
    # Earlier versions take the five numbers that they know, and ignore what they do not.
    assert len(written["workload"]) == 5
    del written["workload_tokens"]
    assert Memory.from_dict(written, 2.0).workload == replace(work, tokens=0.0)


def test_tokens_of_prompts_are_those_computed() -> None:
    counted = {"prompts": 100.0, "answers": 100.0, "prompt_sum": 2e6, "prompt_squares": 5e10}
    found = workload(Recent((Slice(0.0, 5.0, {**counted, "prompt_tokens": 9e5}),)), 5.0)
    assert found is not None
    assert (found.prompt, found.tokens) == (20_000.0, 9000.0)
