"""The captured way of sampling without a GPU: graphs are played by calling what they would have recorded.

What is tested is the bookkeeping (plans as lines, rows that leave, prompts, padding); tests/gpu has the real graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.objectives.mdlm import MDLM
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.left_to_right import LeftToRight
from unmask.samplers.planned import PlannedSampler
from unmask.samplers.semi_ar import SemiAR
from unmask.sampling import loop
from unmask.sampling.canvas import Canvas
from unmask.sampling.captured import Captured, Graphs, graphs_of
from unmask.sampling.cuda_graphs import MIN_ROUNDS, DevicePlan, replay
from unmask.sampling.loop import sample, steps

V, L = 40, 48


class Played:
    """A graph that does when replayed what was done when it was recorded."""

    def __init__(self, body: Callable[[], None], times: int) -> None:
        self.body, self.times = body, times

    def replay(self) -> None:
        for _ in range(self.times):
            self.body()


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(self: Captured, body: Callable[[], None], pool: Any, times: int = 1) -> Played:
        body()  # the warm-up, whose line is void
        self.lines.line.zero_()
        return Played(body, times)

    monkeypatch.setattr(Captured, "capture", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))


def network(**options: Any) -> Network:
    torch.manual_seed(0)
    net = DiT(size="nano", hidden=32, blocks=2, heads=2, **options).build(num_ids=V + 1, mask_id=V).eval()
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net


def mixed(seed: int = 3) -> Canvas:
    """Rows of several lengths with prompts and gaps, some nearly finished."""
    torch.manual_seed(1)
    rows = [torch.randint(0, V, (n,)).tolist() for n in (L, L, 21, L, 33, L, 9)]
    for i, row in enumerate(rows):
        for at in range(2 + i, len(row)):
            if at % (2 + i):
                row[at] = V
    return Canvas.of_rows(rows, mask_id=V, pad_id=0, seed=seed)


SAMPLERS = [
    Ancestral(steps=None),
    Ancestral(steps=1),
    Ancestral(steps=12, temperature=0.7),
    Ancestral(steps=500),
    Ancestral(steps=12, top_k=5, top_p=0.9),
    Ancestral(steps=12, draw="argmax"),
    LeftToRight(),
]


@pytest.mark.parametrize("conditioning", ["none", "level"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_the_text_is_that_of_the_plain_loop(sampler: PlannedSampler, conditioning: str) -> None:
    net, canvas = network(conditioning=conditioning), mixed()
    want = sample(net, canvas, sampler).tokens
    predictor = MDLM().predictor(net)
    for quiet in (True, False):
        seen = list(replay(predictor, sampler, sampler.start(canvas), quiet=quiet))
        assert seen[-1].tokens_BL.equal(want)
    plain = list(steps(net, canvas, sampler))
    assert len(seen) == len(plain)
    for a, b in zip(seen, plain, strict=True):
        assert a.row_N.equal(b.row_N)
        assert a.position_N.equal(b.position_N)
        assert a.token_N.equal(b.token_N)
        torch.testing.assert_close(a.log_prob_N.float(), b.log_prob_N.float())
        assert a.tokens_BL.equal(b.tokens_BL)


def test_rows_leave_when_they_are_done() -> None:
    tokens = torch.full((8, L), V)
    tokens[2:, 5:] = 1  # six rows have five positions to open, two have all
    state = Ancestral(steps=None).start(Canvas.of(tokens, mask_id=V))
    plan = DevicePlan.of(state)
    assert plan.segments == [(0, 5, 8), (5, L, 2)]
    assert L - 5 >= MIN_ROUNDS
    assert set(plan.row_of_slot[:2]) == {0, 1}
    at, source, target, level = plan.lines(state, 0, 5, 8)
    assert at.shape == (5, 8, 1)
    assert (target < 8 * L).sum(dim=1).tolist() == [8] * 5
    assert level.shape == (5, 8)
    assert source.shape == target.shape


def test_graphs_are_kept_by_shape_and_forgotten_with_the_network() -> None:
    net, sampler = network(), Ancestral(steps=500)
    predictor = MDLM().predictor(net)
    for seed in (0, 1, 2):
        list(replay(predictor, sampler, sampler.start(mixed(seed)), quiet=True))
    known = graphs_of(net).captures
    for seed in (0, 1, 2):
        list(replay(predictor, sampler, sampler.start(mixed(seed)), quiet=True))
    assert graphs_of(net).captures == known
    before: Graphs = graphs_of(net)
    net.double()
    assert graphs_of(net) is not before


def test_the_plans_buffers_stay_small_when_much_opens_at_once() -> None:
    """One round that opens all takes one line of all positions, not one of them for every position."""
    net = network()
    sampler = Ancestral(steps=1)
    list(replay(MDLM().predictor(net), sampler, sampler.start(Canvas.blank(num=2, length=L, mask_id=V)), quiet=True))
    (graph,) = graphs_of(net).known.values()
    assert graph.at.numel() <= 16 * 2 * 64  # type: ignore[attr-defined]


def test_between_two_steps_nothing_is_set_for_others() -> None:
    """Whoever takes the steps keeps their own gradients and kernels while the run stands still."""
    net, sampler = network(), Ancestral(steps=4)
    run = replay(MDLM().predictor(net), sampler, sampler.start(mixed()))
    next(run)
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert [step.tokens_BL.requires_grad for step in run] == [False] * 3


@pytest.mark.parametrize("end", [None, 3])
def test_windows_are_replayed_one_after_another(end: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way a GPU takes through the windows: the same steps, the same text, with rows that end too."""
    net, sampler = network(), SemiAR(window=16, stride=8, inner=Ancestral(steps=3))
    canvas = replace(Canvas.blank(num=3, length=32, mask_id=V, seed=2), end_id=end)
    plain = list(steps(net, canvas, sampler))
    monkeypatch.setattr(loop, "can_replay", lambda *given: True)
    replayed = list(steps(net, canvas, sampler))
    if end is None:
        for a, b in zip(plain, replayed, strict=True):
            assert a.position_N.equal(b.position_N)
            assert a.token_N.equal(b.token_N)
    for tokens in (replayed[-1].tokens_BL, sample(net, canvas, sampler).tokens):
        for one, other in zip(plain[-1].tokens_BL.tolist(), tokens.tolist(), strict=True):
            length = one.index(end) if end in one else len(one)  # what follows an end is not shown
            assert one[: length + 1] == other[: length + 1]
