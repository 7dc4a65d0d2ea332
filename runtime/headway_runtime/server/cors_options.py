"""The flags that say which web pages may use the server from a browser; names and defaults as in vLLM."""

import argparse
import json
from dataclasses import dataclass

ANY = ("*",)


@dataclass(frozen=True, slots=True)
class CorsOptions:
    """See the flags of the same names. No origins: no page of another origin may read an answer."""

    allowed_origins: tuple[str, ...] = ANY
    allowed_methods: tuple[str, ...] = ANY
    allowed_headers: tuple[str, ...] = ANY
    allow_credentials: bool = False


def add_cors_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add = parser.add_argument
    for name, what in (
        ("origins", "whose pages may use this server from a browser; [] for none"),
        ("methods", "they may use"),
        ("headers", "they may send"),
    ):
        add(
            f"--allowed-{name}",
            type=_names,
            default=ANY,
            metavar="LIST",
            help=f'{name} {what}: a name or a JSON list (default ["*"])',
        )
    add("--allow-credentials", action="store_true", help="let those pages send cookies, too")


def cors_options(arguments: argparse.Namespace) -> CorsOptions:
    """What was asked for."""
    return CorsOptions(
        allowed_origins=arguments.allowed_origins,
        allowed_methods=arguments.allowed_methods,
        allowed_headers=arguments.allowed_headers,
        allow_credentials=arguments.allow_credentials,
    )


def _names(text: str) -> tuple[str, ...]:
    """A JSON list of names, or one name as it is."""
    if not text.startswith("["):
        return (text,)
    try:
        names = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f'{text!r} is not JSON ({error}); write e.g. ["*"]') from None
    if not all(isinstance(name, str) and name for name in names):
        raise argparse.ArgumentTypeError(f'{text!r} has something else than names; write e.g. ["*"]')
    return tuple(names)
