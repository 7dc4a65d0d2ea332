"""Nonsense in a config.json ends in an error that names the file and the field, or is of no consequence."""

import contextlib
import dataclasses
from typing import Any

import pytest
import transformers
from tests.models.config_classes import CLASSES, SIZES, WITHOUT_EFFECT

from headway_runtime.errors import ModelLoadError
from headway_runtime.model_config_families import FAMILIES
from headway_runtime.model_config_rope import KNOWN_KEYS

# What JSON can hold and nobody means; numbers that no float and no tensor can have among them.
NONSENSE: tuple[Any, ...] = (
    *({}, [], [{}], [["x"]], {"x": [1]}, "", "x", True, [None], [1, [2]]),
    *(-1, 0, 1.5, float("inf"), 10**400),
)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_nonsense_in_any_field_is_refused_by_name_if_it_is_refused(architecture: str, read: Any) -> None:
    """Never by an error of Python's own, which names neither file nor field."""
    inner = "text_config" if architecture == "Gemma3ForConditionalGeneration" else None
    known = CLASSES.get(architecture, transformers.Gemma3TextConfig)
    names = {field.name for field in dataclasses.fields(known)} | {"model_type", "torch_dtype"}
    for name in sorted(names - WITHOUT_EFFECT):
        for value in NONSENSE:
            fields = {name: value} if inner is None else {inner: SIZES | {name: value}}
            with contextlib.suppress(ModelLoadError):
                read(architecture, **fields)


@pytest.mark.parametrize(
    "kind", ["default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"]
)
def test_nonsense_in_any_rotary_field_is_refused_by_name_if_it_is_refused(kind: str, read: Any) -> None:
    good: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 64}
    good |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    good |= {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8} if kind == "longrope" else {}
    for name in sorted(KNOWN_KEYS | {"original_max_position_embeddings"}):
        for value in NONSENSE:
            for field in ("rope_scaling", "rope_parameters"):
                with contextlib.suppress(ModelLoadError):
                    read("LlamaForCausalLM", **{field: good | {name: value}})
