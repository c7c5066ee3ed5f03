"""The selective scan of Mamba: h_t = exp(step_t A) h_{t-1} + step_t B_t x_t, y_t = C_t h_t + D x_t (arXiv 2312.00752).

A row is split into chunks that are processed in parallel, each from the final state of the chunks before it: exactly
the recurrence, in fewer and larger steps. Only the states between chunks are kept for the gradient; those inside a
chunk are recomputed, some chunks at a time, so that memory grows with L as for any other layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from unmask import kernels

AT_ONCE = 1 << 16  # numbers of a state that are worth one operation: more would leave the processor's cache
LONGEST = 64  # steps of a chunk


def selective_scan(
    x_BLE: Tensor,
    step_BLE: Tensor,
    A_EN: Tensor,
    B_BLN: Tensor,
    C_BLN: Tensor,
    D_E: Tensor,
    *,
    state_BNE: Tensor | None = None,
    valid_BL: Tensor | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """y_BLE and the state after the last step, [B, N, E], in float32 or what is wider.

    step_BLE: the lengths of the steps, positive; A_EN is negative. state_BNE: the one before the first step, else 0.
    reverse: from each row's end to its beginning. Padding (valid_BL) changes no state, so that a reversed scan begins
    at the row's last token.

    >>> one, A = torch.ones(1, 3, 1), torch.full((1, 1), -math.log(2.0))
    >>> y, state = selective_scan(one, one, A, one, one, torch.zeros(1))
    >>> y.flatten(), state.flatten()
    (tensor([1.0000, 1.5000, 1.7500]), tensor([1.7500]))
    """
    wide = torch.promote_types(x_BLE.dtype, torch.float32)
    step_BLE, A_EN, D_E = step_BLE.to(wide), A_EN.to(wide), D_E.to(wide)
    if valid_BL is not None:
        step_BLE = step_BLE * valid_BL.unsqueeze(-1)
    if state_BNE is None:
        state_BNE = step_BLE.new_zeros(len(x_BLE), A_EN.shape[1], A_EN.shape[0])
    way: Any = _scan_op if torch.compiler.is_compiling() else _Scan.apply
    y_BLE, after_BNE, _ = way(x_BLE, step_BLE, A_EN, B_BLN, C_BLN, D_E, state_BNE.to(wide), reverse)
    return y_BLE, after_BNE


def scan_step(
    x_BE: Tensor, step_BE: Tensor, A_EN: Tensor, B_BN: Tensor, C_BN: Tensor, D_E: Tensor, state_BNE: Tensor
) -> tuple[Tensor, Tensor]:
    """y_BE and the state after one step."""
    wide = state_BNE.dtype
    x_BE, step_BE, A_EN, B_BN, C_BN = (t.to(wide) for t in (x_BE, step_BE, A_EN, B_BN, C_BN))
    decay_BNE = torch.exp(step_BE.unsqueeze(1) * A_EN.T)
    state_BNE = torch.addcmul(decay_BNE * state_BNE, B_BN.unsqueeze(-1), (step_BE * x_BE).unsqueeze(1))
    y_BE = (C_BN.unsqueeze(-1) * state_BNE).sum(dim=1) + D_E.to(wide) * x_BE
    return y_BE, state_BNE


# --- forwards and backwards, in plain torch or by the kernel ----------------------------------------------------------

Grads = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _scan(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last state, and the states that the gradient goes on from."""
    if kernels.fit(x):
        from unmask.kernels.selective_scan import scan

        return scan(x, step, A, B, C, D, state, reverse=reverse)
    return plain_scan(x, step, A, B, C, D, state, reverse)


def _scan_grad(
    dy: Tensor,
    dstate: Tensor,
    x: Tensor,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    starts: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if kernels.fit(x):
        from unmask.kernels.selective_scan import scan_grad

        return scan_grad(dy, dstate, x, step, A, B, C, D, starts, reverse=reverse)
    return plain_scan_grad(dy, dstate, x, step, A, B, C, D, starts, reverse)


def plain_scan(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The scan in plain torch: its output, the last state, and the state before each chunk, [B, chunks, N, E]."""
    x, cut, A_NE, h0_BNE = x.contiguous(), Chunks.of(x, A.shape[1]), A.T.contiguous(), state
    with torch.autocast(x.device.type, enabled=False):
        u_TBKE, step_TBKE = cut.stack(x.to(step) * step, reverse), cut.stack(step, reverse)
        B_TBKN, C_TBKN = cut.stack(B.to(step), reverse), cut.stack(C.to(step), reverse)
        y_TBKE, starts = torch.empty_like(u_TBKE), []
        for k in cut.groups():
            own = [t[:, :, k].contiguous() for t in (u_TBKE, step_TBKE, B_TBKN, C_TBKN)]
            start_BKNE, total_BKE = h0_BNE.unsqueeze(1), own[1].sum(dim=0)
            if total_BKE.shape[1] > 1:
                local_BKNE = _run(
                    torch.zeros_like(h0_BNE).unsqueeze(1).expand(-1, total_BKE.shape[1], -1, -1), A_NE, *own
                )
                start_BKNE = _carried(h0_BNE, total_BKE, A_NE, local_BKNE)
            end_BKNE = _run(start_BKNE, A_NE, *own, y=y_TBKE[:, :, k])
            starts.append(start_BKNE)
            h0_BNE = end_BKNE[:, -1]
        y = cut.unstack(y_TBKE, reverse).contiguous()
        return (y + D * x.to(step)).to(x.dtype), h0_BNE.clone(), torch.cat(starts, dim=1)


def _run(
    h_BKNE: Tensor,
    A_NE: Tensor,
    u_TBKE: Tensor,
    step_TBKE: Tensor,
    B_TBKN: Tensor,
    C_TBKN: Tensor,
    *,
    y: Tensor | None = None,
) -> Tensor:
    """All steps of chunks beside each other; what they put out goes to y. The states after the last."""
    h_BKNE = h_BKNE.clone(memory_format=torch.contiguous_format)
    decay = torch.empty_like(h_BKNE)
    for t in range(len(u_TBKE)):
        torch.mul(step_TBKE[t].unsqueeze(2), A_NE, out=decay).exp_()
        h_BKNE.mul_(decay).addcmul_(B_TBKN[t].unsqueeze(-1), u_TBKE[t].unsqueeze(2))
        if y is not None:
            y[t] = (C_TBKN[t].unsqueeze(-2) @ h_BKNE).squeeze(-2)
    return h_BKNE


def _carried(h0_BNE: Tensor, total_BKE: Tensor, A_NE: Tensor, local_BKNE: Tensor) -> Tensor:
    """The state before each chunk, from what each leaves of nothing, and how long its steps are together."""
    starts = [h0_BNE]
    decay_BKNE = torch.exp(total_BKE.unsqueeze(2) * A_NE)
    for k in range(total_BKE.shape[1] - 1):
        starts.append(torch.addcmul(local_BKNE[:, k], decay_BKNE[:, k], starts[-1]))
    return torch.stack(starts, dim=1)


def plain_scan_grad(
    dy: Tensor,
    dstate: Tensor,
    x: Tensor,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    starts: Tensor,
    reverse: bool,
) -> Grads:
    """The gradients by x, step, A, B, C, D and the first state, from those of the output and of the last state."""
    cut, A_NE, wide = Chunks.of(x, A.shape[1]), A.T.contiguous(), step.dtype
    with torch.autocast(x.device.type, enabled=False):
        x_wide, dy_wide = x.to(wide).contiguous(), dy.to(wide).contiguous()
        stacked = [cut.stack(t.to(wide), reverse) for t in (x_wide * step, step, B, C, dy_wide)]
        made = [torch.empty_like(stacked[i]) for i in (0, 1, 2, 3)]  # by u = step x, step, B, C
        dA_NE, q_BNE = torch.zeros_like(A_NE), dstate.to(wide)
        for k in reversed(list(cut.groups())):
            one = Group._make([*(t[:, :, k].contiguous() for t in stacked), A_NE, starts[:, k]])
            q_BNE = one.backward(q_BNE, [t[:, :, k] for t in made], dA_NE)
        du, dstep, dB, dC = (cut.unstack(t, reverse).contiguous() for t in made)
        dx = torch.addcmul(D * dy_wide, du, step)
        dD = (dy_wide * x_wide).sum(dim=(0, 1))
        return (
            dx.to(x.dtype),
            torch.addcmul(dstep, du, x_wide),
            dA_NE.T.contiguous(),
            dB.to(B.dtype),
            dC.to(C.dtype),
            dD,
            q_BNE.contiguous(),
        )


class Group(NamedTuple):
    """Chunks whose gradients are computed beside each other: what stands in them, and the states before them."""

    u_TBKE: Tensor
    step_TBKE: Tensor
    B_TBKN: Tensor
    C_TBKN: Tensor
    dy_TBKE: Tensor
    A_NE: Tensor
    starts_BKNE: Tensor

    def backward(self, q_BNE: Tensor, made: list[Tensor], dA_NE: Tensor) -> Tensor:
        """The gradient by the state before the first chunk, from that by the state after the last one."""
        decay, states = self._states()
        ends_BKNE = self._ends(q_BNE, decay)
        du, dstep, dB, dC = made
        q, along = ends_BKNE, torch.zeros_like(ends_BKNE)
        for t in reversed(range(len(decay))):
            g_BKNE = torch.addcmul(q, self.C_TBKN[t].unsqueeze(-1), self.dy_TBKE[t].unsqueeze(2))
            dC[t] = (states[t + 1] @ self.dy_TBKE[t].unsqueeze(-1)).squeeze(-1)
            dB[t] = (g_BKNE @ self.u_TBKE[t].unsqueeze(-1)).squeeze(-1)
            du[t] = (self.B_TBKN[t].unsqueeze(-2) @ g_BKNE).squeeze(-2)
            q = g_BKNE.mul_(decay[t])
            by_exponent = q * states[t]
            along.addcmul_(by_exponent, self.step_TBKE[t].unsqueeze(2))
            dstep[t] = by_exponent.mul_(self.A_NE).sum(dim=2)
        dA_NE += along.sum(dim=(0, 1))
        return q[:, 0]

    def _states(self) -> tuple[list[Tensor], list[Tensor]]:
        """The decay of each step, and the states before the first one and after each."""
        decay, states = [], [self.starts_BKNE]
        for t in range(len(self.u_TBKE)):
            decay.append((self.step_TBKE[t].unsqueeze(2) * self.A_NE).exp_())
            h = decay[-1] * states[-1]
            states.append(h.addcmul_(self.B_TBKN[t].unsqueeze(-1), self.u_TBKE[t].unsqueeze(2)))
        return decay, states

    def _ends(self, q_BNE: Tensor, decay: list[Tensor]) -> Tensor:
        """The gradient by the state after each chunk."""
        if (K := self.u_TBKE.shape[2]) == 1:
            return q_BNE.unsqueeze(1)
        local_BKNE = torch.zeros_like(decay[0])
        for t in reversed(range(len(decay))):
            local_BKNE.addcmul_(self.C_TBKN[t].unsqueeze(-1), self.dy_TBKE[t].unsqueeze(2)).mul_(decay[t])
        total_BKNE = torch.exp(self.step_TBKE.sum(dim=0).unsqueeze(2) * self.A_NE)
        ends = [q_BNE]
        for k in reversed(range(1, K)):
            ends.append(torch.addcmul(local_BKNE[:, k], total_BKNE[:, k], ends[-1]))
        return torch.stack(ends[::-1], dim=1)


class Chunks(NamedTuple):
    """How rows of L positions are cut: into `num` chunks of `steps`, of which `together` are read beside each other.

    >>> Chunks.of(torch.zeros(1, 1000, 64), 16)
    Chunks(length=1000, steps=16, num=63, together=64)
    """

    length: int
    steps: int
    num: int
    together: int

    @classmethod
    def of(cls, x_BLE: Tensor, N: int) -> Chunks:
        B, L, E = x_BLE.shape
        together = max(1, AT_ONCE // (B * E * N))
        # A chunk is read twice, and chunks are joined one after another: T steps for L / T of them cost 2 T + L / T.
        steps = min(LONGEST, 1 << round(math.log2(max(math.sqrt(L / 2), 1)))) if together > 1 else LONGEST
        steps = max(1, min(steps, L))
        return cls(L, steps, -(-L // steps), together)

    def groups(self) -> Iterator[slice]:
        for k in range(0, self.num, self.together):
            yield slice(k, k + self.together)

    def stack(self, t_BLX: Tensor, reverse: bool) -> Tensor:
        """[T, B, chunks, X]; nothing follows the last position."""
        t_BLX = t_BLX.flip(1) if reverse else t_BLX
        t_BLX = F.pad(t_BLX, (0, 0, 0, self.num * self.steps - self.length)).contiguous()
        return t_BLX.view(len(t_BLX), self.num, self.steps, -1).permute(2, 0, 1, 3)

    def unstack(self, t_TBKX: Tensor, reverse: bool) -> Tensor:
        t_BLX = t_TBKX.permute(1, 2, 0, 3).flatten(1, 2)[:, : self.length]
        return t_BLX.flip(1) if reverse else t_BLX


# --- for autograd, and as operators for a compiler, which takes them as they are --------------------------------------


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, ctx.reverse = inputs
    ctx.save_for_backward(*tensors, output[2])


def _backward_by(grad: Any) -> Any:
    """grad: `_scan_grad`, or as an operator, which a compiler needs that traces the gradient after the forward pass."""

    def backward(ctx: Any, dy: Tensor, dstate: Tensor, _: Any) -> tuple[Any, ...]:
        return *grad(dy.contiguous(), dstate.contiguous(), *ctx.saved_tensors, ctx.reverse), None

    return backward


def _setup_own(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _setup(ctx, inputs, output)
    ctx.mark_non_differentiable(output[2])


class _Scan(torch.autograd.Function):
    forward, setup_context, backward = (
        staticmethod(_scan),
        staticmethod(_setup_own),
        staticmethod(_backward_by(_scan_grad)),
    )


_scan_op = library.custom_op("unmask::selective_scan", _scan, mutates_args=())
_grad_op = library.custom_op("unmask::selective_scan_grad", _scan_grad, mutates_args=())
_scan_op.register_autograd(_backward_by(_grad_op), setup_context=_setup)


@_scan_op.register_fake
def _(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    num = _num_starts(x, A.shape[1])
    return x.new_empty(x.shape), state.new_empty(state.shape), state.new_empty(len(x), num, *state.shape[1:])


def _num_starts(x: Tensor, N: int) -> int:
    """How many states of a row are kept for the gradient: the kernel and plain torch cut a row differently."""
    if kernels.fit(x):
        from unmask.kernels.selective_scan import cut

        segments, tiles = cut(*x.shape)
        return segments * tiles + 1
    return Chunks.of(x, N).num


@_grad_op.register_fake
def _(
    dy: Tensor,
    dstate: Tensor,
    x: Tensor,
    step: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    starts: Tensor,
    reverse: bool,
) -> Grads:
    inputs = (x, step, A, B, C, D, dstate)
    dx, dstep, dA, dB, dC, dD, dfirst = (t.new_empty(t.shape) for t in inputs)
    return dx, dstep, dA, dB, dC, dD, dfirst
