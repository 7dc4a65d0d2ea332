"""Act-order: a checkpoint tells each input's group, a product wants groups that are contiguous."""

import torch
from torch import Tensor


def consistent_order(groups_of: Tensor, group_size: int, *, has_own_order: bool) -> Tensor | None:
    """int64 [inputs] such that groups follow each other; None where they do anyway.

    groups_of: [inputs], the group of each. has_own_order: whether the configuration says that it is one.
    ValueError says what is wrong.
    """
    inputs = len(groups_of)
    groups = inputs // group_size
    groups_of = groups_of.long()
    if bool(((groups_of < 0) | (groups_of >= groups)).any()):
        raise ValueError(f"names a group below 0 or above {groups - 1}; copy or quantize the model anew")
    if bool((torch.bincount(groups_of, minlength=groups) != group_size).any()):
        raise ValueError(
            f"does not put {group_size} inputs in each of {groups} groups; copy or quantize the model anew"
        )
    order = groups_of.argsort(stable=True)
    if bool((order == torch.arange(inputs, device=order.device)).all()):
        return None
    if not has_own_order:
        raise ValueError(
            "puts inputs in an order of its own, though the configuration says otherwise; correct desc_act"
        )
    return order
