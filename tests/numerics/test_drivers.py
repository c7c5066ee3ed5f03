"""The DiT's block is written once and driven in many ways: all of them give the same vectors.

What runs on a GPU alone (captured graphs, kernels without the interpreter) is held to these in tests/gpu.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from matrix import sample
from unmask import kernels
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.denoisers.dit.block import Block
from unmask.denoisers.network import Attend, as_denoiser
from unmask.denoisers.ragged import ragged, vectors_at
from unmask.errors import UsageError

IDS, MASK, B, L, D = 11, 10, 3, 8, 16
GENERATOR = torch.Generator().manual_seed(0)
Z = torch.randint(0, IDS, (B, L), generator=GENERATOR)
LEVEL = torch.tensor([0.1, 0.5, 0.9])
VALID = torch.arange(L) < torch.tensor([8, 5, 3])[:, None]
AT = torch.tensor([[1, 5], [0, 4], [2, 2]])
FLAT = torch.tensor([1, 5, 8, 12, 18])  # distinct and real, in the padded batch


def build(std: float = 0.2, **options: Any) -> DiTNetwork:
    torch.manual_seed(0)
    net = DiT(hidden=D, blocks=2, heads=2, dropout=0.0, cond_dim=8, **options).build(num_ids=IDS, mask_id=MASK)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=std)
    return net.double().eval()


def networks() -> Iterator[dict[str, Any]]:
    for causal, qk_norm in itertools.product((False, True), (False, True)):
        for more in (
            {},
            {"value_residual": True},
            {"conditioning": "constant"},
            {"conditioning": "level"},
            {"conditioning": "sigma", "classes": 3},
        ):
            if not (causal and ("classes" in more or more.get("conditioning") == "level")):
                yield {"causal": causal, "qk_norm": qk_norm, **more}


def labels(options: dict[str, Any]) -> Tensor | None:
    return torch.tensor([0, -1, 2]) if "classes" in options else None


@pytest.mark.parametrize("options", list(networks()), ids=str)
@torch.no_grad()
def test_all_drivers_give_the_same_vectors(options: dict[str, Any]) -> None:
    net, cond = build(**options), labels(options)
    want = net.trunk(Z, LEVEL, valid_BL=VALID, cond=cond)
    flat_want = want.flatten(0, 1)[FLAT]

    def same(got: Tensor, wanted: Tensor, driver: str) -> None:
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10, msg=lambda m: f"{driver}: {m}")

    for b in range(B):
        n = int(VALID[b].sum())
        one = None if cond is None else cond[b : b + 1]
        same(net.trunk(Z[b : b + 1, :n], LEVEL[b : b + 1], cond=one)[0], want[b, :n], "alone")
    at = net.trunk(Z, LEVEL, valid_BL=VALID, cond=cond, at_BK=AT)
    same(at, want[torch.arange(B)[:, None], AT], "at positions")
    same(net.trunk_at(Z, LEVEL, FLAT, valid_BL=VALID, cond=cond), flat_want, "flat")
    place = (VALID.flatten().cumsum(0) - 1)[FLAT]
    same(net.trunk_ragged(Z[VALID], LEVEL, ragged(VALID), place, cond=cond), flat_want, "ragged")
    same(vectors_at(net, Z, LEVEL, FLAT, valid_BL=VALID, label_B=cond), flat_want, "the shorter way")
    same(net.trunk(net.embed(Z), LEVEL, valid_BL=VALID, cond=cond), want, "vectors instead of ids")
    each_BL = LEVEL[:, None].expand(B, L)
    same(net.trunk(Z, each_BL, valid_BL=VALID, cond=cond), want, "a level for each position")
    positions_BL = torch.arange(L).expand(B, L)
    same(net.trunk(Z, LEVEL, valid_BL=VALID, cond=cond, positions_BL=positions_BL), want, "positions told")
    net.checkpoint_activations = True
    with torch.enable_grad():
        same(net.trunk(Z, LEVEL, valid_BL=VALID, cond=cond).detach(), want, "checkpointed")
    if not net.causal:
        return
    want, cache = net.trunk(Z), net.new_cache(B, L)
    parts = [net.trunk(Z, cache=cache, span=span) for span in ((0, 3), (3, 4), (4, 8))]
    same(torch.cat(parts, dim=1), want, "cached")
    caches, where = [net.new_cache(1, L) for _ in range(B)], [1, 4, 2]
    for b, first in enumerate(where):
        net.trunk(Z[b : b + 1], cache=caches[b], span=(0, first))
    row = torch.arange(B)
    for _ in range(3):
        at_B = torch.tensor(where)
        same(net.step_rows(Z[row, at_B - 1], caches, where), want[row, at_B], "rows of their own")
        where = [position + 1 for position in where]


@torch.no_grad()
def test_values_are_mixed_by_their_share() -> None:
    """None of the first block's is the plain network; all of them, and a later block's own projection is not read."""
    net, plain = build(value_residual=True), build()
    plain.load_state_dict({name: p for name, p in net.state_dict().items() if "value_share" not in name})
    share, later = net.layers[1].value_share, net.layers[1].qkv.weight
    assert net.layers[0].value_share is None
    assert share is not None
    share.fill_(0.0)
    assert net.trunk(Z).equal(plain.trunk(Z))
    share.fill_(1.0)
    before = net.trunk(Z)
    later[2 * D :] += 1.0
    torch.testing.assert_close(net.trunk(Z), before, rtol=1e-12, atol=1e-12)
    share.fill_(0.5)
    assert not net.trunk(Z).isclose(before).all()


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(
    "options", sample([o for o in networks() if o["qk_norm"] or "conditioning" not in o], 4), ids=str
)
@torch.no_grad()
def test_the_drivers_with_kernels_give_the_same_vectors(options: dict[str, Any]) -> None:
    """In Triton's interpreter, or on a GPU. On a CPU the MLP's GELU is the exact one, hence the tolerance."""
    from unmask.denoisers.dit.fused import fused_decode, fused_trunk

    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, cond = build(std=0.1, **options).float().to(device), labels(options)
    z, level, valid, at = (t.to(device) for t in (Z, LEVEL, VALID, AT))
    cond = None if cond is None else cond.to(device)
    shifted = net.shift(z) if net.causal else z
    mask = None if net.causal else Attend(valid).allowed()
    for more in ({}, {"at_BK": at}):
        plain = net._blocks(shifted, level, mask, causal=net.causal, cond=cond, **more)
        fused = fused_trunk(net, shifted, level, mask=mask, causal=net.causal, cond=cond, **more)
        real = valid if not more else torch.ones_like(at, dtype=torch.bool)
        torch.testing.assert_close(fused[real], plain[real], rtol=2e-3, atol=2e-3)
    vectors = net.embed(shifted)
    before = vectors.clone()
    torch.testing.assert_close(fused_trunk(net, vectors, level, cond=cond), fused_trunk(net, shifted, level, cond=cond))
    assert vectors.equal(before)
    if net.causal:
        cache = net.new_cache(B, L)
        assert cache is not None
        net.trunk(z, cache=cache, span=(0, 3))
        for position in (3, 4, 5):
            h = fused_decode(net, z[:, position - 1], torch.tensor([position], device=device), cache, 7)
            want = net._blocks(shifted, None, None, causal=True)[:, position]
            torch.testing.assert_close(h, want, rtol=2e-3, atol=2e-3)


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize(
    ("options", "checkpointed"),
    [
        ({"qk_norm": False}, False),
        ({"conditioning": "constant"}, False),
        ({"value_residual": True}, False),
        ({"value_residual": True}, True),
        ({"causal": True}, False),
        ({"conditioning": "sigma", "classes": 3}, False),
        ({"conditioning": "level"}, True),
    ],
    ids=str,
)
def test_the_training_pass_with_kernels_gives_the_same_gradients(
    options: dict[str, Any], checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole rows, of padded ones and of rows without padding, in Triton's interpreter or on a GPU."""
    from unmask.denoisers.dit.fused_training import fused_training_trunk

    for kernel in ("add_norm", "linear_gelu"):
        monkeypatch.setattr(f"unmask.kernels.{kernel}.LINES", 4)  # the interpreter is slow

    device = "cuda" if torch.cuda.is_available() else "cpu"
    net, label = build(std=0.1, **options).float().to(device), labels(options)
    net.checkpoint_activations = checkpointed
    z, valid, flat, level = (t.to(device) for t in (Z, VALID, FLAT, LEVEL))
    label = None if label is None else label.to(device)
    named = dict(net.named_parameters())
    weight = torch.randn(len(FLAT), D, generator=torch.Generator().manual_seed(1)).to(device)

    def gradients(h: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad((h * weight).sum(), list(named.values()), allow_unused=True, retain_graph=True)
        return [torch.zeros(1, device=device) if g is None else g for g in grads]

    def same(fused: Tensor, plain: Tensor) -> None:
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
        for name, a, b in zip(named, gradients(fused), gradients(plain), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

    shifted = net.shift(z) if net.causal else z
    c = net.condition(z, level, label)
    mask = None if net.causal else Attend(valid).allowed()
    want = net._blocks(shifted, level, mask, flat_N=flat, causal=net.causal, cond=label)
    same(fused_training_trunk(net, shifted, flat, c, mask=mask, causal=net.causal), want)
    vectors = net.embed(shifted)
    want = net._blocks(vectors, level, None, flat_N=flat, causal=net.causal, cond=label)
    same(fused_training_trunk(net, vectors, flat, c, causal=net.causal), want)
    if checkpointed:
        return
    some = None if net.causal else Attend(back=2).allowed((B, L))  # of a causal one all rows look back
    want = net._blocks(shifted, level, some, flat_N=flat, causal=net.causal, cond=label)
    same(fused_training_trunk(net, shifted, flat, c, causal=net.causal, back=2), want)
    rows, place = ragged(valid), (valid.flatten().cumsum(0) - 1)[flat]
    ids = torch.where(rows.position_M == 0, net.mask_id, z[valid].roll(1)) if net.causal else z[valid]
    if net.takes_ragged():
        want = net._blocks(ids, level, None, flat_N=place, causal=net.causal, cond=label, rows=rows)
        same(fused_training_trunk(net, ids, place, c, causal=net.causal, rows=rows), want)


def test_a_block_of_ones_own_is_run_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernels stand in for what they do not know."""

    class Own(Block):
        pass

    monkeypatch.setattr(kernels, "fit", lambda tensor: True)
    net = build().eval()
    assert net.can_fuse_training()
    with torch.no_grad():
        assert net.can_fuse()
        net.blocks[1].__class__ = Own
        assert not net.can_fuse()
    assert not net.can_fuse_training()


@pytest.mark.parametrize("conditioning", ["level", "sigma"])
def test_each_position_may_have_its_own_level(conditioning: str) -> None:
    """One block sees other positions only through keys and values, so the last norm's own level is told apart there."""
    net = build(conditioning=conditioning)
    level_BL = torch.rand(B, L, generator=GENERATOR)
    h = net.trunk(Z, level_BL, valid_BL=VALID)
    torch.testing.assert_close(net.trunk(Z, level_BL, valid_BL=VALID, at_BK=AT), h[torch.arange(B)[:, None], AT])
    torch.testing.assert_close(net.trunk_at(Z, level_BL, FLAT, valid_BL=VALID), h.flatten(0, 1)[FLAT])
    alone = Attend(mask=torch.eye(L, dtype=torch.bool))  # nobody sees another: a position's level is its own affair
    h = net.trunk(Z, level_BL, attend=alone)
    for b, position in ((0, 3), (2, 6)):
        row = net.trunk(Z[b : b + 1], level_BL[b, position : position + 1], attend=alone)
        torch.testing.assert_close(h[b, position], row[0, position])
    with pytest.raises(UsageError, match="each position"):
        net.trunk(Z, level_BL[:, :3])


def test_blocks_and_masks_say_who_sees_whom() -> None:
    net = build()
    blocks = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    h = net.trunk(Z, attend=Attend(blocks=blocks))
    torch.testing.assert_close(h[:, :3], net.trunk(Z[:, :3]))  # the first block sees itself alone
    matrix = blocks[None, :] <= blocks[:, None]
    torch.testing.assert_close(net.trunk(Z, attend=Attend(mask=matrix)), h)
    torch.testing.assert_close(net.trunk(Z, attend=Attend(blocks=blocks.expand(B, L))), h)
    torch.testing.assert_close(
        net.trunk(Z, attend=Attend(mask=matrix.expand(B, L, L)), at_BK=AT), h[torch.arange(B)[:, None], AT]
    )
    torch.testing.assert_close(net.trunk_at(Z, None, FLAT, attend=Attend(blocks=blocks)), h.flatten(0, 1)[FLAT])
    later = Z.clone()
    later[:, 5:] = (later[:, 5:] + 1) % IDS
    moved = (net.trunk(later, attend=Attend(blocks=blocks)) - h).abs().amax(dim=(0, 2))
    assert (moved[:5] == 0).all()
    assert (moved[5:] > 1e-6).all()
    padded = net.trunk(Z, attend=Attend(VALID, blocks=blocks))
    assert padded.isfinite().all()
    torch.testing.assert_close(padded[1, :5], net.trunk(Z[1:2, :5], attend=Attend(blocks=blocks[:5]))[0])
    got = vectors_at(net, Z, None, FLAT, attend=Attend(VALID, blocks=blocks))
    torch.testing.assert_close(got, padded.flatten(0, 1)[FLAT])


def test_what_a_network_cannot_do_it_refuses() -> None:
    net, causal = build(), build(causal=True)
    with pytest.raises(UsageError, match="as wide as the embedding"):
        net.trunk(torch.zeros(B, L, D + 1))
    with pytest.raises(UsageError, match="no mask"):
        causal.trunk(Z, attend=Attend(blocks=torch.zeros(L)))
    with pytest.raises(UsageError, match="not both"):
        net.trunk(Z, valid_BL=VALID, attend=Attend(VALID))
    with pytest.raises(UsageError, match="span"):
        causal.trunk(Z, span=(0, 3))
    wrapped = as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    for option in ({"attend": Attend(blocks=torch.zeros(L))}, {"cache": []}, {"positions_BL": Z}):
        with pytest.raises(UsageError, match="wrapped function"):
            wrapped.trunk(Z, LEVEL, **option)
    assert net.new_cache(1, L) is None


def test_gradients_flow_through_vectors_and_levels() -> None:
    net = build(conditioning="level")
    vectors = net.embed(Z).detach().requires_grad_()
    level_BL = torch.rand(B, L, generator=GENERATOR).requires_grad_()
    net.trunk_at(vectors, level_BL, FLAT).square().sum().backward()  # type: ignore[no-untyped-call]
    for t in (vectors, level_BL):
        assert t.grad is not None
        assert bool(t.grad.abs().sum() > 0)


@pytest.mark.parametrize("told", [False, True])
def test_a_wrapped_function_takes_padding(told: bool) -> None:
    """The mean of a row's tokens decides, so padding that were seen would show."""
    calls: list[tuple[int, int]] = []

    def mean(z: Tensor, level: Tensor, label: Tensor, valid_BL: Tensor) -> Tensor:
        calls.append((z.shape[0], z.shape[1]))
        mean_B = (z * valid_BL).sum(dim=1) / valid_BL.sum(dim=1) + level + label
        return mean_B[:, None, None].expand(*z.shape, 12)

    def untold(z: Tensor, level: Tensor, label: Tensor) -> Tensor:
        return mean(z, level, label, torch.ones_like(z, dtype=torch.bool))

    net = as_denoiser(mean if told else untold, vocab_size=11, mask_id=11, classes=3)
    assert net.takes_padding == told
    label = torch.tensor([2, 0, 1])
    order = torch.tensor([1, 0, 2, 1])  # two rows of one length
    h = net.trunk(Z[order], LEVEL[order], valid_BL=VALID[order], cond=label[order])
    assert calls == ([(4, 8)] if told else [(1, 3), (2, 5), (1, 8)])
    for i, b in enumerate(order.tolist()):
        n = int(VALID[b].sum())
        alone = net.trunk(Z[b : b + 1, :n], LEVEL[b : b + 1], cond=label[b : b + 1])[0]
        torch.testing.assert_close(h[i, :n], alone)


def test_muon_takes_what_the_network_names() -> None:
    net = build(conditioning="constant")
    names = net.matrices()
    assert set(names) <= dict(net.named_parameters()).keys()
    assert {name.split(".", 2)[2]: maps for name, maps in names.items()} == {
        "qkv.weight": 3,
        "out.weight": 1,
        "mlp_in.weight": 1,
        "mlp_out.weight": 1,
    }
    assert as_denoiser(lambda z, level: z, vocab_size=2, mask_id=2).matrices() == {}
