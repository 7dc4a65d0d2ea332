"""How long a prompt waits for others, on one replica and on a fleet whose gateway looks for the fewest."""

import heapq
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from headway_operator.samples import Limits
from headway_operator.slo.capacity import Factors, Replica, Workload, with_work
from headway_operator.slo.sizing import workload
from headway_operator.slo.slices import Slice
from headway_operator.slo.step_fit import StepModel
from headway_operator.slo.window import Recent

PLAIN, LIMITS = Factors(), Limits(64, 2048)
# Prompts of a second each, of which a step's base is next to nothing; answers of one token.
PROMPTS = Replica(
    StepModel(base=0.1, prefill=0.1, sequence=0.001, kv=0.0), Workload(1e4, 2e8, 1.0, 1e4, 0.0), 95.0
)


def ninety_fifth(fleet: int, per_second: float, service: Callable[[], float]) -> float:
    """Milliseconds until a prompt is computed, where each goes to the replica with the fewest: simulated."""
    chance, now, latencies = random.Random(fleet), 0.0, []
    free_at = [0.0] * fleet
    ends: list[list[float]] = [[] for _ in range(fleet)]
    for _ in range(60_000):
        now += chance.expovariate(per_second)
        for own in ends:
            while own and own[0] <= now:
                heapq.heappop(own)
        one = min(range(fleet), key=lambda place: (len(ends[place]), chance.random()))
        free_at[one] = max(free_at[one], now) + service()
        heapq.heappush(ends[one], free_at[one])
        latencies.append(1000.0 * (free_at[one] - now))
    return sorted(latencies)[int(0.95 * len(latencies))]


@pytest.mark.parametrize("fleet", [1, 2, 4, 12])
@pytest.mark.parametrize("use", [0.3, 0.6, 0.8])
def test_prompts_alone_wait_as_long_as_they_do_behind_a_gateway(fleet: int, use: float) -> None:
    seconds = 1e-3 * (1e4 * (0.1 + 0.1 / 2048))
    chance = random.Random(17)
    simulated = ninety_fifth(fleet, use * fleet / seconds, lambda: chance.expovariate(1.0 / seconds))
    found = replace(PROMPTS, fleet=fleet).latencies(use / seconds, LIMITS, PLAIN)
    assert 0.8 <= found.ttft / simulated <= 1.15, (found.ttft, simulated)


def test_beside_many_answers_the_number_of_requests_tells_nothing_of_prompts() -> None:
    """A replica with a long queue of prompts has as many requests as one with none."""
    model = StepModel(base=8.3, prefill=0.05, sequence=0.25, kv=0.0)
    few = Replica(model, Workload(4000.0, 4e7, 10.0, 4000.0, 0.0), 95.0)
    many = with_work(few, answer=400.0)

    def share(replica: Replica) -> float:
        """Of what the first token takes on one of ten replicas, over one that stands alone."""
        alone, among = (
            replace(replica, fleet=fleet).latencies(1.5, Limits(256, 2048), PLAIN) for fleet in (1, 10)
        )
        return among.ttft / alone.ttft

    assert share(few) < 0.8
    assert share(many) > 0.9


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


def test_tokens_of_prompts_are_those_computed() -> None:
    counted = {"prompts": 100.0, "answers": 100.0, "prompt_sum": 2e6, "prompt_squares": 5e10}
    found = workload(Recent((Slice(0.0, 5.0, {**counted, "prompt_tokens": 9e5}),)), 5.0)
    assert found is not None
    assert (found.prompt, found.tokens) == (20_000.0, 9000.0)
