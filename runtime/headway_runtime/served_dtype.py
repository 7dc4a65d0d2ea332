"""The dtype that a model is computed in: the user's word; for "auto" the checkpoint's, unless that is slow.

Checkpoints of 4-bit weights mostly say float16, which GPUs had first. A CPU's products that read codes as
they lie take bfloat16 alone; in float16 each step would turn all weights into plain numbers first, which is
slower than weights that are plain. So "auto" is bfloat16 then. Imports no torch.
"""

import logging
from typing import cast

from headway_runtime.fit.placement import this_processor
from headway_runtime.model_config import StoredDtype
from headway_runtime.quantization.choice import Quantization

logger = logging.getLogger(__name__)


def served_dtype(
    wanted: str, stored: StoredDtype, quantization: Quantization, *, is_cpu: bool
) -> StoredDtype:
    """wanted: one of `config.Dtype`. stored: what the checkpoint says."""
    if wanted != "auto":
        return cast("StoredDtype", wanted)
    return "bfloat16" if _lacks_products(stored, quantization, is_cpu=is_cpu) else stored


def log_choice(wanted: str, stored: StoredDtype, quantization: Quantization, *, is_cpu: bool) -> None:
    """A line where "auto" is not the checkpoint's dtype, and a warning where the user's is a slow one."""
    served = served_dtype(wanted, stored, quantization, is_cpu=is_cpu)
    if wanted == "auto" and served != stored:
        logger.info(
            "dtype auto: %s, though the checkpoint says %s: this CPU's products of quantized weights take %s",
            *(served, stored, served),
        )
    elif _lacks_products(served, quantization, is_cpu=is_cpu):
        logger.warning(
            "--dtype %s is slow here: this CPU's products of quantized weights (%s) take bfloat16, so each "
            "step turns all weights into plain numbers first; leave the flag out, or use --dtype bfloat16",
            *(served, quantization.name),
        )


def _lacks_products(dtype: StoredDtype, quantization: Quantization, *, is_cpu: bool) -> bool:
    """Whether quantized weights of that dtype do without products of codes that this CPU has."""
    if not is_cpu or dtype != "float16" or quantization.name == "none":
        return False
    return this_processor("bfloat16", num_threads=1).has_strips
