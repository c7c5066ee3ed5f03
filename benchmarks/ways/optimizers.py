"""Other updates: a rate of its own for the embedding, Muon with rows of one size, an average without a ramp."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from unmask.config import OptimConfig
from unmask.denoisers.network import Network
from unmask.training.ema import Ema
from unmask.training.muon import orthogonal
from unmask.training.optim import AdamWAndMuon, Updater, is_muon, make_optimizer

MakeUpdater = Callable[[Network, OptimConfig], Updater]


def plain_updater(network: Network, config: OptimConfig) -> Updater:
    """What `unmask train` uses."""
    optimizer, names = make_optimizer(network, config)
    return Updater(optimizer, names, ema=Ema(network, config.ema), clip=config.clip)


# --- the average ------------------------------------------------------------------------------------------------------


class FlatEma(Ema):
    """The same decay from the first step on; the plain one's ramp holds it below (1 + n) / (10 + n)."""

    def advance(self) -> float:
        self.num_updates += 1
        return 1 - self.decay


def flat_ema_updater(network: Network, config: OptimConfig) -> Updater:
    optimizer, names = make_optimizer(network, config)
    return Updater(optimizer, names, ema=FlatEma(network, config.ema), clip=config.clip)


# --- rates ------------------------------------------------------------------------------------------------------------


class RatedUpdater(Updater):
    """Every group's rate is the schedule's times the group's own `rate`; in torch's kernels on all devices."""

    @torch.no_grad()
    def update(self, *, lr: float, grad_norm: Tensor, nonfinite: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("rate", 1.0)
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, grad_norm)
        self.optimizer.found_inf = nonfinite.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        assert self.ema is not None
        self.ema.update()


def embedding_rate(rate: float) -> MakeUpdater:
    """The embedding (and the head, where it is the same) learns at a multiple of the rate."""

    def make(network: Network, config: OptimConfig) -> Updater:
        optimizer, names = make_optimizer(network, config)
        first, *rest = optimizer.param_groups
        owned = dict(zip(names, first["params"], strict=False))
        embedding = owned.pop("embed.weight")
        alone = {**first, "params": [embedding], "rate": rate}
        groups = [alone, {**first, "params": list(owned.values())}, *rest]
        names = ["embed.weight", *(name for name in names if name != "embed.weight")]
        made = AdamWAndMuon([group for group in groups if group["params"]], lr=config.lr, fused=True)
        return RatedUpdater(made, names, ema=Ema(network, config.ema), clip=config.clip)

    return make


# --- Muon with rows of one size ---------------------------------------------------------------------------------------


class NorMuon(AdamWAndMuon):
    """Muon, each row of the orthogonal update divided by the root of a running mean of its square (NorMuon)."""

    beta2 = 0.95

    @torch.no_grad()
    def step_muon(self, *, averages: Mapping[Tensor, Tensor] | None = None, towards: float = 0.0, **how: Any) -> None:
        for group in filter(is_muon, self.param_groups):
            by_shape: dict[tuple[int, int], list[tuple[Tensor, int]]] = {}
            for p, parts in zip(group["params"], group["parts"], strict=True):
                by_shape.setdefault((p.shape[0] // parts, p.shape[1]), []).append((p, parts))
            for shape, members in by_shape.items():
                self._step_shape(group, shape, members, **how)
        for p, average in (averages or {}).items():
            average.lerp_(p, towards)

    def _step_shape(
        self,
        group: dict[str, Any],
        shape: tuple[int, int],
        members: list[tuple[Tensor, int]],
        scale: Tensor | float,
        nonfinite: Tensor | None,
    ) -> None:
        R, C = shape
        keep, params, sizes = group["momentum"], [p for p, _ in members], [parts for _, parts in members]
        fine = 1.0 if nonfinite is None else (nonfinite == 0).float()
        for p in params:
            if p not in self.state:
                self.state[p] = {"momentum": torch.zeros_like(p), "row_square": torch.zeros_like(p[:, :1])}
        scaled = torch._foreach_mul([p.grad for p in params if p.grad is not None], scale)
        grads = [torch.nan_to_num(grad) for grad in scaled]
        momenta = [self.state[p]["momentum"] for p in params]
        torch._foreach_lerp_(momenta, grads, 1 - keep)
        ahead = torch._foreach_lerp(grads, momenta, keep)
        ortho_NRC = orthogonal(torch.cat([x.view(n, R, C) for x, n in zip(ahead, sizes, strict=True)]))
        for p, update in zip(params, torch.split(ortho_NRC, sizes), strict=True):
            rows = self.state[p]["row_square"].view(*update.shape[:2], 1)
            rows.lerp_(update.square().mean(dim=2, keepdim=True), 1 - self.beta2)
            even = update / (rows.sqrt() + 1e-8)
            # where nothing moves yet, as before a block's zero output has a gradient, nothing is divided by zero
            even *= group["rms"] * (R * C) ** 0.5 / (even.norm(dim=(1, 2), keepdim=True) + 1e-8)
            p.mul_(1 - fine * group["lr"] * group["weight_decay"])
            p.sub_(fine * group["lr"] * even.view_as(p))


def normuon_updater(network: Network, config: OptimConfig) -> Updater:
    optimizer, names = make_optimizer(network, config)
    made = NorMuon(optimizer.param_groups, lr=config.lr, fused=True)
    return Updater(made, names, ema=Ema(network, config.ema), clip=config.clip)
