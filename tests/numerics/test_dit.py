"""The DiT keeps the denoiser's contract: asked positions, padding, cache, causality, conditioning."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from unmask import samplers
from unmask.data.batch import make_batch
from unmask.denoisers.dit import SIZES, DiT
from unmask.denoisers.flat_rows import gather_positions
from unmask.denoisers.network import Network
from unmask.denoisers.ragged import ragged as ragged_rows
from unmask.errors import UsageError
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

SMALL = DiT(hidden=32, blocks=3, heads=4, dropout=0.0, qk_norm=False, zero_init=False)
IDS, MASK = 11, 10


def build(config: DiT) -> Network:
    torch.manual_seed(0)
    net = config.build(num_ids=IDS, mask_id=MASK).double().eval()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return net


Z = torch.randint(0, IDS, (3, 8), generator=torch.Generator().manual_seed(0))
LEVEL = torch.tensor([0.1, 0.5, 1.0])


@pytest.mark.parametrize("conditioning", ["none", "constant", "level", "sigma"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_asked_positions_are_those_of_the_whole(conditioning: str, causal: bool, qk_norm: bool) -> None:
    if causal and conditioning in ("level", "sigma"):
        pytest.skip("refused: a causal denoiser sees no noise")
    net = build(dataclasses.replace(SMALL, conditioning=conditioning, causal=causal, qk_norm=qk_norm))
    at = torch.tensor([[1, 5], [0, 7], [3, 3]])
    torch.testing.assert_close(net.trunk(Z, LEVEL, at_BK=at), gather_positions(net.trunk(Z, LEVEL), at))


@pytest.mark.parametrize("causal", [False, True])
def test_padding_is_not_seen(causal: bool) -> None:
    net = build(dataclasses.replace(SMALL, causal=causal))
    valid = torch.arange(8) < torch.tensor([8, 5, 3])[:, None]
    h = net.trunk(Z, valid_BL=valid)
    torch.testing.assert_close(h[1, :5], net.trunk(Z[1:2, :5])[0])
    torch.testing.assert_close(h[2, :3], net.trunk(Z[2:3, :3])[0])


def test_causal_network_sees_only_what_stands_before() -> None:
    net = build(dataclasses.replace(SMALL, causal=True))
    changed = Z.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % IDS
    same = (net.trunk(Z) - net.trunk(changed)).abs().amax(dim=(0, 2))
    assert (same[:5] == 0).all()  # position 4 is predicted without looking at token 4
    assert (same[5:] > 1e-6).all()


@pytest.mark.parametrize("stops", [[8], [1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 7, 8]])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_cache_gives_the_same_vectors(stops: list[int], qk_norm: bool) -> None:
    net = build(dataclasses.replace(SMALL, causal=True, qk_norm=qk_norm))
    cache, parts = net.new_cache(*Z.shape), []
    for span in zip([0, *stops], stops, strict=False):
        parts.append(net.trunk(Z, cache=cache, span=span))
        assert net.trunk(Z, cache=cache, span=span).equal(parts[-1])  # a call may be repeated
    torch.testing.assert_close(torch.cat(parts, dim=1), net.trunk(Z))
    with pytest.raises(UsageError, match="cache of 8"):
        net.trunk(Z, cache=cache, span=(8, 9))


@pytest.mark.parametrize("more", [{}, {"qk_norm": True}, {"conditioning": "constant"}])
def test_rows_step_from_positions_of_their_own(more: dict[str, Any]) -> None:
    net = build(dataclasses.replace(SMALL, causal=True, **more))
    assert net.can_step_rows()
    want = net.trunk(Z)
    caches, at = [net.new_cache(1, 8) for _ in Z], [1, 4, 2]
    for b, (cache, first) in enumerate(zip(caches, at, strict=True)):
        net.trunk(Z[b : b + 1], cache=cache, span=(0, first))
    for _ in range(4):
        ids_M = torch.cat([Z[torch.arange(3), torch.tensor(at) - 1], torch.zeros(2, dtype=torch.long)])
        again = [net.step_rows(ids_M, caches, at)[:3] for _ in range(2)]  # one that failed after it is made again
        assert again[0].equal(again[1])
        torch.testing.assert_close(again[0], want[torch.arange(3), torch.tensor(at)])
        at = [position + 1 for position in at]
    assert at == [5, 8, 6]
    with pytest.raises(UsageError, match="position 8 of a cache of 8"):
        net.step_rows(Z[:, 0], caches, at)
    with pytest.raises(UsageError, match="position 0"):
        net.step_rows(Z[:1, 0], caches[:1], [0])


def test_only_causal_networks_step_rows() -> None:
    assert not build(SMALL).can_step_rows()


def test_qk_norm_takes_the_size_of_queries_and_keys_away() -> None:
    for qk_norm in (False, True):
        net = build(dataclasses.replace(SMALL, qk_norm=qk_norm))
        before = net.trunk(Z)
        with torch.no_grad():
            for block in net.layers:  # type: ignore[attr-defined]
                block.qkv.weight[: 2 * 32] *= 7
        assert torch.allclose(net.trunk(Z), before, rtol=1e-4, atol=1e-4) == qk_norm


@pytest.mark.parametrize(
    "options", [{}, {"conditioning": "level"}, {"conditioning": "constant"}, {"classes": 3}], ids=str
)
def test_every_block_learns_from_the_start_or_the_step_after(options: dict[str, Any]) -> None:
    """Blocks may start as the identity, by adaLN's gates or by zeros of their own; by both they would stay it."""
    torch.manual_seed(0)
    net = DiT(hidden=32, blocks=2, heads=2, **options).build(num_ids=IDS, mask_id=MASK)
    x_BL = torch.randint(0, MASK, (8, 12))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(3):  # the head first, then what gates a block, then the block
        optimizer.zero_grad()
        MDLM(form="time").loss(net, make_batch(x_BL, seed=0, step=step)).nats.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, p in net.named_parameters():
        if name.startswith("blocks.") and name.endswith("weight") and "modulation" not in name:
            assert p.grad is not None
            assert bool(p.grad.any()), name


@pytest.mark.parametrize("zero_init", [False, True])
def test_blocks_that_start_as_the_identity(zero_init: bool) -> None:
    torch.manual_seed(0)
    net = dataclasses.replace(SMALL, zero_init=zero_init).build(num_ids=IDS, mask_id=MASK).eval()
    assert net.trunk(Z).equal(net.norm(net.embed(Z))) == zero_init


def test_positions_are_relative() -> None:
    net = build(SMALL)
    moved = torch.arange(100, 108).expand(3, 8)
    torch.testing.assert_close(net.trunk(Z, positions_BL=moved), net.trunk(Z), rtol=1e-4, atol=1e-6)
    stretched = (2 * torch.arange(8)).expand(3, 8)
    assert (net.trunk(Z, positions_BL=stretched) - net.trunk(Z)).abs().max() > 1e-3


def test_only_conditioned_networks_look_at_the_level() -> None:
    for conditioning, looks in (("none", False), ("constant", False), ("level", True), ("sigma", True)):
        net = build(dataclasses.replace(SMALL, conditioning=conditioning))
        moved = (net.trunk(Z, LEVEL) - net.trunk(Z, LEVEL / 2)).abs().max()
        assert (moved > 1e-6) == looks
        assert net.uses_level == looks
    with pytest.raises(UsageError, match="level_B"):
        build(dataclasses.replace(SMALL, conditioning="level")).trunk(Z)


def test_what_is_not_supported_raises() -> None:
    net = build(SMALL)
    with pytest.raises(UsageError, match="without classes"):
        net.trunk(Z, cond=torch.zeros(3, 4))
    with pytest.raises(UsageError, match="causal"):
        net.trunk(Z, cache=[])


def test_activation_checkpointing_gives_the_same_gradients() -> None:
    net = build(dataclasses.replace(SMALL, dropout=0.2)).train()
    grads = []
    for on in (False, True):
        net.checkpoint_activations = on
        net.zero_grad()
        torch.manual_seed(3)
        net.head(net.trunk(Z)).square().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    torch.testing.assert_close(grads[0], grads[1])


def test_sizes_have_the_papers_parameter_counts() -> None:
    """Blocks alone: 12 hidden^2 + 5 hidden (MLP biases) + 2 hidden (norms) each."""
    for size, (hidden, blocks, _) in SIZES.items():
        with torch.device("meta"):
            net = DiT(size=size).build(num_ids=IDS, mask_id=MASK)  # type: ignore[arg-type]
        got = sum(p.numel() for name, p in net.named_parameters() if name.startswith("blocks."))
        assert got == blocks * (12 * hidden**2 + 7 * hidden)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_do_not_depend_on_their_batch(causal: bool) -> None:
    """The same row alone, among others, and among longer ones."""
    net = build(dataclasses.replace(SMALL, causal=causal))
    sampler = samplers.LeftToRight() if causal else samplers.Ancestral(steps=6)
    canvas = Canvas.blank(num=6, length=8, mask_id=MASK, seed=4)
    together = sample(net, canvas, sampler).tokens
    for i in range(6):
        alone = dataclasses.replace(
            canvas, tokens=canvas.tokens[i : i + 1], open_BL=canvas.open_BL[i : i + 1], key_B=canvas.key_B[i : i + 1]
        )
        assert sample(net, alone, sampler).tokens.equal(together[i : i + 1])
    rows = [[MASK] * 8, [MASK] * 5]
    ragged = sample(net, Canvas.of_rows(rows, mask_id=MASK, pad_id=0, seed=4), sampler).tokens
    short = dataclasses.replace(
        canvas, tokens=canvas.tokens[1:2, :5], open_BL=canvas.open_BL[1:2, :5], key_B=canvas.key_B[1:2]
    )
    assert ragged[0].equal(together[0])
    assert ragged[1, :5].equal(sample(net, short, sampler).tokens[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("conditioning", ["none", "constant"])
def test_rows_without_padding_give_the_padded_loss_and_gradients(causal: bool, conditioning: str) -> None:
    objective = AR() if causal else MDLM(form="count")
    net = DiT(size="nano", conditioning=conditioning, causal=causal, dropout=0.0, qk_norm=True)  # type: ignore[arg-type]
    network = net.build(num_ids=50, mask_id=49).double()
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x_BL, lengths = torch.randint(0, 49, (6, 20)), torch.tensor([3, 20, 7, 11, 1, 15])
    prompts = torch.tensor([0, 4, 7, 2, 0, 14])
    batch = make_batch(x_BL, lengths, prompts, seed=0, step=3)
    assert network.takes_ragged()
    results = []
    for ragged in (True, False):
        network.takes_ragged = lambda ragged=ragged: ragged  # type: ignore[method-assign, misc]
        network.zero_grad()
        nats = objective.loss(network, batch).nats
        nats.backward()  # type: ignore[no-untyped-call]
        results.append(
            (nats.detach(), torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None]))
        )
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-11)


def test_what_rows_without_padding_hold_elsewhere_is_nothing_to_them() -> None:
    """A row's vectors do not depend on its neighbours, whether they stand before or behind it."""
    network = DiT(size="nano", dropout=0.0).build(num_ids=50, mask_id=49).double()
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.3)
    valid_BL = torch.arange(8) < torch.tensor([5, 8, 2])[:, None]
    rows, z_M = ragged_rows(valid_BL), torch.randint(0, 49, (15,))
    mine = torch.arange(5, 13)
    before = network.trunk_ragged(z_M, None, rows, mine)
    z_M[:5], z_M[13:] = 7, 8
    assert torch.equal(network.trunk_ragged(z_M, None, rows, mine), before)
    z_M[6] = (z_M[6] + 1) % 49
    assert not torch.allclose(network.trunk_ragged(z_M, None, rows, mine), before)
