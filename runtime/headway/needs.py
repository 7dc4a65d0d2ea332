"""Which modules a command needs besides Headway's own, and what to install where one is not there.

A server is several processes that import what they need at different times; looked for first, what is missing
is told in one line and before anything has been started. `tests/contract/test_extras.py` computes the tables.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

# Of the HTTP processes, the engine and the process that fetches; of the gateway.
NEEDED_MODULES: Mapping[str, tuple[str, ...]] = {
    "serve": (
        "botocore",
        "cryptography",
        "fastapi",
        "httptools",
        "httpx2",
        "huggingface_hub",
        "jinja2",
        "jwt",
        "llguidance",
        "msgspec",
        "numpy",
        "prometheus_client",
        "pydantic",
        "safetensors",
        "starlette",
        "tokenizers",
        "torch",
        "tqdm",
        "urllib3",
        "uvicorn",
        "uvloop",
        "zmq",
        "zstandard",
    ),
    "gateway": (
        "aiohttp",
        "cryptography",
        "jwt",
        "kubernetes",
        "multidict",
        "prometheus_client",
        "yarl",
    ),
}


def missing_modules(command: str) -> list[str]:
    """Those that `command` would miss, without importing anything."""
    return [name for name in NEEDED_MODULES.get(command, ()) if find_spec(name) is None]


def told(names: Sequence[str], extras: str) -> str:
    """What a command that misses `names` says of them."""
    listed = ", ".join(map(repr, names))
    which = "which is" if len(names) == 1 else "which are"
    return f"needs {listed}, {which} not installed; remedy: pip install -e '.[{extras}]' in the checkout"
