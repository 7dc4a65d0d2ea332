"""Every error the runtime raises on purpose, in one tree.

    HeadwayRuntimeError
    ├── ConfigError               a flag or config value is wrong; the process does not start
    │   └── DoesNotFitError       the memory there is cannot hold the model as it is asked for
    ├── ModelLoadError            the model's files are missing, damaged or of an unknown architecture
    ├── ModelFetchError           the model's files cannot be brought to this machine
    │   ├── SourceRefusedError    its source says no: there is no such model, or no right to it
    │   └── NoRoomError           the disk has no room for them
    ├── InvalidRequestError       the client's fault: becomes HTTP 400 with `param`
    │   ├── ContextLengthError    prompt (plus one token) can never fit
    │   └── AdapterNotFoundError  no adapter has that name (any more): HTTP 404
    ├── AdapterRefusedError       an adapter cannot be loaded now: HTTP 400
    ├── LimitRangeError           an admin change outside the envelope: HTTP 422
    ├── QueueFullError            the bound on waiting requests is reached: HTTP 503 with Retry-After
    ├── RankDiedError             a process that holds a share of the model has ended or hangs
    ├── OtherResultError          a process that holds a share of the model has read other files than rank 0
    └── EngineDeadError           the engine process has ended: HTTP 503, then the server exits

Bugs are `assert` or built-in exceptions, never these.
"""

from typing import Literal

# What is wrong with a request, in one word: OpenAI's where it has one. docs/api.md says what each means.
RequestCode = Literal[
    "array_above_max_length",
    "context_length_exceeded",
    "decimal_above_max_value",
    "decimal_below_min_value",
    "empty_array",
    "empty_string",
    "integer_above_max_value",
    "integer_below_min_value",
    "invalid_grammar",
    "invalid_json",
    "invalid_type",
    "invalid_value",
    "missing_mutually_exclusive_parameters",
    "missing_required_parameter",
    "model_not_found",
    "mutually_exclusive_parameters",
    "object_above_max_properties",
    "string_above_max_length",
    "unknown_parameter",
    "unsupported_content_type",
    "unsupported_parameter",
]


class HeadwayRuntimeError(Exception):
    """Base of the tree; `str()` names the field, the value and the remedy.

    exit_status: of a command that ends with it.
    """

    exit_status = 2


class ConfigError(HeadwayRuntimeError):
    """A flag, environment variable or config value is not usable."""


class DoesNotFitError(ConfigError):
    """The memory that is free cannot hold the model: the arithmetic, and the nearest that fits."""

    exit_status = 4  # told apart by who supervises the process: the remedy is another size, or more memory


class ModelLoadError(HeadwayRuntimeError):
    """The model cannot be read: which file or config field, and why."""


class ModelFetchError(HeadwayRuntimeError):
    """The model's files cannot be brought here: from where, what was answered, and the remedy."""

    exit_status = 3  # told apart by who supervises the process: nothing is wrong with the command line


class SourceRefusedError(ModelFetchError):
    """The source says that there is no such model or revision, or that the credentials do not open it."""


class NoRoomError(ModelFetchError):
    """The disk that the model is to lie on has no room for what is still to come."""


class InvalidRequestError(HeadwayRuntimeError):
    """A request the client must change. `param` is the field at fault, if one is; `code` is OpenAI's word."""

    def __init__(
        self, message: str, *, param: str | None = None, code: RequestCode = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for one generated token, or can never fit the KV cache."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class AdapterNotFoundError(InvalidRequestError):
    """No LoRA adapter of that name is loaded: there never was one, or it was unloaded."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the LoRA adapter {name!r} cannot be found; load it, or use one that /v1/models lists",
            param="model",
            code="model_not_found",
        )
        self.name = name


class AdapterRefusedError(HeadwayRuntimeError):
    """An adapter's name is taken, or there is no room for it."""


class LimitRangeError(HeadwayRuntimeError):
    """A live limit outside its envelope. Names field, value and range."""

    def __init__(self, field: str, value: object, low: float, high: float) -> None:
        super().__init__(f"{field}={value!r} is outside [{low}, {high}]; choose a value inside that range")
        self.field = field
        self.value = value
        self.low = low
        self.high = high


class QueueFullError(HeadwayRuntimeError):
    """`max_waiting` requests wait already. `retry_after_seconds` is an estimate for the client."""

    def __init__(self, num_waiting: int, retry_after_seconds: int) -> None:
        super().__init__(f"{num_waiting} requests wait already; retry in {retry_after_seconds} s")
        self.retry_after_seconds = retry_after_seconds


class RankDiedError(HeadwayRuntimeError):
    """One of several processes that share a model is gone or silent: which rank, where, and how it ended."""


class OtherResultError(HeadwayRuntimeError):
    """Of several processes that share a model, one came to another result: which rank, and where."""

    def __init__(self, who: str) -> None:
        super().__init__(f"{who} has other files than rank 0; copy the same to all nodes")
        self.who = who


class EngineDeadError(HeadwayRuntimeError):
    """The engine process ended; no further request can be served by this server."""
