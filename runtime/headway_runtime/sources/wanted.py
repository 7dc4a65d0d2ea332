"""Which of a source's files make a model that this engine reads, or an adapter: configuration, tokenizer,
safetensors.

Code, pickles and other formats are never among them, whatever a repository holds. Pure: knows names and the
text of an index, nothing of where they come from.
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import PurePosixPath

from headway_runtime.checkpoint_files import INDEX_FILE, SINGLE_FILE, is_index, model_files
from headway_runtime.errors import ModelFetchError

CONFIG_FILE = "config.json"
# Small files, by name. What quantization tools write beside config.json is there too; an index of shards is
# one as well, whatever its name.
SMALL_FILES = frozenset(
    {
        CONFIG_FILE,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "chat_template.json",
        "quantize_config.json",
        "quant_config.json",
        "hf_quant_config.json",
    }
)


@dataclass(frozen=True, slots=True)
class Kind:
    """What is to be fetched. noun: what it is called. config_file: without which it is none of these.

    suffix: of what the cache notes of one, as a source may be both.
    """

    noun: str
    config_file: str
    small_files: frozenset[str]
    single_file: str
    suffix: str = ""


MODEL = Kind("a model in Hugging Face layout", CONFIG_FILE, SMALL_FILES, SINGLE_FILE)
ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER = Kind(
    "a LoRA adapter as PEFT saves it",
    ADAPTER_CONFIG_FILE,
    frozenset({ADAPTER_CONFIG_FILE}),
    "adapter_model.safetensors",
    "-adapter",
)
_SHARD = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
# The folder of a model in an image, as KServe's modelcars have it.
IMAGE_ROOT = "models"


def may_be_wanted(path: str) -> bool:
    """Whether a file of that name could belong to a model, in whichever folder it lies."""
    name = PurePosixPath(path).name
    is_small = name in SMALL_FILES | ADAPTER.small_files or is_index(name)
    return is_small or bool(_SHARD.fullmatch(name))


def small_files(names: Iterable[str], where: str, kind: Kind = MODEL) -> list[str]:
    """Those that are fetched first. ModelFetchError if there can be no model."""
    known = set(names)
    if kind.config_file not in known:
        raise ModelFetchError(f"{where}: there is no {kind.config_file}; name the place of {kind.noun}")
    return sorted(known & kind.small_files | set(_index_files(known, kind)))


def index_file(names: Iterable[str], kind: Kind = MODEL) -> str | None:
    """Which of the small files names the shards, if one does."""
    found = _index_files(names, kind)
    return found[0] if len(found) == 1 else None


def _index_files(names: Iterable[str], kind: Kind) -> list[str]:
    return [name for name in _whole_models(names, kind) if is_index(name)]


def _whole_models(names: Iterable[str], kind: Kind) -> list[str]:
    return model_files(names) if kind is MODEL else sorted({kind.single_file} & set(names))


def weight_files(names: Collection[str], index: bytes | None, where: str, kind: Kind = MODEL) -> list[str]:
    """The shards that `index` (the text of `index_file`) names, or the one file.

    ModelFetchError if they are not there.
    """
    found_files = _whole_models(names, kind)
    if len(found_files) > 1:
        raise ModelFetchError(
            f"{where}: holds {' and '.join(map(repr, found_files))}, each of which may be the model; "
            "choose a revision or a folder with one of them"
        )
    if index is None:
        if found_files:
            return found_files
        others = sorted(name for name in names if name.endswith(_OTHER_WEIGHTS))
        found = f" (there is {others[0]!r}, which is never fetched)" if others else ""
        if kind is ADAPTER:
            raise ModelFetchError(
                f"{where}: holds no {kind.single_file}{found}; only safetensors are read, so save the "
                "adapter with safe_serialization=True"
            )
        raise ModelFetchError(
            f"{where}: holds neither {SINGLE_FILE} nor {INDEX_FILE}{found}; only safetensors checkpoints are "
            "served, so convert it or choose a repository that has them"
        )
    index_name = found_files[0] if found_files else INDEX_FILE
    try:
        shards = set(json.loads(index)["weight_map"].values())
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise ModelFetchError(
            f"{where}: {index_name} cannot be read ({error!r}); its owner has to upload it again"
        ) from error
    for shard in sorted(map(str, shards)):
        if not _SHARD.fullmatch(shard) or shard not in names:
            raise ModelFetchError(
                f"{where}: {index_name} names {shard!r}, which is no safetensors file beside it; "
                "its owner has to upload it"
            )
    return sorted(shards)


def model_root(paths: Iterable[str], where: str, kind: Kind = MODEL) -> str:
    """The folder that holds the config, "" being the top; an image's own folder for models comes first."""
    roots = {
        str(PurePosixPath(path).parent) for path in paths if PurePosixPath(path).name == kind.config_file
    }
    if IMAGE_ROOT in roots or len(roots) == 1:
        root = IMAGE_ROOT if IMAGE_ROOT in roots else roots.pop()
        return "" if root == "." else root
    if not roots:
        raise ModelFetchError(
            f"{where}: none of its layers holds a {kind.config_file}; push {kind.noun}, in "
            f"/{IMAGE_ROOT} of an image or as files of an artifact"
        )
    raise ModelFetchError(
        f"{where}: holds several models, in {', '.join(sorted(roots))}; push one per artifact"
    )
