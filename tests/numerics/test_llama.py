"""The Llama-like network keeps the denoiser's contract, in every way of driving it and in every reading.

A reading is causal, of both sides, or of both sides and shifted; pretrained weights are held to transformers' own
numbers in tests/test_pretrained_llama.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask import samplers
from unmask.data.batch import make_batch
from unmask.denoisers.llama import Llama, LlamaNetwork
from unmask.denoisers.llama.rope import RopeScaling, frequencies
from unmask.denoisers.network import Attend
from unmask.denoisers.ragged import ragged, vectors_at
from unmask.errors import UsageError
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.objectives.mdlm_warm import MDLMWarm
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample

IDS, MASK, BEGIN = 11, 10, 3
SMALL = Llama(hidden=32, blocks=3, heads=4, groups=2, inner=40)
READINGS: dict[str, dict[str, Any]] = {
    "both sides": {},
    "shifted": {"shifted": True, "begin": BEGIN},
    "causal": {"causal": True, "begin": BEGIN},
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"scaling": RopeScaling(factor=4.0, length=6)},
    "qwen2": {"qkv_bias": True, "tied": True, "groups": 1},
    "qwen3": {"qk_norm": True, "head_dim": 12, "out_bias": True, "mlp_bias": True, "groups": None},
}
EVERY = pytest.mark.parametrize(
    "options", [a | b for a, b in itertools.product(READINGS.values(), KINDS.values())], ids=str
)
EACH = pytest.mark.parametrize("reading", READINGS)

B, L = 3, 8
GENERATOR = torch.Generator().manual_seed(0)
Z = torch.randint(0, IDS, (B, L), generator=GENERATOR)
VALID = torch.arange(L) < torch.tensor([8, 5, 3])[:, None]
AT = torch.tensor([[1, 5], [0, 4], [2, 2]])
FLAT = torch.tensor([0, 3, 7, 8, 12, 16, 18])


def build(std: float = 0.2, **options: Any) -> LlamaNetwork:
    torch.manual_seed(0)
    net = dataclasses.replace(SMALL, **options).build(num_ids=IDS, mask_id=MASK)
    for name, p in net.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=std)
    return net.double().eval()


def near(got: Tensor, want: Tensor, what: str = "") -> None:
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda m: f"{what}: {m}")


@EVERY
@torch.no_grad()
def test_all_drivers_give_the_same_vectors(options: dict[str, Any]) -> None:
    net = build(**options)
    want = net.trunk(Z, valid_BL=VALID)
    flat_want = want.flatten(0, 1)[FLAT]
    for b in range(B):
        n = int(VALID[b].sum())
        near(net.trunk(Z[b : b + 1, :n])[0], want[b, :n], "alone, without padding")
    near(net.trunk(Z, valid_BL=VALID, at_BK=AT), want[torch.arange(B)[:, None], AT], "at positions")
    near(net.trunk_at(Z, None, FLAT, valid_BL=VALID), flat_want, "flat")
    place = (VALID.flatten().cumsum(0) - 1)[FLAT]
    near(net.trunk_ragged(Z[VALID], None, ragged(VALID), place), flat_want, "ragged")
    longer = ragged(VALID, 8)
    z_M = torch.nn.functional.pad(Z[VALID], (0, len(longer.at_M) - int(VALID.sum())), value=MASK)
    near(net.trunk_ragged(z_M, None, longer, place), flat_want, "ragged, up to a multiple")
    near(vectors_at(net, Z, None, FLAT, valid_BL=VALID), flat_want, "the shorter way")
    near(net.trunk(net.embed(Z), valid_BL=VALID), want, "vectors instead of ids")
    near(net.trunk(Z, valid_BL=VALID, positions_BL=torch.arange(L).expand(B, L)), want, "positions told")
    net.checkpoint_activations = True
    with torch.enable_grad():
        near(net.trunk(Z, valid_BL=VALID).detach(), want, "checkpointed")


@pytest.mark.parametrize("options", [READINGS["causal"] | kind for kind in KINDS.values()], ids=str)
@torch.no_grad()
def test_caches_give_the_same_vectors(options: dict[str, Any]) -> None:
    net = build(**options)
    want = net.trunk(Z)
    for stops in ([8], list(range(1, 9)), [3, 4, 7, 8]):
        cache, parts = net.new_cache(B, L), []
        for span in zip([0, *stops], stops, strict=False):
            parts.append(net.trunk(Z, cache=cache, span=span))
            assert net.trunk(Z, cache=cache, span=span).equal(parts[-1])  # a call may be repeated
        near(torch.cat(parts, dim=1), want, "spans")
    with pytest.raises(UsageError, match="cache of 8"):
        net.trunk(Z, cache=cache, span=(8, 9))
    caches, at, row = [net.new_cache(1, L) for _ in Z], [1, 4, 2], torch.arange(B)
    for b, first in enumerate(at):
        net.trunk(Z[b : b + 1], cache=caches[b], span=(0, first))
    for _ in range(4):
        ids_M = torch.cat([Z[row, torch.tensor(at) - 1], torch.zeros(2, dtype=torch.long)])
        again = [net.step_rows(ids_M, caches, at)[:B] for _ in range(2)]
        assert again[0].equal(again[1])
        near(again[0], want[row, torch.tensor(at)], "rows of their own")
        at = [position + 1 for position in at]
    with pytest.raises(UsageError, match="position 8 of a cache of 8"):
        net.step_rows(Z[:, 0], caches, at)
    cache = net.new_cache(B, L)
    for position in range(L):  # as a captured graph calls it: by its counter, and the mask before the first position
        ids_B = Z[:, position - 1] if position else torch.full((B,), MASK)
        for stop in {6, 8} if position < 6 else {8}:
            near(net.decode(ids_B, torch.tensor([position]), cache, stop), want[:, position], "by its counter")


@EACH
@torch.no_grad()
def test_who_sees_whom(reading: str) -> None:
    """Position 4 is read with token 4 changed, and with each later one: what is seen moves it, nothing else does."""
    net = build(**READINGS[reading])

    def moved(token: int, **told: Any) -> Tensor:
        other = Z.clone()
        other[:, token] = (other[:, token] + 1) % IDS
        h = [net.trunk(z, attend=Attend(**told) if told else None) for z in (Z, other)]
        return (h[0] - h[1]).abs().amax(dim=(0, 2)) > 1e-9

    if reading == "causal":
        assert moved(4).tolist() == [False] * 5 + [True] * 3
        with pytest.raises(UsageError, match="no mask"):
            net.trunk(Z, attend=Attend(blocks=torch.zeros(L)))
        return
    assert moved(4).all()
    assert moved(0).all()
    sees_itself = reading == "both sides"
    for told in ({"causal": True}, {"causal": True, "mask": torch.ones(L, L, dtype=torch.bool)}, {"back": B}):
        assert moved(4, **told).tolist() == [False] * 4 + [sees_itself] + [True] * 3
        assert moved(0, **told).tolist() == [sees_itself] + [True] * 7
    blocks = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    seen = moved(4, blocks=blocks)
    assert not seen[:3].any()
    assert seen[4:].all()
    h = net.trunk(Z, attend=Attend(blocks=blocks))
    near(h[:, :3], net.trunk(Z[:, :3]), "the first block sees itself alone")
    near(net.trunk(Z, attend=Attend(mask=blocks[None, :] <= blocks[:, None])), h, "as a mask")
    near(net.trunk(Z, attend=Attend(mask=torch.ones(L, L, dtype=torch.bool))), net.trunk(Z), "a mask of ones")
    near(net.trunk(Z, attend=Attend(blocks=blocks), at_BK=AT), h[torch.arange(B)[:, None], AT], "at positions")
    near(net.trunk_at(Z, None, FLAT, attend=Attend(blocks=blocks)), h.flatten(0, 1)[FLAT], "flat")
    padded = net.trunk(Z, attend=Attend(VALID, blocks=blocks))
    assert padded.isfinite().all()
    near(padded[1, :5], net.trunk(Z[1:2, :5], attend=Attend(blocks=blocks[:5]))[0], "padded")


@pytest.mark.parametrize("reading", ["both sides", "shifted"])
@torch.no_grad()
def test_rows_that_look_back_beside_rows_that_do_not(reading: str) -> None:
    net = build(**READINGS[reading])
    causal, full = net.trunk(Z, attend=Attend(causal=True)), net.trunk(Z)
    want = torch.cat([causal[:2], full[2:]])
    near(net.trunk(Z, attend=Attend(back=2)), want)
    near(net.trunk(Z, attend=Attend(back=2), at_BK=AT), want[torch.arange(B)[:, None], AT])
    near(net.trunk_at(Z, None, FLAT, attend=Attend(back=2)), want.flatten(0, 1)[FLAT])
    flat_want = torch.cat(
        [net.trunk(Z[:2], VALID[:2], attend=Attend(causal=True)), net.trunk(Z[2:], valid_BL=VALID[2:])]
    )
    got = vectors_at(net, Z, None, FLAT, attend=Attend(VALID, back=2))
    near(got, flat_want.flatten(0, 1)[FLAT], "ragged")
    one = net.trunk(Z[:, :1], attend=Attend(back=B, mask=torch.ones(1, 1, dtype=torch.bool)))
    near(one, net.trunk(Z[:, :1], attend=Attend(causal=True)), "rows of one token")


@torch.no_grad()
def test_shifted_and_told_to_look_back_it_is_the_causal_network() -> None:
    """So weights of autoregression mean from the first step on what they meant."""
    shifted, causal = build(**READINGS["shifted"]), build(**READINGS["causal"])
    near(shifted.trunk(Z, attend=Attend(causal=True)), causal.trunk(Z))
    # and each next token is told by the vector that stood at the one before it where nothing is shifted
    plain = build()
    rows = torch.cat([torch.full((B, 1), BEGIN), Z], dim=1)
    near(causal.trunk(Z), plain.trunk(rows, attend=Attend(causal=True))[:, :-1])


@pytest.mark.parametrize("reading", READINGS)
@torch.no_grad()
def test_rows_do_not_depend_on_their_batch(reading: str) -> None:
    """The same row alone, among others, and among longer ones."""
    net = build(**READINGS[reading])
    sampler = samplers.LeftToRight() if net.causal else samplers.Ancestral(steps=6)
    canvas = Canvas.blank(num=4, length=8, mask_id=MASK, seed=4)
    together = sample(net, canvas, sampler).tokens
    assert not (together == MASK).any()
    for i in range(4):
        part = {name: getattr(canvas, name)[i : i + 1] for name in ("tokens", "open_BL", "key_B")}
        assert sample(net, dataclasses.replace(canvas, **part), sampler).tokens.equal(together[i : i + 1])
    rows = [[MASK] * 8, [MASK] * 5]
    mixed = sample(net, Canvas.of_rows(rows, mask_id=MASK, pad_id=0, seed=4), sampler).tokens
    short = dataclasses.replace(
        canvas, tokens=canvas.tokens[1:2, :5], open_BL=canvas.open_BL[1:2, :5], key_B=canvas.key_B[1:2]
    )
    assert mixed[0].equal(together[0])
    assert mixed[1, :5].equal(sample(net, short, sampler).tokens[0])


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("warm", [False, True])
def test_rows_without_padding_give_the_padded_loss_and_gradients(reading: str, warm: bool) -> None:
    if warm and reading == "causal":
        return  # it looks back always
    objective = AR() if reading == "causal" else MDLMWarm(share=0.5, form="count") if warm else MDLM(form="count")
    net = build(**READINGS[reading])
    lengths, prompts = torch.tensor([3, 8, 7, 5, 1, 6, 8, 8]), torch.tensor([0, 4, 7, 2, 0, 4, 0, 0])
    batch = make_batch(torch.randint(0, MASK, (8, L)), lengths, prompts, seed=0, step=3, done=0.0)
    results = []
    for way in (True, False):
        net.takes_ragged = lambda way=way: way  # type: ignore[method-assign, misc]
        net.zero_grad()
        nats = objective.loss(net, batch).nats
        nats.backward()  # type: ignore[no-untyped-call]
        results.append((nats.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])))
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("reading", ["both sides", "shifted"])
def test_the_next_token_is_told_by_what_stands_before_it(reading: str) -> None:
    """mdlm_warm's extra loss, prefix by prefix; a shifted network tells a row's first token, too."""
    net = build(**READINGS[reading])
    batch = make_batch(torch.randint(0, MASK, (4, L)), torch.tensor([8, 2, 1, 5]), seed=0, step=0, done=0.0)
    got = MDLMWarm(share=1.0, until=1.0).loss(net, batch).nats
    want = 0.0
    for row, length in zip(batch.x_BL, (8, 2, 1, 5), strict=True):
        for end in range(0 if net.shifted else 1, length):
            before = torch.cat([torch.tensor([BEGIN]), row[:end]]) if net.shifted else row[:end]
            h = build().trunk(before[None], attend=Attend(causal=True))[0, -1]
            want -= float(torch.log_softmax(net.head(h)[:MASK], dim=-1)[row[end]].detach())
    assert float(got.detach()) == pytest.approx(want, rel=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@EACH
def test_gradients_are_those_of_differences(reading: str, kind: str) -> None:
    """Of the loss by each kind of weight, along a direction; and the same with checkpointed activations."""
    net = build(std=0.1, **READINGS[reading], **KINDS[kind])
    objective = AR() if reading == "causal" else MDLM(form="count")
    batch = make_batch(torch.randint(0, MASK, (4, L)), seed=0, step=3)
    grads = []
    for net.checkpoint_activations in (False, True):
        net.zero_grad()
        objective.loss(net, batch).nats.backward()  # type: ignore[no-untyped-call]
        grads.append({name: p.grad for name, p in net.named_parameters()})
    for name, p in net.named_parameters():
        grad = grads[0][name]
        assert grad is not None, name
        torch.testing.assert_close(grad, grads[1][name])
        if not name.startswith(("blocks.1", "blocks.2")):
            direction, start = torch.randn_like(p), p.detach().clone()
            with torch.no_grad():
                ends = [
                    objective.loss(net, batch).nats for p.data in (start + 1e-6 * direction, start - 1e-6 * direction)
                ]
            p.data = start
            slope = float(ends[0] - ends[1]) / 2e-6
            assert slope == pytest.approx(float((grad * direction).sum()), rel=1e-4, abs=1e-5), name


def test_rotary_frequencies_of_long_rows() -> None:
    """Fast turns stay, slow ones are slower by the factor, those between lie between."""
    plain = frequencies(64, 500_000.0, None, torch.device("cpu"))
    scaled = frequencies(64, 500_000.0, RopeScaling(factor=8.0, length=8192), torch.device("cpu"))
    turns = 8192 * plain / (2 * torch.pi)
    ratio = plain / scaled
    torch.testing.assert_close(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 8.0))
    between = ratio[(turns < 4) & (turns > 1)]
    assert len(between) > 0
    assert ((between > 1) & (between < 8)).all()


def test_precision_of_training_keeps_close() -> None:
    net = build(**READINGS["shifted"]).float()
    with torch.no_grad():
        want = net.trunk(Z, valid_BL=VALID)[VALID]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = net.trunk(Z, valid_BL=VALID)[VALID]
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() < 0.05 * want.abs().max()


def test_what_a_network_cannot_do_it_refuses() -> None:
    net, causal = build(), build(**READINGS["causal"])
    for wrong, word in (
        ({"groups": 3}, "multiple of groups"),
        ({"head_dim": 7}, "even"),
        ({"heads": 5, "groups": 5}, "multiple of heads"),
        ({"inner": 0}, "at least 1"),
        ({"theta": 0.5}, "theta"),
    ):
        with pytest.raises(UsageError, match=word):
            dataclasses.replace(SMALL, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="scaling needs"):
        RopeScaling(low=4.0, high=1.0)
    with pytest.raises(UsageError, match="one of the 11 ids"):
        Llama(causal=True, begin=11).build(num_ids=IDS, mask_id=MASK)
    with pytest.raises(UsageError, match="without classes"):
        net.trunk(Z, cond=torch.zeros(3))
    with pytest.raises(UsageError, match="cache needs a causal"):
        net.trunk(Z, cache=[])
    with pytest.raises(UsageError, match="span"):
        causal.trunk(Z, span=(0, 3))
    with pytest.raises(UsageError, match="as wide as the embedding"):
        net.trunk(torch.zeros(B, L, 5))
    assert net.new_cache(1, L) is None
    assert not net.can_step_rows()
    assert not causal.can_decode()  # no graph is captured on a CPU


def test_what_muon_takes_and_the_start() -> None:
    net = SMALL.build(num_ids=IDS, mask_id=MASK)
    names = net.matrices()
    assert set(names) <= dict(net.named_parameters()).keys()
    assert {name.split(".", 2)[2]: maps for name, maps in names.items()} == {
        "q.weight": 1,
        "kv.weight": 2,
        "out.weight": 1,
        "gate_up.weight": 2,
        "down.weight": 1,
    }
    assert not net(Z).any()  # the uniform law
    tied = dataclasses.replace(SMALL, tied=True).build(num_ids=IDS, mask_id=MASK)
    assert tied.output.weight is tied.embed.weight
    assert tied(Z).any()
