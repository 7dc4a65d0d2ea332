"""What a benchmark is asked to do: frozen, resolved and checked, but nothing opened and nobody asked yet."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headway_bench.arrivals import ArrivalKind
from headway_bench.drive import Extent
from headway_bench.http_client import Address
from headway_bench.prompts import LengthSource
from headway_bench.sender import Endpoint
from headway_bench.spread import Spread
from headway_bench.traces import Replay


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Which server, and what every request to it carries."""

    base_url: str
    address: Address
    endpoint: Endpoint
    model: str | None
    headers: Mapping[str, str]
    extra_body: Mapping[str, Any]
    temperature: float | None
    ignore_eos: bool
    stream: bool
    max_tokens_field: str
    timeout_seconds: float
    ready_timeout_seconds: float


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """When requests are sent: at one of `request_rates`, by one of `concurrencies`, or as the trace says."""

    request_rates: tuple[float, ...]
    concurrencies: tuple[int, ...]
    arrivals: ArrivalKind
    burstiness: float | None
    ramp_seconds: float
    extent: Extent
    pause_seconds: float


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """What is asked. A length that is None comes from the trace or the data set, else it is the default."""

    input_length: Spread | None
    output_length: Spread | None
    turns: Spread
    think_seconds: Spread
    num_prefixes: int
    prefix_length: int
    dataset: Path | None
    trace: Path | None
    replay: Replay
    length_source: Literal["auto"] | LengthSource
    tokenizer: Path | None


@dataclass(frozen=True, slots=True)
class ReportConfig:
    """What is reported, and where to."""

    objectives: Mapping[str, float]
    confidence: float
    json_path: Path | None
    with_requests: bool
    plot_path: Path | None
    fail_on_error: bool
    quiet: bool


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """One benchmark. `command` is how it was called, without secrets."""

    server: ServerConfig
    load: LoadConfig
    prompts: PromptConfig
    report: ReportConfig
    seed: int
    command: str
