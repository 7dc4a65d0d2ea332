"""What one replica's requests see at a rate and limits, from the time of its steps.

From the step model (`step_fit`), the work that requests bring, and queueing. All times are milliseconds,
rates are per millisecond. With the fitted base a, prefill b, and s = sequence + kv * context of a decoded
token:

work      each request takes w = p*b + o*s of the device besides the steps' base: p prompt tokens that are not
          in the prefix cache, counted by what they cost (`samples.Moments`), o tokens generated. u = rate * w
          is the share of time that goes to it.
TPOT      a decoding sequence meets, per step, the base, its own s, the s of rate*o*TPOT others (Little), and
          rate*p*b*TPOT of prompts: TPOT = (a + s) / (1 - u). It varies with the prompts that come while an
          answer lasts, rate * E[p^2] * b^2 * TPOT / o, and with the number that decode, s^2 * rate*o*TPOT.
routing   a gateway gives a request to the replica with the fewest, so that a busy one gets some only while
          all are busy: of n replicas, on each of which r requests would be on average if none met another,
          one that is busy gets r^(sqrt(2(n+1)) - 2) of the rate (Erlang's C over r, by Sakasegawa 1977; 1
          where n = 1 or r >= 1). So much of others' work and prompts is met by a decoding sequence, and in
          the step under way by a new prompt.
TTFT      the rest of the step under way and the one launched behind it, then a queue for the prompts' share
          of steps, with service p*(b + h/room), where h is what a step costs without prompts, and room the
          tokens that the budget leaves beside decodes; then one's own chunks. While nobody decodes, a budget
          counts tokens by number and not by cost, so that fewer steps do. Of answers that are not streamed a
          gateway does not know which have begun: where many decode on each replica, the number of requests
          on it says nothing of its prompts, and each is a queue of its own: M/G/1 (Pollaczek and Khinchine).
          Where few do, a prompt goes to a replica that has none: M/G/n, whose waits are
          u^(sqrt(2(n+1)) - 2) / n of those, u the share of time that prompts take (Sakasegawa). Between, the
          two are averaged. Where all answers are streamed it is M/G/n everywhere, and what is told here too
          long: for the factor to put right.

bursts    counts of arrivals vary by I, the index of dispersion (`forecast`), times what chance makes them.
          That is what groups of a geometric size do that come at once: with one request, a = (I - 1) / 2 come
          before it, and as many after it. A gateway gives each of n replicas one before any gets a second
          one; so on its own there are r / (1 - r) before it, r = (a / (1 + a))^n. It waits for their prompts
          (M^X/G/1: Burke, Delays in Single-Server Queues with Batch Input, 1975), as those after it stop its
          tokens, and all of them are there for half of its answer. Of n replicas together so many more or
          fewer run than on average as the root of 1 + a times what chance makes them: of groups, if answers
          are exponential, half of the excess is left.

places    where few of them, all taken, keep TPOT well below that, requests wait for one (`place_queue`), and
          hold it for their prompt and their answer, which is taken to be exponential.

Latencies at a percentile are those of the lognormal distribution with the mean and variance above. What
they leave out (routing, how far apart a group comes, the scheduler's order) is put right by two factors,
measured over predicted, which are learnt (`sizing.calibrated`).

Prior art sizes on means: llm-inferno's queue analysis, Dynamo's planner, WVA's queueing model. This sizes on
the percentile that was promised.
"""

from dataclasses import dataclass, field
from math import exp, inf, sqrt

from headway_operator.samples import Limits
from headway_operator.slo.lognormal import deviations_of, quantile, share_above
from headway_operator.slo.place_queue import queue_for_places
from headway_operator.slo.predictions import OVERLOADED, Factors, Latencies, Workload
from headway_operator.slo.step_fit import StepModel
from headway_operator.slo.target import Target

MOST_KV_USE = 0.85
MOST_UTILIZATION = 0.97
# Where so many decode on each replica, half of the prompts come to a queue that the gateway does not see. Of
# prompts for 0.4 to 0.7 of the time of ten replicas, simulated, P95 of TTFT is told 0.75 to 1.2 times.
BLIND_RUNNING = 5.0
# Requests wait for places where these, all taken, keep TPOT below this share of what it would be with a place
# for each. Next to one it is the same, and better known with a place for each.
FEW_PLACES = 0.8


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica's speed and load in kind, and the percentile (in percent) that latencies are taken at.

    fleet: of how many replicas a gateway chooses the least loaded; 1 where requests are spread blindly.
    applied: limits that it has, which decide where two kinds are nearly as good (`leaning`). burst: by how
    much the index of dispersion of all arrivals is more than 1, as shared by `fleet`.

    Worked out of these, as latencies are asked for some dozens of times in a decision: before: of those that
    come with a request, how many are before it at its replica; others: of all that do, a replica's share;
    deviations of the percentile; token: milliseconds of a step for each sequence that decodes; request:
    milliseconds of the device for each request, but for the base of steps; prompt_spread: prompts' variance.
    """

    model: StepModel
    workload: Workload
    percent: float
    fleet: int = 1
    applied: Limits | None = None
    burst: float = 0.0
    others: float = field(init=False)
    before: float = field(init=False)
    deviations: float = field(init=False)
    token: float = field(init=False)
    request: float = field(init=False)
    prompt_spread: float = field(init=False)

    def __post_init__(self) -> None:
        model, work = self.model, self.workload
        token = model.sequence + model.kv * work.context
        for name, value in (
            ("deviations", deviations_of(self.percent)),
            ("token", token),
            ("request", work.prompt * model.prefill + work.answer * token),
            ("prompt_spread", max(0.0, work.prompt_square - work.prompt**2)),
            ("others", self.burst / self.fleet),
            ("before", _before(self.burst / 2.0, self.fleet)),
        ):
            object.__setattr__(self, name, value)

    @property
    def most_per_second(self) -> float:
        """What the device could do if steps had no base."""
        return 1000.0 / max(1e-9, self.request)

    def latencies(self, per_second: float, limits: Limits, factors: Factors) -> Latencies:
        """At a rate of requests; OVERLOADED where there is no balance."""
        rate = per_second / 1000.0
        found, met = self._but_ttft(rate, limits, factors)
        if met is None:
            return found
        return found._replace(ttft=factors.ttft * self._ttft(rate, met, found.running, limits))

    def keeps(
        self, per_second: float, limits: Limits, factors: Factors, target: Target, share: float = 1.0
    ) -> bool:
        """Whether latencies at a rate stay within a share of both targets, and memory of its bound: TTFT is
        asked for last, as it takes longest to tell."""
        rate = per_second / 1000.0
        found, met = self._but_ttft(rate, limits, factors)
        wanted = target.targets.ttft_milliseconds
        if not self.is_kept(found, target, share):
            return False
        if met is None or wanted is None:
            return True
        return factors.ttft * self._ttft(rate, met, found.running, limits) <= share * wanted

    def _but_ttft(self, rate: float, limits: Limits, factors: Factors) -> tuple[Latencies, float | None]:
        """Latencies without TTFT, and what of the rate a busy replica meets; None where it is with TTFT."""
        if rate * self.request >= MOST_UTILIZATION:
            return OVERLOADED, None
        met = self._met(rate, limits)
        tpot, noise, running = self._decoding(rate, met)
        guessed = factors.tpot * quantile(tpot, noise, self.deviations)
        if self._is_shorter_with_few(limits.max_num_seqs, factors, FEW_PLACES * guessed):
            return self._with_queue_for_places(rate, limits, factors), None
        # The percentile's request finds a place.
        if running + self.deviations * self.uneven(running) > limits.max_num_seqs:
            return OVERLOADED, None
        crowd = self.crowd(running)
        longest = self.longest_step(crowd, limits)
        kv_use = self.workload.kv_share * crowd
        return Latencies(0.0, min(guessed, longest), running, kv_use, longest < guessed), met

    def _is_shorter_with_few(self, places: int, factors: Factors, milliseconds: float) -> bool:
        """Whether TPOT is, with all places taken; for most numbers its mean alone says that it is not."""
        mean, _ = self._full(places)
        return factors.tpot * mean <= milliseconds and self.full_tpot(places, factors) <= milliseconds

    def _with_queue_for_places(self, rate: float, limits: Limits, factors: Factors) -> Latencies:
        """Where requests wait for one of few places; see the header."""
        model, work, places = self.model, self.workload, limits.max_num_seqs
        room = limits.max_num_batched_tokens - places
        if room < 1:
            return OVERLOADED
        tpot, _ = self._full(places)
        step = model.base + self.token * (places - 1)
        own = step * self._chunks(room, places - 1.0) + model.prefill * work.prompt
        answer = work.answer * tpot
        spread = model.prefill**2 * self.prompt_spread
        left = ((own + answer) ** 2 + spread + answer**2) / (2.0 * (own + answer))
        held = rate * (own + answer) / places
        queue = queue_for_places(held, left, places, self.fleet)
        if queue is None:
            return OVERLOADED
        waits, wait = queue
        ahead = 1.5 * step if places > 1 else 0.0
        spread += ahead**2 / 3.0 + waits * (2.0 - waits) * wait**2
        before, each = self.before, (own + answer) / places / (1.0 - held)
        spread += before * (1.0 + before) * each**2
        ttft = factors.ttft * quantile(ahead + waits * wait + before * each + own, spread, self.deviations)
        slowest = min(self.full_tpot(places, factors), self.longest_step(places, limits))
        return Latencies(ttft, slowest, held * places, work.kv_share * places, is_bounded=places == 1)

    def _decoding(self, rate: float, met: float) -> tuple[float, float, float]:
        """TPOT's mean and variance, and how many sequences decode on average."""
        model, work = self.model, self.workload
        tpot = (model.base + self.token) / (1.0 - met * rate * self.request)
        answer = max(1.0, work.answer)
        running = rate * work.answer * tpot
        noise = met * rate * work.prompt_square * model.prefill**2 * tpot / answer
        noise += self.token**2 * running
        if self.before:
            # As many come after it as before it, and both are there for half of its answer.
            later, each = self.before, self.token + model.prefill * work.prompt / answer
            spread = model.prefill**2 * self.prompt_spread / answer**2
            tpot += later * each
            noise += later * ((1.0 + later) * each**2 + spread)
        return tpot, noise, rate * work.answer * tpot

    def missing_tpot(self, per_second: float, limits: Limits, factors: Factors, milliseconds: float) -> float:
        """The share of requests whose TPOT is more than that, at a rate with a place for each."""
        rate = per_second / 1000.0
        if rate * self.request >= MOST_UTILIZATION:
            return 1.0
        tpot, noise, running = self._decoding(rate, self._met(rate, limits))
        if self.longest_step(self.crowd(running), limits) <= milliseconds:
            return 0.0
        return share_above(tpot, noise, milliseconds / factors.tpot)

    def longest_step(self, crowd: float, limits: Limits) -> float:
        """One that has its whole token budget, beside so many sequences."""
        crowd = min(float(limits.max_num_seqs), crowd)
        prompts = max(0.0, limits.max_num_batched_tokens - crowd)
        return self.model.base + self.token * crowd + self.model.prefill * prompts

    def crowd(self, running: float) -> float:
        """Sequences at the percentile, of so many on average."""
        return running + self.deviations * sqrt(running * (1.0 + self.others / 2.0))

    def uneven(self, running: float) -> float:
        """The standard deviation of how many sequences run on each replica, of so many on average, where the
        gateway evens them out."""
        return sqrt(running * (1.0 / self.fleet + self.others / 2.0))

    def _met(self, rate: float, limits: Limits) -> float:
        """The share of the rate that comes to a replica which is busy; see the header."""
        if self.fleet == 1:
            return 1.0
        work = self.workload
        chunks = max(1.0, work.prompt / limits.max_num_batched_tokens)
        alone = self.model.base * (chunks + work.answer) + self.request
        return float(min(1.0, max(1e-9, rate * alone)) ** (sqrt(2.0 * (self.fleet + 1.0)) - 2.0))

    def _ttft(self, rate: float, met: float, running: float, limits: Limits) -> float:
        model, work = self.model, self.workload
        room = limits.max_num_batched_tokens - running
        if room < 1.0:
            return inf
        step = model.base + self.token * running
        counted = self._counted(running)
        per_token = model.prefill + counted * step / room
        service, square = work.prompt * per_token, work.prompt_square * per_token**2
        busy = rate * service
        if busy >= MOST_UTILIZATION:
            return inf
        waits, queued = self._queue(busy, running)
        queued *= square / max(1e-9, 2.0 * service)
        before, each = self.before, service / (1.0 - busy)
        busy *= met
        own = step * self._chunks(room, running) + model.prefill * work.prompt
        # The step under way is one with prompts in `busy` of all cases.
        biggest = min(work.prompt_square / max(1.0, work.prompt), room / counted)
        ahead = 1.5 * (step + busy * model.prefill * biggest) if busy > 0.0 else 0.0
        spread = per_token**2 * self.prompt_spread + ahead**2 / 3.0
        if queued > 0.0:
            spread += queued * (2.0 * queued / waits - queued)
        spread += before * ((1.0 + before) * each**2 + per_token**2 * self.prompt_spread)
        return quantile(ahead + queued + before * each + own, spread, self.deviations)

    def _chunks(self, room: float, running: float) -> float:
        """Of an exponential prompt, on average, in steps with room for so many tokens beside decodes."""
        return 1.0 / (1.0 - exp(-room / max(1.0, self._counted(running) * self.workload.prompt)))

    def _counted(self, running: float) -> float:
        """What a step's budget counts of a prompt, over its cost, with so many sequences decoding on average:
        its cost beside some, its tokens beside none, as by chance (Poisson)."""
        tokens, cost = self.workload.tokens, self.workload.prompt
        return 1.0 - exp(-running) * (1.0 - tokens / cost) if 0.0 < tokens < cost else 1.0

    def _queue(self, busy: float, running: float) -> tuple[float, float]:
        """The share of prompts that wait for others, and how long prompts wait on average, in what is left of
        one on average. busy: the share of time that prompts take. See the header."""
        if busy <= 0.0:
            return 0.0, 0.0
        all_busy = busy ** (sqrt(2.0 * (self.fleet + 1.0)) - 1.0)
        blind = running**2 / (running**2 + BLIND_RUNNING**2)
        waits = blind * busy + (1.0 - blind) * all_busy
        queued = blind * busy + (1.0 - blind) * all_busy / self.fleet
        return waits, queued / (1.0 - busy)

    def is_kept(self, found: Latencies, target: Target, share: float = 1.0) -> bool:
        """Whether latencies stay within a share of both targets, and memory of its bound."""
        ttft, tpot = target.targets.ttft_milliseconds, target.targets.tpot_milliseconds
        return (
            (ttft is None or found.ttft <= share * ttft)
            and (tpot is None or found.tpot <= share * tpot)
            and found.kv_use <= share * MOST_KV_USE
        )

    def idle(self, limits: Limits) -> Latencies:
        """What a request of the percentile's prompt sees on a replica that has nothing else to do."""
        model, work = self.model, self.workload
        prompt = quantile(work.prompt, self.prompt_spread, self.deviations)
        chunks = max(1.0, self._counted(0.0) * prompt / limits.max_num_batched_tokens)
        return Latencies(
            model.base * chunks + model.prefill * prompt, model.base + self.token, 0.0, work.kv_share
        )

    def answer_seconds(self, target: Target) -> float:
        """What an answer takes whose tokens come as slowly as they may."""
        tpot = target.targets.tpot_milliseconds
        if tpot is None:
            tpot = self.model.base + self.token
        return self.workload.answer * tpot / 1000.0

    def full_tpot(self, taken: int, factors: Factors) -> float:
        """At the percentile, with so many places taken all the time."""
        return factors.tpot * quantile(*self._full(taken), self.deviations)

    def full_missing_tpot(self, taken: int, factors: Factors, milliseconds: float) -> float:
        """The share of requests whose TPOT is more than that, likewise."""
        return share_above(*self._full(taken), milliseconds / factors.tpot)

    def full_per_second(self, taken: int, factors: Factors) -> float:
        """Requests that end, likewise: each holds its place for its prompt and its answer."""
        mean, _ = self._full(taken)
        held = self.model.base + self.workload.prompt * self.model.prefill
        return 1000.0 * taken / (held + self.workload.answer * factors.tpot * mean)

    def _full(self, taken: int) -> tuple[float, float]:
        """TPOT's mean and variance. Each sequence that ends makes room for a prompt: while one of n is
        written, as many prompts come on average as there are others."""
        model, work = self.model, self.workload
        each = model.prefill / max(1.0, work.answer)
        mean = model.base + taken * self.token + (taken - 1) * each * work.prompt
        return mean, (taken - 1) * each**2 * work.prompt_square


def _before(ahead: float, fleet: int) -> float:
    """Of so many requests that come at once before one, geometrically distributed, how many a gateway gives
    to the same of so many replicas, on average: each gets one before any gets a second one."""
    again = (ahead / (1.0 + ahead)) ** fleet if ahead > 0.0 else 0.0
    return again / (1.0 - again)
