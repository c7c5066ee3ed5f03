"""AdamW and Muon: the update with clipping and averaging, the learning-rate schedule, the state by parameter name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from unmask import kernels
from unmask.config import OptimConfig
from unmask.denoisers.network import Network
from unmask.distributed.parallel import like, local, whole
from unmask.errors import ModelFolderError, UsageError
from unmask.storage.untrusted import printable
from unmask.training.ema import Ema
from unmask.training.muon import muon_

FEW = 1 << 16  # parameters of fewer numbers are updated together


def make_optimizer(network: Network, config: OptimConfig) -> tuple[torch.optim.AdamW, list[str]]:
    """AdamW over all parameters that require a gradient, including the objective's, and their names in its order.

    Weight decay applies to matrices only. With `muon`, the parameters that the network names (`Network.matrices`) form
    a group that Muon updates.
    """
    named = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    stacked = network.matrices() if config.muon else {}
    if unknown := sorted(stacked.keys() - dict(network.named_parameters()).keys()):
        raise UsageError(f"the network names {unknown[0]} as a matrix for Muon, which is none of its parameters")
    by_muon = [(name, p) for name, p in named if name in stacked]
    matrices = [(name, p) for name, p in named if p.ndim > 1 and name not in stacked]
    others = [(name, p) for name, p in named if p.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": [p for _, p in matrices], "weight_decay": config.weight_decay},
        {"params": [p for _, p in others], "weight_decay": 0.0},
    ]
    if by_muon:
        parts = [stacked[name] for name, _ in by_muon]
        muon = {"momentum": config.momentum, "rms": config.muon_rms, "parts": parts}
        groups.append({"params": [p for _, p in by_muon], "weight_decay": config.weight_decay, **muon})
    # One kernel for all parameters, several times faster than a loop, on the CPU as well.
    optimizer = AdamWAndMuon(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return optimizer, [name for name, _ in matrices + others + by_muon]


class AdamWAndMuon(torch.optim.AdamW):
    """AdamW, with groups that have a momentum updated by Muon."""

    # torch wraps these to exclude them from compilation; the wrapper imports the compiler, which takes seconds.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    _adamw_step = inspect.unwrap(torch.optim.AdamW.step)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        try:
            self.param_groups = [group for group in groups if not is_muon(group)]
            self._adamw_step(closure)
        finally:
            self.param_groups = groups
        self.step_muon(scale=1.0, nonfinite=getattr(self, "found_inf", None))

    def step_muon(
        self,
        *,
        scale: Tensor | float,
        nonfinite: Tensor | None,
        averages: Mapping[Tensor, Tensor] | None = None,
        towards: float = 0.0,
    ) -> None:
        """Update Muon's groups with scale x their gradients, unless nonfinite is not 0.

        The averages of their parameters are moved by the fraction `towards`.
        """
        for group in filter(is_muon, self.param_groups):
            owned = [(p, parts) for p, parts in zip(group["params"], group["parts"], strict=True) if p.grad is not None]
            for p, _ in owned:
                if p not in self.state:
                    self.state[p] = {"momentum": torch.zeros_like(p)}
            muon_(
                [p for p, _ in owned],
                [p.grad for p, _ in owned],
                [self.state[p]["momentum"] for p, _ in owned],
                parts=[parts for _, parts in owned],
                scale=scale,
                nonfinite=nonfinite,
                lr=group["lr"],
                momentum=group["momentum"],
                rms=group["rms"],
                weight_decay=group["weight_decay"],
                averages=None if averages is None else [averages[p] for p, _ in owned],
                towards=towards,
            )


def is_muon(group: Mapping[str, Any]) -> bool:
    return "momentum" in group


class Updater:
    """Clips, updates and averages. A non-finite gradient changes nothing, without a device synchronisation.

    >>> layer = torch.nn.Linear(2, 1)
    >>> updater = Updater(torch.optim.AdamW(layer.parameters(), fused=True), ["weight", "bias"], ema=None, clip=1.0)
    >>> layer(torch.ones(2)).backward()
    >>> updater.update(lr=0.1, grad_norm=updater.grad_norm(), nonfinite=torch.tensor(False))
    """

    def __init__(self, optimizer: torch.optim.AdamW, names: list[str], *, ema: Ema | None, clip: float) -> None:
        self.optimizer, self.names, self.ema, self.clip = optimizer, names, ema, clip
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.adamws = [p for group in optimizer.param_groups if not is_muon(group) for p in group["params"]]
        by_muon = [owned for group, owned in _groups(optimizer, names) if is_muon(group)]
        self.muons = {name: p for owned in by_muon for name, p in owned.items()}
        self.count: int | None = None  # updates so far, read from the optimizer's state when first needed

    def grad_norm(self) -> Tensor:
        return whole(torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None]))

    @torch.no_grad()
    def update(self, *, lr: float, grad_norm: Tensor, nonfinite: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if all(p.dtype == torch.float32 and kernels.fit(p) for p in self.parameters):
            self._update_in_one_pass(grad_norm, nonfinite)
            return
        if self.clip:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip, grad_norm)
        self.optimizer.found_inf = nonfinite.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        if self.ema is not None and (nonfinite.is_cuda or not nonfinite):  # no check on a GPU, which would synchronise
            self.ema.update()

    def _update_in_one_pass(self, grad_norm: Tensor, nonfinite: Tensor) -> None:
        from unmask.kernels.adamw import adamw_

        if self.count is None:
            self.count = self._begin()
        self.count += 1
        scale = (self.clip / (grad_norm + 1e-6)).clamp(max=1.0) if self.clip else torch.ones_like(grad_norm)
        towards = 0.0 if self.ema is None else self.ema.advance()
        torch._foreach_add_([self.optimizer.state[p]["step"] for p in self.adamws], 1.0)
        for group, owned in _groups(self.optimizer, self.names):
            if is_muon(group):
                continue
            # a process's shard of a small tensor may be empty
            held = {name: p for name, p in owned.items() if p.grad is not None and local(p).numel()}
            few = {name: p for name, p in held.items() if local(p).numel() < FEW}
            self._update_few(group, few, scale, nonfinite, towards)
            for name, p in held.items():
                if name in few:
                    continue
                state = self.optimizer.state[p]
                adamw_(
                    local(p),
                    local(p.grad).contiguous(),  # type: ignore[arg-type]
                    local(state["exp_avg"]),
                    local(state["exp_avg_sq"]),
                    None if self.ema is None else local(self.ema.shadow[name]),
                    scale=scale,
                    nonfinite=nonfinite,
                    count=self.count,
                    lr=group["lr"],
                    betas=group["betas"],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                    towards=towards,
                )
        if isinstance(self.optimizer, AdamWAndMuon):
            averages = None if self.ema is None else {p: self.ema.shadow[name] for name, p in self.muons.items()}
            self.optimizer.step_muon(scale=scale, nonfinite=nonfinite, averages=averages, towards=towards)
            idle = [p for p in self.muons.values() if averages and p.grad is None]  # the average is still updated
            self._average(
                [local(averages[p]) for p in idle] if averages else [], list(map(local, idle)), nonfinite, towards
            )

    def _update_few(
        self, group: dict[str, Any], few: dict[str, Tensor], scale: Tensor, nonfinite: Tensor, towards: float
    ) -> None:
        """Update all small parameters in one launch: separate launches would cost more than the update itself."""
        if not few:
            return
        params, grads = [local(p) for p in few.values()], [local(cast(Tensor, p.grad)) for p in few.values()]
        state = [self.optimizer.state[p] for p in few.values()]
        torch._fused_adamw_(
            params,
            grads,
            [local(entry["exp_avg"]) for entry in state],
            [local(entry["exp_avg_sq"]) for entry in state],
            [],
            [entry["step"] for entry in state],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=1 / scale,
            found_inf=nonfinite.float(),
        )
        self._average([local(self.ema.shadow[name]) for name in few] if self.ema else [], params, nonfinite, towards)

    @staticmethod
    def _average(averages: list[Tensor], params: list[Tensor], nonfinite: Tensor, towards: float) -> None:
        """Move the averages by the fraction `towards` to the parameters, unless nonfinite is not 0."""
        if averages:
            ways = torch._foreach_sub(params, averages)
            torch._foreach_mul_(ways, towards * (nonfinite == 0).float())
            torch._foreach_add_(averages, ways)

    def _begin(self) -> int:
        """Create the optimizer's state if there is none yet, as torch would; return the number of updates so far."""
        for p in self.adamws:
            if p not in self.optimizer.state:
                zero = torch.zeros((), device=p.device)
                self.optimizer.state[p] = {
                    "step": zero,
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        return int(self.optimizer.state[self.adamws[0]]["step"])


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The learning rate of step `step` (from 0): linear warm-up, then constant, cosine, or warm-up–stable–decay.

    >>> learning_rate(OptimConfig(lr=1.0, warmup=10), 4, 100), learning_rate(OptimConfig(lr=1.0, warmup=0.1), 4, 100)
    (0.5, 0.5)
    """
    warmup = config.warmup if config.warmup >= 1 else config.warmup * num_steps
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    done = (step + 1 - warmup) / max(1, num_steps - warmup)
    fall = 1.0
    if config.schedule == "cosine":
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
    elif config.schedule == "wsd":
        left = (num_steps - step) / max(1.0, config.decay_fraction * num_steps)
        fall = min(1.0, left)
    return config.lr * warm * (config.min_ratio + (1 - config.min_ratio) * fall)


def flatten_optimizer(optimizer: torch.optim.Optimizer, names: list[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state by parameter name: tensors ("exp_avg/blocks.0.qkv.weight"), and the rest for JSON.

    `names` are those of the optimizer's parameters, in the order of its groups. A tensor's values are kept bit by bit.

    >>> layer = torch.nn.Linear(2, 1)
    >>> tensors, state = flatten_optimizer(torch.optim.AdamW(layer.parameters()), ["weight", "bias"])
    >>> state["groups"][0]["params"]
    ['weight', 'bias']
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group, owned in _groups(optimizer, names):
        for name, parameter in owned.items():
            entry = optimizer.state.get(parameter, {})
            tensors |= {f"{key}/{name}": v.detach() for key, v in entry.items() if isinstance(v, Tensor)}
            values[name] = {key: v for key, v in entry.items() if not isinstance(v, Tensor)}
        options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in _NOT_SAVED}
        groups.append({**options, "params": list(owned)})
    return tensors, {"groups": groups, "values": values, "tensors": sorted(tensors)}


def empty_state(optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Empty tensors for the state that `flatten_optimizer` returned, sharded like the parameters, to be read into.

    >>> layer = torch.nn.Linear(2, 1)
    >>> empty_state(torch.optim.AdamW(layer.parameters()), ["weight", "bias"], {"tensors": ["exp_avg/bias"]})
    {'exp_avg/bias': tensor([0.])}
    """
    owned = {name: p for _, group in _groups(optimizer, names) for name, p in group.items()}
    room: dict[str, Tensor] = {}
    for key in state["tensors"]:
        kind, _, name = key.partition("/")
        if name not in owned or kind not in ("step", "exp_avg", "exp_avg_sq", "momentum"):
            raise ModelFolderError(f"the saved optimizer has other parameters or groups: {printable(key)}")
        room[key] = torch.zeros(()) if kind == "step" else torch.zeros_like(owned[name], requires_grad=False)
    return room


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> None:
    """Restore the state that `flatten_optimizer` returned, in an optimizer for parameters of the same names.

    >>> layer = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    >>> restore_optimizer(optimizer, ["weight", "bias"], *flatten_optimizer(optimizer, ["weight", "bias"]))
    """
    groups, saved = _groups(optimizer, names), state["groups"]
    if [list(owned) for _, owned in groups] != [group["params"] for group in saved]:
        odd = sorted(set(names).symmetric_difference(name for group in saved for name in group["params"]))
        raise ModelFolderError(
            f"the saved optimizer has other parameters or groups: {odd[0] if odd else 'their order'}"
        )
    if odd := sorted(set(state["tensors"]).symmetric_difference(tensors)):
        raise ModelFolderError(f"the saved optimizer state is not whole: {odd[0]} is missing or unexpected")
    fresh: dict[Tensor, dict[str, Any]] = {}
    for group, owned in groups:
        # torch keeps the step count on the CPU unless the whole update runs on the device
        on_device = group.get("fused") or group.get("capturable")
        for name, parameter in owned.items():
            entry = dict(state["values"][name])
            for key in [key for key in tensors if key.partition("/")[2] == name]:
                value, kind = tensors[key], key.partition("/")[0]
                wanted = torch.Size() if kind == "step" else parameter.shape
                if value.shape != wanted:
                    shapes = f"{tuple(value.shape)}, not {tuple(wanted)}"
                    raise ModelFolderError(f"the saved optimizer state {key} has shape {shapes}")
                if kind == "step":
                    entry[kind] = value.detach().clone().to(parameter.device if on_device else "cpu")
                else:
                    # a tensor that is sharded already was read for this parameter
                    entry[kind] = like(value if hasattr(value, "to_local") else value.detach().clone(), parameter)
            if entry:
                fresh[parameter] = entry
    for (group, _), options in zip(groups, saved, strict=True):
        group.update({k: _like(group.get(k), v) for k, v in options.items() if k not in _NOT_SAVED})
    optimizer.state.clear()
    optimizer.state.update(fresh)


# Keys of a group that are not hyper-parameters; how an update is computed depends on the current device.
_NOT_SAVED = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")


def _groups(optimizer: torch.optim.Optimizer, names: list[str]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Every group with its parameters by name."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count != len(names) or len(set(names)) != len(names):
        raise UsageError(f"the optimizer has {count} parameters; give each a name of its own, got {len(names)}")
    rest = iter(names)
    return [(group, {next(rest): parameter for parameter in group["params"]}) for group in optimizer.param_groups]


def _like(current: Any, value: Any) -> Any:
    """A value from JSON, converted to the type of the optimizer's current value."""
    if isinstance(current, tuple):
        if not isinstance(value, list | tuple) or len(value) != len(current):
            raise ModelFolderError(f"the saved optimizer has {str(value)[:40]!r} in place of {current}")
        return tuple(_like(c, v) for c, v in zip(current, value, strict=True))
    if isinstance(current, int | float | Tensor) and not isinstance(value, int | float):
        raise ModelFolderError(f"the saved optimizer has {str(value)[:40]!r} in place of a number")
    return torch.tensor(value, dtype=current.dtype, device=current.device) if isinstance(current, Tensor) else value
