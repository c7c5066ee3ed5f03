"""The selective scan against the recurrence step by step, its gradients, and what it needs of memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmask.denoisers.recurrent import scan as scans
from unmask.denoisers.recurrent.scan import Chunks, scan_step, selective_scan

E, N = 6, 4


def inputs(B: int, L: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
    """x, step, A, B, C, D and a first state."""
    torch.manual_seed(seed)
    shapes = [(B, L, E), (B, L, E), (E, N), (B, L, N), (B, L, N), (E,), (B, N, E)]
    made = [torch.randn(*shape, dtype=dtype) for shape in shapes]
    made[1], made[2] = made[1].abs(), -3 * made[2].abs()
    return made


def recurrence(
    x: Tensor, step: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor, *, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    each = []
    for t in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
        y, state = scan_step(x[:, t], step[:, t], A, B[:, t], C[:, t], D, state)
        each.append(y)
    return torch.stack(each[::-1] if reverse else each, dim=1), state


def test_a_step_is_the_papers() -> None:
    x, step, A, B, C, D, state = inputs(1, 1)
    y, after = scan_step(x[:, 0], step[:, 0], A, B[:, 0], C[:, 0], D, state)
    for e in range(E):
        total = D[e] * x[0, 0, e]
        for n in range(N):
            h = torch.exp(step[0, 0, e] * A[e, n]) * state[0, n, e] + step[0, 0, e] * B[0, 0, n] * x[0, 0, e]
            torch.testing.assert_close(after[0, n, e], h)
            total = total + C[0, 0, n] * h
        torch.testing.assert_close(y[0, e], total)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("L", "at_once", "chunks"),
    [(1, 1 << 16, 1), (150, 1, 3), (37, 1 << 16, 10), (150, 300, 19)],
    ids=["one step", "a chunk at a time", "all chunks at once", "some at a time"],
)
def test_the_recurrence_and_its_gradients(
    L: int, at_once: int, chunks: int, dtype: torch.dtype, reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scans, "AT_ONCE", at_once)
    given = inputs(2, L, dtype)
    assert Chunks.of(given[0], N).num == chunks
    mine, plain = ([t.clone().requires_grad_() for t in given] for _ in range(2))
    got = selective_scan(*mine[:6], state_BNE=mine[6], reverse=reverse)
    want = recurrence(*plain, reverse=reverse)
    weights = [torch.randn_like(t) for t in want]
    for outputs in (got, want):
        sum((t * weight).sum() for t, weight in zip(outputs, weights, strict=True)).backward()  # type: ignore[union-attr]
    near = 1e-10 if dtype == torch.float64 else 1e-5
    for a, b in zip((*got, *(t.grad for t in mine)), (*want, *(t.grad for t in plain)), strict=True):
        assert a is not None
        assert b is not None
        assert (a - b).abs().max().item() <= near * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("reverse", [False, True])
def test_the_gradient_by_finite_differences(reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scans, "AT_ONCE", 2 * E * N * 2)
    given = [t.requires_grad_() for t in inputs(2, 9)]
    assert torch.autograd.gradcheck(
        lambda *all: selective_scan(*all[:6], state_BNE=all[6], reverse=reverse), given, fast_mode=True
    )


def test_a_state_goes_on_where_another_scan_ended() -> None:
    x, step, A, B, C, D, state = inputs(2, 50)
    whole, last = selective_scan(x, step, A, B, C, D, state_BNE=state)
    first, middle = selective_scan(x[:, :21], step[:, :21], A, B[:, :21], C[:, :21], D, state_BNE=state)
    rest, end = selective_scan(x[:, 21:], step[:, 21:], A, B[:, 21:], C[:, 21:], D, state_BNE=middle)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole)
    torch.testing.assert_close(end, last)


def test_a_reversed_scan_begins_at_the_last_token() -> None:
    x, step, A, B, C, D, _ = inputs(2, 40)
    valid_BL = torch.arange(40) < torch.tensor([[40], [23]])
    y, state = selective_scan(x, step, A, B, C, D, valid_BL=valid_BL, reverse=True)
    short, own = selective_scan(x[1:, :23], step[1:, :23], A, B[1:, :23], C[1:, :23], D, reverse=True)
    torch.testing.assert_close(y[1:, :23], short)
    torch.testing.assert_close(state[1:], own)


def test_under_autocast_the_state_is_float32() -> None:
    x, step, A, B, C, D, state = inputs(2, 40, torch.float32)
    half = [t.bfloat16() for t in (x, B, C)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, last = selective_scan(half[0], step, A, half[1], half[2], D, state_BNE=state)
    want, end = recurrence(half[0].float(), step, A, half[1].float(), half[2].float(), D, state)
    assert (y.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(last, end, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y.float(), want, rtol=1e-2, atol=1e-2)


def test_no_tensor_is_as_large_as_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for the gradient, and whatever is made on the way: a fraction of [B, L, N, E]."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest, L = 0, 4096

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for t in made if isinstance(made, tuple | list) else [made]:
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().nbytes() // t.element_size())
            return made

    monkeypatch.setattr(scans, "AT_ONCE", 1 << 10)
    given = [t.requires_grad_() for t in inputs(1, L, torch.float32)]
    kept = []
    with Largest(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        selective_scan(*given[:6])[0].sum().backward()
    assert 0 < largest <= L * N * E / 3
    assert sum(kept) <= 5 * L * E
