"""The vocabulary loss in chunks: logits exist for a few hundred positions at a time, never for the whole batch.

For training each chunk's gradient is taken as soon as its loss is known (the loss is a sum, so chunks do not interact).
The backward pass then only scales what is there: nothing is kept, nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from unmask.denoisers._network import Network
from unmask.objectives._terms import subs_log_probs

# nats_C = term(logits_CI, lo, hi): the loss of positions lo..hi of the flat list.
Term = Callable[[Tensor, int, int], Tensor]

# Logits of one chunk: 4 Mi numbers, 16 MiB in float32. Large enough for efficient products, small beside activations.
CHUNK_NUMBERS = 1 << 22


@dataclass(frozen=True)
class LossSum:
    """A sum of nats and the number of tokens it is over. The loop divides by the global count, once."""

    nats: Tensor
    tokens: Tensor


def token_nats(network: Network, h_ND: Tensor, term: Term) -> Tensor:
    """The loss of every position, without gradients."""
    with torch.no_grad():
        parts = [term(network.head(h_ND[lo:hi]), lo, hi) for lo, hi in _chunks(network, len(h_ND))]
    return torch.cat(parts) if parts else h_ND.new_zeros(0)


def summed_nats(network: Network, h_ND: Tensor, term: Term) -> Tensor:
    """The sum of the losses, differentiable in h_ND and in the head's parameters."""
    if not torch.is_grad_enabled():
        return token_nats(network, h_ND, term).sum()
    parameters = [p for p in network.head_parameters() if p.requires_grad]
    total: Tensor = _ChunkedSum.apply(network, term, h_ND, *parameters)  # type: ignore[no-untyped-call]
    return total


def cross_entropy(x_N: Tensor, mask_id: int, zero_masking: bool = True) -> Term:
    """-log x_theta[x] at each position."""

    def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
        log_p = subs_log_probs(logits_CI, mask_id, zero_masking)
        return -log_p.gather(1, x_N[lo:hi, None]).squeeze(1)

    return term


def sum_rows(where_BL: Tensor, nats_N: Tensor) -> Tensor:
    """Add up each row's tokens, in float64 where the device has it: bounds are sums of many numbers."""
    dtype = torch.float32 if nats_N.device.type == "mps" else torch.float64
    total_B = torch.zeros(len(where_BL), dtype=dtype, device=nats_N.device)
    return total_B.index_add(0, where_BL.nonzero(as_tuple=True)[0], nats_N.to(dtype))


def _chunks(network: Network, n: int) -> Iterator[tuple[int, int]]:
    size = max(64, CHUNK_NUMBERS // network.num_ids)
    return ((lo, min(lo + size, n)) for lo in range(0, n, size))


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, network: Network, term: Term, h_ND: Tensor, *parameters: Tensor) -> Tensor:
        grad_h = torch.zeros_like(h_ND)
        grads = [torch.zeros_like(p) for p in parameters]
        total = torch.zeros((), dtype=torch.promote_types(h_ND.dtype, torch.float32), device=h_ND.device)
        for lo, hi in _chunks(network, len(h_ND)):
            with torch.enable_grad():
                h = h_ND[lo:hi].detach().requires_grad_()
                nats = term(network.head(h), lo, hi).sum()
            first, *rest = torch.autograd.grad(nats, [h, *parameters], allow_unused=True)
            if first is not None:
                grad_h[lo:hi] = first
            for grad, new in zip(grads, rest, strict=True):
                if new is not None:
                    grad += new
            total += nats.detach()
        ctx.grads = [grad_h, *grads]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> Any:
        # In place, and handed over: a head of 50,000 ids is large, and nobody reads these again.
        grads, ctx.grads = ctx.grads, None
        return (None, None, *(g.mul_(grad_total.to(g.dtype)) for g in grads))
