"""Whether a promise is kept at a rate, which is asked for without all that is predicted."""

import random
from collections import Counter
from typing import Any

from headway_operator.samples import Limits, Targets
from headway_operator.slo.capacity import Replica
from headway_operator.slo.predictions import Factors, Workload
from headway_operator.slo.step_fit import StepModel


def test_what_is_kept_is_what_latencies_are_within(build: Any) -> None:
    """Of random replicas, loads, limits and targets, some of them missing."""
    chance, kept = random.Random(7), Counter[bool]()
    for _ in range(2000):
        prompt = chance.uniform(50.0, 8000.0)
        work = Workload(prompt, prompt**2 * chance.uniform(1, 4), chance.uniform(1, 500), prompt, 0.004)
        model = StepModel(chance.uniform(1, 40), chance.uniform(0, 0.3), chance.uniform(0, 1), 1e-5)
        replica = Replica(model, work, chance.choice((95.0, 99.0)), chance.choice((1, 3, 30)))
        limits = Limits(seqs := chance.choice((1, 4, 64)), max(seqs, chance.choice((64, 2048))))
        wanted = Targets(chance.choice((None, 300.0, 9000.0)), chance.choice((None, 30.0, 300.0)))
        given = build.target(targets=wanted)
        rate, share = replica.most_per_second * chance.random(), chance.choice((1.0, 0.5))
        factors = Factors(chance.uniform(0.3, 2.0), chance.uniform(0.5, 2.0))
        found = replica.keeps(rate, limits, factors, given, share)
        assert found == replica.is_kept(replica.latencies(rate, limits, factors), given, share)
        kept[found] += 1
    assert min(kept.values()) > 200
