"""`headway plan` as a user meets it."""

import itertools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headway_runtime.fit.gpu_kinds import GPU_KINDS
from headway_runtime.fit.plan_command import main

GIB = 2**30
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan(fixture_folder: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """plan(model, *flags): the exit status, and the JSON."""

    def run(model: str, *flags: str) -> tuple[int, dict[str, Any]]:
        status = main([str(fixture_folder(model)), *flags, "--json"])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_a_model_that_fits_is_said_to(plan: Any) -> None:
    status, got = plan("qwen3-30b-a3b", "--gpu", "h100-80g")
    assert status == 0
    assert got["fits"]
    assert got["changes"] == []
    assert got["memory_bytes"] == 81559 * 2**20
    assert got["kv_bytes_per_token"] == 2 * 48 * 4 * 128 * 2
    parts = got["weight_bytes"] + got["kv_bytes"] + got["step"]["kept"] + got["overhead_bytes"]
    peak = max(got["step"][stage] for stage in ("attention", "feed_forward", "sampling"))
    assert got["total_bytes"] == parts + peak
    assert got["left_bytes"] == got["memory_bytes"] - got["total_bytes"]


def test_a_model_that_does_not_fit_is_refused_with_what_would(plan: Any) -> None:
    status, got = plan("llama-3.1-8b", "--gpu", "l4")
    assert status == 1
    assert got["left_bytes"] < 0
    flags = [one["flags"] for one in got["changes"]]
    assert flags[0] == "--quantization fp8 --kv-cache-dtype fp8"
    assert "--tensor-parallel-size 2" in [one.partition(" --kv-cache-memory")[0] for one in flags]
    assert any(one.startswith("--gpu a100-40g") for one in flags)
    assert all(one["left_bytes"] >= 0 for one in got["changes"])


def test_what_is_proposed_fits_when_it_is_asked_for(plan: Any) -> None:
    _, got = plan("llama-3.1-8b", "--gpu", "l4", "--max-num-seqs", "40", "--context", "4096")
    assert len(got["changes"]) > 4
    for one in got["changes"]:
        flags = one["flags"].partition(" --kv-cache-memory-bytes")[0].split()
        if "--max-model-len" in flags:
            # A context is no longer than that.
            flags += ["--context", str(min(4096, int(flags[flags.index("--max-model-len") + 1])))]
        gpu = [] if "--gpu" in flags else ["--gpu", "l4"]
        number = [] if "--max-num-seqs" in flags else ["--max-num-seqs", "40"]
        context = [] if "--context" in flags else ["--context", "4096"]
        status, again = plan("llama-3.1-8b", *gpu, *number, *context, *flags)
        assert (status, again["total_bytes"]) == (0, one["total_bytes"]), one["flags"]


def test_as_many_sequences_fit_as_there_is_room_for(plan: Any) -> None:
    flags = ("--gpu", "a100-80g", "--max-model-len", "8192", "--context", "2000")
    _, got = plan("llama-3.1-8b", *flags)
    count = got["sequences_that_fit"]
    assert count > 64
    assert plan("llama-3.1-8b", *flags, "--max-num-seqs", str(count))[0] == 0
    status, got = plan("llama-3.1-8b", *flags, "--max-num-seqs", str(count + 1))
    assert (status, got["sequences_that_fit"]) == (1, count)


@pytest.mark.parametrize("kind", ["h100-80g", "t4"])
def test_as_many_sequences_fit_as_the_nearest_change_says(kind: str, plan: Any) -> None:
    """Fewer sequences have a smaller step, too, which leaves room for more of them."""
    flags = (
        "--dtype",
        "float16",
        "--quantization",
        "int4",
        "--kv-cache-dtype",
        "fp8",
        "--max-model-len",
        "8192",
    )
    status, got = plan("llama-3.1-8b", "--gpu", kind, *flags, "--max-num-seqs", "900")
    assert status == 1
    number = re.search(r"^--max-num-seqs (\d+)", got["changes"][0]["flags"])
    assert number is not None
    assert got["sequences_that_fit"] == int(number[1])
    for count, want in ((int(number[1]), 0), (int(number[1]) + 1, 1)):
        assert plan("llama-3.1-8b", "--gpu", kind, *flags, "--max-num-seqs", str(count))[0] == want


def test_a_gpu_with_kernels_gathers_no_keys_and_values_and_makes_no_masks(plan: Any) -> None:
    """T x (3 H + 2 D + 2 Q + K) numbers and nothing else, whatever the cache keeps; on a T4 by PyTorch."""
    flags = ("--max-num-seqs", "96", "--context", "8192", "--max-model-len", "8192")
    numbers = 2048 * (3 * 4096 + 2 * 128 + 2 * 4096 + 2 * 8 * 128 + 4096)
    for coded in ((), ("--kv-cache-dtype", "fp8")):
        _, got = plan("llama-3.1-8b", "--gpu", "h100-80g", *flags, *coded)
        assert got["step"]["attention"] == 2 * numbers
        assert got["fits"] == bool(coded)
        _, got = plan("llama-3.1-8b", "--gpu", "t4", "--dtype", "float16", *flags, *coded)
        gathered = 96 * 8192 * (2 * 8 * 128 * (11 if coded else 2) + 2)
        assert got["step"]["attention"] > gathered


def test_another_gpu_is_proposed_with_the_arithmetic_of_its_own_kernels(plan: Any) -> None:
    flags = ("--dtype", "float16", "--context", "8192", "--max-num-seqs", "8")
    _, got = plan("llama-3.1-8b", "--gpu", "t4", *flags)
    (change, *_) = (one for one in got["changes"] if one["flags"].startswith("--gpu "))
    kind = change["flags"].split()[1]
    assert plan("llama-3.1-8b", "--gpu", kind, *flags)[1]["total_bytes"] == change["total_bytes"]


def test_eight_bit_keys_and_values_are_counted_with_their_scales(plan: Any) -> None:
    _, got = plan("llama-3.1-8b", "--memory", "80Gi", "--kv-cache-dtype", "fp8")
    assert got["kv_bytes_per_token"] == 2 * 32 * 8 * (128 + 4)


def test_two_gpus_halve_weights_and_kv(plan: Any) -> None:
    (_, one), (_, two) = (plan("llama-3.1-8b", "--gpu", "h200", "--num-gpus", count) for count in ("1", "2"))
    assert two["weight_bytes"] == pytest.approx(one["weight_bytes"] / 2, rel=0.01)
    assert two["kv_bytes"] == one["kv_bytes"] / 2


def test_bounds_are_bytes_and_flops_over_the_data_sheets_numbers(plan: Any) -> None:
    """Of a dense model, by hand: 8.03 G weights less the embedding, read once a step."""
    _, got = plan(
        *("llama-3.1-8b", "--gpu", "h100-80g", "--max-model-len", "8192", "--context", "1024"),
        *("--concurrency", "8", "--price-per-gpu-hour", "3.6", "--efficiency", "0.5"),
    )
    read = 2 * (8_030_261_248 - 128256 * 4096)
    together = got["bounds"]["together"]
    assert together["decode_bytes"] == read + 8 * 1024 * 131072
    assert together["tpot_seconds"] == pytest.approx(together["decode_bytes"] / 3.35e12)
    layers = 1_342_177_280 + 5_637_144_576
    head = 128256 * 4096
    flops = 2 * (1024 * layers + head) + 4 * 4096 * 32 * 1024 * 1025 / 2
    assert got["bounds"]["alone"]["prefill_flops"] == pytest.approx(flops)
    assert got["bounds"]["alone"]["ttft_seconds"] == pytest.approx(flops / 989.5e12)
    tokens_per_hour = 8 / together["tpot_seconds"] * 0.5 * 3600
    usd = got["estimated_usd_per_million_output_tokens"]
    assert usd == pytest.approx(3.6 / tokens_per_hour * 1e6)


def test_more_sequences_than_fit_at_once_are_refused_with_both_numbers_and_have_no_cost(
    plan: Any, fixture_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--gpu", "l4", "--max-model-len", "8192", "--price", "1")
    status, got = plan("llama-3.1-8b", *flags, "--concurrency", "500")
    assert (status, got["fits"], got["num_sequences"]) == (1, False, 500)
    fitting = got["sequences_that_fit"]
    assert got["bounds"]["together"]["concurrency"] == fitting == 6
    assert "estimated_usd_per_million_output_tokens" not in got
    assert main([str(fixture_folder("llama-3.1-8b")), *flags, "--concurrency", "500"]) == 1
    told = capsys.readouterr().out
    assert "6 sequences of 8,192 tokens fit at once, 500 are asked for" in told
    assert "no estimate of the cost: what is asked for does not fit" in told


@pytest.mark.parametrize("count", ["10", "500"])
def test_what_is_proposed_for_a_concurrency_fits_when_it_is_asked_for(count: str, plan: Any) -> None:
    asked = {"--gpu": "l4", "--max-model-len": "8192", "--concurrency": count}
    _, got = plan("llama-3.1-8b", *itertools.chain(*asked.items()))
    assert got["changes"][0]["flags"].startswith("--max-num-seqs 6 ")
    for one in got["changes"]:
        words = one["flags"].split()
        changed = asked | dict(zip(words[::2], words[1::2], strict=True))
        changed.pop("--kv-cache-memory-bytes", None)
        status, again = plan("llama-3.1-8b", *itertools.chain(*changed.items()))
        assert (status, again["total_bytes"]) == (0, one["total_bytes"]), one["flags"]


def test_whose_flags_a_proposal_has_is_told(capsys: pytest.CaptureFixture[str], fixture_folder: Any) -> None:
    folder = str(fixture_folder("llama-3.1-8b"))
    assert main([folder, "--gpu", "l4"]) == 1
    told = capsys.readouterr().out
    assert "--kv-cache-memory-bytes is a flag of headway serve" in told
    assert "--concurrency is a flag" not in told
    assert main([folder, "--gpu", "l4", "--max-model-len", "8192", "--concurrency", "500"]) == 1
    assert "--concurrency is a flag of headway plan alone" in capsys.readouterr().out
    assert main([folder, "--gpu", "h200"]) == 0
    assert "is a flag of" not in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["-f", "service.yaml"], ["--slo", "ttft=500"]])
def test_flags_of_a_load_are_told_what_they_need(
    capsys: pytest.CaptureFixture[str], fixture_folder: Any, flags: list[str]
) -> None:
    assert main([str(fixture_folder("llama-3.1-8b")), "--gpu", "l4", *flags]) == 2
    told = capsys.readouterr().err
    assert flags[0] in told
    assert "flags of a load, such as -f and --slo, need --trace FILE or --generate KIND" in told


def test_as_many_sequences_as_fit_at_once_have_a_cost(plan: Any) -> None:
    flags = ("--gpu", "l4", "--max-model-len", "8192", "--price", "1")
    status, got = plan("llama-3.1-8b", *flags, "--concurrency", "5")
    assert status == 0
    assert got["estimated_usd_per_million_output_tokens"] > 0
    assert plan("llama-3.1-8b", *flags, "--concurrency", "6")[0] == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_device_of_no_table_has_bounds_and_a_cost_too(device: str, plan: Any) -> None:
    """Told an H100's numbers it is one."""
    length = ("--max-model-len", "8192", "--context", "1024", "--concurrency", "8", "--price", "3.6")
    _, want = plan("llama-3.1-8b", "--gpu", "h100-80g", *length)
    own = ("--memory", "81559Mi", "--bandwidth", "3.35TB", "--flops", "989.5T", "--device", device)
    status, got = plan("llama-3.1-8b", *own, *length, "--weight-compression", "none")
    assert status == 0
    assert got["bounds"]["together"] == want["bounds"]["together"]
    cost = "estimated_usd_per_million_output_tokens"
    assert got[cost] == want[cost]
    assert got["bounds"]["gpu"]["source"] == "as --bandwidth and --flops say"


def test_a_step_of_one_token_reads_its_experts_alone(plan: Any) -> None:
    _, got = plan("qwen3-30b-a3b", "--gpu", "h200", "--context", "16", "--concurrency", "4")
    experts = 28_991_029_248 * 2
    rest = got["bounds"]["alone"]["decode_bytes"] - experts * 8 / 128
    met = 1 - (1 - 8 / 128) ** 4
    more = 3 * 16 * got["kv_bytes_per_token"]
    assert got["bounds"]["together"]["decode_bytes"] == pytest.approx(rest + experts * met + more)


def test_a_draft_takes_its_share(plan: Any, fixture_folder: Any) -> None:
    draft = json.dumps({"model": str(fixture_folder("llama-3.2-1b")), "num_speculative_tokens": 4})
    _, got = plan("llama-3.1-8b", "--gpu", "h200", "--speculative-config", draft)
    assert got["draft_kv_bytes_per_token"] == 2 * 16 * 8 * 64 * 2
    assert sum(one["num_weights"] for one in got["draft_weights"]) == 1_235_814_400


def test_host_memory_for_prefixes_is_a_cpus_own_and_of_a_gpu_what_they_pass_through(plan: Any) -> None:
    _, without = plan("llama-3.1-8b", "--gpu", "h100-80g")
    _, got = plan("llama-3.1-8b", "--gpu", "h100-80g", "--kv-offloading-size", "64")
    assert got["kv_offloading_bytes"] == 64 * GIB
    assert got["offloaded_tokens"] == 64 * GIB // 131072
    # Twice 64 blocks of 2 MiB.
    assert got["total_bytes"] == without["total_bytes"] + 2 * 64 * 16 * 131072
    on_cpu = ("llama-3.1-8b", "--device", "cpu", "--memory", "64Gi", "--max-model-len", "4096")
    _, without = plan(*on_cpu)
    status, got = plan(*on_cpu, "--kv-offloading-size", "8")
    assert status == 0
    assert got["total_bytes"] == without["total_bytes"] + 8 * GIB
    status, got = plan(*on_cpu, "--kv-offloading-size", "60")
    assert status == 1
    (first, *_) = got["changes"]
    assert first["flags"].startswith("--kv-offloading-size ")
    status, _ = plan(*on_cpu, *first["flags"].partition(" --kv-cache-memory")[0].split())
    assert status == 0


def test_the_arithmetic_is_shown_line_by_line(
    fixture_folder: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(fixture_folder("llama-3.1-8b")), "--gpu", "l4"]) == 1
    told = capsys.readouterr().out
    for line in (
        "MLP              10.50 GiB  5,637,144,576 x bfloat16",
        "2 x 32 layers x 8 KV heads x (128 x 2 B bfloat16) = 131,072 B",
        "lower bounds, not predictions, of L4: 300 GB/s",
        "does not fit: 32.72 GiB are needed, 22.49 GiB are there, 10.23 GiB too few",
    ):
        assert line in told


def test_every_gpu_kind_names_its_source_and_has_plausible_numbers() -> None:
    for kind in GPU_KINDS.values():
        assert kind.source.endswith(("data sheet", "white paper"))
        assert 15 * GIB <= kind.memory_bytes <= 200 * GIB
        assert kind.runs_triton == (kind.name not in ("t4", "mi300x"))
        assert 40 <= kind.num_multiprocessors <= 304
        assert kind.fp8_flops is None or 1.9 < kind.fp8_flops / kind.flops < 2.1
        assert kind.int8_flops is not None
        assert 1.9 < kind.int8_flops / kind.flops < 4.1


def test_it_starts_without_torch(fixture_folder: Any) -> None:
    code = (
        "import sys; from headway_runtime.fit.plan_command import main; "
        f"status = main([{str(fixture_folder('llama-3.1-8b'))!r}, '--device', 'cpu', '--memory', '64Gi']); "
        "assert status == 0, status; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "on a CPU: 64.00 GiB" in done.stdout


def test_what_is_said_to_fit_leaves_its_step_the_memory_that_the_engines_own_choice_would_take(
    plan: Any,
) -> None:
    """0.85 of what weights leave free of an L4 is more than a step of 16,384 tokens leaves."""
    length = ("--max-model-len", "16384", "--max-num-batched-tokens", "16384")
    status, got = plan("llama-3.1-8b", "--gpu", "l4", *length)
    step = got["step"]
    peak = max(step[stage] for stage in ("attention", "feed_forward", "sampling"))
    free = got["memory_bytes"] - got["overhead_bytes"] - got["weight_bytes"]
    assert status == 0
    assert 0.85 * free > free - peak - step["kept"] == got["default_kv_bytes"] >= got["kv_bytes"]


def test_ranks_on_cpus_share_a_machines_memory(plan: Any) -> None:
    _, whole = plan("llama-3.2-1b", "--device", "cpu", "--memory", "16Gi")
    _, half = plan("llama-3.2-1b", "--device", "cpu", "--memory", "16Gi", "--tensor-parallel-size", "2")
    assert half["tensor_parallel_size"] == 2
    assert half["weight_bytes"] == pytest.approx(whole["weight_bytes"] / 2, rel=0.02)
    assert (whole["memory_bytes"], half["memory_bytes"]) == (16 * GIB, 8 * GIB)


def test_ranks_on_cpus_share_the_memory_for_prefixes(plan: Any) -> None:
    flags = ("--device", "cpu", "--memory", "17179869185", "--tensor-parallel-size", "2")
    _, without = plan("llama-3.2-1b", *flags)
    _, got = plan("llama-3.2-1b", *flags, "--kv-offloading-size", "3")
    assert got["memory_bytes"] == 17179869185 // 2
    assert got["kv_offloading_bytes"] == 3 * GIB
    assert got["total_bytes"] - without["total_bytes"] == 3 * GIB // 2
    assert got["offloaded_tokens"] == 3 * GIB // 2 // (16 * got["kv_bytes_per_token"]) * 16


def test_the_documents_examples_are_what_the_command_prints_in_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "plan.md").read_text()
    examples = re.findall(r"```\n\$ headway plan ([^\n]*)\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 2
    for flags, shown in examples:
        assert main(shlex.split(flags)) in (0, 1)
        assert capsys.readouterr().out == shown
