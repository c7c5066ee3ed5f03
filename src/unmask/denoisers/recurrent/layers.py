"""What recurrent and convolutional denoisers share: residual blocks, what conditions them, their trunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unmask.denoisers.dit.embedding import Embedding
from unmask.denoisers.dit.lines import Lines
from unmask.denoisers.dit.time import TimeEmbedding, signal_of
from unmask.denoisers.flat_rows import gather_positions, take_rows
from unmask.denoisers.network import Attend, LinearHead, Network, attending, check_labels, level_column, refuse_options
from unmask.errors import UsageError

Conditioning = Literal["none", "level", "sigma"]


class RMSNorm(nn.Module):
    """x / rms(x) x weight."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


class Branch(nn.Module):
    """x + gate x layer(norm(x)); shift, scale and gate by adaLN where there is conditioning."""

    def __init__(self, norm: nn.Module, layer: nn.Module, hidden: int, cond_dim: int) -> None:
        super().__init__()
        self.norm, self.layer = norm, layer
        self.modulation = nn.Linear(cond_dim, 3 * hidden) if cond_dim else None

    def forward(self, x_BLD: Tensor, c: Tensor | None, valid_BL: Tensor | None) -> Tensor:
        return self.around(x_BLD, c, lambda h_BLD: self.layer(h_BLD, valid_BL))

    def around(self, x: Tensor, c: Tensor | None, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """The branch with another way through its layer, such as that of one step."""
        if self.modulation is None or c is None:
            return x + layer(self.norm(x))
        shift, scale, gate = Lines().spread(self.modulation(c)).chunk(3, dim=-1)
        return x + gate * layer(torch.addcmul(shift, self.norm(x), 1 + scale))


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)

    def forward(self, h_BLD: Tensor, valid_BL: Tensor | None) -> Tensor:
        return cast(Tensor, self.mlp_out(F.gelu(self.mlp_in(h_BLD), approximate="tanh")))


class Block(nn.Module):
    """Branches one after another."""

    def __init__(self, *branches: Branch) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x_BLD: Tensor, c: Tensor | None, valid_BL: Tensor | None) -> Tensor:
        for branch in self.branches:
            x_BLD = branch(x_BLD, c, valid_BL)
        return x_BLD


class Sizes(NamedTuple):
    """What a layered network is told of itself."""

    num_ids: int
    mask_id: int
    hidden: int
    tied: bool
    conditioning: Conditioning = "none"
    cond_dim: int = 128
    classes: int = 0
    label_dropout: float = 0.0
    begin: int | None = None


def check_sizes(*, conditioning: str, cond_dim: int, classes: int, label_dropout: float, **sizes: int) -> None:
    """Refuse a description that no network can have.

    >>> check_sizes(conditioning="none", cond_dim=128, classes=0, label_dropout=0.1, hidden=0)
    Traceback (most recent call last):
    unmask.errors.UsageError: hidden must be at least 1, got 0
    """
    for name, value in {**sizes, "cond_dim": cond_dim}.items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if classes < 0 or not 0 <= label_dropout < 1:
        raise UsageError(f"classes must be 0 or more and label_dropout in [0, 1), got {classes} and {label_dropout}")


def check_begin(begin: int | None, num_ids: int) -> int | None:
    """Refuse a beginning that is no id."""
    if begin is not None and not 0 <= begin < num_ids:
        raise UsageError(f"begin must be an id below {num_ids}, or none for the mask; got {begin}")
    return begin


class Layered(Network):
    """Embedding, blocks without attention, norm and head."""

    attends = False
    embed: Embedding

    def __init__(self, name: str, sizes: Sizes, blocks: list[Block], norm: nn.Module) -> None:
        super().__init__()
        self.name, self.num_ids, self.mask_id, self.width = name, sizes.num_ids, sizes.mask_id, sizes.hidden
        self.begin = sizes.mask_id if sizes.begin is None else sizes.begin
        self.conditioning, self.uses_level = sizes.conditioning, sizes.conditioning != "none"
        self.num_classes, self.label_dropout = sizes.classes, sizes.label_dropout
        self.embed = Embedding(sizes.num_ids, sizes.hidden)
        self.time = TimeEmbedding(sizes.cond_dim) if self.uses_level else None
        self.label = nn.Embedding(sizes.classes + 1, sizes.cond_dim) if sizes.classes else None  # the last: no class
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.output = nn.Linear(sizes.hidden, sizes.num_ids, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.zeros_(self.output.weight)  # at first the uniform law
        for part, p in self.named_parameters():
            if "modulation" in part:
                nn.init.zeros_(p)  # at first every block is the identity
        if sizes.tied:
            self.output.weight = self.embed.weight

    def trunk(
        self,
        z: Tensor,
        level: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        positions_BL: Tensor | None = None,
        cond: Tensor | None = None,
        cache: Any = None,
        span: tuple[int, int] | None = None,
        at_BK: Tensor | None = None,
    ) -> Tensor:
        refuse_options(self.name, positions_BL=positions_BL, cache=cache, span=span)
        h_BLD = self.read(z, level, self.seen(attend, valid_BL), cond)
        return self.final(h_BLD if at_BK is None else gather_positions(h_BLD, at_BK))

    def trunk_at(
        self,
        z: Tensor,
        level: Tensor | None,
        flat_N: Tensor,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        h_BLD = self.read(z, level, self.seen(attend, valid_BL), cond)
        return self.final(take_rows(h_BLD.flatten(0, 1), flat_N))

    def seen(self, attend: Attend | None, valid_BL: Tensor | None) -> Tensor | None:
        """What is no padding; a pattern of what sees what is attention's, and refused."""
        told = attending(attend, valid_BL)
        refuse_options(self.name, mask=told.mask, blocks=told.blocks)
        if not self.causal:
            refuse_options(self.name, causal=told.causal or None, back=told.back or None)
        return told.valid_BL

    def read(self, z: Tensor, level: Tensor | None, valid_BL: Tensor | None, cond: Tensor | None) -> Tensor:
        """The residual stream after the last block."""
        c = self.condition(z, level, cond)
        x_BLD: Tensor = self.embed(self.shift(z) if self.causal else z)
        for block in self.blocks:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x_BLD = checkpoint(block, x_BLD, c, valid_BL, use_reentrant=False)
            else:
                x_BLD = block(x_BLD, c, valid_BL)
        return x_BLD

    def final(self, x: Tensor) -> Tensor:
        """The last norm, of chosen vectors."""
        return cast(Tensor, self.norm(x))

    def head(self, h_ND: Tensor) -> Tensor:
        return cast(Tensor, self.output(h_ND))

    def head_parameters(self) -> list[nn.Parameter]:
        return list(self.output.parameters())

    def head_linear(self) -> nn.Linear | LinearHead:
        return self.output

    def begins_anew(self) -> dict[str, Tensor]:
        """The parameters that condition the blocks, so that at first they change nothing: the gates are 1.

        Weights that lack all of them are those of the same network without conditioning.
        """
        made = {}
        for name, p in self.named_parameters():
            if name.startswith(("time.", "label.")):
                made[name] = p.detach()
            elif ".modulation." in name:
                made[name] = torch.zeros_like(p)
                if name.endswith(".bias"):
                    made[name].chunk(3)[2].fill_(1.0)  # shift and scale are 0
        return made

    def parts(self) -> list[nn.Module]:
        return list(self.blocks)

    def matrices(self) -> dict[str, int]:
        """The linear maps of the blocks, save adaLN's and those that have a few rows or columns alone."""
        stacked = {name: module for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        own = {name: module for name, module in stacked.items() if name.startswith("blocks.")}
        return {
            f"{name}.weight": int(getattr(module, "stacks", 1))
            for name, module in own.items()
            if "modulation" not in name and min(module.weight.shape) >= 16
        }

    def shift(self, z: Tensor) -> Tensor:
        """Position l is predicted from what stands before it; before the first stands `begin`."""
        if not z.is_floating_point():
            return F.pad(z[:, :-1], (1, 0), value=self.begin)
        first_B1E = self.embed(torch.full((len(z), 1), self.begin, device=z.device))
        return torch.cat([first_B1E.to(z.dtype), z[:, :-1]], dim=1)

    def condition(self, z: Tensor, level: Tensor | None, label_B: Tensor | None) -> Tensor | None:
        """What adaLN sees: [B or 1, C], or [B, L, C] where each position has a level of its own."""
        label_B, level = check_labels(label_B, self.num_classes), level_column(level, z, self.uses_level, torch.float32)
        time = None if self.time is None or level is None else self.time(signal_of(self.conditioning, level))
        if self.label is None:
            return None if time is None else F.silu(time)
        if label_B is None:  # one row serves the whole batch
            label_B = torch.full((1,), -1, device=z.device)
        label = self.label(torch.where(label_B < 0, self.num_classes, label_B))
        if time is None:
            return F.silu(label)
        return F.silu(time + (label if time.ndim == 2 else label.unsqueeze(1)))
