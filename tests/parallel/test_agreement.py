"""What nodes must say alike: weights of equal sizes and shapes are told apart by what is in them."""

import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway_runtime import checkpoint_digest
from headway_runtime.config import (
    EngineConfig,
    LoraConfig,
    LoraModule,
    OffloadConfig,
    ParallelConfig,
    SpeculativeConfig,
)
from headway_runtime.engine_options import keyword_options
from headway_runtime.errors import ModelLoadError
from headway_runtime.parallel import wire
from headway_runtime.parallel.agreement import agreed_words, difference
from headway_runtime.parallel.messages import Hello

Words = Callable[..., dict[str, object]]


@pytest.fixture
def words(engine_config: Callable[..., EngineConfig]) -> Words:
    """words(folder, **changes): what a node says that has the model in that folder."""
    parallel = ParallelConfig(size=2, num_nodes=2)
    return lambda folder, **changes: agreed_words(
        replace(engine_config(folder, parallel=parallel), **changes)
    )


@pytest.fixture
def folders(checkpoint: Any, tmp_path: Path) -> tuple[Path, Path]:
    """The same checkpoint on two nodes, under other paths."""
    first, second = tmp_path / "here", tmp_path / "there"
    for folder in (first, second):
        shutil.copytree(checkpoint("llama").folder, folder)
    return first, second


def test_copies_agree(folders: tuple[Path, Path], words: Words) -> None:
    first, second = folders
    os.utime(second / "model.safetensors", (0, 0))
    assert difference(words(second), words(first)) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"enforce_eager": True}, "its enforce_eager is True, node 0's False"),
        ({"weight_compression": "none"}, "its weight_compression is 'none', node 0's 'auto'"),
        ({"cuda_graph_sizes": (1, 2)}, "its cuda_graph_sizes is [1, 2], node 0's None"),
        ({"offload": OffloadConfig(2**30)}, "its kv_offloading_bytes is 1073741824, node 0's None"),
        ({"lora": LoraConfig(2, 4, 16)}, "its enable_lora is True, node 0's False"),
        (
            {"speculative": SpeculativeConfig("ngram")},
            "its speculative_config's method is 'ngram', node 0's None",
        ),
    ],
)
def test_other_flags_are_named(
    folders: tuple[Path, Path], words: Words, changes: dict[str, Any], told: str
) -> None:
    first, second = folders
    assert (difference(words(second, **changes), words(first)) or "").startswith(told)
    assert difference(words(second, **changes), words(first, **changes)) is None
    sending, receiving = socket.socketpair()
    with sending, receiving:
        wire.send(sending, Hello("node", 1, 1, 1, agreed=words(second, **changes)))
        hello = wire.receive_first(receiving)
    assert isinstance(hello, Hello)
    assert difference(hello.agreed, words(first, **changes)) is None, "as it comes over the connection"


def test_a_draft_and_adapters_may_lie_elsewhere(folders: tuple[Path, Path], words: Words) -> None:
    first, second = folders
    here, there = (
        {
            "speculative": SpeculativeConfig("draft_model", str(folder)),
            "lora": LoraConfig(2, 4, 16, (LoraModule("sql", "hf://org/sql", str(folder)),)),
        }
        for folder in folders
    )
    assert difference(words(second, **there), words(first, **here)) is None


def test_other_weights_of_equal_sizes_are_named(folders: tuple[Path, Path], words: Words) -> None:
    first, second = folders
    path = second / "model.safetensors"
    torch.manual_seed(1)
    tensors = {name: torch.randn_like(one) for name, one in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    size = path.stat().st_size
    assert size == (first / "model.safetensors").stat().st_size
    told = difference(words(second), words(first))
    assert told is not None
    assert told.startswith(f"its model's model.safetensors is '{size} bytes, digest ")
    assert told.endswith("; give all nodes the same model and flags")
    # Nothing is read where nothing is loaded, or where all ranks read the same files.
    for changes in ({"load_format": "dummy"}, {"parallel": ParallelConfig(size=2)}):
        assert difference(words(second, **changes), words(first, **changes)) is None


def test_a_file_that_says_how_weights_are_coded_is_named(folders: tuple[Path, Path], words: Words) -> None:
    first, second = folders
    (second / "quantize_config.json").write_text('{"bits": 4}')
    told = difference(words(second), words(first))
    assert told is not None
    assert told.startswith("its model's quantize_config.json (digest) is ")


def test_a_large_file_is_read_in_some_places_from_its_header_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_digest, "NUM_SAMPLES", 16)
    monkeypatch.setattr(checkpoint_digest, "SAMPLE_BYTES", 64)
    path = tmp_path / "model.safetensors"
    tensors = {name: torch.arange(40_000.0) for name in ("a", "b")}
    save_file(tensors, path)
    whole = path.read_bytes()

    def told(contents: bytes) -> str:
        path.write_bytes(contents)
        return checkpoint_digest.told_checkpoint_file(path)

    as_it_was = told(whole)
    assert told(whole) == as_it_was
    assert told(whole.replace(b'"a"', b'"c"')) != as_it_was
    assert told(whole[:-1] + b"x") != as_it_was
    assert told(whole[:-1]) != as_it_was
    save_file({name: one + 1.0 for name, one in tensors.items()}, path)
    assert told(path.read_bytes()) != as_it_was
    # What is no header at all is told when it is loaded, not here.
    assert told(b"\xff" * len(whole)) != as_it_was


def test_files_that_cannot_be_read_are_named(folders: tuple[Path, Path], words: Words) -> None:
    path = folders[0] / "model.safetensors"
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        words(folders[0])


def test_a_hello_of_many_files_is_short_enough(words: Words, tmp_path: Path) -> None:
    """As many shards as the largest open models have, and more."""
    (tmp_path / "config.json").write_text("{}")
    names = [f"model-{index:05d}-of-00400.safetensors" for index in range(400)]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    weight_map = ", ".join(f'"tensor{index}": "{name}"' for index, name in enumerate(names))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{weight_map}}}}}')
    hello = wire.encode(Hello("node", 1, 1, 1, agreed=words(tmp_path)))
    assert len(hello) < wire.MOST_HELLO_BYTES


def test_another_number_of_sequences_on_gpus_alone_is_named(checkpoint: Any) -> None:
    """One node is told what is the default of CPUs, the other nothing."""
    folder = checkpoint("llama").folder
    said, unsaid = (agreed_words(keyword_options(folder, flags)) for flags in ({"max_num_seqs": 64}, {}))
    assert (difference(said, unsaid) or "").startswith("its max_num_seqs (on a GPU) is 64, node 0's 256")
