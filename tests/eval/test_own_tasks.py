"""Tasks and text of the user's own: read, answered greedily and counted; the command as it is installed."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from headway_eval.input_rows import ROLES
from headway_eval.suite_names import numbered, unique_names
from headway_eval.texts import read_texts
from headway_runtime.server.chat_messages import ChatMessage

MODEL = "bundled://headway-tiny"
ROWS = [
    {"prompt": "12+34=", "answer": "46"},
    {"messages": [{"role": "user", "content": "What is 12 + 34?"}], "answer": "46", "match": "contains"},
    {"messages": [{"role": "user", "content": "What is 12 + 34?"}], "answer": r"= 4\d$", "match": "regex"},
    {
        "messages": [{"role": "user", "content": "Give a JSON object with name Ada and age 36."}],
        "answer": {"age": 36, "name": "Ada"},
        "match": "json",
    },
    {"prompt": "12+34=", "answer": "47", "kind": "wrong", "id": 7},
    {"prompt": "12+34=", "answer": "4", "max_tokens": 1, "kind": "short"},
    {"prompt": "12+34=", "answer": "4", "match": "contains"},
]


def test_tasks_of_every_rule_are_answered_and_counted(run_eval: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    judged = run_eval(MODEL, "--quantization", "int8", "--tasks", str(path), "--text", "none")
    (suite,) = judged.report["tasks"]
    assert judged.status == 0
    assert {one["name"]: (one["num_tasks"], one["model_right"]) for one in suite["kinds"]} == {
        "all": (5, 5),
        "wrong": (1, 0),
        "short": (1, 1),
    }
    assert (suite["name"], suite["baseline_right"]) == ("mine.jsonl", 6)
    assert suite["model_interval"][0] < 6 / 7 < suite["model_interval"][1]


def test_messages_have_the_roles_of_requests(tmp_path: Path) -> None:
    assert get_args(ChatMessage.model_fields["role"].annotation) == ROLES
    path = tmp_path / "chats.jsonl"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "now"}}]}
    messages = [*({"role": role, "content": "a"} for role in ROLES), call, {"role": "user", "content": ""}]
    path.write_text(json.dumps({"messages": messages}))
    assert [text.content for text in read_texts(path)] == [messages]


def test_files_of_one_name_are_told_apart(run_eval: Callable[..., Any], tmp_path: Path) -> None:
    flags: list[str] = []
    for folder, answer, count in (("easy", "46", 6), ("hard", "47", 1)):
        path = tmp_path / folder / "sums.jsonl"
        path.parent.mkdir()
        path.write_text(count * (json.dumps({"prompt": "12+34=", "answer": answer}) + "\n"))
        flags += ["--tasks", str(path)]
    verdict = tmp_path / "verdict.json"
    judged = run_eval(MODEL, *flags, "--text", "none", "--verdict-file", str(verdict))
    assert {one["name"]: one["model_right"] for one in judged.report["tasks"]} == {
        "easy/sums.jsonl": 6,
        "hard/sums.jsonl": 0,
    }
    want = ["accuracy drop, easy/sums.jsonl", "accuracy drop, hard/sums.jsonl"]
    assert [one["name"] for one in judged.report["checks"]] == want
    assert [one["name"] for one in json.loads(verdict.read_text())["checks"]] == want


def test_names_of_files_are_as_long_as_tells_them_apart() -> None:
    paths = ["/a/x.jsonl", "/b/x.jsonl", "/c/a/x.jsonl", "y.jsonl", "./y.jsonl", "x.jsonl"]
    assert unique_names([Path(one) for one in paths]) == [
        *("/a/x.jsonl", "b/x.jsonl", "c/a/x.jsonl"),
        *("y.jsonl", "y.jsonl (2)", "x.jsonl"),
    ]
    assert numbered(["a" * 30, "a" * 29, "a"], 12) == ["aaaaaaaaa...", "aaaaa... (2)", "a"]


def test_more_tasks_than_may_wait_are_answered_in_order(run_eval: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    sums = [(a, b) for a in range(11, 29) for b in (31, 47)]
    path.write_text("\n".join(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in sums))
    judged = run_eval(
        MODEL, "--tasks", str(path), "--text", "none", "--max-num-seqs", "3", "--max-waiting", "5"
    )
    (suite,) = judged.report["tasks"]
    assert suite["num_tasks"] == len(sums)
    assert suite["model_right"] >= 0.9 * len(sums)
    assert suite["changed"] == []


def test_a_long_text_goes_through_the_kv_cache(run_eval: Callable[..., Any], tmp_path: Path) -> None:
    """The first token after a short start barely sees the cache's rounding; far into a text, all do."""
    path = tmp_path / "long.txt"
    path.write_text(" ".join(f"The code of the kite is {number}." for number in range(100, 300)))
    flags = ("--text", str(path), "--tasks", "none", "--dtype", "float32", "--baseline-dtype", "float32")
    rounded = run_eval(MODEL, *flags, "--kv-cache-dtype", "fp8").report["text"]
    exact = run_eval(MODEL, *flags, "--kv-cache-dtype", "auto").report["text"]
    in_other_chunks = run_eval(MODEL, *flags, "--kv-cache-dtype", "fp8", "--chunk-tokens", "33").report[
        "text"
    ]
    assert exact["largest_kl"] == 0.0
    assert rounded["mean_kl"] > 1e-5
    # A chunk reads its own keys and values as it stores them, so it does not show where one begins.
    assert abs(in_other_chunks["mean_kl"] / rounded["mean_kl"] - 1) < 0.05


def test_the_command_is_installed_and_tells_its_progress_in_lines(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("The code of the kite is 47.")
    command = [str(Path(sys.executable).parent / "headway"), "eval", MODEL]
    flags = ["--text", str(path), "--tasks", "none", "--quantization", "int4", "--max-kl", "0"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert "verdict: FAILED" in done.stdout
    assert done.stderr.startswith("text: 0 of ")
