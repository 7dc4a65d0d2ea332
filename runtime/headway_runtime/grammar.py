"""A request's grammar in the words of llguidance, the library that compiles and follows grammars.

Imports nothing heavy: llguidance itself only when the first grammar comes. Knows no tokens; see
`grammar_compiler.py` for what a model's vocabulary is needed for. What the library does with a text from
outside may take for ever, or all memory: only a process that is watched may let it (`grammar_trial.py`).

- JSON may have white space between its parts as those have it who write JSON for people: one space, or one
  line break and an indentation. A model that falls into a loop of spaces comes out of it again.
- A schema whose own options say `"whitespace_flexible": false` gets COMPACT_JSON: no white space but that of
  the separators, so that no token is spent on it.
- A list of choices becomes one regular expression, which costs a tenth of as many alternatives of a grammar.
- `ebnf` is GBNF as llama.cpp has it; a text in Lark's syntax is taken for that, as other servers do.
"""

import json
import re
from typing import Any

from headway_runtime.request import Grammar

MAX_INDENTATION = 32
# Longer texts are refused; compiling takes memory in proportion.
MAX_SOURCE_CHARACTERS = 1 << 20
MAX_MESSAGE_CHARACTERS = 1000
# The library's options of a schema, under this keyword of it.
OPTIONS_KEYWORD = "x-guidance"
READABLE_JSON: Any = {"whitespace_pattern": rf"\x20|\r?\n[\x20\t]{{0,{MAX_INDENTATION}}}"}
# As Python writes it, and with it most chat templates and what models were trained on.
COMPACT_JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# A first rule that says how its tree looks, which the converter does not know for Lark's.
_SHAPED_START = re.compile(r"^\s*[?!]{1,2}start\s*:", re.MULTILINE)
_REGEX_SYMBOLS = frozenset("\\.+*?()|[]{}^$#&-~/")


class GrammarError(ValueError):
    """A grammar that cannot be compiled; the message is for the client. part: index of the one at fault."""

    def __init__(self, message: str, part: int | None = None) -> None:
        super().__init__(message)
        self.part = part


def faulty_part(grammar: Grammar) -> tuple[int, str] | None:
    """The first part that is at fault, and why; None if each alone may be right.

    May take for ever: some schemas of a few bytes do.
    """
    from llguidance import LLMatcher

    for index, part in enumerate(grammar.parts):
        try:
            text = library_text(Grammar("json_schema", part.source))
        except GrammarError as error:
            return index, str(error)
        # The library warns in the same way as it fails; a warning is no reason to refuse.
        is_error, complaints = LLMatcher.validate_grammar_with_warnings(text)
        if is_error:
            return index, shorten(complaints[0])
    return None


def library_text(grammar: Grammar) -> str:
    """The grammar as llguidance reads it. GrammarError if it is not even a text of its kind."""
    from llguidance import LLMatcher

    if len(grammar.source) > MAX_SOURCE_CHARACTERS:
        raise GrammarError(_too_long(grammar))
    match grammar.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=READABLE_JSON)
        case "json_schema":
            return _from_schema(grammar.source)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            return LLMatcher.grammar_from_regex("|".join(map(_escape, _choices(grammar.source))))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.source)
        case "ebnf":
            return LLMatcher.grammar_from_lark(_lark_of(grammar.source))


def shorten(message: str) -> str:
    """A library's message, not longer than anybody reads."""
    message = message.strip()
    return message if len(message) <= MAX_MESSAGE_CHARACTERS else message[:MAX_MESSAGE_CHARACTERS] + " ..."


def _from_schema(source: str) -> str:
    from llguidance import LLMatcher

    try:
        schema = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON ({error}); send an object") from None
    if schema is True:
        schema, source = {}, "{}"
    if not isinstance(schema, dict):
        # false is a schema by the standard, but nothing matches it.
        raise GrammarError(f"the JSON schema is {schema!r:.40}, not an object; send an object")
    own = schema.get(OPTIONS_KEYWORD)
    if isinstance(own, dict) and own.get("whitespace_flexible") is False:
        return LLMatcher.grammar_from_json_schema(source, defaults=COMPACT_JSON)
    return LLMatcher.grammar_from_json_schema(source, overrides=READABLE_JSON)


def _choices(source: str) -> list[str]:
    try:
        choices = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the choices are not JSON ({error}); send a list of texts") from None
    if not (isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices)):
        raise GrammarError("the choices are not a list of at least one text; send one")
    return choices


def _escape(text: str) -> str:
    """A regular expression that matches `text` alone."""
    return "".join(f"\\x{{{ord(one):x}}}" if ord(one) < 32 else _escape_symbol(one) for one in text)


def _escape_symbol(character: str) -> str:
    return "\\" + character if character in _REGEX_SYMBOLS else character


def _lark_of(source: str) -> str:
    if _SHAPED_START.search(source):
        return source
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(source)
    except Exception as error:
        # The converter raises bare exceptions, and those of its bugs.
        raise GrammarError(f"the grammar is neither GBNF nor Lark: {shorten(str(error))}") from error


def _too_long(grammar: Grammar) -> str:
    num_characters = len(grammar.source)
    return f"the grammar has {num_characters} characters, more than {MAX_SOURCE_CHARACTERS}; shorten it"
