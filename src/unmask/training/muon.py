"""Muon: momentum whose matrices are orthogonalised (all singular values 1); equal shapes in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unmask import kernels
from unmask.distributed.parallel import like, local, share_like, whole

# An odd polynomial that moves singular values in (0, 1] towards 1; five iterations suffice for a training step.
_STEPS, _A, _B, _C = 5, 3.4445, -4.7750, 2.0315


def orthogonal(x_NRC: Tensor) -> Tensor:
    """U V^T of each matrix U S V^T, approximately: singular values between 0.7 and 1.2, except those near 0.

    >>> [round(s, 1) for s in torch.linalg.svdvals(orthogonal(torch.tensor([[[3.0, 0.0], [0.0, 0.5]]])))[0].tolist()]
    [1.0, 0.7]
    """
    tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = x_NRC.mT if tall else x_NRC  # the product below is then the smaller one
    x = x / (x.norm(dim=(1, 2), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)) + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(_STEPS):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    x = x.mT if tall else x
    return x.to(x_NRC.dtype)


def muon_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    *,
    parts: Sequence[int],
    scale: Tensor | float,
    nonfinite: Tensor | None,
    lr: float,
    momentum: float,
    rms: float,
    weight_decay: float,
    averages: Sequence[Tensor] | None = None,
    towards: float = 0.0,
) -> None:
    """One update of each matrix with scale x its gradient and Nesterov momentum; no change if nonfinite is not 0.

    parts: the number of stacked maps in each parameter, which are orthogonalised separately. The update's root mean
    square is lr x rms for every shape, so that AdamW's learning rate and weight decay fit both optimizers. Sharded
    matrices are gathered, orthogonalised by each process, and sharded again; everything else is done shard by shard.
    averages: moved by the fraction `towards` to the new weights.
    """
    if not params:
        return
    if isinstance(scale, Tensor) and nonfinite is not None and all(_plain(t) for t in (*params, *grads)):
        how: dict[str, Any] = {"lr": lr, "beta": momentum, "rms": rms, "weight_decay": weight_decay, "towards": towards}
        _by_kernels(params, grads, momenta, averages, parts=parts, scale=scale, nonfinite=nonfinite, **how)
        return
    places = params
    params, grads, momenta = ([local(t) for t in tensors] for tensors in (params, grads, momenta))
    grads = torch._foreach_mul(list(grads), scale)
    if nonfinite is not None:  # without synchronising: zero gradient, finite momentum, no update
        fine = nonfinite == 0
        grads = [torch.where(fine, grad, m) for grad, m in zip(grads, momenta, strict=True)]
        lr = lr * fine  # type: ignore[assignment]
    torch._foreach_lerp_(list(momenta), grads, 1 - momentum)
    ahead = torch._foreach_lerp(grads, list(momenta), momentum)
    updates: list[Tensor] = [torch.empty(0)] * len(params)
    for (R, C), members in _by_shape(places, parts).items():
        full = [whole(share_like(ahead[i], places[i])) for i in members]
        ortho = orthogonal(torch.cat([x.reshape(parts[i], R, C) for i, x in zip(members, full, strict=True)]))
        ortho *= rms * max(R, C) ** 0.5  # an R x C matrix has min(R, C) singular values of 1
        for i, update in zip(members, torch.split(ortho, [parts[i] for i in members]), strict=True):
            updates[i] = local(like(update.reshape(places[i].shape), places[i]))
    torch._foreach_mul_(list(params), 1 - lr * weight_decay)
    torch._foreach_sub_(list(params), torch._foreach_mul(updates, lr))
    if averages is not None:
        torch._foreach_lerp_([local(t) for t in averages], list(params), towards)


def _plain(tensor: Tensor) -> bool:
    return kernels.fit(tensor) and tensor.dtype == torch.float32 and not hasattr(tensor, "to_local")


def _by_shape(params: Sequence[Tensor], parts: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """The indices of parameters, by the shape of the maps that they stack."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, (p, n) in enumerate(zip(params, parts, strict=True)):
        by_shape.setdefault((p.shape[0] // n, p.shape[1]), []).append(i)
    return by_shape


def _by_kernels(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    averages: Sequence[Tensor] | None,
    *,
    parts: Sequence[int],
    scale: Tensor,
    nonfinite: Tensor,
    lr: float,
    beta: float,
    rms: float,
    weight_decay: float,
    towards: float,
) -> None:
    """`muon_` for whole matrices on a GPU: one kernel before the products and one after them."""
    from unmask.kernels.muon import apply_, momentum_

    narrow = torch.bfloat16 if params[0].is_cuda else torch.float32
    for (R, C), members in _by_shape(params, parts).items():
        counts = [parts[i] for i in members]
        ahead_NRC = params[members[0]].new_empty(sum(counts), R, C, dtype=narrow)
        for i, ahead in zip(members, torch.split(ahead_NRC, counts), strict=True):
            momentum_(grads[i].contiguous(), momenta[i], ahead, scale=scale, nonfinite=nonfinite, beta=beta)
        rate = lr * rms * max(R, C) ** 0.5
        for i, update in zip(members, torch.split(orthogonal(ahead_NRC), counts), strict=True):
            average = None if averages is None else averages[i]
            how = {"rate": rate, "decay": lr * weight_decay, "towards": towards}
            apply_(params[i], update.contiguous(), average, nonfinite=nonfinite, **how)
