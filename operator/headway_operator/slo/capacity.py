"""How many requests one replica serves per second within both targets, at the best limits it may have.

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

places    where few of them, all taken, keep TPOT well below that, requests wait for one (`place_queue`), and
          hold it for their prompt and their answer, which is taken to be exponential.

Latencies at a percentile are those of the lognormal distribution with the mean and variance above. What
they leave out (routing, bursts, the scheduler's order) is put right by two factors, measured over predicted,
which are learnt (`sizing.calibrated`).

Prior art sizes on means: llm-inferno's queue analysis, Dynamo's planner, WVA's queueing model. This sizes on
the percentile that was promised.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt

from headway_operator.samples import Limits, Targets
from headway_operator.slo.leaning import LEANING, is_nearer
from headway_operator.slo.lognormal import deviations_of, quantile, share_above
from headway_operator.slo.place_queue import queue_for_places
from headway_operator.slo.predictions import OVERLOADED, Capacity, Factors, Latencies, Workload
from headway_operator.slo.step_fit import StepModel
from headway_operator.slo.target import Target

MOST_KV_USE = 0.85
MOST_UTILIZATION = 0.97
# Halvings of the token budget that are considered.
NUM_BUDGETS = 4
# A smaller budget must promise so much more: what a model says of small steps is worth less.
LEAST_GAIN = 1.05
# But one of which no step is longer than TPOT may be is preferred if it keeps this share of the rate where a
# replica is alone, down to that of a large fleet, where prompts wait for less than is told, and if it has no
# fewer tokens than this.
EVEN_STEPS_SHARE, LEAST_EVEN_STEPS_SHARE, LEAST_EVEN_TOKENS = 0.95, 0.8, 16.0
# They take no more than this share of the target: what a prompt's token costs is the engine's estimate.
EVEN_STEPS_USE, BISECTIONS, ROUGH_BISECTIONS = 0.95, 10, 6
# Where so many decode on each replica, half of the prompts come to a queue that the gateway does not see. Of
# prompts for 0.4 to 0.7 of the time of ten replicas, simulated, P95 of TTFT is told 0.75 to 1.2 times.
BLIND_RUNNING = 5.0
# Requests wait for places where these, all taken, keep TPOT below this share of what it would be with a place
# for each. Next to one it is the same, and better known with a place for each.
FEW_PLACES = 0.8
# Such a queue grows fast next to its limit: of what it is told to serve a replica is trusted with this share.
QUEUE_USE = 0.9
# The limit on sequences leaves at least so many standard deviations above the mean number.
SEQUENCE_DEVIATIONS = 1.0


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica's speed and load in kind, and the percentile (in percent) that latencies are taken at.

    fleet: of how many replicas a gateway chooses the least loaded; 1 where requests are spread blindly.
    applied: limits that it has, which decide where two kinds are nearly as good (`leaning`).
    """

    model: StepModel
    workload: Workload
    percent: float
    fleet: int = 1
    applied: Limits | None = None

    @property
    def _deviations(self) -> float:
        return deviations_of(self.percent)

    @property
    def most_per_second(self) -> float:
        """What the device could do if steps had no base."""
        token = self.model.sequence + self.model.kv * self.workload.context
        return 1000.0 / max(1e-9, self.workload.prompt * self.model.prefill + self.workload.answer * token)

    def latencies(self, per_second: float, limits: Limits, factors: Factors) -> Latencies:
        """At a rate of requests; OVERLOADED where there is no balance."""
        model, work, rate = self.model, self.workload, per_second / 1000.0
        token = model.sequence + model.kv * work.context
        used = rate * (work.prompt * model.prefill + work.answer * token)
        if used >= MOST_UTILIZATION:
            return OVERLOADED
        met = self._met(rate, token, limits)
        tpot, noise, running = self._decoding(rate, met, used, token)
        guessed = factors.tpot * quantile(tpot, noise, self._deviations)
        if self._is_shorter_with_few(limits.max_num_seqs, factors, FEW_PLACES * guessed):
            return self._with_queue_for_places(rate, token, limits, factors)
        # The percentile's request finds a place; a gateway evens out how many run on each.
        if running + self._deviations * sqrt(running / self.fleet) > limits.max_num_seqs:
            return OVERLOADED
        ttft = self._ttft(rate, met, running, token, limits)
        crowd = self._crowd(running)
        longest = self._longest_step(crowd, token, limits)
        kv_use = work.kv_share * crowd
        return Latencies(factors.ttft * ttft, min(guessed, longest), running, kv_use, longest < guessed)

    def _is_shorter_with_few(self, places: int, factors: Factors, milliseconds: float) -> bool:
        """Whether TPOT is, with all places taken; for most numbers its mean alone says that it is not."""
        mean, _ = self._full(places)
        return factors.tpot * mean <= milliseconds and self.full_tpot(places, factors) <= milliseconds

    def _with_queue_for_places(
        self, rate: float, token: float, limits: Limits, factors: Factors
    ) -> Latencies:
        """Where requests wait for one of few places; see the header."""
        model, work, places = self.model, self.workload, limits.max_num_seqs
        room = limits.max_num_batched_tokens - places
        if room < 1:
            return OVERLOADED
        tpot, _ = self._full(places)
        step = model.base + token * (places - 1)
        own = step * self._chunks(room, places - 1.0) + model.prefill * work.prompt
        answer = work.answer * tpot
        spread = model.prefill**2 * max(0.0, work.prompt_square - work.prompt**2)
        left = ((own + answer) ** 2 + spread + answer**2) / (2.0 * (own + answer))
        held = rate * (own + answer) / places
        queue = queue_for_places(held, left, places, self.fleet)
        if queue is None:
            return OVERLOADED
        waits, wait = queue
        ahead = 1.5 * step if places > 1 else 0.0
        spread += ahead**2 / 3.0 + waits * (2.0 - waits) * wait**2
        ttft = factors.ttft * quantile(ahead + waits * wait + own, spread, self._deviations)
        slowest = min(self.full_tpot(places, factors), self._longest_step(places, token, limits))
        return Latencies(ttft, slowest, held * places, work.kv_share * places, is_bounded=places == 1)

    def _decoding(self, rate: float, met: float, used: float, token: float) -> tuple[float, float, float]:
        """TPOT's mean and variance, and how many sequences decode on average."""
        model, work = self.model, self.workload
        tpot = (model.base + token) / (1.0 - met * used)
        running = rate * work.answer * tpot
        noise = met * rate * work.prompt_square * model.prefill**2 * tpot / max(1.0, work.answer)
        return tpot, noise + token**2 * running, running

    def missing_tpot(self, per_second: float, limits: Limits, factors: Factors, milliseconds: float) -> float:
        """The share of requests whose TPOT is more than that, at a rate with a place for each."""
        model, work, rate = self.model, self.workload, per_second / 1000.0
        token = model.sequence + model.kv * work.context
        used = rate * (work.prompt * model.prefill + work.answer * token)
        if used >= MOST_UTILIZATION:
            return 1.0
        tpot, noise, running = self._decoding(rate, self._met(rate, token, limits), used, token)
        if self._longest_step(self._crowd(running), token, limits) <= milliseconds:
            return 0.0
        return share_above(tpot, noise, milliseconds / factors.tpot)

    def _longest_step(self, crowd: float, token: float, limits: Limits) -> float:
        """One that has its whole token budget, beside so many sequences."""
        crowd = min(float(limits.max_num_seqs), crowd)
        prompts = max(0.0, limits.max_num_batched_tokens - crowd)
        return self.model.base + token * crowd + self.model.prefill * prompts

    def _crowd(self, running: float) -> float:
        """Sequences at the percentile, of so many on average."""
        return running + self._deviations * sqrt(running)

    def _met(self, rate: float, token: float, limits: Limits) -> float:
        """The share of the rate that comes to a replica which is busy; see the header."""
        if self.fleet == 1:
            return 1.0
        model, work = self.model, self.workload
        chunks = max(1.0, work.prompt / limits.max_num_batched_tokens)
        alone = model.base * chunks + model.prefill * work.prompt + work.answer * (model.base + token)
        return exp((sqrt(2.0 * (self.fleet + 1.0)) - 2.0) * log(max(1e-9, min(1.0, rate * alone))))

    def _ttft(self, rate: float, met: float, running: float, token: float, limits: Limits) -> float:
        model, work = self.model, self.workload
        room = limits.max_num_batched_tokens - running
        if room < 1.0:
            return inf
        step = model.base + token * running
        counted = self._counted(running)
        per_token = model.prefill + counted * step / room
        service, square = work.prompt * per_token, work.prompt_square * per_token**2
        busy = rate * service
        if busy >= MOST_UTILIZATION:
            return inf
        waits, queued = self._queue(busy, running)
        queued *= square / max(1e-9, 2.0 * service)
        busy *= met
        own = step * self._chunks(room, running) + model.prefill * work.prompt
        # The step under way is one with prompts in `busy` of all cases.
        biggest = min(work.prompt_square / max(1.0, work.prompt), room / counted)
        ahead = 1.5 * (step + busy * model.prefill * biggest) if busy > 0.0 else 0.0
        spread = per_token**2 * max(0.0, work.prompt_square - work.prompt**2) + ahead**2 / 3.0
        if queued > 0.0:
            spread += queued * (2.0 * queued / waits - queued)
        return quantile(ahead + queued + own, spread, self._deviations)

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

    def capacity(self, target: Target, factors: Factors) -> Capacity:
        """At the best feasible limits, whatever is applied today; but for a kind that is nearly as good."""
        best: tuple[float, Limits] | None = None
        for halvings in range(NUM_BUDGETS):
            limits = target.with_token_budget(target.highest.max_num_batched_tokens >> halvings)
            if best is None:
                best = (self._most(target, limits, factors), limits)
                continue
            # Not looked for where it cannot be found: latencies only grow with the rate.
            wanted = best[0] * LEAST_GAIN
            if limits == best[1] or not self.is_kept(self.latencies(wanted, limits, factors), target):
                continue
            found = self._most(target, limits, factors, wanted)
            if found > wanted:
                best = (found, limits)
        assert best is not None
        per_second, limits = self._with_even_steps(best, target, factors)
        full = self._full_sequences(limits, target, factors)
        few = target.bound_limits(Limits(full, limits.max_num_batched_tokens))
        limits = self.with_places(few, per_second, target, factors)
        unpromised = replace(target, targets=Targets())
        bound = max(per_second, self._most(unpromised, target.highest, factors))
        return self._with_few_places(Capacity(per_second, limits, bound, full), target, factors)

    def _with_few_places(self, found: Capacity, target: Target, factors: Factors) -> Capacity:
        """As many places as keep TPOT while all are taken, and a queue for them, where that serves more."""
        highest, full = target.highest, found.full_num_seqs
        if found.limits.max_num_batched_tokens != highest.max_num_batched_tokens:
            full = self._full_sequences(highest, target, factors)
        limits = target.bound_limits(Limits(full, highest.max_num_batched_tokens))
        gain = 1.0 if is_nearer(self.applied, limits, found.limits) else LEAST_GAIN
        wanted = gain * found.per_second
        is_more = limits.max_num_seqs > found.limits.max_num_seqs
        if is_more or not self.is_kept(self.latencies(wanted, limits, factors), target):
            return found
        per_second = max(found.per_second, QUEUE_USE * self._most(target, limits, factors, wanted))
        return Capacity(per_second, limits, max(per_second, found.bound), limits.max_num_seqs)

    def _with_even_steps(
        self, best: tuple[float, Limits], target: Target, factors: Factors
    ) -> tuple[float, Limits]:
        """The largest token budget of which no step takes longer than TPOT may, where it costs next to
        nothing: TPOT hangs on no guess of how prompts are spread then."""
        wanted = target.targets.tpot_milliseconds
        if wanted is None or self.model.prefill <= 0.0 or best[0] <= 0.0:
            return best
        rate, limits = best
        # The rate says how many run, and these how many prompt tokens fit: roughly at first.
        lost_alone, lost = 1.0 - EVEN_STEPS_SHARE, 1.0 - LEAST_EVEN_STEPS_SHARE
        least = best[0] * (1.0 - lost + (lost - lost_alone) / self.fleet)
        for bisections in (ROUGH_BISECTIONS, BISECTIONS):
            tokens = self._even_tokens(rate, wanted, target.highest)
            if not LEAST_EVEN_TOKENS <= tokens < inf:
                return best
            tokens = min(tokens, target.highest.max_num_batched_tokens)
            limits = target.with_token_budget(int(tokens))
            needed = LEANING * least if is_nearer(self.applied, limits, best[1]) else least
            # Not looked for where it cannot be found, as above.
            if not self.is_kept(self.latencies(needed, limits, factors), target):
                return best
            rate = self._most(target, limits, factors, needed, bisections)
        return rate, limits

    def _even_tokens(self, per_second: float, milliseconds: float, highest: Limits) -> float:
        """Of a step that takes so long, beside the sequences that run at such a rate; may be no number."""
        token = self.model.sequence + self.model.kv * self.workload.context
        crowd = self._crowd(self.latencies(per_second, highest, Factors()).running)
        return crowd + (EVEN_STEPS_USE * milliseconds - self.model.base - token * crowd) / self.model.prefill

    def idle(self, limits: Limits) -> Latencies:
        """What a request of the percentile's prompt sees on a replica that has nothing else to do."""
        model, work = self.model, self.workload
        token = model.sequence + model.kv * work.context
        variance = max(0.0, work.prompt_square - work.prompt**2)
        prompt = quantile(work.prompt, variance, self._deviations)
        chunks = max(1.0, self._counted(0.0) * prompt / limits.max_num_batched_tokens)
        return Latencies(model.base * chunks + model.prefill * prompt, model.base + token, 0.0, work.kv_share)

    def answer_seconds(self, target: Target) -> float:
        """What an answer takes whose tokens come as slowly as they may."""
        tpot = target.targets.tpot_milliseconds
        if tpot is None:
            tpot = self.model.base + self.model.sequence + self.model.kv * self.workload.context
        return self.workload.answer * tpot / 1000.0

    def _most(
        self,
        target: Target,
        limits: Limits,
        factors: Factors,
        low: float = 0.0,
        bisections: int = BISECTIONS,
    ) -> float:
        """The highest rate that keeps the promise, per second. low: one that is known to."""
        high = max(low, self.most_per_second)
        for _ in range(bisections):
            middle = (low + high) / 2.0
            if self.is_kept(self.latencies(middle, limits, factors), target):
                low = middle
            else:
                high = middle
        return low

    def with_places(self, limits: Limits, per_second: float, target: Target, factors: Factors) -> Limits:
        """The limits with places for such a rate at least; as they are where that is more than can be."""
        unlimited = Limits(target.highest.max_num_seqs, limits.max_num_batched_tokens)
        running = self.latencies(per_second, unlimited, factors).running
        if running == inf:
            return limits
        deviations = max(SEQUENCE_DEVIATIONS, self._deviations / sqrt(self.fleet))
        needed = int(running + deviations * sqrt(running) + 1.0)
        return target.bound_limits(replace(unlimited, max_num_seqs=max(limits.max_num_seqs, needed)))

    def _full_sequences(self, limits: Limits, target: Target, factors: Factors) -> int:
        """As many as keep TPOT and memory with all places taken all the time."""
        tpot = target.targets.tpot_milliseconds
        highest = min(target.highest.max_num_seqs, limits.max_num_batched_tokens)
        if self.workload.kv_share > 0.0:
            highest = max(1, min(highest, int(MOST_KV_USE / self.workload.kv_share)))
        if tpot is None:
            return highest
        token = self.model.sequence + self.model.kv * self.workload.context
        taken = range(1, highest + 1)
        # Whatever is guessed of prompts, no token comes later than the longest step: beside one sequence, or
        # beside the most.
        bounded = 0
        if self._longest_step(1, token, limits) <= tpot:
            bounded = bisect_right(taken, tpot, key=lambda number: self._longest_step(number, token, limits))
        if bounded == highest:
            return highest
        guessed = bisect_right(taken, tpot, key=lambda number: self.full_tpot(number, factors))
        return max(1, bounded, guessed)

    def full_tpot(self, taken: int, factors: Factors) -> float:
        """At the percentile, with so many places taken all the time."""
        return factors.tpot * quantile(*self._full(taken), self._deviations)

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
        token = model.sequence + model.kv * work.context
        each = model.prefill / max(1.0, work.answer)
        mean = model.base + taken * token + (taken - 1) * each * work.prompt
        return mean, (taken - 1) * each**2 * work.prompt_square
