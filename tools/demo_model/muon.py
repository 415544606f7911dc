"""The Muon optimiser for the matrices inside the layers; matrices of one shape are processed together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Moves every matrix of the batch towards the nearest orthogonal matrix (Newton-Schulz iteration)."""
    tall = update.shape[-2] > update.shape[-1]
    x = update.mT if tall else update
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix updates are orthogonalised; the learning rate has the scale of AdamW's."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        groups: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.shape, []).append(parameter)
        defaults = {"lr": lr, "momentum": momentum, "decay": decay}
        super().__init__([{"params": same} for same in groups.values()], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            same = group["params"]
            gradient = torch.stack([p.grad for p in same])
            state = self.state[same[0]]
            velocity = state.setdefault("velocity", torch.zeros_like(gradient))
            velocity.lerp_(gradient, 1 - group["momentum"])
            update = orthogonalise(gradient.lerp(velocity, group["momentum"]))
            scale = 0.2 * max(gradient.shape[-2:]) ** 0.5
            for parameter, change in zip(same, update.unbind(), strict=True):
                parameter.mul_(1 - group["lr"] * group["decay"]).add_(change, alpha=-group["lr"] * scale)
