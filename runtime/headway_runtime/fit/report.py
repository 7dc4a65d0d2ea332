"""`headway plan`'s answer as text, line by line, and as JSON."""

from dataclasses import asdict, dataclass

from headway_runtime.fit.bounds import Bounds, usd_per_million_tokens
from headway_runtime.fit.changes import Change
from headway_runtime.fit.gpu_kinds import GpuKind
from headway_runtime.fit.headers import Headers
from headway_runtime.fit.memory_fit import Fit
from headway_runtime.fit.told import told_bytes, told_count, told_number, told_seconds
from headway_runtime.fit.weight_bytes import PartBytes
from headway_runtime.memory import KV_BYTES

MOST_CHANGES = 10


@dataclass(frozen=True, slots=True)
class Speed:
    """kind: of GPU. usd_per_gpu_hour: None where no price was told."""

    kind: GpuKind
    alone: Bounds
    together: Bounds
    usd_per_gpu_hour: float | None
    efficiency: float


@dataclass(frozen=True, slots=True)
class Answer:
    """All that is told. headers: of the weights' files, where they lie there."""

    source: str
    device: str
    fit: Fit
    changes: list[Change]
    speed: Speed | None
    headers: Headers | None


def text(answer: Answer) -> str:
    """Lines, the verdict last."""
    return "\n".join(
        [*_head(answer), *_arithmetic(answer.fit), *_sequences(answer), *_speed(answer), *_verdict(answer)]
    )


def _head(answer: Answer) -> list[str]:
    question, fit = answer.fit.question, answer.fit
    ranks = f", each of {question.num_ranks} with its share" if question.num_ranks > 1 else ""
    lines = [
        (
            f"{answer.source} ({fit.model.architecture}, {question.placement.dtype}, quantization "
            f"{question.model.quantization.name}) on {answer.device}{ranks}: "
            f"{told_bytes(question.memory_bytes)}"
        )
    ]
    if answer.headers is not None:
        files = told_count(answer.headers.num_files, "safetensors file")
        lines.append(f"  {files}: {told_bytes(answer.headers.num_bytes)}")
    return [*lines, ""]


def _arithmetic(fit: Fit) -> list[str]:
    question = fit.question
    lines = ["weights"]
    lines += [_part(one) for one in fit.weights]
    if fit.draft_weights:
        lines += ["weights of the draft", *(_part(one) for one in fit.draft_weights)]
    lines.append(_sum("weights", fit.weight_bytes))
    if question.num_adapters:
        told = f"LoRA adapters: {question.num_adapters:,} of rank {question.adapter_rank}"
        lines += ["", _sum(told, fit.adapter_bytes)]
    lines += ["", "KV cache"]
    number_bytes, scale_bytes = KV_BYTES[fit.kv_dtype]
    model = fit.model
    scales = f" + {scale_bytes} B scale" if scale_bytes else ""
    lines.append(
        f"  a token: 2 x {model.num_layers} layers x {model.num_kv_heads} KV heads x "
        f"({model.head_dim} x {number_bytes} B {fit.kv_dtype}{scales}) = {fit.kv_bytes_per_token:,} B"
    )
    if fit.draft_kv_bytes_per_token:
        lines.append(f"  of the draft: {fit.draft_kv_bytes_per_token:,} B a token")
    lines.append(
        f"  {question.num_sequences:,} x {question.context:,} tokens: "
        f"{told_bytes(fit.kv_bytes(question.num_sequences, question.context))}"
    )
    if fit.least_kv_bytes >= fit.wanted_kv_bytes:
        lines.append(
            f"  an engine needs at least one sequence of max_model_len, {question.max_model_len:,} tokens: "
            f"{told_bytes(fit.least_kv_bytes)}"
        )
    step = fit.step
    return [
        *lines,
        _sum("KV cache", fit.wanted_kv_bytes),
        "",
        *_offload(fit),
        f"largest step: {step.num_tokens:,} tokens, its peak in {step.stage}",
        _line("attention", step.attention),
        _line("feed-forward", step.feed_forward),
        _line("logits and sampling", step.sampling),
        _line("step inputs, hashes, workspace", step.kept),
        _sum("largest step", step.total),
        "",
        _sum("runtime overhead, a constant (docs/plan.md)", question.overhead_bytes),
        _sum("in all", fit.total_bytes),
        _sum("left", fit.left_bytes),
        "",
    ]


def _offload(fit: Fit) -> list[str]:
    question = fit.question
    if not question.offload_bytes:
        return []
    room = f"  room for blocks of {fit.offloaded_tokens:,} tokens"
    if question.placement.is_cpu:
        return [_sum("KV offload, host memory", fit.offload_bytes), room, ""]
    return [
        _sum("KV offload, host memory, of the machine's memory and not of the GPU's", question.offload_bytes),
        room,
        _sum("KV offload, blocks on their way", fit.offload_bytes),
        "",
    ]


def _part(one: PartBytes) -> str:
    count = f"{one.num_weights:,} x {one.kept_as}" if one.num_weights else f"{one.kept_as}"
    if one.part == "head" and not one.num_weights:
        count += ", the embedding once more as products read it"
    extra = f", of which scales and the like {told_bytes(one.extra_bytes)}" if one.extra_bytes else ""
    return f"  {one.part:<14}{told_bytes(one.num_bytes):>12}  {count}{extra}"


def _line(name: str, num_bytes: int) -> str:
    return f"  {name:<38}{told_bytes(num_bytes):>12}"


def _sum(name: str, num_bytes: int) -> str:
    return f"{name:<48}{told_bytes(num_bytes):>14}"


def _sequences(answer: Answer) -> list[str]:
    fit, question = answer.fit, answer.fit.question
    number = fit.sequences_that_fit
    asked = f", {question.num_sequences:,} are asked for" if question.num_sequences > max(1, number) else ""
    lines = [
        (
            f"{told_count(number, 'sequence')} of {question.context:,} tokens fit at once{asked} "
            f"(--max-num-seqs {question.max_num_seqs})"
        )
    ]
    if fit.fits and fit.default_kv_bytes < fit.wanted_kv_bytes:
        lines.append(
            f"the engine's own choice for its KV cache would be {told_bytes(fit.default_kv_bytes)}; for this "
            f"plan start it with --kv-cache-memory-bytes {fit.wanted_kv_bytes}"
        )
    return [*lines, ""]


def _speed(answer: Answer) -> list[str]:
    speed = answer.speed
    if speed is None:
        return []
    kind, alone, together, context = speed.kind, speed.alone, speed.together, answer.fit.question.context
    codes = {"fp8": kind.fp8_flops, "int8": kind.int8_flops}
    faster = [f"{name} {told_number(one)}FLOP/s" for name, one in codes.items() if one is not None]
    compute = f"{told_number(kind.flops)}FLOP/s" + (f" ({', '.join(faster)})" if faster else "")
    lines = [
        (
            f"lower bounds, not predictions, of {kind.product}: {kind.bytes_per_second / 1e9:,.0f} GB/s, "
            f"{compute}, {kind.source}"
        ),
        (
            f"  TTFT of {context:,} tokens >= {told_seconds(alone.ttft_seconds)}: "
            f"{told_number(alone.prefill_flops)}FLOP a GPU"
        ),
    ]
    lines += [
        f"  TPOT of {told_count(one.concurrency, 'sequence')} >= {told_seconds(one.tpot_seconds)}: "
        f"{told_bytes(one.decode_bytes)}, {told_number(one.decode_flops)}FLOP a step and GPU; at most "
        f"{one.tokens_per_second:,.0f} tokens/s"
        for one in ([alone] if alone == together else [alone, together])
    ]
    if speed.usd_per_gpu_hour is not None and not answer.fit.fits:
        lines.append("  no estimate of the cost: what is asked for does not fit")
    elif speed.usd_per_gpu_hour is not None:
        usd = _usd(speed, answer.fit.question.num_ranks)
        lines.append(
            f"  estimate: {usd:.3f} USD per million output tokens at "
            f"{told_count(together.concurrency, 'sequence')}, "
            f"{speed.usd_per_gpu_hour} USD per GPU-hour and {speed.efficiency:.0%} of the bound, always "
            "decoding"
        )
    if not kind.has_bfloat16 and answer.fit.question.placement.dtype == "bfloat16":
        lines.append(f"  {kind.product} has no matrix products in bfloat16: give --dtype float16")
    return [*lines, ""]


def _usd(speed: Speed, num_gpus: int) -> float:
    assert speed.usd_per_gpu_hour is not None
    return usd_per_million_tokens(speed.together, num_gpus, speed.usd_per_gpu_hour, speed.efficiency)


def _verdict(answer: Answer) -> list[str]:
    fit, question = answer.fit, answer.fit.question
    if fit.fits:
        return [f"fits: {told_bytes(fit.left_bytes)} of {told_bytes(question.memory_bytes)} are left"]
    lines = [
        (
            f"does not fit: {told_bytes(fit.total_bytes)} are needed, {told_bytes(question.memory_bytes)} "
            f"are there, {told_bytes(-fit.left_bytes)} too few"
        )
    ]
    if not answer.changes:
        return [*lines, "no single change, nor two of them, would make it fit"]
    lines.append("nearest changes that fit, those that cost least first:")
    lines += [
        f"  {one.flags}: {told_bytes(one.fit.total_bytes)} of {told_bytes(one.fit.question.memory_bytes)}, "
        f"{told_bytes(one.fit.left_bytes)} left ({one.cost})"
        for one in answer.changes[:MOST_CHANGES]
    ]
    told = " ".join(one.flags for one in answer.changes[:MOST_CHANGES])
    if "--kv-cache-memory-bytes" in told:
        lines.append("--kv-cache-memory-bytes is a flag of headway serve; a plan counts what the cache needs")
    if "--concurrency" in told:
        lines.append("--concurrency is a flag of headway plan alone")
    return lines


def as_json(answer: Answer) -> dict[str, object]:
    """The same numbers, in bytes and seconds."""
    fit, question, speed = answer.fit, answer.fit.question, answer.speed
    found: dict[str, object] = {
        "model": answer.source,
        "architecture": fit.model.architecture,
        "device": answer.device,
        "dtype": question.placement.dtype,
        "quantization": question.model.quantization.name,
        "tensor_parallel_size": question.num_ranks,
        "memory_bytes": question.memory_bytes,
        "weights": [asdict(one) for one in fit.weights],
        "draft_weights": [asdict(one) for one in fit.draft_weights],
        "weight_bytes": fit.weight_bytes,
        "adapter_bytes": fit.adapter_bytes,
        "kv_cache_dtype": fit.kv_dtype,
        "kv_bytes_per_token": fit.kv_bytes_per_token,
        "draft_kv_bytes_per_token": fit.draft_kv_bytes_per_token,
        "max_model_len": question.max_model_len,
        "context": question.context,
        "num_sequences": question.num_sequences,
        "kv_offloading_bytes": question.offload_bytes,
        "offloaded_tokens": fit.offloaded_tokens,
        "least_kv_bytes": fit.least_kv_bytes,
        "kv_bytes": fit.wanted_kv_bytes,
        "step": asdict(fit.step),
        "overhead_bytes": question.overhead_bytes,
        "total_bytes": fit.total_bytes,
        "left_bytes": fit.left_bytes,
        "fits": fit.fits,
        "sequences_that_fit": fit.sequences_that_fit,
        "default_kv_bytes": fit.default_kv_bytes,
        "changes": [
            {
                "flags": one.flags,
                "cost": one.cost,
                "total_bytes": one.fit.total_bytes,
                "memory_bytes": one.fit.question.memory_bytes,
                "left_bytes": one.fit.left_bytes,
            }
            for one in answer.changes
        ],
    }
    if answer.headers is not None:
        found["file_bytes"] = answer.headers.num_bytes
    if speed is not None:
        found["bounds"] = {
            "gpu": asdict(speed.kind),
            "alone": asdict(speed.alone),
            "together": asdict(speed.together),
        }
        if speed.usd_per_gpu_hour is not None and fit.fits:
            found["estimated_usd_per_million_output_tokens"] = _usd(speed, question.num_ranks)
    return found
