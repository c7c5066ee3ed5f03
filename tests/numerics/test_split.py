"""Loss and gradients do not depend on how a global batch is cut (MATH 6.6), nor on how the head's work is chunked."""

from __future__ import annotations

import itertools

import pytest
import torch

from unmask import objectives
from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.objectives import Objective, chunked_loss

ROWS, LENGTH, IDS = 12, 10, 17
OBJECTIVES = [
    objectives.MDLM(),
    objectives.MDLM(form="count"),
    objectives.MDLM(steps=8),
    objectives.D3PM(steps=8),
    objectives.D3PM(steps=8, auxiliary=0.1),
    objectives.MLM(),
    objectives.AR(),
]
each_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)


def network(objective: Objective, dtype: torch.dtype, tied: bool = False) -> Network:
    torch.manual_seed(0)
    causal = isinstance(objective, objectives.AR)
    net = DiT(hidden=16, blocks=2, heads=2, dropout=0.0, causal=causal, tied=tied).build(num_ids=IDS, mask_id=IDS - 1)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return net.to(dtype)


def gradients(objective: Objective, net: Network, cuts: list[int]) -> tuple[float, torch.Tensor]:
    """The global loss, and all gradients in one vector, from the batch cut at these rows."""
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, IDS - 1, (ROWS, LENGTH), generator=g)
    valid = torch.randint(5, LENGTH + 1, (ROWS,), generator=g)
    prefix = torch.randint(0, 4, (ROWS,), generator=g)
    tokens = int((valid - prefix).sum())
    net.zero_grad()
    total = 0.0
    for lo, hi in itertools.pairwise(cuts):
        batch = make_batch(x[lo:hi], valid[lo:hi], prefix[lo:hi], seed=5, step=3, first_row=lo, num_rows=ROWS)
        loss = objective.loss(net, batch)
        (loss.nats / tokens).backward()
        total += float(loss.nats.detach()) / tokens
    return total, torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


@each_objective
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_any_cut_gives_the_same_loss_and_gradients(objective: Objective, dtype: torch.dtype, limit: float) -> None:
    net = network(objective, dtype)
    whole_loss, whole = gradients(objective, net, [0, ROWS])
    for cuts in ([0, 6, 12], [0, 1, 5, 12], list(range(ROWS + 1))):
        loss, parts = gradients(objective, net, cuts)
        assert abs(loss - whole_loss) <= limit * abs(whole_loss)
        assert (parts - whole).norm() <= limit * whole.norm()


@each_objective
@pytest.mark.parametrize("tied", [False, True])
def test_chunked_loss_equals_plain_autograd(objective: Objective, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients taken chunk by chunk in the forward pass against ordinary backpropagation of the same sum."""
    net = network(objective, torch.float64, tied)
    monkeypatch.setattr(
        chunked_loss, "_chunks", lambda h, ids: ((lo, min(lo + 7, len(h))) for lo in range(0, len(h), 7))
    )
    in_chunks, chunked = gradients(objective, net, [0, ROWS])

    def plain(net: Network, h: torch.Tensor, term: chunked_loss.Term, tensors: object = ()) -> torch.Tensor:
        return term(net.head(h), 0, len(h)).sum()

    monkeypatch.setattr(chunked_loss, "summed_nats", plain)
    monkeypatch.setattr("unmask.objectives.mdlm.summed_nats", plain)
    monkeypatch.setattr(net, "head_linear", lambda: None)
    plain_loss, whole = gradients(objective, net, [0, ROWS])
    assert in_chunks == pytest.approx(plain_loss, rel=1e-12)
    torch.testing.assert_close(chunked, whole, rtol=1e-10, atol=1e-14)


def test_a_head_that_names_no_parameters_still_gets_gradients() -> None:
    """The default of head_parameters is all of them: a denoiser that forgets to say trains all the same."""
    net = network(objectives.MDLM(), torch.float64)
    want = gradients(objectives.MDLM(), net, [0, ROWS])[1]
    net.head_parameters = lambda: Network.head_parameters(net)  # type: ignore[method-assign]
    torch.testing.assert_close(gradients(objectives.MDLM(), net, [0, ROWS])[1], want)
