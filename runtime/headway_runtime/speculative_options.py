"""What a user may say of speculation: `--speculative-config`, one JSON object with vLLM's names.

    {"method": "ngram", "num_speculative_tokens": 4}
    {"model": "bundled://headway-tiny-draft", "num_speculative_tokens": 4}

`adaptive` (not in vLLM): false always guesses that many.

Checks that the draft's vocabulary is the model's, which only their files can tell. Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headway_runtime.config import SpeculativeConfig
from headway_runtime.errors import ConfigError, ModelFetchError, ModelLoadError
from headway_runtime.model_config import read_model_config
from headway_runtime.model_config_fields import read_object
from headway_runtime.sources import resolve

FLAG = "--speculative-config"
TOKENIZER = "tokenizer.json"
METHODS = ("draft_model", "ngram")
MOST_SPECULATIVE_TOKENS = 16
DEFAULT_SPECULATIVE_TOKENS = 4
LONGEST_LOOKUP = 32
KNOWN = (
    *("method", "model", "num_speculative_tokens", "adaptive"),
    *("prompt_lookup_min", "prompt_lookup_max"),
)


@dataclass(frozen=True, slots=True)
class SpeculativeOptions:
    """config: who guesses. num_speculative_tokens: upper end of the live limit."""

    config: SpeculativeConfig
    num_speculative_tokens: int


def speculative_options(
    text: str | Mapping[str, object] | None,
    model_path: Path,
    download_dir: str | None = None,
    lifeline_fd: int | None = None,
    *,
    headers_only: bool = False,
) -> SpeculativeOptions | None:
    """What was asked for; None for no speculation. ConfigError names the field at fault.

    download_dir, lifeline_fd, headers_only: as `sources.resolve` has them, for a draft that is fetched.
    """
    if text is None:
        return None
    fields = _object(text)
    unknown = [name for name in fields if name not in KNOWN]
    if unknown:
        raise _error(unknown[0], fields[unknown[0]], f"known are {', '.join(KNOWN)}")
    method = _method(fields)
    number = _integer(
        fields, "num_speculative_tokens", DEFAULT_SPECULATIVE_TOKENS, 1, MOST_SPECULATIVE_TOKENS
    )
    adaptive = fields.get("adaptive", True)
    if not isinstance(adaptive, bool):
        raise _error("adaptive", adaptive, "want true or false")
    if method == "draft_model":
        for name in ("prompt_lookup_min", "prompt_lookup_max"):
            if name in fields:
                raise _error(name, fields[name], 'it is for method "ngram"; leave it out')
        folder = _draft_folder(fields, model_path, download_dir, lifeline_fd, headers_only=headers_only)
        return SpeculativeOptions(SpeculativeConfig("draft_model", str(folder), adaptive=adaptive), number)
    if "model" in fields and fields["model"] not in ("ngram", "[ngram]"):
        raise _error("model", fields["model"], 'method "ngram" has none; leave one of them out')
    longest = _integer(fields, "prompt_lookup_max", 5, 1, LONGEST_LOOKUP)
    shortest = _integer(fields, "prompt_lookup_min", min(2, longest), 1, longest)
    return SpeculativeOptions(SpeculativeConfig("ngram", None, shortest, longest, adaptive), number)


def _object(text: str | Mapping[str, object]) -> Mapping[str, object]:
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{FLAG}={text!r} is not JSON ({error}); write an object") from error
    if not isinstance(value, dict):
        raise ConfigError(f'{FLAG}={text!r}: want an object; write {{"method": "ngram"}}, for example')
    return value


def _method(fields: Mapping[str, object]) -> str:
    method = fields.get("method")
    if method is None:
        if "model" not in fields:
            raise _error("method", None, 'say "ngram", or name the "model" that guesses')
        return "ngram" if fields["model"] in ("ngram", "[ngram]") else "draft_model"
    if method not in METHODS:
        raise _error("method", method, f"want one of {', '.join(METHODS)}")
    return str(method)


def _integer(fields: Mapping[str, object], name: str, default: int, low: int, high: int) -> int:
    value = fields.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise _error(name, value, f"want an integer from {low} to {high}")
    return value


def _draft_folder(
    fields: Mapping[str, object],
    model_path: Path,
    download_dir: str | None,
    lifeline_fd: int | None,
    *,
    headers_only: bool,
) -> Path:
    source = fields.get("model")
    if not isinstance(source, str) or not source:
        raise _error("model", source, "name the model that guesses, as the served one is named")
    try:
        folder = resolve(
            source, download_dir=download_dir, lifeline_fd=lifeline_fd, headers_only=headers_only
        )
        read_model_config(folder)
        differing = first_difference(model_path, folder)
    except (ConfigError, ModelFetchError, ModelLoadError) as error:
        raise ConfigError(f"{FLAG}: model: {error}") from error
    # Of headers alone a tokenizer may not have been fetched.
    if not headers_only and (model_path / TOKENIZER).is_file() and not (folder / TOKENIZER).is_file():
        raise _error(
            "model",
            source,
            f"{folder} has no {TOKENIZER} by which to tell that its tokens are the model's; if they are, "
            "copy the model's there, else choose another",
        )
    if differing is not None:
        raise _error("model", source, f"its vocabulary is another one: {differing}; choose another")
    return folder


def first_difference(model_path: Path, draft_path: Path) -> str | None:
    """Why token ids mean something else to the draft; None if they do not.

    ModelLoadError for a tokenizer.json, or a config.json where one has none, that cannot be read.
    """
    files = [folder / TOKENIZER for folder in (model_path, draft_path)]
    if not all(path.is_file() for path in files):
        # Without tokenizers, the sizes are all there is to go by.
        sizes = [read_model_config(folder).vocab_size for folder in (model_path, draft_path)]
        return None if sizes[0] == sizes[1] else f"vocab_size is {sizes[1]}, the model's {sizes[0]}"
    if files[0].read_bytes() == files[1].read_bytes():
        return None
    own, draft = (_vocabulary(path) for path in files)
    for token in own.keys() | draft.keys():
        if own.get(token) != draft.get(token):
            return f"token {token!r} has id {draft.get(token)}, in the model's {own.get(token)}"
    return None


def _vocabulary(path: Path) -> dict[str, int]:
    """Ids by token, of a tokenizer.json. ModelLoadError names what of it is none."""
    tokenizer = read_object(path)
    model = tokenizer.get("model")
    listed = model.get("vocab") if isinstance(model, dict) else None
    found: dict[str, int] = {}
    if isinstance(listed, dict):
        for token, token_id in listed.items():
            found[token] = _token_id(path, f"model.vocab[{token!r}]", token_id)
    elif isinstance(listed, list):  # as Unigram models have it: pairs of token and score
        for index, pair in enumerate(listed):
            if not isinstance(pair, list) or not pair or not isinstance(pair[0], str):
                raise _damaged(path, f"model.vocab[{index}]", pair, "want a pair of token and score")
            found[pair[0]] = index
    elif listed is not None:
        raise _damaged(path, "model.vocab", listed, "want an object or a list of tokens")
    added = tokenizer.get("added_tokens")
    if added is not None and not isinstance(added, list):
        raise _damaged(path, "added_tokens", added, "want a list of objects")
    for index, one in enumerate(added or []):
        where = f"added_tokens[{index}]"
        if not isinstance(one, dict) or not isinstance(one.get("content"), str):
            raise _damaged(path, where, one, "want an object with content and id")
        found[one["content"]] = _token_id(path, f"{where}.id", one.get("id"))
    return found


def _token_id(path: Path, field: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _damaged(path, field, value, "want an integer")
    return value


def _damaged(path: Path, field: str, value: object, wanted: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: {field}={value!r}: {wanted}; copy the model's file again")


def _error(name: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"{FLAG}: {name}={value!r}: {remedy}")
