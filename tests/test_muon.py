"""Muon: its matrices, its update against the plain definition, and a run that uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask.config import OptimConfig, from_dict
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.errors import ConfigError
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.ema import Ema
from unmask.training.loop import train
from unmask.training.muon import muon_, orthogonal
from unmask.training.optim import Updater, flatten_optimizer, is_muon, make_optimizer, restore_optimizer

MUON = OptimConfig(muon=True, lr=1e-2, warmup=0, weight_decay=0.1)


def network(**options: Any) -> DiTNetwork:
    torch.manual_seed(0)
    return DiT(hidden=16, blocks=2, heads=2, dropout=0.0, **options).build(num_ids=11, mask_id=10)


def set_gradients(net: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("shape", [(12, 12), (6, 20), (20, 6)])
def test_singular_values_go_to_one_and_the_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, *shape) * torch.tensor([1e-3, 1.0, 1e3])[:, None, None]
    y = orthogonal(x)
    values = torch.linalg.svdvals(y)
    assert values.min() > 0.3
    assert values.max() < 1.3
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    inner = u.mT @ y @ vh.mT  # diagonal, if the singular vectors are the same
    assert (inner - torch.diag_embed(inner.diagonal(dim1=1, dim2=2))).abs().max() < 1e-3
    torch.testing.assert_close(orthogonal(x[1:2])[0], y[1], rtol=1e-4, atol=1e-5)  # neighbours do not matter


def plain_muon(p: Tensor, grads: list[Tensor], parts: int, lr: float, momentum: float, decay: float) -> Tensor:
    """One matrix at a time, as it is written down."""
    m, p = torch.zeros_like(p), p.clone()
    for grad in grads:
        m = momentum * m + (1 - momentum) * grad
        ahead = momentum * m + (1 - momentum) * grad
        for part, direction in zip(p.chunk(parts), ahead.chunk(parts), strict=True):
            size = max(part.shape) ** 0.5 * 0.2
            part.mul_(1 - lr * decay).sub_(lr * size * orthogonal(direction[None])[0])
    return p


def test_the_batched_update_is_that_of_each_matrix() -> None:
    torch.manual_seed(0)
    shapes, parts = [(12, 4), (4, 4), (16, 4), (4, 16), (4, 4)], [3, 1, 1, 1, 1]
    params = [torch.randn(shape) for shape in shapes]
    wanted, grads = [p.clone() for p in params], [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    momenta = [torch.zeros_like(p) for p in params]
    how = {"parts": parts, "lr": 0.1, "momentum": 0.9, "rms": 0.2, "weight_decay": 0.3}
    for each in grads:
        muon_(params, each, momenta, scale=1.0, nonfinite=torch.tensor(0.0), **how)
    for i, p in enumerate(params):
        want = plain_muon(wanted[i], [each[i] for each in grads], parts[i], 0.1, 0.9, 0.3)
        torch.testing.assert_close(p, want, rtol=1e-4, atol=1e-5)
    before = [t.clone() for t in params + momenta]
    nan = [torch.full(shape, torch.nan) for shape in shapes]
    muon_(params, nan, momenta, scale=torch.tensor(torch.nan), nonfinite=torch.tensor(1.0), **how)
    assert all(a.equal(b) for a, b in zip(before, params + momenta, strict=True))


def test_which_parameters_are_muons() -> None:
    net = network(conditioning="constant", cond_dim=8, tied=True)
    optimizer, names = make_optimizer(net, MUON)
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    turned = {id(p) for group in optimizer.param_groups if is_muon(group) for p in group["params"]}
    kinds = {name.split(".", 2)[2] for name, p in net.named_parameters() if id(p) in turned}
    assert kinds == {"qkv.weight", "out.weight", "mlp_in.weight", "mlp_out.weight"}
    assert len(turned) == 8


def test_a_step_moves_everything_and_its_state_comes_back_bit_by_bit() -> None:
    def updater(net: DiTNetwork) -> Updater:
        optimizer, names = make_optimizer(net, MUON)
        return Updater(optimizer, names, ema=Ema(net, 0.9), clip=1.0)

    def step(net: DiTNetwork, over: Updater, seed: int) -> None:
        set_gradients(net, seed)
        over.update(lr=1e-2, grad_norm=over.grad_norm(), nonfinite=torch.tensor(False))

    net = network()
    first = updater(net)
    start = {name: p.detach().clone() for name, p in net.named_parameters()}
    step(net, first, 1)
    for name, p in net.named_parameters():
        assert not p.equal(start[name]), name
        assert not first.ema.shadow[name].equal(start[name]), name  # type: ignore[union-attr]
    moved = net.blocks[0].mlp_in.weight - start["blocks.0.mlp_in.weight"] * (1 - 1e-2 * 0.1)  # type: ignore[union-attr,operator]
    assert float(moved.detach().square().mean().sqrt()) == pytest.approx(1e-2 * 0.2, rel=0.25)

    other = network()
    second = updater(other)
    other.load_state_dict(net.state_dict())
    restore_optimizer(second.optimizer, second.names, *flatten_optimizer(first.optimizer, first.names))
    for n, over in ((net, first), (other, second)):
        step(n, over, 2)
    assert all(a.equal(b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"muon_rms": 0.0}, {"muon": "often"}])
def test_what_it_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        from_dict(OptimConfig, wrong)


def test_a_run_with_muon_qk_norm_and_zero_init_resumes_bit_by_bit(tmp_path: Path, make_config: Any) -> None:
    denoiser = DiT(hidden=32, blocks=2, heads=2, dropout=0.0, qk_norm=True, zero_init=True)
    optim = {"muon": True, "lr": 1e-2}

    def run(name: str, steps: int, **how: Any) -> dict[str, dict[str, Tensor]]:
        config = make_config(tmp_path / name, steps=steps, denoiser=denoiser, optim=optim, save_every=4)
        train(config, device="cpu", **how)
        found = load_checkpoint(tmp_path / name)
        assert found is not None
        return found.tensors

    whole = run("whole", 8)
    run("parts", 4)
    again = run("parts", 8, resume=True)
    assert whole.keys() == again.keys()
    for file, tensors in whole.items():
        assert [name for name, t in tensors.items() if not t.equal(again[file][name])] == []
