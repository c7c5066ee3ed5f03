"""The bench of ways to learn faster: what claims the bound has it by enumeration; turned off, a way is the baseline."""

from __future__ import annotations

import doctest
import importlib
import itertools
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from matrix import sample
from unmask.config import OptimConfig
from unmask.data.batch import Batch, make_batch
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.denoisers.network import Attend, Network, as_denoiser
from unmask.errors import UsageError
from unmask.objectives.mdlm import MDLM
from unmask.training.optim import Updater

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from ways import networks
from ways.catalogue import BASELINE, NETWORK, SETTINGS, WAYS, Setting, Way, way_named
from ways.command import run_command
from ways.data import Tokens
from ways.objectives import Bell, Complement, Counts, NextToken, Power, Weighted, looking_back, numbers
from ways.optimizers import embedding_rate, flat_ema_updater, normuon_updater, plain_updater
from ways.prepare import prepare
from ways.results import add_line, read_lines
from ways.run import main as run_main
from ways.schedules import Kept, NextTokenFirst, Pairs, Plan, Stage, Turning
from ways.table import best_ways, exchange, rows
from ways.training import HeldOut, Learner, look_steps, run_way, sizes, time_way

CPU = torch.device("cpu")
CONFIG = DiT(hidden=24, blocks=4, heads=2, tied=True)
SMALL = Setting("small", CONFIG, length=8, batch=8, steps=6, valid_rows=4, valid_draws=8)
MASK, NUM_IDS = 10, 11


def made_tokens(size: int = 900) -> Tokens:
    rng = np.random.default_rng(0)
    train, valid = (np.cumsum(rng.integers(0, 2, n)) % 3 for n in (size, 100))
    parts_I2 = np.full((NUM_IDS, 2), -1)
    parts_I2[2] = 0, 1  # as if it had been merged from these
    return Tokens(train.astype(np.uint16), valid.astype(np.uint16), NUM_IDS, MASK, parts_I2)


@pytest.fixture
def tokens() -> Tokens:
    return made_tokens()


def learned(way: Way, tokens: Tokens, steps: int = 6) -> DiTNetwork:
    """A network of this way after some steps, so that no block is the identity any more."""
    learner = Learner(way, 0, replace(SMALL, steps=steps), tokens, CPU)
    for moment in learner.moments:
        learner.learn(moment, learner.parts(moment))
    return learner.network.eval()


# --- losses by enumeration --------------------------------------------------------------------------------------------

L = 4
ORDERS = torch.tensor(list(itertools.permutations(range(L))))
TEXT = torch.tensor([1, 0, 2, 1])


def toy() -> Network:
    """Any law of a position given the whole of z: a table of logits."""
    table = torch.randn(4**L, L, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    place = 4 ** torch.arange(L)
    return as_denoiser(lambda z, level: table[(z * place).sum(1)], vocab_size=3, mask_id=3, uses_level=False)


def masked_nats(network: Network, masked_L: Tensor) -> float:
    """The sum of -log x_theta[x] over the masked positions."""
    logits_LI = network(TEXT.masked_fill(masked_L, 3)[None])[0]
    log_p = torch.log_softmax(logits_LI[:, :3], dim=1)
    return float(-(log_p[torch.arange(L), TEXT] * masked_L).sum())


def enumerated_bound(network: Network) -> float:
    """The sum over n of 1/n times the mean over sets of n tokens."""
    total = 0.0
    for n in range(1, L + 1):
        sets = [torch.isin(torch.arange(L), torch.tensor(s)) for s in itertools.combinations(range(L), n)]
        total += sum(masked_nats(network, s) for s in sets) / len(sets) / n
    return total


@pytest.fixture
def every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's key is the number of the order in which its positions are masked."""
    rank = ORDERS.argsort(dim=1).double() / L
    monkeypatch.setattr("unmask.objectives.mdlm.position_uniforms", lambda key_B, like_BL: rank[key_B])


def in_every_order(time: float, copies: int = 1) -> Batch:
    key_B = torch.arange(len(ORDERS)).repeat(copies)
    x_BL = TEXT.expand(len(key_B), -1)
    return Batch(x_BL, None, torch.ones_like(x_BL, dtype=torch.bool), key_B, torch.full((len(key_B),), time).double())


UNBIASED = [Counts(), Bell(width=0.25), Bell(width=0.4, centre=0.3), Power(power=-0.5), Power(power=1.0)]


@pytest.mark.usefixtures("every_order")
@pytest.mark.parametrize("objective", UNBIASED, ids=repr)
def test_the_expected_loss_is_the_bound_whatever_the_law(objective: Counts) -> None:
    network, law = toy(), objective.law(L)
    edges = [0.0, *law.cumsum(0).tolist()]
    expected = 0.0
    for n in range(1, L + 1):  # every time between two edges draws n
        batches = [in_every_order(edges[n - 1] + share * float(law[n - 1])) for share in (0.01, 0.99)]
        nats = [float(objective.loss(network, batch).nats) for batch in batches]
        assert nats[0] == pytest.approx(nats[1], rel=1e-12)
        expected += float(law[n - 1]) * nats[0] / len(ORDERS)
    assert expected == pytest.approx(enumerated_bound(network), rel=1e-6)


@pytest.mark.usefixtures("every_order")
def test_a_mask_and_its_complement_are_the_bound_together_and_each() -> None:
    network, objective = toy(), Complement()
    halves = torch.zeros(2, dtype=torch.float64)
    for n in range(L + 1):
        batch = in_every_order((n + 0.5) / (L + 1), copies=2)
        noised = objective.noised(batch, objective.process(network))
        assert (noised.masked_BL.sum(1) == torch.tensor([n, L - n]).repeat_interleave(len(ORDERS))).all()
        halves += objective.row_nats(network, batch).view(2, -1).mean(1) / (L + 1)
    assert halves.tolist() == pytest.approx([enumerated_bound(network)] * 2, rel=1e-12)


def test_the_baseline_is_the_count_form(tokens: Tokens) -> None:
    network = learned(BASELINE, tokens)
    batch = make_batch(tokens.rows(0, 32, 8, seed=0), seed=5, step=2)
    ours, theirs = (one.noised(batch, one.process(network)) for one in (Counts(), MDLM(form="count")))
    assert ours.masked_BL.equal(theirs.masked_BL)
    torch.testing.assert_close(ours.weight_B, theirs.weight_B)
    ahead = Counts().ahead(batch, Counts().process(network))
    assert Counts().loss(network, ahead).nats.equal(Counts().loss(network, batch).nats)


@pytest.mark.parametrize(
    "objective", [Weighted(power=p, least=k) for p in (0.0, 0.5, 1.0) for k in (0.0, 0.2)], ids=repr
)
def test_other_weights_have_the_same_total_in_the_mean(objective: Weighted) -> None:
    n_L, law = numbers(20), objective.law(20)
    assert float((law * n_L * objective.weight(20)).sum()) == pytest.approx(20)
    assert (law[n_L < objective.least * 20] == 0).all()
    ratio = objective.weight(20) * n_L**objective.power
    torch.testing.assert_close(ratio, ratio[:1].expand(20))


def test_the_bound_weighted_by_one_is_the_bound() -> None:
    torch.testing.assert_close(Weighted(power=1.0).weight(20), Counts().weight(20))


def test_padding_is_refused() -> None:
    batch = make_batch(torch.zeros(2, 4, dtype=torch.long), torch.tensor([4, 3]), seed=0, step=0)
    with pytest.raises(UsageError, match="wrap"):
        Counts().noised(batch, Counts().process(toy()))


# --- the next token through the same weights --------------------------------------------------------------------------


def test_the_next_token_is_read_by_a_mask_that_looks_back(tokens: Tokens) -> None:
    network = learned(WAYS["mixed"], tokens)
    batch = make_batch(tokens.rows(0, 4, 8, seed=1), seed=0, step=0)
    nats = NextToken().loss(network, batch).nats.detach()
    assert not network.causal
    logits = network(batch.x_BL, attend=Attend(mask=torch.ones(8, 8, dtype=torch.bool).tril()))
    logits[..., MASK] = -torch.inf
    plain = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.x_BL[:, 1:].flatten(), reduction="sum")
    assert float(nats) == pytest.approx(float(plain.detach()), rel=1e-5)


def test_a_network_that_shifts_is_refused_for_the_next_token(tokens: Tokens) -> None:
    network = BASELINE.build(SMALL, made_tokens())
    with pytest.raises(UsageError, match="Unshifted"):
        NextToken().loss(network, make_batch(tokens.rows(0, 4, 8, seed=1), seed=0, step=0))


# --- networks ---------------------------------------------------------------------------------------------------------

# How the change is turned off: the parameters that are set, and to what.
OFF = {
    "value-embedding": {"value_gain": 0.0},
    "skips": {"skip_gain": 0.0},
    "attention-gain": {"attention_gain": 1.0},
    "embedding-mix": {"of_stream": 1.0, "of_embedding": 0.0},
}
OWN_NETWORKS = [way for way in WAYS.values() if way.network is not DiTNetwork]


def plain_twin(network: DiTNetwork) -> DiTNetwork:
    """The plain DiT with what both have."""
    twin = DiTNetwork(network.config, num_ids=NUM_IDS, mask_id=MASK).eval()
    own = twin.state_dict()
    shared = {k: v for k, v in network.state_dict().items() if k in own and own[k].shape == v.shape}
    twin.load_state_dict(shared, strict=False)
    return twin


@pytest.mark.parametrize("way", OWN_NETWORKS, ids=lambda way: way.name)
def test_a_network_computes_its_own_pass(way: Way, tokens: Tokens) -> None:
    network = learned(way, tokens)
    x_BL = tokens.rows(0, 4, 8, seed=2)
    with torch.no_grad():
        for p in network.parameters():
            p += 0.5 * (p.numel() == 1)  # a few steps do not move a learned number far
        assert not network.can_fuse()
        other = plain_twin(network)(x_BL) - network(x_BL)
        changes = way.network is not networks.Unshifted  # which differs only while it looks back
        assert (other.abs().max() > 1e-5) == changes
        at = network.head(network.trunk_at(x_BL, None, torch.arange(3, 20)))  # the loss's shorter way
        torch.testing.assert_close(at, network(x_BL).flatten(0, 1)[3:20], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OFF)
def test_turned_off_it_is_the_plain_network(name: str, tokens: Tokens) -> None:
    network = learned(WAYS[name], tokens)
    with torch.no_grad():
        for parameter, p in network.named_parameters():
            if parameter.rpartition(".")[2] in OFF[name]:
                p.fill_(OFF[name][parameter.rpartition(".")[2]])
        x_BL = tokens.rows(0, 4, 8, seed=2)
        torch.testing.assert_close(network(x_BL), plain_twin(network)(x_BL))


def test_several_changes_turned_off_are_the_plain_network(tokens: Tokens) -> None:
    network = learned(way_named("+".join(OFF)), tokens)
    x_BL, off = tokens.rows(0, 4, 8, seed=2), {k: v for values in OFF.values() for k, v in values.items()}
    with torch.no_grad():
        assert not torch.allclose(network(x_BL), plain_twin(network)(x_BL), atol=1e-3)
        for parameter, p in network.named_parameters():
            if parameter.rpartition(".")[2] in off:
                p.fill_(off[parameter.rpartition(".")[2]])
        torch.testing.assert_close(network(x_BL), plain_twin(network)(x_BL))


def test_every_network_goes_with_every_other(tokens: Tokens) -> None:
    names = [way.name for way in NETWORK if way.name not in ("swiglu", "softcap-30")]
    for pair in [*itertools.combinations(names, 2), names]:
        learned(way_named("+".join(pair)), tokens, steps=1)
    for pair in (("swiglu", "relu2"), ("softcap-15", "softcap-30")):
        with pytest.raises(UsageError, match="leave out one"):
            way_named("+".join(pair))


def test_ways_at_once_change_all_that_each_does() -> None:
    both = way_named("lr-0.6+plain+relu2+untied+momentum-0.9")
    assert (both.objective, both.network) == (Weighted(power=0.0), networks.SquaredRelu)
    assert both.rates(SMALL) == replace(SMALL.optim, lr=3e-3, momentum=0.9)
    assert not both.denoiser(CONFIG).tied
    with pytest.raises(UsageError, match="objective"):
        way_named("plain+half")
    with pytest.raises(UsageError, match="plain"):
        way_named("plane+relu2")


@pytest.mark.parametrize("way", OWN_NETWORKS, ids=lambda way: way.name)
def test_what_is_shared_starts_as_in_the_baseline(way: Way) -> None:
    torch.manual_seed(4)
    plain = dict(BASELINE.build(SMALL, made_tokens()).named_parameters())
    torch.manual_seed(4)
    own = dict(way.build(SMALL, made_tokens()).named_parameters())
    same = [name for name, p in own.items() if name in plain and plain[name].shape == p.shape]
    assert all(own[name].equal(plain[name]) for name in same)
    assert len(same) > len(plain) / 2


@pytest.mark.parametrize("way", NETWORK, ids=lambda way: way.name)
def test_no_network_is_larger_outside_its_embeddings(way: Way) -> None:
    """By more than a few numbers a block, which the table shows."""
    counts = [sizes(w.build(SMALL, made_tokens()))["parameters"] for w in (way, BASELINE)]
    assert counts[0] - counts[1] <= 2 * CONFIG.dims[1]
    assert counts[0] > 0.9 * counts[1]


def test_every_matrix_of_swiglu_is_muons_and_stacks_two_maps() -> None:
    network = WAYS["swiglu"].build(SMALL, made_tokens())
    assert network.matrices()["blocks.0.mlp_in.weight"] == 2
    assert network.matrices()["blocks.0.qkv.weight"] == 3


def test_capped_logits_stay_within(tokens: Tokens) -> None:
    network = learned(WAYS["softcap-15"], tokens)
    with torch.no_grad():
        network.output.bias[:2] = torch.tensor([1e4, 1.0])
        logits = network.head(torch.zeros(1, 24))[0]
    assert logits[:2].tolist() == pytest.approx([15.0, 15 * math.tanh(1 / 15)])


def test_the_head_starts_as_the_tokens_shares(tokens: Tokens) -> None:
    network = WAYS["unigram-start"].build(SMALL, tokens)
    with torch.no_grad():
        log_p = torch.log_softmax(network.head(torch.zeros(1, 24))[0], dim=0)
    share = (np.bincount(tokens.train, minlength=NUM_IDS) + 1) / (len(tokens.train) + NUM_IDS)
    torch.testing.assert_close(log_p.exp(), torch.from_numpy(share).float())


def test_mixed_values_pass_through_the_first_blocks(tokens: Tokens) -> None:
    """With a share of 1 every later block reads the first one's values: its own do not matter."""
    network = learned(WAYS["value-residual"], tokens)
    x_BL = tokens.rows(0, 2, 8, seed=2)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if name.endswith("share"):
                p.fill_(1.0)
        before = network(x_BL)
        network.layers[2].qkv.weight[48:] = 7.0
        torch.testing.assert_close(network(x_BL), before)
        network.layers[0].qkv.weight[48:] = 7.0
        assert not torch.allclose(network(x_BL), before, atol=1e-3)


# --- updates ----------------------------------------------------------------------------------------------------------


def one_step(updater: Updater, network: DiTNetwork, lr: float = 0.1) -> dict[str, Tensor]:
    """How far each parameter goes by one update of random gradients."""
    generator = torch.Generator().manual_seed(0)
    for p in network.parameters():
        p.grad = torch.randn(p.shape, generator=generator) * 1e-3
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    updater.update(lr=lr, grad_norm=updater.grad_norm(), nonfinite=torch.tensor(False))
    return {name: before[name] - p.detach() for name, p in network.named_parameters()}


def fresh_network() -> DiTNetwork:
    torch.manual_seed(0)
    return DiTNetwork(CONFIG, num_ids=NUM_IDS, mask_id=MASK)


@pytest.mark.parametrize("rate", [1.0, 3.0])
def test_the_embedding_has_its_own_rate_and_nothing_else(rate: float) -> None:
    moves = []
    for make in (plain_updater, embedding_rate(rate)):
        network = fresh_network()
        moves.append(one_step(make(network, OptimConfig()), network))
    for name, plain in moves[0].items():
        torch.testing.assert_close(moves[1][name], plain * (rate if name == "embed.weight" else 1.0))


def test_rows_of_normuon_move_equally_far_and_as_far_as_muons() -> None:
    network = fresh_network()
    move = one_step(normuon_updater(network, OptimConfig(muon_rms=0.2)), network, lr=0.1)
    for name, parts in network.matrices().items():
        for part in move[name].chunk(parts):
            torch.testing.assert_close(part.norm(dim=1), part.norm(dim=1).mean().expand(len(part)))
            assert float(part.square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=1e-3)


def test_a_flat_average_has_no_ramp() -> None:
    network = fresh_network()
    updater = flat_ema_updater(network, OptimConfig(ema=0.9))
    assert updater.ema is not None
    before = updater.ema.shadow["embed.weight"].clone()
    one_step(updater, network)
    torch.testing.assert_close(updater.ema.shadow["embed.weight"], 0.9 * before + 0.1 * network.embed.weight.detach())


# --- plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.name)
def test_every_way_does_the_same_work(way: Way) -> None:
    moments = way.plan.moments(64, 16, 64)
    assert 0 <= moments[-1].tokens + moments[-1].work - 64 * 16 * 64 < 16 * 64
    assert [m.tokens for m in moments[1:]] == list(itertools.accumulate(m.work for m in moments[:-1]))
    assert max(look_steps(moments, SETTINGS["tiny"].looks)) == len(moments) - 1


def test_an_epoch_has_every_window_once(tokens: Tokens) -> None:
    windows = len(tokens.train) // 8
    plain = tokens.train[: windows * 8].reshape(-1, 8)
    for epoch in range(2):
        rows_BL = tokens.rows(epoch * windows, windows, 8, seed=1).numpy()
        assert sorted(map(tuple, rows_BL)) == sorted(map(tuple, plain))
    assert not tokens.rows(0, windows, 8, seed=1).equal(tokens.rows(windows, windows, 8, seed=1))


def test_texts_become_a_chain_and_come_back(tmp_path: Path) -> None:
    for name, texts in (("train", ["ab", "", "c"]), ("valid", ["d"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(str(tmp_path / "train.jsonl"), str(tmp_path / "valid.jsonl"), "bytes", tmp_path / "held", most=5)
    held = Tokens.load(tmp_path / "held")
    assert held.train.tolist() == [97, 98, 256, 99, 256]
    assert held.valid.tolist() == [100, 256]
    assert (held.num_ids, held.mask_id, held.parts_I2) == (258, 257, None)
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "ababab " * 30}) + "\n")
    prepare(str(tmp_path / "train.jsonl"), str(tmp_path / "valid.jsonl"), "bpe:260", tmp_path / "held")
    assert Tokens.load(tmp_path / "held").parts_I2 is not None


def test_tokens_are_split_in_training_alone(tokens: Tokens, tmp_path: Path) -> None:
    tokens.save(tmp_path / "held")
    held = Tokens.load(tmp_path / "held")
    split = replace(held, split=0.5)
    plain_BL, split_BL = (some.rows(0, 40, 8, seed=1) for some in (held, split))
    assert plain_BL.equal(tokens.rows(0, 40, 8, seed=1))
    assert not split_BL.equal(plain_BL)
    for row, parts in zip(plain_BL.tolist(), split_BL.tolist(), strict=True):
        spelled, spelled_in_parts = ("".join("01" if id == 2 else str(id) for id in ids) for ids in (row, parts))
        assert spelled.startswith(spelled_in_parts)
    assert split.held_out(4, 8).equal(held.held_out(4, 8))
    learner = Learner(way_named("fast+split-0.1+decay-2"), 0, SMALL, tokens, CPU)
    assert (learner.tokens.split, learner.optim.weight_decay) == (0.1, 2.0)
    with pytest.raises(UsageError, match="prepare a text with a BPE"):
        replace(split, parts_I2=None).rows(0, 4, 8, seed=1)


def test_shifted_windows_lie_in_the_text_and_move_each_epoch() -> None:
    tokens = Tokens(np.arange(85, dtype=np.uint16), np.zeros(8, np.uint16), NUM_IDS, MASK)
    windows = 85 // 8 - 1
    starts = [tokens.rows(e * windows, windows, 8, seed=1, shifted=True)[:, 0] for e in range(3)]
    offsets = {int(start_B.min()) for start_B in starts}
    assert all((start_B % 8 == start_B[0] % 8).all() for start_B in starts)
    assert len(offsets) > 1
    assert max(offsets) < 8


def test_a_kept_text_opens_in_one_order(tokens: Tokens) -> None:
    plan, network = Kept(keep=4), toy()
    moments = plan.moments(12, 8, 16)
    by_text: dict[tuple[int, ...], list[Tensor]] = {}
    for moment in moments:
        ((objective, batch),) = plan.parts(Counts(), tokens, moment, seed=3)
        assert sorted((batch.time_B * 4).ceil().tolist()) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
        assert isinstance(objective, Counts)
        masked_BL = objective.noised(batch, objective.process(network)).masked_BL
        for x_L, masked_L in zip(batch.x_BL, masked_BL, strict=True):
            by_text.setdefault(tuple(x_L.tolist()), []).append(masked_L)
    whole = [steps for steps in by_text.values() if len(steps) == 4]
    assert len(whole) >= 8
    for steps in whole:
        for early, late in itertools.pairwise(steps):
            assert (late <= early).all()
            assert int(early.sum() - late.sum()) == 4  # of 16: a quarter opens


def test_pairs_have_half_as_many_texts(tokens: Tokens) -> None:
    ((_, batch),) = Pairs().parts(Complement(), tokens, Plan().moments(2, 8, 16)[1], seed=0)
    assert batch.x_BL[:4].equal(batch.x_BL[4:])
    assert sorted((batch.time_B[:4] * 4).ceil().tolist()) == [1.0, 2.0, 3.0, 4.0]  # spread evenly over the texts


def test_rows_for_the_next_token_leave_even_times_to_the_others(tokens: Tokens) -> None:
    plan = NextTokenFirst(start=0.5, flat=0.0, until=0.7)
    first, *_, last = plan.moments(10, 8, 16)
    (next_token, causal), (_, masked) = plan.parts(Counts(), tokens, first, seed=0)
    assert isinstance(next_token, NextToken)
    assert len(causal.x_BL) == len(masked.x_BL) == 4
    assert sorted((masked.time_B * 4).ceil().tolist()) == [1.0, 2.0, 3.0, 4.0]
    assert len(plan.parts(Counts(), tokens, last, seed=0)) == 1


def test_a_run_turns_from_one_loss_to_another(tokens: Tokens) -> None:
    plan = Turning(first=Weighted(power=0.5), until=0.7)
    asked = [plan.parts(Counts(), tokens, moment, seed=0)[0][0] for moment in plan.moments(10, 8, 16)]
    assert asked == [Weighted(power=0.5)] * 7 + [Counts()] * 3


def test_a_stage_of_short_rows_takes_more_of_them() -> None:
    moments = Plan((Stage(0.5, 1.0, 0.25), Stage())).moments(4, 8, 16)
    assert [(m.batch, m.length) for m in moments] == [(32, 4), (32, 4), (8, 16), (8, 16)]


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", sample(WAYS.values(), 14), ids=lambda way: way.name)
def test_every_way_learns(way: Way, tokens: Tokens) -> None:
    setting = replace(SMALL, steps=12, batch=16, length=16)
    held_out = HeldOut(tokens, setting)
    curve = run_way(way, 0, setting, tokens, CPU, held_out)["curve"]
    if not way.name.startswith("ema-flat"):  # its average still holds the first weights after a few steps
        assert curve[-1][2] < math.log(MASK) - 0.5
    assert 0 <= curve[-1][0] - round(12 * way.work) * 16 * 16 < 16 * 16
    assert [point[0] for point in curve] == sorted(point[0] for point in curve)


def test_the_measure_is_the_objectives_own_bound(tokens: Tokens) -> None:
    network = learned(BASELINE, tokens)
    setting = replace(SMALL, valid_rows=6)
    bound = MDLM(form="count").bound(network, tokens.held_out(6, 8), seed=20_240, num_samples=8)
    held_out = HeldOut(tokens, setting)
    assert held_out.nats(network, Counts()) == pytest.approx(bound.nats_per_token, rel=1e-6)


def test_autoregression_is_measured_by_the_tokens_that_it_predicts(tokens: Tokens) -> None:
    network, x_BL = learned(WAYS["ar"], tokens), tokens.held_out(6, 8)
    with looking_back(network), torch.no_grad():
        log_p_BLI = network.eval()(x_BL)[..., :MASK].log_softmax(dim=-1)
    nats = -log_p_BLI[:, :-1].gather(-1, x_BL[:, 1:, None]).mean()
    held_out = HeldOut(tokens, replace(SMALL, valid_rows=6))
    assert held_out.nats(network, NextToken()) == pytest.approx(float(nats), rel=1e-5)


def test_a_run_repeats_itself(tokens: Tokens) -> None:
    held_out = HeldOut(tokens, SMALL)
    both = [run_way(WAYS["dropout-0.1"], 1, SMALL, tokens, CPU, held_out)["curve"] for _ in range(2)]
    assert [p[2] for p in both[0]] == [p[2] for p in both[1]]


def test_timing_scales_to_the_whole_run(tokens: Tokens) -> None:
    line = time_way(WAYS["batch-half"], SMALL, tokens, CPU, steps=3)
    assert line["steps"] == 12
    assert line["alone_seconds"] > 0


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *args])
    run_main()


def test_a_second_call_skips_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held, out = tmp_path / "tokens.npz.xz", tmp_path / "runs.jsonl"
    made_tokens(4000).save(held)
    args = ["--tokens", str(held), "--out", str(out), "--setting", "tiny", "--device", "cpu", "--steps", "4"]
    call(monkeypatch, *args, "--ways", "baseline", "plain")
    with out.open("a") as file:
        file.write('{"way": "half", "se')  # killed while it wrote
    call(monkeypatch, *args, "--ways", "baseline", "plain", "half")
    assert capsys.readouterr().out.count("seed 0") == 3
    assert [line["way"] for line in read_lines(out, "tiny", 4)] == ["baseline", "plain", "half"]
    assert read_lines(out, "tiny", 5) == []
    call(monkeypatch, *args, "--best", "1", "--seeds", "2")
    assert len(read_lines(out, "tiny", 4)) == 5
    with pytest.raises(UsageError, match="plain"):
        call(monkeypatch, *args, "--ways", "plane")


@pytest.mark.parametrize("wrong", [["--ways", "plane"], ["--tokens", "none.npz.xz"]])
def test_a_wrong_use_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    made_tokens(4000).save(tmp_path / "tokens.npz.xz")
    args = ["--tokens", str(tmp_path / "tokens.npz.xz"), "--out", str(tmp_path / "runs.jsonl"), *wrong]
    monkeypatch.setattr(sys, "argv", ["run", *args])
    with pytest.raises(SystemExit) as e:
        run_command(run_main)
    assert e.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_way_that_fails_is_noted_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held, out = tmp_path / "tokens.npz.xz", tmp_path / "runs.jsonl"
    made_tokens(4000).save(held)
    args = ["--tokens", str(held), "--out", str(out), "--setting", "tiny", "--device", "cpu", "--steps", "2"]

    def broken(*args: Any) -> Any:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr("ways.run.run_way", broken)
        call(patch, *args, "--ways", "baseline")
    assert read_lines(out, "tiny", 2)[0]["error"] == "RuntimeError: no"
    call(monkeypatch, *args, "--ways", "baseline")
    assert "error" not in read_lines(out, "tiny", 2)[0]
    capsys.readouterr()


# --- the table --------------------------------------------------------------------------------------------------------


def line(way: str, seed: int, *nats: float, **more: Any) -> dict[str, Any]:
    curve = [[100 * (i + 1), 1.0 + i, value] for i, value in enumerate(nats)]
    sized = {"parameters": 10, "embeddings": 5, "processes": 4, "setting": "small", "setting_steps": 600}
    return {"way": way, "seed": seed, "curve": curve, **sized, **more}


LINES = [
    line("baseline", 0, 5.0, 4.0),
    line("baseline", 1, 5.2, 4.2),
    line("plain", 0, 4.8, 3.9),
    line("plain", 1, 5.0, 3.9),
    line("half", 0, 5.0, 4.1),
    line("half", 1, 5.0, 4.3),
    line("work-2", 0, 4.5, 3.6),
]


def test_differences_are_paired_and_have_students_interval() -> None:
    table = {row.way: row for row in rows(LINES)}
    plain = table["plain"]
    assert plain.last == pytest.approx(-0.2)  # -0.1 and -0.3
    assert plain.own == pytest.approx(12.706 * math.sqrt(0.02 / 2))
    assert table["half"].own == pytest.approx(0.0, abs=1e-9)  # +0.1 twice
    # two ways with one degree of freedom each: the mean of the two variances, and t of 2
    assert plain.pooled == pytest.approx(4.303 * math.sqrt(0.01 / 2))
    assert plain.third == pytest.approx(-0.2)
    assert plain.reached == pytest.approx((100 + 100 * 0.8 / 0.9 + 100 + 100 * 0.8 / 1.1) / 2 / 200)
    assert table["half"].reached is None


def test_a_difference_is_worth_tokens_of_the_baseline() -> None:
    """Twice the tokens give 0.4 nats: half of that is worth the root of 2."""
    table = {row.way: row for row in rows(LINES)}
    assert table["plain"].worth == pytest.approx(math.sqrt(2))
    assert table["half"].worth is None
    assert table["baseline"].worth == 1
    assert table["work-2"].worth == pytest.approx(2)
    assert exchange({"baseline": {0: LINES[0]}}, 3.9) is None


def test_a_run_that_diverged_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    for one in [*LINES, line("normuon", 0, 5.0, math.nan)]:
        add_line(path, one)
    assert json.loads(path.read_text().splitlines()[-1])["curve"][-1][2] is None
    held = read_lines(path, "small", 600)
    assert "normuon" not in {row.way for row in rows(held)}
    assert best_ways(held, 1) == ["baseline", "plain"]
    with pytest.raises(UsageError, match="baseline"):
        rows(held[2:])


@pytest.mark.parametrize("name", ["catalogue", "networks", "results", "schedules", "table"])
def test_examples(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"ways.{name}"))
    assert tried.attempted > 0
    assert tried.failed == 0
