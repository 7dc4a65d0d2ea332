"""Whether what a service asks for may be served: judged before, being judged, or to be judged now.

The algorithm:

1. A model that is held against itself to the letter needs no judge.
2. A file that is not there is waited for; nothing can be judged without it.
3. What is judged has a hash (`judged`). A verdict on it, good or bad, that status has stands for good:
   nothing is judged twice, by whichever operator. An evaluation that came to no verdict stands as long as its
   Job is there; deleting that asks for another one.
4. An evaluation of that name that has ended gives the verdict; one on its way is waited for. Where what it
   left behind is gone, its Job is not kept, and the next pass finds none.
5. Else one begins, unless no replica is wanted. One under way ends where the service is suspended.

Knows nothing of what is done about it: `withhold` does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headway_operator import names
from headway_operator.quality.judged import has_nothing_to_judge, judged_hash
from headway_operator.quality.judgement import Judgement, Reason, in_words, recorded
from headway_operator.quality.verdict_wire import read_verdict
from headway_operator.spec import Service
from headway_operator.state import Evaluation, Observed
from headway_operator.times import timestamp

MAX_HISTORY = 8
# Nothing more will happen until somebody does something.
STUCK_REASONS = ("Failed", "TimedOut", "JobFailed", "FileMissing")


@dataclass(frozen=True, slots=True)
class Gate:
    """status, reason, message: of the condition QualityVerified.

    hash, job: of what is judged, and of the Job that does; "" where nothing has to be. begins: that Job is to
    be made. judgement: the end it came to. history: all that are remembered, this one first. is_news: it came
    to its end in this pass.
    """

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str
    hash: str = ""
    job: str = ""
    begins: bool = False
    judgement: Judgement | None = None
    history: tuple[Judgement, ...] = ()
    is_news: bool = False

    @property
    def is_open(self) -> bool:
        """Whether what was asked for may be served."""
        return self.status == "True"

    @property
    def is_under_way(self) -> bool:
        """Whether a verdict will come by itself."""
        return self.reason in ("Verifying", "VerdictLost")

    @property
    def is_stuck(self) -> bool:
        """Whether it stays as it is until somebody changes something."""
        return self.reason in STUCK_REASONS


def materials(service: Service) -> tuple[str, ...]:
    """The files that the cluster is asked about, by the names that the spec has for them."""
    return () if service.spec.quality is None else service.spec.quality.materials()


def open_or_shut(
    service: Service, image: str, observed: Observed, digests: Mapping[str, str], now: float
) -> Gate | None:
    """None without a gate. image: of the runtime. digests: of the files that are there, "" where unknown."""
    quality, history = service.spec.quality, recorded(service.status)
    if quality is None:
        return None
    if has_nothing_to_judge(service.spec):
        message = "a plain checkpoint without levers is its own baseline"
        return Gate("True", "NothingToJudge", message, history=history)
    if missing := [one for one in quality.materials() if one not in digests]:
        message = f"{missing[0]!r} is not there; make it, or change spec.quality"
        return Gate("Unknown", "FileMissing", message, history=history)
    hash_ = judged_hash(service.spec, image, digests)
    job = names.evaluation(service.name, hash_)
    evaluation = next((one for one in observed.evaluations if one.name == job), None)
    known = next((one for one in history if one.hash == hash_), None)
    if known is not None and (known.is_verdict or evaluation is not None):
        return _judged(known, job, history, is_news=False)
    is_under_way = evaluation is None or evaluation.phase in ("pending", "running")
    if service.spec.suspend and is_under_way:
        # Without a name its Job is not kept: what it occupies is given back as well.
        message = "spec.suspend is true; what is asked for is judged when it is false again"
        return Gate("Unknown", "Suspended", message, hash_, history=history)
    if evaluation is not None:
        if evaluation.phase in ("pending", "running"):
            cause = f": {evaluation.message}" if evaluation.message else ""
            message = f"{job} is {evaluation.phase}{cause}"
            return Gate("Unknown", "Verifying", message, hash_, job, history=history)
        if evaluation.phase == "lost":
            message = (
                f"{job} came to its end, but {evaluation.message} and the verdict with it; the Job is "
                "deleted to run again"
            )
            return Gate("Unknown", "VerdictLost", message, hash_, history=history)
        return _judged(_judgement(service, evaluation, hash_, now), job, history, is_news=True)
    if service.spec.replicas == 0:
        message = "spec.replicas is 0; what is asked for is judged when it is raised"
        return Gate("Unknown", "ScaledToZero", message, hash_, job, history=history)
    return Gate("Unknown", "Verifying", f"{job} begins", hash_, job, begins=True, history=history)


def awaiting_model(service: Service, message: str) -> Gate | None:
    """While the model is not there, nothing is judged and nothing is forgotten. message: why it is not."""
    if service.spec.quality is None:
        return None
    return Gate("Unknown", "AwaitingModel", message, history=recorded(service.status))


def _judged(judgement: Judgement, job: str, history: tuple[Judgement, ...], *, is_news: bool) -> Gate:
    others = tuple(one for one in history if one.hash != judgement.hash)
    return Gate(
        status="True" if judgement.reason == "Passed" else "False",
        reason=judgement.reason,
        message=judgement.message,
        hash=judgement.hash,
        job=job,
        judgement=judgement,
        history=(judgement, *others)[:MAX_HISTORY],
        is_news=is_news,
    )


def _judgement(service: Service, evaluation: Evaluation, hash_: str, now: float) -> Judgement:
    verdict = read_verdict(evaluation.output)
    if verdict is None:
        reason, message = _without_verdict(service, evaluation)
        return Judgement(hash_, reason, message, timestamp(now))
    return Judgement(
        hash=hash_,
        reason="Passed" if verdict.passed else "Failed",
        message=in_words(verdict.checks, verdict.left_out),
        finished_at=timestamp(now),
        checks=verdict.checks,
        text=verdict.text,
        tasks=verdict.tasks,
    )


def _without_verdict(service: Service, evaluation: Evaluation) -> tuple[Reason, str]:
    again = f"once that is remedied, delete the Job {evaluation.name} to have it run again"
    cause = evaluation.message or "it left no verdict"
    if evaluation.phase == "timed_out":
        assert service.spec.quality is not None, "an evaluation is judged by a spec that asks for one"
        limit = service.spec.quality.timeout_seconds
        before = next(
            (
                str(condition["message"])
                for condition in service.status.get("conditions") or ()
                if condition["type"] == "QualityVerified" and condition["reason"] == "Verifying"
            ),
            "",
        )
        seen = f"; last seen: {before}" if before else ""
        return "TimedOut", f"no verdict within {limit} s (spec.quality.timeoutSeconds){seen}; {again}"
    return "JobFailed", f"{cause}; {again}"
