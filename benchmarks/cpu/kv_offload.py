"""TTFT of a prompt whose beginning was computed before, by where that beginning lies now.

    python -m benchmarks.cpu.kv_offload [--rounds 8] [--threads N] [--quick] [--output FILE]

One engine of the benchmark's model in this process, no server, one request at a time, greedy: a prefix of
1,500 tokens, then a question of 36. The KV cache has room for one prompt and a half. In turn, for each of
`--rounds` prefixes: it is computed, by another engine without offload and by this one; asked for again at
once, it is still in the KV cache; asked for again after all the others, it comes from host memory. Then
another engine starts over the same folder: the prefixes come from the disk, half of them from files that the
system had to read from the device, half from its page cache. TTFT is from `add_request` to the end of the
step that gave the first token. Answers are compared.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.conditions import conditions
from benchmarks.cpu.environments import cache_folder
from benchmarks.cpu.model_folder import CONFIG, make_model_folder

PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 1500, 36, 8
BLOCK_SIZE = 16
MAX_MODEL_LEN = 1600
BLOCKS_PER_PROMPT = -(-(PREFIX_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS) // BLOCK_SIZE)
FLUSH_SECONDS = 60.0
PLAIN, RECOMPUTED = "computed, by an engine without offload", "computed, which drives another one out"
CACHED, HOST = "still in the KV cache", "reloaded from host memory"
COLD, WARM = "reloaded from disk, read from the device", "reloaded from disk, in the page cache"


@dataclass
class Measured:
    """Seconds by case, and the blocks that each copy's seconds are of."""

    ttft: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)
    num_different: int = 0
    copies: dict[str, Any] = field(default_factory=dict)


class Asker:
    """One engine, one request at a time."""

    def __init__(self, folder: Path, disk: Path | None, num_threads: int, num_prompts: int) -> None:
        """disk: None for an engine that does not offload."""
        from headway_runtime.config import EngineConfig, Envelope, Limits, OffloadConfig
        from headway_runtime.engine import EngineCore
        from headway_runtime.metrics import EngineMetrics

        block_bytes = self._block_bytes(folder)
        limits = (4, MAX_MODEL_LEN)
        self.metrics = EngineMetrics()
        self.core = EngineCore(
            EngineConfig(
                model_path=str(folder),
                device="cpu",
                dtype="bfloat16",
                load_format="auto",
                max_model_len=MAX_MODEL_LEN,
                block_size=BLOCK_SIZE,
                kv_cache_memory_bytes=block_bytes * (BLOCKS_PER_PROMPT * 3 // 2),
                envelope=Envelope(*limits),
                limits=Limits(*limits),
                max_waiting=4,
                num_threads=num_threads,
                offload=None
                if disk is None
                else OffloadConfig(block_bytes * BLOCKS_PER_PROMPT * (num_prompts + 2), str(disk), 1 << 40),
            ),
            self.metrics,
        )
        self._num_asked = 0

    @staticmethod
    def _block_bytes(folder: Path) -> int:
        from headway_runtime.memory import kv_bytes_per_token
        from headway_runtime.model_config import read_model_config

        return BLOCK_SIZE * kv_bytes_per_token(read_model_config(folder), "bfloat16")

    def ask(self, prompt: list[int]) -> tuple[float, float, list[int], int]:
        """Time to the first token, processor time of all threads until then, answer, prompt tokens found."""
        from headway_runtime.request import Request, SamplingParams

        self._num_asked += 1
        started_at, cpu_at = time.monotonic(), time.process_time()
        sampling = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
        self.core.add_request(Request(str(self._num_asked), tuple(prompt), sampling, started_at), started_at)
        ttft = cpu = 0.0
        num_cached = 0
        answer: list[int] = []
        while self.core.has_work:
            for output in self.core.step(time.monotonic()).outputs:
                if not answer:
                    ttft, cpu = time.monotonic() - started_at, time.process_time() - cpu_at
                    num_cached = output.num_cached_tokens
                answer += output.token_ids
        return ttft, cpu, answer, num_cached

    def flush(self) -> None:
        """Wait until the disk has what it is to have."""
        disk = self.core._offload._disk  # type: ignore[union-attr]
        assert disk.flush(FLUSH_SECONDS), "the disk was not done in time"  # type: ignore[union-attr]


def run(rounds: int, num_threads: int, *, is_quick: bool) -> Measured:
    import torch

    folder = cache_folder() / ("model-quick" if is_quick else "model")
    make_model_folder(folder, is_quick=is_quick)
    generator = torch.Generator().manual_seed(11)
    shape = (rounds + 1, PREFIX_TOKENS + QUESTION_TOKENS)
    other, *prompts = torch.randint(3, CONFIG["vocab_size"], shape, generator=generator).tolist()
    measured = Measured()
    with tempfile.TemporaryDirectory(dir=cache_folder()) as name:
        disk = Path(name)
        plain, asker = (Asker(folder, one, num_threads, rounds) for one in (None, disk))
        for one in (plain, asker):
            one.ask(other)  # the first step of an engine is like no other
        for which, prompt in enumerate(prompts):
            pair = [(plain, PLAIN), (asker, RECOMPUTED)]
            for one, case in reversed(pair) if which % 2 else pair:
                asker.flush()
                _ask(one, measured, case, which, prompt, expects_found=False)
            _ask(asker, measured, CACHED, which, prompt, expects_found=True)
        for which, prompt in enumerate(prompts):
            _ask(asker, measured, HOST, which, prompt, expects_found=True)
        asker.flush()
        measured.copies = dict(asker.metrics.snapshot().offload.transfers)
        asker.core.close()
        plain.core.close()
        asker = Asker(folder, disk, num_threads, rounds)
        asker.ask(other)
        asker.flush()
        for which, prompt in enumerate(prompts):
            if which % 2 == 0:
                _drop_from_page_cache(disk)
            case = WARM if which % 2 else COLD
            _ask(asker, measured, case, which, prompt, expects_found=True)
        found = asker.metrics.snapshot().offload
        assert found.disk.hit_tokens >= rounds * (PREFIX_TOKENS - BLOCK_SIZE), "not all came from the disk"
        measured.copies["disk_to_host"] = found.transfers["disk_to_host"]
        asker.core.close()
    return measured


def _ask(
    asker: Asker, measured: Measured, case: str, which: int, prompt: list[int], *, expects_found: bool
) -> None:
    seconds, cpu, answer, num_cached = asker.ask(prompt)
    assert (num_cached >= PREFIX_TOKENS - BLOCK_SIZE) == expects_found, (case, num_cached)
    measured.ttft.setdefault(case, []).append(seconds)
    measured.cpu.setdefault(case, []).append(cpu)
    measured.num_different += measured.answers.setdefault(which, answer) != answer


def _drop_from_page_cache(folder: Path) -> None:
    """Have the system forget what it holds of the files; written ones only."""
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def render(measured: Measured, flags: str, told: str) -> str:
    """The results page."""
    base = statistics.median(measured.ttft[PLAIN])
    rows = [
        f"| {case} | {len(own)} | {statistics.median(own) * 1e3:.0f} | {min(own) * 1e3:.0f} | "
        f"{max(own) * 1e3:.0f} | {base / statistics.median(own):.1f} | "
        f"{statistics.median(measured.cpu[case]) * 1e3:.0f} |"
        for case, own in measured.ttft.items()
    ]
    copies = [
        f"| {name.replace('_', ' ')} | {one.num_blocks} | {one.seconds / one.num_blocks * 1e3:.2f} | "
        f"{one.num_bytes / one.seconds / 1e9:.1f} |"
        for name, one in measured.copies.items()
        if one.num_blocks
    ]
    total = sum(map(len, measured.ttft.values()))
    return "\n".join(
        [
            "# TTFT of a known prefix, by where it lies",
            "",
            f"Written by `python -m benchmarks.cpu.kv_offload {flags}",
            "--output benchmarks/cpu/kv_offload.md`.",
            told,
            "",
            f"A prefix of {PREFIX_TOKENS:,} tokens and a question of {QUESTION_TOKENS}, one request at a",
            "time, the benchmark's Llama of 349 million parameters in bfloat16, blocks of 16 tokens and 768",
            "KiB, the KV cache with room for one prompt and a half; in process, without a server. TTFT is",
            f"from the request's coming to its first token. Of the answers, {ANSWER_TOKENS} tokens each,",
            f"{measured.num_different} of {total} differ from the first one to the same prompt.",
            "",
            "| the prefix is | requests | TTFT, median ms | least | most | without / this | CPU, median ms |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *rows,
            "",
            "| copies of blocks | blocks | ms each | GB/s |",
            "| --- | ---: | ---: | ---: |",
            *copies,
            "",
            "CPU: processor time of all threads until the first token, writing to the disk included.",
            "Copies between the KV cache and host memory are part of a step; those to and from the disk are",
            "made by a thread of their own, beside it.",
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="a model of two layers, to try the script")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    from headway_runtime.server.engine_handle import engine_environment

    wanted = engine_environment(os.environ, arguments.threads)
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        # Read when libraries load, so it has to be there from the start.
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.cpu.kv_offload", *sys.argv[1:]], wanted)
    where = conditions()
    told = ", ".join(
        [
            f"Commit {where['commit']}",
            str(where["date"]),
            str(where["processor"]),
            f"{arguments.threads} of {where['cpus']} CPUs",
            f"load average {where['load_average']:.0f} at the start",
            f"{arguments.rounds} prefixes.",
        ]
    )
    measured = run(arguments.rounds, arguments.threads, is_quick=arguments.quick)
    flags = f"--threads {arguments.threads} --rounds {arguments.rounds}"
    page = render(measured, flags, told)
    print(page)
    if arguments.output is not None:
        arguments.output.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
