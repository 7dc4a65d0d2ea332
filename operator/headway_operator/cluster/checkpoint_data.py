"""A checkpoint as a ConfigMap holds it: JSON that people can read, compressed where it is long.

Nothing of more than 1 MiB is accepted by the API server; a service of 1,000 replicas has some 2 MiB of JSON,
a tenth of that compressed. Pure.
"""

import base64
import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

MEMORY_FILE, COMPRESSED_FILE = "memory.json", "memory.json.gz"
# In bytes. Others share the ConfigMap.
LONGEST_PLAIN = 256 * 1024
LEVEL = 3


def data_of(memory: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """`data` or `binaryData`, with the memory in it."""
    text = json.dumps(memory, separators=(",", ":"))
    if len(text) <= LONGEST_PLAIN:
        return {"data": {MEMORY_FILE: text}}
    packed = gzip.compress(text.encode(), compresslevel=LEVEL, mtime=0)
    return {"binaryData": {COMPRESSED_FILE: base64.b64encode(packed).decode()}}


def memory_in(config_map: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What `data_of` put in; None where there is nothing. Raises ValueError for what it did not write."""
    packed = (config_map.get("binaryData") or {}).get(COMPRESSED_FILE)
    text = (config_map.get("data") or {}).get(MEMORY_FILE, "null")
    try:
        memory = json.loads(text if packed is None else gzip.decompress(base64.b64decode(packed)))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(str(error)) from error
    return memory if isinstance(memory, dict) else None
