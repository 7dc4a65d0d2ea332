"""Text to token ids and one token id to its text, for the tokenizer of one model folder.

Wraps the `tokenizers` library (no transformers, no torch) and reads the special tokens that
`tokenizer_config.json` names. Knows nothing of chat templates, streams or requests.

A token's *piece* is what it adds to the output, whatever came before it: raw bytes, for vocabularies that
spell text in bytes, or text. `Vocabulary` finds it out of the decoder that `tokenizer.json` declares, so
that a stream can be decoded one token at a time in constant time; a decoder whose pieces depend on their
neighbours is refused when the server starts.
"""

import functools
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tokenizers

from headway_runtime.errors import ConfigError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
Piece = bytes | str


def read_json_file(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file, {} where there is no such file. ConfigError if it is not one."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read as JSON ({error}); fetch the model's files again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no JSON object; fetch the model's files again")
    return value


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """How the declared decoder turns tokens into text.

    kind: "bytes" for byte-level vocabularies, "text" for those with `space_mark` for a space.
    has_byte_tokens: whether tokens such as <0xE2> stand for one raw byte.
    """

    kind: Literal["bytes", "text"]
    space_mark: str = ""
    has_byte_tokens: bool = False


def read_decoder_shape(decoder: Mapping[str, Any] | None) -> DecoderShape:
    """Understand tokenizer.json's `decoder`. ConfigError, naming its type, for one not supported."""
    if decoder is None:
        raise ConfigError("tokenizer.json: decoder is null; declare how tokens become text, e.g. ByteLevel")
    steps = decoder.get("decoders", [decoder])
    space_mark, has_byte_tokens = "", False
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if len(steps) == 1:
                return DecoderShape("bytes")
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "}:
                space_mark = mark
            case {"type": "Metaspace", "replacement": str(mark)}:
                space_mark = mark
            case {"type": "ByteFallback"}:
                has_byte_tokens = True
            # Fuse joins; Strip takes the space off the very start of a text, and a generated text never is
            # at the start: its prompt is.
            case {"type": "Fuse"} | {"type": "Strip", "stop": 0}:
                pass
            case _:
                raise ConfigError(
                    f"tokenizer.json: decoder {step.get('type')!r} is not supported; supported are "
                    "ByteLevel, and sequences of Replace, Metaspace, ByteFallback, Fuse and Strip"
                )
    return DecoderShape("text", space_mark, has_byte_tokens)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, the rest for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()


class Vocabulary:
    """The piece of every token id, worked out when first asked for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self._shape = read_decoder_shape(None if decoder is None else json.loads(decoder.__getstate__()))
        self._nothing: Piece = b"" if self._shape.kind == "bytes" else ""
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._pieces: dict[int, Piece] = {}

    @property
    def is_byte_level(self) -> bool:
        """Whether every piece is bytes of one UTF-8 text."""
        return self._shape.kind == "bytes"

    def piece(self, token_id: int) -> Piece:
        """What `token_id` adds to a text: nothing for special tokens and for ids without a token."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._nothing if token_id in self._special_ids else self._spell(token_id)
            self._pieces[token_id] = found
        return found

    def piece_or_name(self, token_id: int) -> Piece:
        """The same, but special tokens add their name."""
        return self._spell(token_id) if token_id in self._special_ids else self.piece(token_id)

    def piece_or_name_of(self, shown: Collection[int], token_id: int) -> Piece:
        """The same, but only special tokens that are `shown` add their name."""
        return self._spell(token_id) if token_id in shown else self.piece(token_id)

    def special_ids_of(self, names: Collection[str]) -> frozenset[int]:
        """The special tokens among those of these names."""
        found = [self._tokenizer.token_to_id(name) for name in names]
        return self._special_ids.intersection(token_id for token_id in found if token_id is not None)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, special tokens by their name."""
        piece = self.piece_or_name(token_id)
        return piece if isinstance(piece, bytes) else piece.encode()

    def _spell(self, token_id: int) -> Piece:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return self._nothing
        if self._shape.kind == "bytes":
            try:
                return bytes([_BYTE_OF_CHARACTER[character] for character in token])
            except KeyError:
                return token.encode()
        if (
            self._shape.has_byte_tokens
            and len(token) == 6
            and token.startswith("<0x")
            and token.endswith(">")
        ):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        return token.replace(self._shape.space_mark, " ") if self._shape.space_mark else token


class Tokenizer:
    """Encodes prompts and spells tokens of one model folder. Safe to call from several threads."""

    def __init__(self, model_path: Path) -> None:
        path = model_path / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError(
                f"{path}: not a readable tokenizer ({error}); give a folder that holds one"
            ) from error
        # A tokenizer.json may ask for truncation or padding; a prompt must arrive as it was sent.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = read_json_file(model_path / "tokenizer_config.json")
        self.vocabulary = Vocabulary(self._tokenizer)
        self.special_tokens = self._read_special_tokens()
        self.eos_token_ids = self._read_eos_token_ids(model_path)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; with special tokens, the model's own beginning-of-sequence goes first."""
        # A batch of one: for a batch, the library lets other threads run while it works. A text of 100,000
        # characters takes it a tenth of a second, in which no stream would move.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def fewest_tokens(self, text: str) -> int:
        """Tokens that `text` has at least, by its length: none spells more than the longest one.

        Encoding megabytes takes seconds of computing, which a prompt that can never fit is not worth.
        """
        return len(text) // self._longest_spelling

    @functools.cached_property
    def _longest_spelling(self) -> int:
        """Characters of a text that one token can take up, at most."""
        if any(token.lstrip or token.rstrip for token in self._tokenizer.get_added_tokens_decoder().values()):
            return sys.maxsize  # such a token swallows any number of spaces
        longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))
        # Normal forms may join a few characters into one before they are encoded.
        return longest if self._tokenizer.normalizer is None else 4 * longest

    def token_offsets(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Where in `text` each of its tokens begins, in characters.

        Tokens that the tokenizer has added itself begin where the one before has ended.
        """
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
        offsets: list[int] = []
        end_before = 0
        for (start, end), is_added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            if is_added and start == end == 0:
                offsets.append(end_before)
                continue
            # Some tokenizers leave a token's own spaces out of its place. Tokens of one character share it.
            offsets.append(min(start, end_before))
            end_before = end
        return offsets

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The library's own text of `token_ids`."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_string(self, token_id: int) -> str:
        """How the vocabulary itself writes a token; empty for an id without one."""
        return self._tokenizer.id_to_token(token_id) or ""

    @property
    def size(self) -> int:
        """How many token ids have a token."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def _read_special_tokens(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in SPECIAL_TOKEN_NAMES:
            value = self.config.get(name)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                found[name] = value
        return found

    def _read_eos_token_ids(self, model_path: Path) -> frozenset[int]:
        """Every end-of-sequence id: generation_config.json's and config.json's, and the tokenizer's own."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = read_json_file(model_path / name).get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            found.update(token_id for token_id in values if isinstance(token_id, int))
        eos_token = self.special_tokens.get("eos_token")
        if eos_token is not None and (token_id := self._tokenizer.token_to_id(eos_token)) is not None:
            found.add(token_id)
        return frozenset(found)
