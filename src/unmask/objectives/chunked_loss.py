"""The vocabulary loss in chunks: logits exist for some positions at a time, never for the whole batch.

In training each chunk's gradient is computed as soon as its loss is known (the loss is a sum, so chunks do not
interact). The backward pass only scales these gradients: no logits are kept and nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from unmask import kernels
from unmask.denoisers.network import Network
from unmask.devices import widest
from unmask.errors import UsageError
from unmask.objectives.terms import subs_log_probs

# nats_C = term(logits_CI, lo, hi): the loss of positions lo..hi of the flat list.
Term = Callable[[Tensor, int, int], Tensor]

# Logits of one chunk: 4 Mi numbers, 16 MiB in float32. Large enough for efficient products, small beside activations.
CHUNK_NUMBERS = 1 << 22
CUDA_CHUNK_NUMBERS = 1 << 28  # 512 MiB in bfloat16: a GPU needs thousands of rows at a time
ALIGN = 64  # rows of logits are aligned for a GPU's matrix units; 50,258 ids become 50,304


@dataclass(frozen=True)
class LossSum:
    """A sum of nats and its number of tokens. The training loop divides by the global count, once."""

    nats: Tensor
    tokens: Tensor


def token_nats(network: Network, h_ND: Tensor, term: Term) -> Tensor:
    """The loss of every position, without gradients."""
    with torch.no_grad():
        parts = [term(network.head(h_ND[lo:hi]), lo, hi) for lo, hi in _chunks(h_ND, network.num_ids)]
    return torch.cat(parts) if parts else h_ND.new_zeros(0)


def summed_nats(network: Network, h_ND: Tensor, term: Term, *, tensors: Sequence[Tensor] = ()) -> Tensor:
    """The sum of the losses, differentiable in h_ND, the head's parameters and `tensors`, for any term and any head.

    tensors: all other tensors requiring a gradient that the term uses (such as the weights of a learned schedule), as
    the very objects that it uses. A loss that depends on a tensor not listed here is refused, since that tensor would
    get no gradient.
    """
    if not torch.is_grad_enabled():
        return token_nats(network, h_ND, term).sum()
    named = [t for t in tensors if t.requires_grad]
    parameters = [p for p in network.head_parameters() if p.requires_grad and not any(p is t for t in named)]
    total: Tensor = _ChunkedSum.apply(network, term, h_ND, *parameters, *named)  # type: ignore[no-untyped-call]
    return total


def kept_nats(network: Network, h_ND: Tensor, term: Term, *, tensors: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """`summed_nats`, and the loss of each position without gradients."""
    parts: list[Tensor] = []

    def kept(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
        nats_C = term(logits_CI, lo, hi)
        parts.append(nats_C.detach())
        return nats_C

    total = summed_nats(network, h_ND, kept, tensors=tensors)
    return total, torch.cat(parts) if parts else h_ND.new_zeros(0)


def weighted_cross_entropy(network: Network, h_ND: Tensor, x_N: Tensor, weight_N: Tensor) -> Tensor:
    """The sum of weight x -log x_theta[x] under zero masking, with an explicit gradient if the head is linear.

    Also differentiable in the weights if they require a gradient.
    """
    return weighted_nats(network, h_ND, x_N, weight_N)[0]


def weighted_nats(network: Network, h_ND: Tensor, x_N: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    """`weighted_cross_entropy`, and the loss of each position without gradients."""
    linear = network.head_linear()
    if linear is None or not torch.is_grad_enabled():
        entropy = cross_entropy(x_N, network.mask_id)

        def weighted(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            return weight_N[lo:hi] * entropy(logits_CI, lo, hi)

        return kept_nats(network, h_ND, weighted, tensors=[weight_N])
    both: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        h_ND, linear.weight, linear.bias, x_N, weight_N, network.mask_id
    )
    return both


def cross_entropy(x_N: Tensor, mask_id: int, zero_masking: bool = True) -> Term:
    """-log x_theta[x] at each position."""

    def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
        log_p = subs_log_probs(logits_CI, mask_id, zero_masking)
        return -log_p.gather(1, x_N[lo:hi, None]).squeeze(1)

    return term


def with_auxiliary(term: Term, x_N: Tensor, weight: float, mask_id: int, zero_masking: bool = True) -> Term:
    """The term plus weight x -log x_theta[x], D3PM's auxiliary loss (its equation 5)."""
    entropy = cross_entropy(x_N, mask_id, zero_masking)

    def both(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
        return term(logits_CI, lo, hi) + weight * entropy(logits_CI, lo, hi)

    return both


def at_positions(where_BL: Tensor, nats_N: Tensor) -> Tensor:
    """[B, L] each token's nats at its position, in float64 if the device has it, since bounds sum many numbers.

    >>> at_positions(torch.tensor([[True, False, True]]), torch.tensor([1.0, 2.0])).tolist()
    [[1.0, 0.0, 2.0]]
    """
    device, dtype = nats_N.device, widest(nats_N.device)
    nats_BL = torch.zeros(where_BL.shape, dtype=dtype, device=device)
    return nats_BL.masked_scatter(where_BL.to(device), nats_N.to(dtype))


def _chunks(h_ND: Tensor, num_ids: int) -> Iterator[tuple[int, int]]:
    """Chunks of about equal size, so that the last one is not tiny."""
    n, numbers = len(h_ND), CUDA_CHUNK_NUMBERS if h_ND.is_cuda else CHUNK_NUMBERS
    most = max(64, numbers // num_ids)
    size = -(-n // max(1, -(-n // most)))
    return ((lo, min(lo + size, n)) for lo in range(0, n, max(1, size)))


class _ChunkedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, network: Network, term: Term, h_ND: Tensor, *parameters: Tensor) -> Tensor:
        grad_h = torch.zeros_like(h_ND)
        grads = [torch.zeros_like(p) for p in parameters]
        total = torch.zeros((), dtype=torch.promote_types(h_ND.dtype, torch.float32), device=h_ND.device)
        for lo, hi in _chunks(h_ND, network.num_ids):
            with torch.enable_grad():
                h = h_ND[lo:hi].detach().requires_grad_()
                nats = term(network.head(h), lo, hi).sum()
            if lo == 0:
                _check_sources(nats, [h, *parameters])
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
        # In place and without a copy: the gradient of a head of 50,000 ids is large, and it is not read again.
        grads, ctx.grads = ctx.grads, None
        return (None, None, *(g.mul_(grad_total.to(g.dtype)) for g in grads))


def _check_sources(nats: Tensor, named: Sequence[Tensor]) -> None:
    """Refuse a loss that depends on an unlisted tensor requiring a gradient, which would get none."""
    leaves = {id(t) for t in named}
    looked_at: set[Any] = {None, *(t.grad_fn for t in named)}  # the graph behind a named tensor is not checked
    todo: list[Any] = [nats.grad_fn]
    while todo:
        node = todo.pop()
        if node in looked_at:
            continue
        looked_at.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) not in leaves:
            raise UsageError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} that requires a gradient and would get "
                "none: name what the term computes with in summed_nats(..., tensors=...)"
            )
        todo += [before for before, _ in node.next_functions]


class _LinearCrossEntropy(torch.autograd.Function):
    """_ChunkedSum for a linear head and the cross entropy: softmax - one-hot overwrites the logits."""

    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_ID: Tensor, bias_I: Tensor | None, x_N: Tensor, weight_N: Tensor, mask_id: int
    ) -> tuple[Tensor, Tensor]:
        kind = h_ND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else h_ND.dtype
        total_dtype = torch.promote_types(dtype, torch.float32)
        num_ids = len(weight_ID)
        # of the weights: each position's own -log x_theta[x]
        grad_weight = torch.empty_like(weight_N) if ctx.needs_input_grad[4] else None
        extra = -num_ids % ALIGN if h_ND.is_cuda else 0
        with torch.autocast(kind, enabled=False):
            h, w_ID = h_ND.to(dtype), F.pad(weight_ID.to(dtype), (0, 0, 0, extra))
            # The mask and the padding ids of a row of logits have probability 0 from the start.
            b_I = h.new_zeros(num_ids) if bias_I is None else bias_I.to(dtype)
            b_I = F.pad(b_I, (0, extra), value=-torch.inf).index_fill(0, _on(h, [mask_id]), -torch.inf)
            grad_h, grad_w = torch.empty_like(h), torch.zeros_like(w_ID, dtype=weight_ID.dtype)
            grad_b = torch.zeros_like(b_I, dtype=total_dtype)
            total = torch.zeros((), dtype=total_dtype, device=h.device)
            weight_N = weight_N.to(total_dtype)
            nats_N = torch.empty_like(weight_N)
            for lo, hi in _chunks(h, len(w_ID)):
                logits_CI = torch.addmm(b_I, h[lo:hi], w_ID.T)
                if grad_weight is None:
                    nats_N[lo:hi] = _cross_entropy_grad_(logits_CI, x_N[lo:hi], weight_N[lo:hi])
                else:
                    nats_C = _cross_entropy_grad_(logits_CI, x_N[lo:hi], torch.ones_like(weight_N[lo:hi]))
                    nats_N[lo:hi] = weight_N[lo:hi] * nats_C
                    logits_CI.mul_(weight_N[lo:hi, None].to(dtype))
                    grad_weight[lo:hi] = nats_C
                total += nats_N[lo:hi].sum()
                torch.mm(logits_CI, w_ID, out=grad_h[lo:hi])
                _add_product_(grad_w, logits_CI.T, h[lo:hi])
                grad_b += logits_CI.sum(dim=0, dtype=total_dtype)
                del logits_CI  # before the next chunk's logits are allocated
        ctx.grads = [grad_h.to(h_ND.dtype), grad_w[:num_ids], None if bias_I is None else grad_b[:num_ids].to(bias_I)]
        ctx.grads += [None, grad_weight]
        ctx.mark_non_differentiable(nats_N)
        return total, nats_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        return (*(g if g is None else g.mul_(grad_total.to(g.dtype)) for g in grads), None)


def _on(like: Tensor, ids: list[int]) -> Tensor:
    return torch.tensor(ids, pin_memory=like.is_cuda).to(like.device, non_blocking=True)


def _cross_entropy_grad_(logits_CI: Tensor, x_C: Tensor, weight_C: Tensor) -> Tensor:
    """Return nats_C = weight x -log softmax(logits)[x], and overwrite logits_CI with the gradient of their sum."""
    if kernels.fit(logits_CI):
        from unmask.kernels.cross_entropy import cross_entropy_grad_

        return cross_entropy_grad_(logits_CI, x_C, weight_C)
    wide_CI = logits_CI.to(weight_C.dtype)
    lse_C = torch.logsumexp(wide_CI, dim=1)
    nats_C = weight_C * (lse_C - wide_CI.gather(1, x_C[:, None]).squeeze(1))
    grad_CI = wide_CI.sub_(lse_C[:, None]).exp_()
    grad_CI.scatter_add_(1, x_C[:, None], grad_CI.new_full((len(x_C), 1), -1.0))
    grad_CI.mul_(weight_C[:, None])
    if grad_CI is not logits_CI:
        logits_CI.copy_(grad_CI)
    return nats_C


def _add_product_(sum_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """sum += a @ b, accumulated in the sum's own, wider type."""
    if sum_MN.dtype == a_MK.dtype:
        sum_MN.addmm_(a_MK, b_KN)
    elif sum_MN.is_cuda and sum_MN.dtype == torch.float32:
        sum_MN += torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    else:
        sum_MN += a_MK @ b_KN
