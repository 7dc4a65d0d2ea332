"""What cannot be judged ends with status 2 and a sentence that names field, value and remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headway_eval.main import main
from headway_eval.tasks import MAX_TOKENS
from headway_runtime import sampling_params
from headway_runtime.sources import BUNDLED_FOLDER

MODEL = "bundled://headway-tiny"


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ('{"prompt": "a", "answer": "b", "mach": "exact"}', "mach='exact': did you mean match?"),
        ('{"prompt": "a", "answer": "b", "match": "fuzzy"}', "match='fuzzy': want one of exact, contains"),
        ('{"prompt": "a"}', "answer is missing; write the expected one"),
        ('{"prompt": "a", "answer": 3}', "answer=3: want a text that is not empty"),
        ('{"prompt": "a", "messages": [], "answer": "b"}', "has prompt and messages; want either"),
        ('{"answer": "b"}', "has neither; want either prompt or messages"),
        ('{"prompt": "a", "answer": "(", "match": "regex"}', "answer='(': is no regular expression"),
        ('{"prompt": "a", "answer": "{", "match": "json"}', "answer='{': is not JSON"),
        (
            '{"prompt": "a", "answer": "b", "max_tokens": 0}',
            "max_tokens=0: want an integer from 1 to 2147483647",
        ),
        (
            json.dumps({"prompt": "a", "answer": "b", "max_tokens": 10**30}),
            f"max_tokens={10**30}: want an integer from 1 to 2147483647",
        ),
        (
            json.dumps({"prompt": "a", "answer": "x{99999999999999999999}", "match": "regex"}),
            "answer='x{99999999999999999999}': is no regular expression (the repetition number is too large)",
        ),
        (
            json.dumps({"prompt": "a", "answer": "(" * 3000 + ")" * 3000, "match": "regex"}),
            "...: is no regular expression (",
        ),
        (
            json.dumps({"prompt": "a", "answer": "[" * 100_000, "match": "json"}),
            "...: is not JSON (",
        ),
        ('{"messages": ["hello"], "answer": "b"}', "messages=['hello']: want a list of objects"),
        ('{"messages": [{"role": "user", "content": 3}], "answer": "b"}', "content=3 is no text"),
        ('{"messages": [{"content": "a"}], "answer": "b"}', "messages[0].role is missing: want one of"),
        (
            '{"messages": [{"role": ["user"], "content": "a"}], "answer": "b"}',
            "messages[0].role=['user']: want one of system, developer, user, assistant, tool",
        ),
        ('{"messages": [{"role": "user"}], "answer": "b"}', "messages[0].content is missing: want a text"),
        ("[1]", "[1] is no object; write one on each line"),
        ("{prompt", "'{prompt' is not JSON"),
        (json.dumps({"prompt": "a " * 40000, "answer": "b"}), "prompt and answer may have"),
    ],
)
def test_a_task_that_is_wrong_is_named_by_file_line_and_field(
    refusal: Callable[..., str], tmp_path: Path, line: str, want: str
) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "12+34=", "answer": "46"}\n\n' + line + "\n")
    said = refusal(MODEL, "--tasks", str(path))
    assert f"--tasks={str(path)!r}, line 3" in said
    assert want in said


def test_an_answer_may_be_as_long_as_a_requests() -> None:
    assert MAX_TOKENS == sampling_params.MAX_TOKENS


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("text.txt", "  \n", "is empty; name a file with text"),
        ("text.jsonl", "\n", "has no line"),
        ("text.jsonl", '{"content": "a"}', "line 1: has neither; want either text or messages"),
        ("text.jsonl", '{"text": ""}', "line 1: text='': want a text that is not empty"),
        ("text.jsonl", '{"text": "a"}', "line 1: is 1 token, which nothing precedes"),
        (
            "text.jsonl",
            '{"messages": [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]}',
            "line 1: messages[1].role='asistant': want one of system, developer, user, assistant, tool",
        ),
        (
            "text.jsonl",
            '{"messages": [{"role": "assistant", "content": null}]}',
            "line 1: messages[0].content=None: want a text, or a list of text parts",
        ),
    ],
)
def test_a_text_that_is_wrong_is_named(
    refusal: Callable[..., str], tmp_path: Path, name: str, content: str, want: str
) -> None:
    (tmp_path / name).write_text(content)
    said = refusal(MODEL, "--text", str(tmp_path / name))
    assert f"--text={str(tmp_path / name)!r}" in said
    assert want in said


def test_a_file_that_is_missing_or_no_text_is_named(refusal: Callable[..., str], tmp_path: Path) -> None:
    assert "cannot be read" in refusal(MODEL, "--text", str(tmp_path / "none.txt"))
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "name a file of UTF-8 text" in refusal(MODEL, "--tasks", str(tmp_path / "bytes.jsonl"))


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        (("--text", "none", "--tasks", "none"), "nothing to judge"),
        (("--tasks", "none", "--tasks", "bundled"), "--tasks=none: is given beside other tasks"),
        (("--window-tokens", "99999"), "--window-tokens=99999: a sequence may have"),
        (("--window-tokens", "64", "--stride-tokens", "64"), "--stride-tokens=64: is not below"),
        (("--json", "/nowhere/report.json"), "--json='/nowhere/report.json'"),
        (("--against", "bundled://nobody"), "--against='bundled://nobody': model source"),
        (("--speculative-config", "{"), "--speculative-config='{' is not JSON"),
        (("--quantization", "awq"), "--quantization='awq'"),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    refusal: Callable[..., str], flags: tuple[str, ...], want: str
) -> None:
    assert want in refusal(MODEL, *flags)


def test_an_unknown_flag_or_value_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (
        ("--baseline-kv-cache-dtype", "int3"),
        ("--max-kl", "-1"),
        ("--max-tokens", str(10**30)),
        ("--what",),
    ):
        with pytest.raises(SystemExit) as stopped:
            main([MODEL, *flags])
        assert stopped.value.code == 2
        assert flags[0] in capsys.readouterr().err


def test_same_of_a_quantized_checkpoint_asks_for_a_baseline(
    refusal: Callable[..., str], fp8_copy: Callable[..., Path]
) -> None:
    said = refusal(str(fp8_copy()))
    assert "--against='same'" in said
    assert "name another one with --against (spec.quality.baseline.source of an InferenceService)" in said


def test_another_vocabulary_is_refused_for_text(refusal: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(BUNDLED_FOLDER / "headway-tiny", folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[600:602]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    said = refusal(MODEL, "--against", str(folder))
    assert "its vocabulary is not 'bundled://headway-tiny''s" in said
    assert "judge tasks alone with --text none" in said
    ids = {first: (600, 601), second: (601, 600)}
    named = next(token for token in ids if f"token {token!r}" in said)
    theirs, ours = vocabulary[named], next(place for place in ids[named] if place != vocabulary[named])
    assert f"token {named!r} has id {theirs}, in the model's {ours}" in said
    assert "--tasks=bundled: is for the bundled models' tokenizer" in refusal(
        str(folder), "--tasks", "bundled", "--text", "none"
    )
    assert "--tasks=None: nothing to judge" in refusal(str(folder))


def test_a_baseline_that_is_broken_is_no_verdict_on_the_model(
    refusal: Callable[..., str], fp8_copy: Callable[..., Path]
) -> None:
    broken = str(fp8_copy({"model.layers.1.mlp.down_proj": 1e40}))
    assert "its perplexity is nan" in refusal(MODEL, "--against", broken, "--tasks", "none")
    assert "failed to answer --tasks=" in refusal(MODEL, "--against", broken, "--text", "none")


@pytest.mark.parametrize(
    ("answer", "count", "want"),
    [
        pytest.param("46", 5, "got 5 of 5 right, and losing all of them may be chance (p=0.062)", id="few"),
        pytest.param("47", 20, "got 0 of 20 right, and losing all of them may be chance (p=1)", id="none"),
    ],
)
def test_tasks_that_no_model_can_fail_are_no_verdict(
    refusal: Callable[..., str], tmp_path: Path, answer: str, count: int, want: str
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(count * (json.dumps({"prompt": "12+34=", "answer": answer}) + "\n"))
    said = refusal(MODEL, "--quantization", "int8", "--tasks", str(path), "--text", "none")
    assert (
        f"could not judge: --tasks: whatever the model answers passes ('mine.jsonl': the baseline {want})"
        in said
    )
    assert "give more tasks that the baseline gets right, or a text (--text)" in said


def test_a_fault_of_the_program_is_no_verdict(
    refusal: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("headway_eval.session.score", broken)
    assert "could not judge: RuntimeError: out of memory" in refusal(MODEL)


@pytest.mark.parametrize("flag", ["--enable-lora", "--baseline-enable-lora"])
def test_adapters_are_refused_as_they_would_not_be_judged(refusal: Callable[..., str], flag: str) -> None:
    assert "--enable-lora: models are judged without adapters; merge the adapter" in refusal(MODEL, flag)


def test_several_nodes_are_refused_as_none_of_them_would_come_twice(refusal: Callable[..., str]) -> None:
    flags = ("--tensor-parallel-size", "2", "--nnodes", "2")
    assert "--nnodes=2: models are judged on one node" in refusal(MODEL, *flags)
