"""The engine as a library: how it ends, its options as keywords, and what it loads."""

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import get_type_hints

import pytest

from headway_runtime import Engine, SamplingParams
from headway_runtime.engine_keywords import EngineKeywords
from headway_runtime.engine_options import keyword_options
from headway_runtime.errors import ConfigError, EngineDeadError
from headway_runtime.server.options import parse_options
from headway_runtime.sources import resolve

MODEL = "bundled://headway-tiny"
GREEDY = SamplingParams(temperature=0, max_tokens=8)


def test_a_closed_engine_says_so_and_whoever_waits_is_told() -> None:
    engine = Engine(MODEL, max_model_len=64, num_threads=1)
    assert engine.generate("a", GREEDY, use_tqdm=False)[0].finished
    problems: list[BaseException] = []
    has_begun = threading.Event()

    def wait() -> None:
        async def stream() -> None:
            endless = SamplingParams(max_tokens=None, ignore_eos=True)
            while True:
                async for _ in engine.generate_async("a", endless):
                    has_begun.set()

        try:
            asyncio.run(stream())
        except EngineDeadError as error:
            problems.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert has_begun.wait(20)
    engine.close()
    engine.close()
    waiting.join(20)
    assert len(problems) == 1
    with pytest.raises(EngineDeadError, match="closed"):
        engine.generate("a", GREEDY, use_tqdm=False)
    assert engine.metrics().counters["received"] >= 2


def test_code_that_lies_with_a_model_is_never_run(tmp_path: Path) -> None:
    """A checkpoint that names code of its own for its config, its model and its tokenizer."""
    folder, trace = Path(shutil.copytree(resolve(MODEL), tmp_path / "model")), tmp_path / "was-run"
    (folder / "own_code.py").write_text(
        f"open({str(trace)!r}, 'w').close()\nConfig = Model = Tokenizer = dict\n"
    )
    for name, auto_map in (
        ("config.json", {"AutoConfig": "own_code.Config", "AutoModelForCausalLM": "own_code.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["own_code.Tokenizer", "own_code.Tokenizer"]}),
    ):
        said = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**said, "auto_map": auto_map}))
    with Engine(str(folder), max_model_len=64, num_threads=1) as engine:
        assert engine.generate("a", GREEDY, use_tqdm=False)[0].finished
    assert not trace.exists()


def test_options_are_the_flags_with_their_defaults_and_checks() -> None:
    folder = resolve(MODEL)
    assert keyword_options(folder, {}) == parse_options([MODEL], {}).engine
    changed = keyword_options(folder, {"max_model_len": 128, "kv_cache_memory_bytes": "64Mi", "dtype": None})
    assert changed == parse_options([MODEL, "--max-model-len=128", "--kv-cache-memory-bytes=64Mi"], {}).engine
    wrong: list[tuple[dict[str, object], str]] = [
        ({"max_model_length": 5}, "did you mean 'max_model_len'"),
        ({"gpu": 1}, "gpu=1 is no option of an engine; there are block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: '0' is out of range; give at least 1"),
        ({"max_num_seqs": 2.5}, "max_num_seqs=2.5: '2.5' is not an integer"),
        ({"dtype": "int3"}, "dtype='int3': want one of 'auto'"),
        ({"max_model_len": 10**6}, "max_position_embeddings"),
    ]
    for keywords, message in wrong:
        with pytest.raises(ConfigError, match=message):
            Engine(MODEL, **keywords)  # type: ignore[arg-type]


def test_every_flag_of_the_engine_is_a_keyword_with_a_type() -> None:
    import argparse

    from headway_runtime.engine_options import add_engine_arguments

    parser = argparse.ArgumentParser(add_help=False)
    add_engine_arguments(parser)
    flags = {action.dest: action.choices for action in parser._actions}
    hints = get_type_hints(EngineKeywords)
    assert hints.keys() == flags.keys()
    for name, choices in flags.items():
        if choices is not None:
            assert set(hints[name].__args__) == set(choices)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)


def test_torch_is_loaded_when_an_engine_is_made_and_not_before() -> None:
    code = """
import sys
from headway_runtime import Engine
from headway_runtime.errors import ConfigError
for model, options in (("bundled://headway-tiny", {"max_model_len": -1}), ("/no/such/folder", {})):
    try:
        Engine(model, **options)
    except ConfigError:
        continue
    raise AssertionError(model)
loaded = {"torch", "numpy", "tqdm"} & sys.modules.keys()
assert not loaded, loaded
Engine("bundled://headway-tiny", max_model_len=64).close()
assert "torch" in sys.modules
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_no_module_of_the_core_imports_fastapi_or_pydantic() -> None:
    code = """
import importlib, pkgutil, sys, headway_runtime
names = [
    one.name
    for one in pkgutil.walk_packages(headway_runtime.__path__, "headway_runtime.", onerror=lambda name: None)
    if not one.name.startswith("headway_runtime.server")
]
assert {"headway_runtime.engine", "headway_runtime.inprocess", "headway_runtime.grammar_trial"} <= set(names)
for name in names:
    importlib.import_module(name)
edge = {"fastapi", "starlette", "uvicorn", "pydantic", "zmq", "prometheus_client", "transformers"}
assert not edge & sys.modules.keys(), edge & sys.modules.keys()
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_the_package_alone_loads_nothing_and_the_engine_no_server() -> None:
    code = """
import sys, headway_runtime
heavy = {"torch", "numpy", "tokenizers", "jinja2", "msgspec", "tqdm"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
assert "Engine" in dir(headway_runtime)
from headway_runtime import SamplingParams
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
with headway_runtime.Engine("bundled://headway-tiny", max_model_len=64) as engine:
    assert engine.generate("hi", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
server = {"fastapi", "starlette", "uvicorn", "pydantic", "zmq", "prometheus_client", "transformers"}
assert not server & sys.modules.keys(), server & sys.modules.keys()
assert not [name for name in sys.modules if name.startswith("headway_runtime.server")]
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_a_program_that_forgets_to_close_ends_all_the_same() -> None:
    code = """
import asyncio
from headway_runtime import Engine, SamplingParams
engine = Engine("bundled://headway-tiny", max_model_len=256)
async def begin():
    stream = engine.generate_async("hi", SamplingParams(max_tokens=None, ignore_eos=True))
    await anext(stream)
    import os
    print("begun", flush=True)
asyncio.run(begin())
"""
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "begun\n"), done.stderr


def test_an_unknown_name_of_the_package_is_an_error() -> None:
    import headway_runtime

    with pytest.raises(AttributeError, match="no attribute 'LLM'"):
        headway_runtime.LLM  # noqa: B018
