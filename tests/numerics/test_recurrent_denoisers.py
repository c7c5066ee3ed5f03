"""Mamba, Caduceus and Hyena: what sees what, both strands alike, caches, padding, and the papers' equations."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask.data.batch import make_batch
from unmask.data.complement import complement_of
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.hyena import Filter, Hyena, causal_conv
from unmask.denoisers.mamba import Mamba, MambaNetwork
from unmask.denoisers.network import Attend, Network
from unmask.errors import UsageError
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.objectives.terms import subs_log_probs
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample
from unmask.storage.model_folder import load_weights, unshared

A, C, G, T, N, EOT, MASK = range(7)
OTHER = (T, G, C, A, N, EOT, MASK)
L = 21

MAMBA = Mamba(hidden=16, blocks=2, states=4)
HYENA = Hyena(hidden=16, blocks=2, length=32, filter_width=16)
PLAIN = Caduceus(hidden=16, blocks=2, states=4)
PS = Caduceus(hidden=16, blocks=2, states=4, equivariance="ps", complement=OTHER)
PH = Caduceus(hidden=16, blocks=2, states=4, equivariance="ph", complement=OTHER)
LEVEL = Caduceus(hidden=16, blocks=2, states=4, conditioning="level", classes=2, equivariance="ps", complement=OTHER)
ALL = {"mamba": MAMBA, "hyena": HYENA, "plain": PLAIN, "ps": PS, "ph": PH, "level": LEVEL}
each = pytest.mark.parametrize("denoiser", ALL.values(), ids=ALL)
causal = pytest.mark.parametrize("denoiser", [MAMBA, HYENA], ids=["mamba", "hyena"])
strands = pytest.mark.parametrize("denoiser", [PS, PH, LEVEL], ids=["ps", "ph", "level"])


def network(denoiser: Denoiser, dtype: torch.dtype = torch.float64) -> Network:
    """Nothing in it is zero or one by chance of its start."""
    torch.manual_seed(0)
    net = denoiser.build(num_ids=7, mask_id=MASK).to(dtype).eval()
    with torch.no_grad():
        for p in net.parameters():
            p += 0.1 * torch.randn_like(p)
    return net


def rows(num: int = 3, length: int = L) -> Tensor:
    torch.manual_seed(1)
    z_BL = torch.randint(0, N + 1, (num, length))
    return z_BL.masked_fill(torch.rand(num, length) < 0.4, MASK)


def how(net: Network, num: int = 3) -> dict[str, Any]:
    """A level and classes, where the network looks at them."""
    level = torch.linspace(0.2, 0.9, num, dtype=torch.float64) if net.uses_level else None
    return {"level": level, "cond": torch.arange(num) % 3 - 1 if net.num_classes else None}


def other_strand(z_BL: Tensor) -> Tensor:
    return torch.tensor(OTHER)[z_BL].flip(1)


# --- what sees what ---------------------------------------------------------------------------------------------------


@causal
@torch.no_grad()
def test_no_position_sees_what_stands_there_or_later(denoiser: Denoiser) -> None:
    net, z_BL = network(denoiser), rows()
    before = net(z_BL)
    for position in (0, 7, L - 1):
        changed = z_BL.clone()
        changed[:, position] = (changed[:, position] + 1) % N
        after = net(changed)
        torch.testing.assert_close(after[:, : position + 1], before[:, : position + 1], rtol=0, atol=1e-9)
        assert position == L - 1 or not torch.allclose(after[:, position + 1], before[:, position + 1])


@torch.no_grad()
def test_mamba_is_causal_to_the_bit() -> None:
    net, z_BL = network(MAMBA, torch.float32), rows()
    changed = z_BL.clone()
    changed[:, 9:] = A
    assert net(changed)[:, :10].equal(net(z_BL)[:, :10])


@pytest.mark.parametrize("denoiser", [PLAIN, PS, PH], ids=["plain", "ps", "ph"])
@torch.no_grad()
def test_every_position_sees_both_sides(denoiser: Denoiser) -> None:
    net, z_BL = network(denoiser), rows()
    before = net(z_BL)
    for position in (0, L - 1):
        changed = z_BL.clone()
        changed[:, position] = (changed[:, position] + 1) % N
        assert bool(((net(changed) - before).abs().amax(dim=-1) > 1e-12).all())


@each
@torch.no_grad()
def test_padding_is_invisible_and_rows_are_their_own(denoiser: Denoiser) -> None:
    net, z_BL, lengths = network(denoiser), rows(), [L, 9, 1]
    valid_BL = torch.arange(L) < torch.tensor(lengths)[:, None]
    together, options = net(z_BL, valid_BL=valid_BL, **how(net)), how(net)
    for b, length in enumerate(lengths):
        own = {name: None if t is None else t[b : b + 1] for name, t in options.items()}
        torch.testing.assert_close(together[b, :length], net(z_BL[b : b + 1, :length], **own)[0])


@each
def test_chosen_positions_and_recomputed_blocks_are_the_same(denoiser: Denoiser) -> None:
    net, z_BL, at_BK = network(denoiser).train(), rows(), torch.tensor([[2, 5], [0, 1], [20, 4]])
    whole = net.trunk(z_BL, **how(net))
    torch.testing.assert_close(net.trunk(z_BL, at_BK=at_BK, **how(net)), whole[torch.arange(3)[:, None], at_BK])
    options = how(net)
    chosen = net.trunk_at(z_BL, options["level"], torch.tensor([50, 3]), cond=options["cond"])
    torch.testing.assert_close(chosen, whole.flatten(0, 1)[[50, 3]])
    grads = []
    for recompute in (False, True):
        net.checkpoint_activations = recompute
        net.zero_grad()
        net(z_BL, **how(net)).square().sum().backward()
        grads.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(grads[0], grads[1])
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in grads[0])


@each
def test_what_only_attention_can_do_is_refused(denoiser: Denoiser) -> None:
    net, z_BL = network(denoiser), rows()
    for attend in (Attend(mask=torch.ones(L, L, dtype=torch.bool)), Attend(blocks=torch.zeros(L))):
        with pytest.raises(UsageError, match="does not support"):
            net.trunk(z_BL, attend=attend, **how(net))
    with pytest.raises(UsageError, match="does not support positions_BL"):
        net.trunk(z_BL, positions_BL=torch.zeros(3, L), **how(net))
    if not denoiser.causal:
        with pytest.raises(UsageError, match="does not support causal"):
            net.trunk(z_BL, attend=Attend(causal=True), **how(net))
    if not net.num_classes:
        with pytest.raises(UsageError, match="without classes"):
            net.trunk(z_BL, cond=torch.zeros(3, dtype=torch.long))


# --- both strands -----------------------------------------------------------------------------------------------------


@strands
@torch.no_grad()
def test_the_other_strand_has_the_same_logits_at_the_same_place(denoiser: Denoiser) -> None:
    net, z_BL = network(denoiser), rows()
    here, there = net(z_BL, **how(net)), net(other_strand(z_BL), **how(net))
    torch.testing.assert_close(there, here.flip(1)[..., list(OTHER)], rtol=0, atol=1e-9)
    assert not torch.allclose(here, here[..., list(OTHER)])  # which says something: letters differ


@torch.no_grad()
def test_a_network_of_one_strand_is_not_so() -> None:
    net, z_BL = network(PLAIN), rows()
    assert not torch.allclose(net(other_strand(z_BL)), net(z_BL).flip(1)[..., list(OTHER)], atol=1e-3)


@strands
@torch.no_grad()
def test_with_mirrored_masks_the_bound_of_both_strands_is_one(denoiser: Denoiser) -> None:
    net = network(denoiser)
    torch.manual_seed(2)
    x_BL, masked_BL = torch.randint(0, N, (3, L)), torch.rand(3, L) < 0.5
    valid_BL = torch.arange(L) < torch.tensor([[L], [L], [14]])
    masked_BL &= valid_BL

    def nats(x: Tensor, masked: Tensor) -> Tensor:
        logits_BLI = net(x.masked_fill(masked, MASK), valid_BL=valid_BL, **how(net))
        log_p = subs_log_probs(logits_BLI.flatten(0, 1), MASK)
        return -(log_p.gather(1, x.flatten().unsqueeze(1)).view(x.shape) * masked).sum(dim=1)

    def turned(t_BL: Tensor) -> Tensor:
        return torch.stack(
            [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(t_BL, valid_BL.sum(1), strict=True)]
        )

    other = nats(torch.tensor(OTHER)[turned(x_BL)], turned(masked_BL))
    torch.testing.assert_close(other, nats(x_BL, masked_BL), rtol=0, atol=1e-9)


@torch.no_grad()
def test_ph_is_trained_on_one_strand_and_used_on_the_average_of_both() -> None:
    net, z_BL = network(PH), rows()
    conjoined = net(z_BL)
    one, other = net.train()(z_BL), net(other_strand(z_BL))
    torch.testing.assert_close(conjoined, (one + other.flip(1)[..., list(OTHER)]) / 2)
    plain = PLAIN.build(num_ids=7, mask_id=MASK).double()
    plain.load_state_dict(net.state_dict())
    torch.testing.assert_close(plain(z_BL), one)
    assert net.train().head_linear().weight.shape == (7, 16)  # type: ignore[union-attr]
    assert net.eval().head_linear().weight.shape == (7, 32)  # type: ignore[union-attr]


def test_the_head_of_both_strands_is_a_linear_map_with_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    net, grads = network(PS).train(), []
    batch = make_batch(torch.randint(0, N, (4, L)), seed=1, step=0)
    for linear in (True, False):
        if not linear:
            monkeypatch.setattr(net, "head_linear", lambda: None)
        net.zero_grad()
        MDLM(form="count").loss(net, batch).nats.backward()
        grads.append([p.grad for p in net.parameters()])
    torch.testing.assert_close(*grads)


def test_complements_come_from_the_tokenizers_letters() -> None:
    tokenizer = load_tokenizer("bytes")
    complement = complement_of(tokenizer)
    assert bytes(complement[b] for b in b"ACGTNacgtn") == b"TGCANtgcan"
    assert complement[tokenizer.mask_id] == tokenizer.mask_id
    assert sum(there != here for here, there in enumerate(complement)) == 8
    assert Caduceus(equivariance="ps").for_tokenizer(tokenizer).complement == complement
    assert PLAIN.for_tokenizer(tokenizer) is PLAIN
    assert PS.for_tokenizer(tokenizer) is PS


@pytest.mark.parametrize(
    ("complement", "said"),
    [
        ((), "train by a recipe"),
        ((T, G, C, A), "4 ids"),
        ((G, G, C, A, N, EOT, MASK), "go in pairs"),
        ((A, C, G, T, N, MASK, EOT), "must be its own"),
        ((9, C, G, T, N, EOT, MASK), "no id below"),
    ],
)
def test_what_is_no_complement_is_refused(complement: tuple[int, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Caduceus(equivariance="ps", complement=complement).build(num_ids=7, mask_id=MASK)


def test_vectors_have_no_other_strand() -> None:
    with pytest.raises(UsageError, match="equivariance = none"):
        network(PS)(torch.zeros(1, 4, 16, dtype=torch.float64))
    assert network(PLAIN)(torch.zeros(1, 4, 16, dtype=torch.float64)).shape == (1, 4, 7)


# --- caches -----------------------------------------------------------------------------------------------------------


def read_in_spans(net: MambaNetwork, z_BL: Tensor, *stops: int) -> Tensor:
    cache = net.new_cache(*z_BL.shape)
    starts = (0, *stops[:-1])
    parts = []
    for start, stop in zip(starts, stops, strict=True):
        for _ in range(2):  # a call may be repeated
            part = net.trunk(z_BL, cache=cache, span=(start, stop))
        parts.append(part)
    return torch.cat(parts, dim=1)


@torch.no_grad()
def test_with_a_cache_mamba_reads_the_same() -> None:
    net, z_BL = network(MAMBA), rows()
    assert isinstance(net, MambaNetwork)
    want = net.trunk(z_BL)
    torch.testing.assert_close(read_in_spans(net, z_BL, 1, 2, 9, 10, L), want)
    torch.testing.assert_close(read_in_spans(net, z_BL, *range(1, L + 1)), want)


@torch.no_grad()
def test_rows_at_different_places_step_together() -> None:
    net, z_BL = network(MAMBA), rows()
    assert isinstance(net, MambaNetwork)
    want, at = net.trunk(z_BL), [3, 11, 1]
    caches = [net.new_cache(1, L) for _ in at]
    for b, (cache, position) in enumerate(zip(caches, at, strict=True)):
        net.trunk(z_BL[b : b + 1], cache=cache, span=(0, position))
    for _ in range(4):
        ids = torch.cat(
            [z_BL[range(3), [position - 1 for position in at]], torch.tensor([A])]
        )  # and one that is nobody's
        for _ in range(2):
            h_MD = net.step_rows(ids, caches, at)
        torch.testing.assert_close(h_MD[:3], want[range(3), at])
        at = [position + 1 for position in at]


@torch.no_grad()
def test_what_a_graph_replays_is_the_same() -> None:
    net, z_BL = network(MAMBA), rows()
    assert isinstance(net, MambaNetwork)
    want, cache = net.trunk(z_BL), net.new_cache(3, L)
    before = torch.nn.functional.pad(z_BL, (1, 0), value=MASK)
    for _ in range(2):  # it begins anew at position 0
        for position in range(L):
            h_BD = net.decode(before[:, position], torch.tensor([position]), cache, L)
            torch.testing.assert_close(h_BD, want[:, position])
    net.trunk(z_BL, cache=cache, span=(0, 5))  # as it does after a prompt
    torch.testing.assert_close(net.decode(before[:, 5], torch.tensor([5]), cache, L), want[:, 5])


@torch.no_grad()
def test_a_state_is_as_large_for_a_long_row() -> None:
    net = network(MAMBA)
    assert isinstance(net, MambaNetwork)
    sizes = {sum(t.numel() for t in net.new_cache(1, length).nothing) for length in (8, 1 << 20)}
    assert sizes == {2 * (3 * 32 + 4 * 32)}
    with pytest.raises(UsageError, match="no state at position 4"):
        net.trunk(rows(), cache=net.new_cache(3, L), span=(4, 5))


def test_sampling_with_and_without_a_cache_writes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    canvas = Canvas.blank(num=3, length=10, mask_id=MASK, seed=1)
    net = network(MAMBA)
    cached = sample(net, canvas, LeftToRight()).tokens
    monkeypatch.setattr(MambaNetwork, "new_cache", lambda *_: None)
    assert sample(net, canvas, LeftToRight()).tokens.equal(cached)


# --- the papers' equations --------------------------------------------------------------------------------------------


def test_a_filter_reaches_over_a_row_and_nothing_comes_around() -> None:
    torch.manual_seed(0)
    u_BLD, filter_LD = torch.randn(2, 17, 3, dtype=torch.float64), torch.randn(17, 3, dtype=torch.float64)
    want = torch.stack([sum(filter_LD[j] * u_BLD[:, t - j] for j in range(t + 1)) for t in range(17)], dim=1)
    torch.testing.assert_close(causal_conv(u_BLD, filter_LD), want)


def test_a_filter_dies_away_at_each_channels_rate() -> None:
    """After 0.3 of the length a hundredth is left of the fastest channel, after 1.5 of the slowest."""
    torch.manual_seed(0)
    one = Filter(Hyena(hidden=8, length=31)).double()
    t_L1, _ = one.places(46)
    left = torch.exp(-t_L1 * one.rates())
    torch.testing.assert_close(left[9, -1], torch.tensor(0.01, dtype=torch.float64))
    torch.testing.assert_close(left[45, 0], torch.tensor(0.01, dtype=torch.float64))
    assert one(46)[:31].equal(one(31)) or torch.allclose(
        one(46)[:31], one(31)
    )  # longer rows go on along the same curve


@each
@torch.no_grad()
def test_weights_and_products_of_16_bits_are_near(denoiser: Denoiser) -> None:
    """Of rows that are longer than 16 bits count."""
    if isinstance(denoiser, Hyena):
        denoiser = replace(denoiser, length=400)
    net, z_BL = network(denoiser, torch.float32), rows(2, 400)
    half, options = copy.deepcopy(net).to(torch.bfloat16), how(net, 2)
    options["level"] = None if options["level"] is None else options["level"].float()
    want = net(z_BL, **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = net(z_BL, **options)
    for got in (mixed, half(z_BL, **options)):
        assert got.dtype == torch.bfloat16
        assert float((got.float() - want).norm() / want.norm()) < 0.05


def test_steps_begin_between_a_thousandth_and_a_tenth() -> None:
    torch.manual_seed(0)
    net = Mamba(hidden=64, blocks=1).build(num_ids=7, mask_id=MASK)
    mixer = net.get_submodule("blocks.0.branches.0.layer.ahead")
    step_E = torch.nn.functional.softplus(mixer.step_bias.detach())
    assert 0.99e-3 < float(step_E.min()) < 2e-3
    assert 0.05 < float(step_E.max()) < 0.101
    assert mixer.rates()[5].detach().tolist() == pytest.approx([-n for n in range(1, 17)])


# 16 ids: what the DNA experiments' vocabularies are padded to
@pytest.mark.parametrize(
    ("denoiser", "number"),
    [(Mamba(), 468_608), (Caduceus(), 470_702), (Hyena(), 436_096)],
    ids=["mamba", "caduceus", "hyena"],
)
def test_parameters(denoiser: Denoiser, number: int) -> None:
    net = denoiser.build(num_ids=16, mask_id=15)
    assert sum(p.numel() for p in net.parameters()) == number
    names = dict(net.named_parameters())
    assert all(names[name].ndim == 2 for name in net.matrices())
    assert not any("log_rates" in name or "embed" in name for name in net.matrices())
    assert len(net.parts()) == denoiser.blocks  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mamba(hidden=0), "hidden must be at least 1"),
        (lambda: Mamba(rank=-1), "rank"),
        (lambda: Caduceus(blocks=0), "blocks must be at least 1"),
        (lambda: Caduceus(classes=-1), "classes must be 0 or more"),
        (lambda: Hyena(length=1), "length must be at least 2"),
    ],
)
def test_sizes_that_no_network_has_are_refused(make: Callable[[], Denoiser], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make()


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("denoiser", [MAMBA, HYENA, PS, LEVEL], ids=["mamba", "hyena", "ps", "level"])
def test_it_learns(denoiser: Denoiser) -> None:
    """Rows of one pair of letters, again and again: 2 log 4 nats for 16 tokens, 0.17 a token; 1.39 without looking."""
    torch.manual_seed(0)
    net = denoiser.build(num_ids=7, mask_id=MASK)
    objective = AR() if denoiser.causal else MDLM(form="time" if denoiser.uses_level else "count")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)

    def batch(seed: int, num: int = 32) -> Tensor:
        rng = torch.Generator().manual_seed(seed)
        return torch.randint(0, 4, (num, 2), generator=rng).repeat(1, 8)

    before = objective.bound(net.eval(), batch(10**6, 100), num_samples=2, seed=1).nats_per_token
    net.train()
    for step in range(40):
        loss = objective.loss(net, make_batch(batch(step), seed=1, step=step))
        optimizer.zero_grad()
        (loss.nats / loss.tokens).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    after = objective.bound(net.eval(), batch(10**6, 100), num_samples=2, seed=1).nats_per_token
    assert before > 0.8 * math.log(6)
    assert after < 0.8


def test_conditioning_that_weights_lack_begins_without_effect() -> None:
    """A network that starts from one without levels and classes computes what that one does, whatever they are."""
    source, conditioned = network(PS), network(LEVEL)
    load_weights(conditioned, conditioned.begins_anew() | unshared(source), "")
    z_BL, level_B = rows(), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    torch.testing.assert_close(conditioned(z_BL, level_B, cond=torch.tensor([0, 1, -1])), source(z_BL))
