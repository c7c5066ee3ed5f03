"""A loss weight that requires a gradient gets it, in every form of the chunked loss, or the call raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.errors import UsageError
from unmask.objectives import chunked_loss
from unmask.objectives.chunked_loss import cross_entropy, summed_nats, weighted_cross_entropy

N, D, V = 150, 8, 11


class Curved(Network):
    """A head that is no single linear map."""

    num_ids, mask_id, width = V + 1, V, D

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, V + 1)

    def trunk(self, *args: Any, **options: Any) -> Tensor:
        raise NotImplementedError

    def head(self, h_ND: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(h_ND)))
        return out


def networks() -> dict[str, Network]:
    torch.manual_seed(0)
    linear = DiT(hidden=D, blocks=1, heads=2).build(num_ids=V + 1, mask_id=V)
    nn.init.normal_(linear.output.weight)
    return {"linear": linear.double(), "curved": Curved().double()}


@pytest.fixture(params=["linear", "curved"])
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Network:
    monkeypatch.setattr(chunked_loss, "CHUNK_NUMBERS", 64 * (V + 1))  # three chunks
    return networks()[request.param]


def numbers() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    h_ND = torch.randn(N, D, generator=generator, dtype=torch.float64)
    x_N = torch.randint(0, V, (N,), generator=generator)
    return h_ND, x_N, torch.randn(3, generator=generator, dtype=torch.float64)


def weights(p_3: Tensor) -> Tensor:
    """Positive and negative ones, and zeros, by which no loss could be divided."""
    at_N = torch.arange(N, dtype=torch.float64) / N
    weight_N = p_3[0].exp() * at_N + p_3[1] * at_N.square() + p_3[2]
    return torch.where(torch.arange(N) % 7 == 0, 0 * weight_N, weight_N)


def difference(f: Callable[[Tensor], Tensor], p_3: Tensor, step: float = 1e-5) -> Tensor:
    along = step * torch.eye(3, dtype=torch.float64)
    return torch.stack([(f(p_3 + e) - f(p_3 - e)) / (2 * step) for e in along])


def test_a_weight_gets_its_gradient(network: Network) -> None:
    h_ND, x_N, p_3 = numbers()

    def total(p_3: Tensor) -> Tensor:
        return 2 * weighted_cross_entropy(network, h_ND, x_N, weights(p_3))

    p_3.requires_grad_()
    (gradient,) = torch.autograd.grad(total(p_3), [p_3])
    assert torch.allclose(gradient, difference(total, p_3.detach()), rtol=1e-8, atol=1e-7)


def test_what_a_term_computes_with_gets_its_gradient(network: Network) -> None:
    h_ND, x_N, p_3 = numbers()

    def total(p_3: Tensor) -> Tensor:
        weight_N, entropy = weights(p_3), cross_entropy(x_N, V)

        def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
            return torch.tanh(weight_N[lo:hi]) * entropy(logits_CI, lo, hi).square() + weight_N[lo:hi]

        return summed_nats(network, h_ND, term, tensors=[weight_N])

    p_3.requires_grad_()
    (gradient,) = torch.autograd.grad(total(p_3), [p_3])
    assert torch.allclose(gradient, difference(total, p_3.detach()), rtol=1e-8, atol=1e-6)


def test_other_gradients_are_those_of_weights_that_need_none(network: Network) -> None:
    h_ND, x_N, p_3 = numbers()
    h_ND.requires_grad_()
    wanted = [h_ND, *network.head_parameters()]
    plain = torch.autograd.grad(weighted_cross_entropy(network, h_ND, x_N, weights(p_3)), wanted)
    learned = torch.autograd.grad(
        weighted_cross_entropy(network, h_ND, x_N, weights(p_3.clone().requires_grad_())), wanted
    )
    for a, b in zip(plain, learned, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_would_be_lost_is_refused(network: Network) -> None:
    h_ND, x_N, p_3 = numbers()
    weight_N, entropy = weights(p_3.requires_grad_()), cross_entropy(x_N, V)

    def term(logits_CI: Tensor, lo: int, hi: int) -> Tensor:
        return weight_N[lo:hi] * entropy(logits_CI, lo, hi)

    with pytest.raises(UsageError, match="gradient"):
        summed_nats(network, h_ND, term)
    with torch.no_grad():
        assert summed_nats(network, h_ND, term).isfinite()
    assert summed_nats(network, h_ND, term, tensors=[weight_N]).requires_grad
