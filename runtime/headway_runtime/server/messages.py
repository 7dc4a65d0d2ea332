"""What the HTTP processes ("fronts") and the engine process say to each other: msgspec structs over ZMQ.

The engine process binds one socket; each front connects to it and says `Hello` first. Messages of one front
and one direction arrive in order. Imported by all processes, so it imports neither torch nor fastapi.
Requests and outputs cross as the engine's own dataclasses, but for what almost every output is: one token
and nothing else.
"""

from dataclasses import dataclass, field, replace

import msgspec
from msgspec import UNSET, UnsetType

from headway_runtime.adapters.adapter import AdapterEntry
from headway_runtime.adapters.metrics import AdapterSnapshot
from headway_runtime.config import Envelope, Limits, LoraModule
from headway_runtime.engine_options import EngineOptions
from headway_runtime.errors import ConfigError, DoesNotFitError
from headway_runtime.metrics import MetricsSnapshot
from headway_runtime.request import Request, RequestOutput
from headway_runtime.server.error_codes import HttpCode

# How the engine process ends when the command line or the model is at fault, which it has then printed.
EXIT_STATUS_CONFIG = ConfigError.exit_status
# With all of these it has printed why, and its successor would end likewise.
EXIT_STATUSES_REFUSED = frozenset((EXIT_STATUS_CONFIG, DoesNotFitError.exit_status))


class Launch(msgspec.Struct, frozen=True):
    """The engine process' command line, as JSON: everything it needs to know at its start.

    address: where to bind the socket. directory: holds it, and nothing else. started_at: `time.monotonic()`
    when the server began, the origin of the timeline.
    """

    engine: EngineOptions
    address: str
    directory: str
    lifeline_fd: int
    parent_pid: int
    started_at: float
    log_level: str


# --- from an HTTP process to the engine process ---


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """The first message of every front, answered by `Ready`.

    A second one of the same number comes from a front that was started again: what its predecessor had asked
    for is dropped.
    """

    front: int


class AddRequests(msgspec.Struct, tag="add", frozen=True):
    """All of one HTTP request's sequences. Each is answered by outputs, or by one `Refused`.

    prompts: each prompt once, however many of the sequences have it. prompt_of: which one each has; in the
    requests themselves there is none.
    """

    prompts: list[tuple[int, ...]]
    prompt_of: list[int]
    requests: list[Request]


def add_requests(requests: list[Request]) -> AddRequests:
    """The message that hands these over. Prompts are told apart by identity, which costs nothing."""
    places: dict[int, int] = {}
    prompts: list[tuple[int, ...]] = []
    for request in requests:
        if places.setdefault(id(request.prompt_token_ids), len(prompts)) == len(prompts):
            prompts.append(request.prompt_token_ids)
    prompt_of = [places[id(request.prompt_token_ids)] for request in requests]
    return AddRequests(prompts, prompt_of, [replace(one, prompt_token_ids=()) for one in requests])


def added_requests(message: AddRequests) -> list[Request]:
    """The requests as they were."""
    return [
        replace(one, prompt_token_ids=message.prompts[place])
        for one, place in zip(message.requests, message.prompt_of, strict=True)
    ]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """The client is gone: drop these requests."""

    request_ids: list[str]


class Finish(msgspec.Struct, tag="finish", frozen=True):
    """A stop string was found: end this request as a normal one."""

    request_id: str


class Report(msgspec.Struct, tag="report", frozen=True):
    """What only the HTTP process saw, for the engine's counters.

    ttft_seconds: of each request whose first byte was written. delivery_seconds: the parts of them after the
    first token was computed. num_missed: requests that failed before it. abandoned_seconds: how long each
    client had waited that left before it. refused: reasons of requests that never reached the engine.
    """

    ttft_seconds: list[float]
    delivery_seconds: list[float]
    num_missed: int
    abandoned_seconds: list[float]
    refused: list[str]


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Answered by `Pong`, between two steps."""


class GetState(msgspec.Struct, tag="get_state", frozen=True):
    """Answered by `State`."""

    query_id: int


class GetSample(msgspec.Struct, tag="get_sample", frozen=True):
    """Answered by `Sample`."""

    query_id: int
    is_draining: bool


class Patch(msgspec.Struct, tag="patch", frozen=True):
    """Change limits or targets; what is UNSET stays. Answered by `State` or `PatchRefused`."""

    query_id: int
    max_num_seqs: int | UnsetType = UNSET
    max_num_batched_tokens: int | UnsetType = UNSET
    num_speculative_tokens: int | UnsetType = UNSET
    ttft_milliseconds: float | UnsetType | None = UNSET
    tpot_milliseconds: float | UnsetType | None = UNSET
    e2e_milliseconds: float | UnsetType | None = UNSET


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """Forget what prompts have in common with earlier ones. Answered by `State`."""

    query_id: int


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Load a LoRA adapter. Answered by `AdapterAnswer` when it can be used, or cannot.

    in_place: one of that name, if there is one, gives way to it.
    """

    query_id: int
    module: LoraModule
    in_place: bool


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Forget a LoRA adapter, once its requests have ended. Answered by `AdapterAnswer`, at once."""

    query_id: int
    name: str


class GetAdapters(msgspec.Struct, tag="get_adapters", frozen=True):
    """Answered by `AdapterAnswer`."""

    query_id: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End the process with status 0."""


AdapterQuestion = LoadAdapter | UnloadAdapter | GetAdapters
AnsweredAtOnce = GetState | GetSample | Patch | ResetPrefixCache | UnloadAdapter | GetAdapters
Question = AnsweredAtOnce | LoadAdapter
ToEngine = Hello | AddRequests | Abort | Finish | Report | Ping | Question | Shutdown


# --- from the engine process to an HTTP process ---


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded.

    kv_dtype: how keys and values are kept. timeline: seconds from the server's start to each stage, in order.
    adapters: as `AdapterList` has them. weight_compression: how plain weights are kept.
    """

    max_model_len: int
    num_kv_tokens: int
    device: str
    kv_dtype: str
    timeline: dict[str, float]
    adapters: list[AdapterEntry] = []
    weight_compression: str = "none"


class AdapterList(msgspec.Struct, tag="adapter_list", frozen=True):
    """The LoRA adapters that requests may name; to every front whenever they change."""

    adapters: list[AdapterEntry]


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """Everything that one step brought for one front.

    request_ids, token_ids: of all requests that got one token and nothing else (see `is_one_token`), as
    these are the many; computed_at: when they were, as in a RequestOutput. outputs: the others. No request is
    in both.
    """

    request_ids: list[str]
    token_ids: list[int]
    computed_at: float
    outputs: list[RequestOutput]


def is_one_token(output: RequestOutput) -> bool:
    """Whether its id, its token and when that was computed are all. (Errors come with a finish reason.)"""
    return (
        output.finish_reason is None
        and len(output.token_ids) == 1
        and not output.logprobs
        and output.queue_seconds is None
        and output.prefill_seconds is None
        and not output.num_cached_tokens
        and output.prompt_logprobs is None
        and output.late_share is None
        and output.max_num_seqs is None
    )


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """The engine's loop goes round."""


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """A request was not accepted. status 503 has retry_after_seconds; 400 and 404 have param and code."""

    request_id: str
    status: int
    message: str
    param: str | None = None
    code: HttpCode = "invalid_value"
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class EngineState:
    """Counters and gauges at one instant. instance: names this start of the engine."""

    instance: str
    uptime_seconds: float
    limits: Limits
    envelope: Envelope
    metrics: MetricsSnapshot
    num_running: int
    num_waiting: int
    oldest_waiting_seconds: float
    kv_blocks_used: int
    kv_blocks_total: int
    kv_blocks_cached: int
    kv_wasted_share: float
    adapters: AdapterSnapshot = field(default_factory=AdapterSnapshot)


class State(msgspec.Struct, tag="state", frozen=True):
    query_id: int
    state: EngineState


class Sample(msgspec.Struct, tag="sample", frozen=True):
    """The body of `/admin/sample`. Written by the engine process, as one sample counts on from the last."""

    query_id: int
    body: bytes


class PatchRefused(msgspec.Struct, tag="patch_refused", frozen=True):
    """A limit outside its range; nothing was changed."""

    query_id: int
    message: str
    field: str
    value: float
    low: float
    high: float


class AdapterAnswer(msgspec.Struct, tag="adapter_answer", frozen=True):
    """What has become of a question about adapters. error: why it was refused. adapters: as they are now.

    is_unknown: whether that is because there is none of the name. is_name: whether it is the name's fault, or
    that of the moment, and not what lies at the path.
    """

    query_id: int
    adapters: list[AdapterEntry]
    error: str | None = None
    is_unknown: bool = False
    is_name: bool = False


Answer = State | Sample | PatchRefused | AdapterAnswer
FromEngine = Ready | Outputs | Refused | Pong | AdapterList | Answer
