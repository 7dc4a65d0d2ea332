"""What a checkpoint says of its KV cache (`kv_cache_scheme`), which `--kv-cache-dtype auto` follows.

Only the type is taken. A cache here finds a scale for each token and head as it stores them, which is finer
than one that was found for a whole layer in advance; those of the checkpoint are not needed.
"""

from pathlib import Path

from headway_runtime.config import KVCacheDtype
from headway_runtime.model_config_fields import read_object
from headway_runtime.quantization.choice import CONFIG_FIELDS
from headway_runtime.quantization.fields import Fields

REMEDY = "keep keys and values in a type that you choose by --kv-cache-dtype, or quantize the model anew"
# By what `type` says of 8 bits, which is "int" where it says nothing.
DTYPES: dict[str, KVCacheDtype] = {"float": "fp8_e4m3", "int": "int8"}
# What shares a scale. What is stored coarser or finer than here is kept by token and head all the same.
STRATEGIES = ("tensor", "channel", "token", "attn_head")


def chosen_kv_cache_dtype(wanted: KVCacheDtype, folder: Path) -> KVCacheDtype:
    """`wanted`, or for "auto" what the checkpoint in `folder` asks for.

    "auto" where it says nothing, or is not asked ("plain"): as the model computes.

    ModelLoadError for a scheme that is none of those that a cache can have.
    """
    if wanted == "plain":
        return "auto"
    if wanted != "auto":
        return wanted
    config = read_object(folder / "config.json")
    for name in CONFIG_FIELDS:
        values = config.get(name)
        if isinstance(values, dict):
            scheme = Fields(values, f"config.json: {name}").object("kv_cache_scheme")
            return "auto" if scheme is None else _dtype(scheme)
    return "auto"


def _dtype(scheme: Fields) -> KVCacheDtype:
    if scheme.get("num_bits", 8) != 8:
        raise scheme.error("num_bits", f"keys and values are kept in 8 bits or plain; {REMEDY}")
    kind = str(scheme.get("type", "int")).lower()
    if kind not in DTYPES:
        raise scheme.error("type", f"supported: {', '.join(map(repr, DTYPES))}; {REMEDY}")
    if scheme.get("symmetric", True) is not True:
        raise scheme.error("symmetric", f"keys and values have no zero points here; {REMEDY}")
    if scheme.get("strategy", "tensor") not in STRATEGIES:
        raise scheme.error("strategy", f"supported: {', '.join(map(repr, STRATEGIES))}; {REMEDY}")
    return DTYPES[kind]
