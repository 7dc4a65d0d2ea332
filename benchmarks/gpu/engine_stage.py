"""Stage 3: the engine end to end with random weights of real shapes, against what the GPU allows.

A decode step's floor is the bytes of the weights that it reads, and of the KV of all its sequences, over the
measured copy bandwidth, or its operations over the measured rate; a prompt's likewise (see costs.py). The
engine is driven as its own thread drives it, a step after the other, whatever a step hides.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from benchmarks.gpu import costs
from benchmarks.gpu.costs import Ceilings, Weights, model_shape
from benchmarks.gpu.engine_plan import FIRST, FULL, SMOKE, Plan
from benchmarks.gpu.engines import EngineOptions, add, drain, make_random, random_prompt
from benchmarks.gpu.gpu_trace import traced
from benchmarks.gpu.report import Report, Row
from benchmarks.gpu.shapes import Shape

from headway_runtime.config import Device, SpeculativeConfig
from headway_runtime.engine import EngineCore

FORMS: tuple[Weights, ...] = ("none", "fp8", "int4")
# Steps that are traced.
TRACED_STEPS = 20
# Of those launches that take most of a step, how many are told.
LONGEST_LAUNCHES = 14
# A long row is written again and again meanwhile.
SECONDS_OF_PART = 5.0


def run_engine(report: Report, device: Device, ceilings: Ceilings, *, is_smoke: bool) -> None:
    """All rows; each model is loaded once."""
    plan = SMOKE if is_smoke else FULL
    for quantization in FORMS:
        has_prompts = quantization == "none" or not is_smoke
        _run_llama(report, device, ceilings, plan, quantization, has_prompts=has_prompts)
    longest = plan.longest_prompt + 64
    with _engine(report, "llama, long", plan.llama, device, longest, plan, "none") as engine:
        if engine is not None:
            long = plan.longest_prompt
            measure = partial(_prompt, engine, plan, long, ceilings, "none", report.check_time)
            report.row("engine", f"prompt of {long}", measure)
    with _engine(report, "qwen3", plan.qwen, device, sum(plan.load[1:]) + 64, plan, "none") as engine:
        if engine is not None:
            name = "qwen3, {} requests, {} in, {} out".format(*plan.load)
            measured = partial(serve_load, engine, plan, lambda: report.seconds_left)
            report.row("engine", name, measured, needs_seconds=plan.load_seconds + 20)
    longest = plan.context + plan.steps + 64
    with _engine(report, "mixture", plan.mixture, device, longest, plan, "none") as engine:
        for batch in plan.batches[:3] if engine is not None else ():
            assert engine is not None
            report.row(
                "engine",
                f"mixture, decode {batch} at {plan.context}",
                partial(_decode, engine, plan.mixture, plan, batch, ceilings, "none", report.check_time),
            )
    _speculation(report, device, plan)


def run_first_decodes(report: Report, device: Device, ceilings: Ceilings, *, is_smoke: bool) -> None:
    """Decodes of one sequence and of 32 by each form of weights, and what the GPU does in them."""
    plan = SMOKE if is_smoke else FIRST
    for quantization in FORMS[:1] if is_smoke else FORMS:
        _run_llama(report, device, ceilings, plan, quantization, has_prompts=False)


def _run_llama(
    report: Report,
    device: Device,
    ceilings: Ceilings,
    plan: Plan,
    quantization: Weights,
    *,
    has_prompts: bool = True,
) -> None:
    label, check_time = f"llama {quantization}", report.check_time
    longest = max(*plan.prompts, plan.context + plan.steps) + 64
    with _engine(report, label, plan.llama, device, longest, plan, quantization) as engine:
        if engine is None:
            return
        for batch in plan.batches:
            report.row(
                "engine",
                f"{label}, decode {batch} at {plan.context}",
                partial(_decode, engine, plan.llama, plan, batch, ceilings, quantization, check_time),
            )
        for batch in (plan.batches[0], plan.traced):
            report.row(
                "engine",
                f"{label}, GPU use of decode {batch} at {plan.context}",
                partial(_gpu_use, engine, plan.llama, plan, batch, device),
            )
        for length in plan.prompts if has_prompts else ():
            report.row(
                "engine",
                f"{label}, prompt of {length}",
                partial(_prompt, engine, plan, length, ceilings, quantization, check_time),
            )
        if has_prompts:
            measure = partial(_prefix, engine, plan, check_time)
            report.row("engine", f"{label}, prefix of {plan.prefix}", measure)


def engine_options(plan: Plan, device: Device, longest: int, quantization: Weights) -> EngineOptions:
    """longest: tokens of a sequence."""
    return {
        "max_model_len": longest,
        "max_num_seqs": max(*plan.batches, plan.load[0]),
        "max_batched_tokens": max(8192 if device == "cuda" else 512, plan.load[0]),
        "quantization": quantization,
        "kv_cache_memory_bytes": None if device == "cuda" else 4 * 2**20,
        "cuda_graph_sizes": plan.batches,
    }


@contextmanager
def _engine(
    report: Report,
    name: str,
    shape: Shape,
    device: Device,
    longest: int,
    plan: Plan,
    quantization: Weights,
) -> Iterator[EngineCore | None]:
    """A loaded engine, gone afterwards with all its memory; None if it could not be made or time is short."""
    made: list[EngineCore] = []

    def load() -> Row:
        engine, seconds = make_random(
            shape,
            device,
            check_time=report.check_time,
            **engine_options(plan, device, longest, quantization),
        )
        made.append(engine)
        return {"load_seconds": seconds, "kv_blocks": engine.kv_blocks_total}

    report.row("engine", f"{name}, load", load, needs_seconds=45)
    try:
        yield made[0] if made else None
    finally:
        for engine in made:
            engine.close()
        made.clear()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _decode(
    engine: EngineCore,
    shape: Shape,
    plan: Plan,
    batch: int,
    ceilings: Ceilings,
    quantization: Weights,
    check_time: Callable[[], None],
) -> Row:
    """The median step of so many sequences; twice, since the first steps of a size prepare it.

    recorded_share: of those steps, how many were launched as one.
    """
    seconds: list[float] = []
    num_recorded = 0
    for _ in range(2):
        _add_decodes(engine, shape, plan, batch)
        seconds.clear()
        num_recorded = _recorded_steps(engine)
        while engine.has_work:
            check_time()
            began_at = time.perf_counter()
            outputs = engine.step(time.monotonic())
            if outputs.num_decodes == batch:
                seconds.append(time.perf_counter() - began_at)
    step = statistics.median(seconds)
    context = plan.context + plan.steps // 2
    floor = costs.decode_step(model_shape(shape), batch, context, quantization).floor_seconds(ceilings)
    return {
        "step_milliseconds": step * 1e3,
        "tokens_per_second": batch / step,
        "floor_milliseconds": floor * 1e3,
        "share_of_floor": floor / step,
        "recorded_share": min(1.0, (_recorded_steps(engine) - num_recorded) / len(seconds)),
    }


def _recorded_steps(engine: EngineCore) -> int:
    """So far."""
    return int(engine.metrics.snapshot().counters["recorded_steps"])


def _add_decodes(engine: EngineCore, shape: Shape, plan: Plan, batch: int) -> None:
    """Always the same prompts, so that those of another batch size are in the prefix cache already."""
    for index in range(batch):
        add(engine, str(index), random_prompt(index, plan.context, shape["vocab_size"]), plan.steps)


def _gpu_use(engine: EngineCore, shape: Shape, plan: Plan, batch: int, device: Device) -> Row:
    """Steps of decodes: how much of their time the GPU computes, and what the host does in it.

    What runs on the device is traced, which takes some time of the host; how long a step takes is measured
    without. longest: the launches that take most of a step, each how often and how long.
    """
    num_steps = max(1, min(TRACED_STEPS, plan.steps // 3))

    def steps() -> None:
        for _ in range(num_steps):
            engine.step(time.monotonic())

    _add_decodes(engine, shape, plan, batch)
    while engine.step(time.monotonic()).num_decodes < batch:
        assert engine.has_work, "sequences ended before all of them decoded"
    began_at = time.perf_counter()
    steps()
    step = (time.perf_counter() - began_at) / num_steps
    found = traced(steps, device)
    drain(engine)
    busy = found.busy_seconds / num_steps
    return {
        "step_milliseconds": step * 1e3,
        "gpu_busy_milliseconds": busy * 1e3,
        "gpu_idle_share": max(0.0, 1.0 - busy / step),
        "host_milliseconds": found.host_seconds / num_steps * 1e3,
        "launches_per_step": found.num_launches / num_steps,
        "traced_step_milliseconds": found.seconds / num_steps * 1e3,
        "longest": [
            f"{name}: {count / num_steps:.3g} x {seconds / count * 1e6:.1f} us"
            for name, (count, seconds) in list(found.launches.items())[:LONGEST_LAUNCHES]
        ],
    }


def _prompt(
    engine: EngineCore,
    plan: Plan,
    length: int,
    ceilings: Ceilings,
    quantization: Weights,
    check_time: Callable[[], None],
) -> Row:
    """One prompt alone to its first token: the median of several, after one that is not counted.

    ttft_over_compute: over what the GPU computes in it, traced with another prompt.
    """
    vocabulary = plan.llama["vocab_size"]
    # Of another length, another seed: no prompt begins like one before.
    first, *prompts, last = (
        random_prompt(10 * length + index, length, vocabulary) for index in range(plan.repeats + 2)
    )
    _first_token(engine, first, check_time)
    median = statistics.median(_first_token(engine, one, check_time) for one in prompts)
    busy = traced(lambda: _first_token(engine, last, check_time), engine.config.device).busy_seconds
    floor = costs.prompt(model_shape(plan.llama), length, quantization).floor_seconds(ceilings)
    row: Row = {
        "ttft_milliseconds": median * 1e3,
        "tokens_per_second": length / median,
        "floor_milliseconds": floor * 1e3,
        "share_of_floor": floor / median,
    }
    if busy:
        row |= {"compute_milliseconds": busy * 1e3, "ttft_over_compute": median / busy}
    return row


def _prefix(engine: EngineCore, plan: Plan, check_time: Callable[[], None]) -> Row:
    """A prompt of which all but the end is known, and one that is new."""
    vocabulary, end = plan.llama["vocab_size"], min(32, plan.prefix // 4)
    misses, hits = [], []
    for index in range(plan.repeats):
        prefix = random_prompt(5000 + index, plan.prefix - 2 * end, vocabulary)
        new, known = (prefix + random_prompt(seed + index, end, vocabulary) for seed in (6000, 7000))
        misses.append(_first_token(engine, new, check_time))
        hits.append(_first_token(engine, known, check_time))
    miss, hit = statistics.median(misses), statistics.median(hits)
    return {"miss_milliseconds": miss * 1e3, "hit_milliseconds": hit * 1e3, "ratio": miss / hit}


def _first_token(engine: EngineCore, prompt: list[int], check_time: Callable[[], None]) -> float:
    began_at = time.perf_counter()
    add(engine, "prompt", prompt, 1)
    drain(engine, check_time)
    return time.perf_counter() - began_at


def serve_load(engine: EngineCore, plan: Plan, seconds_left: Callable[[], float]) -> Iterator[Row]:
    """All requests at once. Cut off when the time is up: the rate is of the tokens until then."""
    count, inputs, outputs = plan.load
    for index in range(count):
        add(engine, str(index), random_prompt(index, inputs, plan.qwen["vocab_size"]), outputs)
    num_tokens, began_at = 0, time.perf_counter()
    until = began_at + min(plan.load_seconds, seconds_left())
    next_part = began_at + SECONDS_OF_PART

    def told() -> Row:
        seconds = time.perf_counter() - began_at
        rate = num_tokens / seconds
        return {"output_tokens_per_second": rate, "is_whole": not engine.has_work, "seconds_run": seconds}

    while engine.has_work and time.perf_counter() < until:
        num_tokens += sum(len(one.token_ids) for one in engine.step(time.monotonic()).outputs)
        if time.perf_counter() > next_part:
            next_part += SECONDS_OF_PART
            yield told()
    row = told()
    for index in range(count):
        engine.abort(str(index), time.monotonic())
    yield row


def _speculation(report: Report, device: Device, plan: Plan) -> None:
    """One sequence with prompt lookup against without, on a prompt that repeats itself."""

    def measure() -> Row:
        rates = {}
        for name, method in (("without", None), ("ngram", SpeculativeConfig("ngram"))):
            engine, _ = make_random(
                plan.llama,
                device,
                max_model_len=plan.context + plan.answer + 64,
                max_num_seqs=8,
                max_batched_tokens=512,
                speculative=method,
                num_guesses=0 if method is None else 6,
                kv_cache_memory_bytes=2**30 if device == "cuda" else 4 * 2**20,
                enable_prefix_caching=False,
                cuda_graph_sizes=(1,),
                check_time=report.check_time,
            )
            phrase = random_prompt(1, 8, plan.llama["vocab_size"])
            # The first of two prepares the sizes of steps.
            for repeat in range(min(2, plan.repeats)):
                add(engine, str(repeat), phrase * (plan.context // 8), plan.answer)
                began_at = time.perf_counter()
                drain(engine, report.check_time)
                rates[name] = plan.answer / (time.perf_counter() - began_at)
            engine.close()
        return {f"{name}_tokens_per_second": rate for name, rate in rates.items()} | {
            "ratio": rates["ngram"] / rates["without"]
        }

    report.row("engine", "llama, prompt lookup at 1", measure, needs_seconds=60)
