"""`--quantization fp8|int8|int4` of a plain checkpoint, as a user meets it: answers, log line, metrics."""

import logging
from typing import Any

import pytest
import torch

from bundled_model.corpus import is_right, sample_tasks
from headway_runtime.engine_options import keyword_options
from headway_runtime.errors import ConfigError
from headway_runtime.inprocess import Engine
from headway_runtime.layers.linear import make_linear
from headway_runtime.layers.quantized_linear import TiledLinear
from headway_runtime.sampling_params import SamplingParams
from headway_runtime.server.metrics_page import config_labels
from headway_runtime.sources import resolve

MODEL = "bundled://headway-tiny"
TOKENS = list(range(3, 40))


@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.02), ("fp8", 0.08), ("int4", 0.3)])
def test_logits_are_near_those_of_the_plain_model(
    quantization: str, most: float, write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any
) -> None:
    written = write_checkpoint(None, packers["plain"]())
    want = logits_of(start_runner(written.folder), TOKENS)
    got = logits_of(start_runner(written.folder, quantization=quantization), TOKENS)
    error = float((got - want).norm() / want.norm())
    assert most / 30 < error < most


def test_a_head_keeps_eight_bits_where_layers_keep_four(
    write_checkpoint: Any, packers: Any, start_runner: Any
) -> None:
    written = write_checkpoint(None, packers["plain"]())
    *layers, head = start_runner(written.folder, quantization="int4")._model.linears
    assert isinstance(head, TiledLinear)
    assert [type(part).__name__ for part in head.parts] == ["Int8Weight"]
    kinds = {type(part).__name__ for layer in layers for part in layer.parts}
    assert kinds == {"Int4Weight"}


def test_an_embedding_is_never_quantized(write_checkpoint: Any, packers: Any, start_runner: Any) -> None:
    written = write_checkpoint(None, packers["plain"](), tie_word_embeddings=True)
    model = start_runner(written.folder, quantization="int4")._model
    assert model._embedding.dtype == torch.float32
    assert type(model.linears[-1]) is type(make_linear([model._embedding]))


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_the_bundled_model_still_answers_rightly(quantization: Any) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=48)
    kinds = (("recall", 250), ("passage", 250), ("sum", None), ("json", None))
    tasks = [task for kind, length in kinds for task in sample_tasks(kind, 5, 10, length)]
    tasks = [task for task in tasks if task.prompt_text is None]
    with Engine(MODEL, device="cpu", quantization=quantization, num_threads=1) as engine:
        found: Any = engine.chat([list(task.prompt_messages) for task in tasks], greedy)
    right = [is_right(task, one.text) for task, one in zip(tasks, found, strict=True)]
    assert len(right) >= 30
    assert sum(right) >= 0.9 * len(right)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
        {"quant_method": "awq", "bits": 4, "group_size": 64},
        {"quant_method": "fp8", "activation_scheme": "static"},
        None,
    ],
)
def test_weights_may_be_made_up_in_any_form(
    config: Any, write_checkpoint: Any, packers: Any, start_runner: Any, logits_of: Any
) -> None:
    written = write_checkpoint(config, packers["plain"]())
    runner = start_runner(written.folder, load_format="dummy", quantization="auto" if config else "int4")
    assert logits_of(runner, TOKENS).isfinite().all()
    assert not any(hasattr(linear, "weight") for linear in runner._model.linears[:-1])


def test_what_is_in_force_is_in_the_options_the_metrics_and_the_log(
    write_checkpoint: Any, packers: Any, start_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 32}
    written = write_checkpoint(config, packers["awq"](32))
    options = keyword_options(written.folder, {})
    assert options.quantization == "awq"
    assert config_labels(options)["quantization"] == "awq"
    with caplog.at_level(logging.INFO):
        start_runner(written.folder)
    assert "quantization awq" in caplog.text


def test_flags_are_checked_before_anything_starts() -> None:
    folder = resolve(MODEL)
    with pytest.raises(ConfigError, match="is not quantized; leave the flag out"):
        keyword_options(folder, {"quantization": "gptq"})
    with pytest.raises(ConfigError, match="quantization='int3': want one of 'auto', 'none', 'fp8'"):
        keyword_options(folder, {"quantization": "int3"})
    assert keyword_options(folder, {}).quantization == "none"
