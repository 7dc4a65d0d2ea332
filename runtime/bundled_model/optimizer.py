"""The optimizer: Muon for weight matrices, Adam for embeddings and norms.

Muon (Keller Jordan, 2024) replaces the momentum of a matrix by its nearest orthogonal matrix, found
by a quintic Newton-Schulz iteration; small models reach a given loss in about half of Adam's steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bundled_model.precision import training_dtype

NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(gradient: Tensor, steps: int = 5) -> Tensor:
    """The gradient [rows, columns] with its singular values pushed near one."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = gradient.to(training_dtype())
    is_tall = x.shape[0] > x.shape[1]
    if is_tall:
        x = x.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    update: Tensor = x.T if is_tall else x
    return update.float()


class Muon:
    """Momentum, orthogonalized per matrix; `step` takes the learning rate of the moment."""

    def __init__(self, matrices: Iterable[nn.Parameter], momentum: float = 0.95) -> None:
        self.matrices = list(matrices)
        self.momentum = momentum
        self.buffers = [torch.zeros_like(matrix) for matrix in self.matrices]

    @torch.no_grad()
    def step(self, learning_rate: float, weight_decay: float) -> None:
        for matrix, buffer in zip(self.matrices, self.buffers, strict=True):
            if matrix.grad is None:
                continue
            buffer.lerp_(matrix.grad, 1 - self.momentum)
            update = orthogonalized(matrix.grad.lerp(buffer, self.momentum))
            scale = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
            matrix.mul_(1 - learning_rate * weight_decay)
            matrix.add_(update, alpha=-learning_rate * scale)


class TwoOptimizers:
    """Muon on the layers' matrices and Adam on all the rest, stepped together."""

    def __init__(self, network: nn.Module, muon_rate: float, adam_rate: float) -> None:
        named = list(network.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        others = [p for name, p in named if p.ndim != 2 or "embed" in name]
        self.muon_rate = muon_rate
        self.adam_rate = adam_rate
        self.muon = Muon(matrices)
        self.adam = torch.optim.Adam(others, lr=adam_rate, betas=(0.9, 0.98), eps=1e-10)

    def step(self, factor: float) -> None:
        """One update with both base rates multiplied by `factor`, then gradients are dropped."""
        self.muon.step(self.muon_rate * factor, weight_decay=0.05)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        for parameter in self.muon.matrices:
            parameter.grad = None
        self.adam.zero_grad(set_to_none=True)
