"""What only a GPU can show: the compiled, fused and captured ways against the plain ones. Skipped without one.

Needs torch, triton and pytest alone: `python -m pytest --noconftest tests/gpu tests/test_kernels.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask import kernels
from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.denoisers.network import Network, as_denoiser
from unmask.denoisers.ragged import ragged
from unmask.devices import fast_attention
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.samplers import Sampler
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.block import Block
from unmask.samplers.confidence import Confidence
from unmask.samplers.entropy_bounded import EntropyBounded
from unmask.samplers.left_to_right import LeftToRight
from unmask.samplers.refine import Refine
from unmask.samplers.remdm import ReMDM
from unmask.samplers.semi_ar import SemiAR
from unmask.sampling.canvas import Canvas
from unmask.sampling.captured import graphs_of
from unmask.sampling.loop import sample, steps
from unmask.training.compiling import compile_trunk

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its numerics are not tested here"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch's own compiler warns of torch
]
CUDA = torch.device("cuda")
V, L = 300, 96


def network(dtype: torch.dtype = torch.float32, **options: Any) -> DiTNetwork:
    torch.manual_seed(0)
    net = DiT(size="nano", **options).build(num_ids=V + 1, mask_id=V)
    with torch.no_grad():
        for p in net.parameters():  # away from the start, where a zero head and zero gates hide everything
            p.add_(0.05 * torch.randn_like(p))
    return net.to(CUDA, dtype).eval()


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


CONDITIONINGS = ["none", "constant", "level", "sigma"]


@pytest.mark.parametrize("conditioning", CONDITIONINGS)
@pytest.mark.parametrize("what", ["all", "at", "padded", "causal"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_the_fused_forward_pass_is_the_plain_one(
    conditioning: str, what: str, qk_norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal = what == "causal"
    if causal and conditioning in ("level", "sigma"):
        pytest.skip("refused by design: a causal denoiser sees no noise")
    net = network(conditioning=conditioning, causal=causal, qk_norm=qk_norm)
    z = torch.randint(0, V, (3, L), device=CUDA)
    level = torch.rand(3, device=CUDA)
    options: dict[str, Tensor] = {}
    shown = torch.ones(3, L, dtype=torch.bool, device=CUDA)
    if what == "at":
        options["at_BK"] = torch.randint(0, L, (3, 7), device=CUDA)
        shown = shown[:, :7]
    if what == "padded":
        shown = torch.arange(L, device=CUDA) < torch.tensor([L, 50, 7], device=CUDA)[:, None]
        options["valid_BL"] = shown
    with torch.no_grad():
        assert net.can_fuse()
        fused = net.trunk(z, level, **options)[shown]
        monkeypatch.setattr(kernels, "HAS_TRITON", False)
        plain = net.trunk(z, level, **options)[shown]
    assert relative(fused, plain) < 1e-5


@pytest.mark.parametrize("conditioning", ["none", "level"])
@pytest.mark.parametrize("objective", [MDLM(), AR()], ids=["mdlm", "ar"])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_bf16_loss_and_gradients_by_kernels_against_fp32_without(
    objective: Any, conditioning: str, qk_norm: bool, padded: bool
) -> None:
    """Relative error of the loss and of all gradients together at most 1e-2; dropout off.

    With qk_norm bf16 itself, without kernels, is 1.0 to 1.2e-2 away on this network; the fast way adds nothing to that.
    """
    causal = isinstance(objective, AR)
    if causal and conditioning == "level":
        pytest.skip("refused by design: a causal denoiser sees no noise")
    options = {"conditioning": conditioning, "causal": causal, "dropout": 0.0, "qk_norm": qk_norm}
    lengths = torch.randint(1, L + 1, (16,)) if padded else None
    batch = make_batch(torch.randint(0, V, (16, L)), lengths, seed=0, step=0)

    def gradients(*, bf16: bool, fast: bool) -> tuple[Tensor, Tensor]:
        net = network(**options).train()
        assert net.can_fuse_training()
        if not fast:
            net.takes_ragged = net.can_fuse_training = lambda: False  # type: ignore[method-assign]
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16), fast_attention():
            nats = objective.loss(net, batch).nats
            nats.backward()
        return nats.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    torch.backends.cuda.matmul.allow_tf32 = False
    want_loss, want = gradients(bf16=False, fast=False)
    got_loss, got = gradients(bf16=True, fast=True)
    limit = 1e-2
    if qk_norm:
        limit = max(limit, 1.25 * relative(gradients(bf16=True, fast=False)[1], want))
    assert limit < 2e-2
    assert relative(got_loss, want_loss) < 1e-2
    assert relative(got, want) < limit


def test_the_kernels_loss_is_plain_autograds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, kernels against none: what the bf16 test allows is rounding and nothing else."""
    batch = make_batch(torch.randint(0, V, (8, L)), seed=0, step=0)
    results = []
    for has_triton in (True, False):
        monkeypatch.setattr(kernels, "HAS_TRITON", has_triton and kernels.HAS_TRITON)
        net = network(dropout=0.0).train()
        nats = MDLM().loss(net, batch).nats
        nats.backward()  # type: ignore[no-untyped-call]
        results.append((nats.detach(), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])))
    assert relative(results[0][0], results[1][0]) < 1e-6
    assert relative(results[0][1], results[1][1]) < 1e-5


def test_a_step_by_kernels_is_the_same_every_time() -> None:
    """Bit for bit, dropout included: a resumed run repeats the one it continues."""
    batch = make_batch(torch.randint(0, V, (8, L)), seed=0, step=0)
    grads = []
    for _ in range(2):
        net = network(dropout=0.2).train()
        torch.manual_seed(3)
        with torch.autocast("cuda", dtype=torch.bfloat16), fast_attention():
            MDLM().loss(net, batch).nats.backward()  # type: ignore[no-untyped-call]
        grads.append(torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]))
    assert grads[0].equal(grads[1])


def test_no_graph_breaks_and_no_recompilation() -> None:
    """Of a network without kernels of its own, over mixed masks, counts and padding: once a shape is known, nothing is
    compiled again."""
    net = network(dropout=0.1).train()
    net.can_fuse_training = lambda: False  # type: ignore[method-assign]
    z, flat = torch.randint(0, V, (4, L), device=CUDA), torch.arange(50, device=CUDA)
    assert torch._dynamo.explain(net.trunk_at)(z, None, flat).graph_break_count == 0
    rows = ragged(torch.ones(4, L, dtype=torch.bool, device=CUDA).tril())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        few = torch.arange(4, device=CUDA)
        assert torch._dynamo.explain(net.trunk_ragged)(z[0, :10], None, rows, few).graph_break_count == 0
    compile_trunk(net)
    full, short = torch.full((4,), L), torch.tensor([L, 40, 7, 60])

    def step(i: int, lengths: Tensor) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            batch = make_batch(torch.randint(0, V, (4, L)), lengths, seed=0, step=i)
            MDLM().loss(net, batch).nats.backward()  # type: ignore[no-untyped-call]

    step(0, full)
    step(0, short)
    torch._dynamo.config.error_on_recompile = True
    try:
        for i in range(1, 20):
            step(i, full if i % 2 else short)
    finally:
        torch._dynamo.config.error_on_recompile = False


def samplers() -> Iterator[tuple[Sampler, bool]]:
    for causal, sampler in (
        (False, Ancestral(steps=16)),
        (False, Ancestral(steps=None)),
        (False, Ancestral(steps=16, top_k=20, top_p=0.9)),
        (False, Ancestral(steps=16, temperature=0.0)),
        (False, Ancestral(steps=300, temperature=0.7)),
        (False, LeftToRight()),
        (False, Ancestral(steps=16, draw="hybrid", sure=0.02)),
        (False, Ancestral(steps=16, draw="argmax")),
        (False, Ancestral(steps=16, temperature_end=0.5)),
        (False, ReMDM(steps=16, eta=0.2)),
        (False, Block(size=16, inner=Ancestral(steps=4))),
        (False, SemiAR(window=32, stride=16, inner=Ancestral(steps=8))),
        (True, LeftToRight()),
        (True, LeftToRight(top_p=0.9)),
    ):
        yield sampler, causal


@pytest.mark.parametrize(("sampler", "causal"), list(samplers()), ids=repr)
def test_captured_sampling_writes_what_the_cpu_writes(sampler: Sampler, causal: bool) -> None:
    """Prompts, gaps, rows of several lengths: the same plan and uniforms, so the same text, or nearly always."""
    net = network(causal=causal)
    cpu = DiT(size="nano", causal=causal).build(num_ids=V + 1, mask_id=V).eval()
    cpu.load_state_dict(net.state_dict())
    torch.manual_seed(1)
    rows = [torch.randint(0, V, (n,)).tolist() for n in (70, 70, 41, 70, 55, 70, 70, 23)]
    for i, row in enumerate(rows):
        for at in range(3 + i, len(row)):
            if causal or at % 7:
                row[at] = V
    canvas = Canvas.of_rows(rows, mask_id=V, pad_id=0, seed=3)
    want = sample(cpu, canvas, sampler).tokens
    got = sample(net, canvas.to(CUDA), sampler).tokens.cpu()
    assert int((got == want).all(dim=1).sum()) >= 7  # float32 differs in the last bit, and a u may sit on an edge
    fixed = canvas.tokens != V
    assert got[fixed].equal(canvas.tokens[fixed])
    assert not (got == V).any()
    seen = list(steps(net, canvas.to(CUDA), sampler))
    assert seen[-1].tokens_BL.cpu().equal(got)
    written = canvas.tokens.clone()
    for step in seen:
        written[step.row_N.cpu(), step.position_N.cpu()] = step.token_N.cpu()
        assert (step.log_prob_N <= 0).all()
    assert written.equal(got)
    told = list(steps(net, canvas.to(CUDA), sampler, runners_up=2))  # by ask and tell, with the same draws
    assert int((told[-1].tokens_BL.cpu() == got).all(dim=1).sum()) >= 7
    for step in told:
        assert step.others is not None
        assert (step.others.prob_NK[:, 0] >= step.others.prob_NK[:, 1]).all()


@pytest.mark.parametrize(
    "sampler",
    [
        Confidence(steps=16, random=0.5),
        EntropyBounded(gamma=20.0, temperature_end=0.5),
        ReMDM(variant="confidence", steps=16, eta=1.0),
        Refine(inner=Ancestral(steps=8), rounds=2),
        SemiAR(window=32, stride=16, inner=Block(size=8, inner=Confidence(tokens=2))),
    ],
    ids=repr,
)
def test_orders_that_look_run_on_a_gpu(sampler: Sampler) -> None:
    """A last bit may change such an order, so texts are not compared with the CPU's, but with a second run."""
    net = network()
    rows = [[V] * n for n in (70, 41, 70, 23)]
    rows[0][5], rows[2][60] = 3, 4
    canvas = replace(Canvas.of_rows(rows, mask_id=V, pad_id=0, seed=3), end_id=0).to(CUDA)
    got = sample(net, canvas, sampler).tokens
    assert got.is_cuda
    assert got.equal(sample(net, canvas, sampler).tokens)
    assert not (got == V).any()
    assert got[~canvas.open_BL].equal(canvas.tokens[~canvas.open_BL])


@pytest.mark.parametrize("uses_level", [False, True], ids=["ignores level", "sees level"])
def test_the_captured_samplers_law_on_a_table(uses_level: bool) -> None:
    """Chi-square against the enumerated law of the chain, T = 2, V = 3, L = 3."""
    torch.manual_seed(0)
    v, length, num = 3, 3, 40_000
    mask = v
    states = torch.tensor(list(itertools.product(range(v + 1), repeat=length)), device=CUDA)
    table = 1.5 * torch.randn(len(states), length, v + 1, device=CUDA)
    tilt = torch.randn(v + 1, device=CUDA) if uses_level else torch.zeros(v + 1, device=CUDA)
    place = (v + 1) ** torch.arange(length - 1, -1, -1, device=CUDA)

    def logits(z: Tensor, level: Tensor | None) -> Tensor:
        tilted = table[(z * place).sum(dim=1)]
        return tilted if level is None else tilted + level.to(tilted)[:, None, None] * tilt

    net = as_denoiser(logits, vocab_size=v, mask_id=mask, uses_level=uses_level)
    net.capturable = True
    canvas = Canvas.blank(num=num, length=length, mask_id=mask, seed=0).to(CUDA)
    tokens = sample(net, canvas, Ancestral(steps=2)).tokens
    assert graphs_of(net).captures > 0
    law = chain_law(net, states, mask, length, levels=(1.0, 0.5, 0.0))
    whole = (states < mask).all(dim=1)
    index = (states[whole] * place).sum(dim=1)
    count = torch.bincount((tokens * place).sum(dim=1), minlength=len(states))[index].double()
    expected = num * law[whole]
    statistic = ((count - expected) ** 2 / expected).sum()
    p = torch.special.gammaincc(torch.tensor((len(index) - 1) / 2).double(), statistic.cpu() / 2)
    assert float(p) > 1e-4
    other = num * chain_law(net, states, mask, length, levels=(1.0, 0.0))[whole]  # the test would notice one step
    assert float(((count - other) ** 2 / other).sum()) > 10 * len(index)


def chain_law(net: Network, states: Tensor, mask: int, length: int, levels: tuple[float, ...]) -> Tensor:
    """The law over all states after the chain that goes down these levels."""
    law = torch.zeros(len(states), dtype=torch.float64, device=CUDA)
    law[(states == mask).all(dim=1).nonzero()[0]] = 1
    for t, s in itertools.pairwise(levels):
        logits = net(states, torch.full((len(states),), t, device=CUDA) if net.uses_level else None).double()
        logits[..., mask] = -torch.inf
        x_theta = torch.softmax(logits, dim=-1)
        step = x_theta * (t - s) / t
        step[..., mask] = s / t
        visible = states != mask
        step = torch.where(visible[..., None], torch.nn.functional.one_hot(states, mask + 1).double(), step)
        # q[i, j] = prod over positions of step[i, k, states[j, k]]
        q = torch.stack([step[:, k].gather(1, states[:, k].expand(len(states), -1)) for k in range(length)]).prod(0)
        law = law @ q
    assert math.isclose(float(law.sum()), 1, rel_tol=1e-9)
    return law


def test_graphs_are_captured_once_over_mixed_lengths_and_follow_the_weights() -> None:
    net = network(torch.bfloat16)
    sizes = [(1, 40), (3, 64), (5, L), (1, L)]

    def run(seed: int) -> list[Tensor]:
        blanks = (Canvas.blank(num=n, length=length, mask_id=V, seed=seed).to(CUDA) for n, length in sizes)
        return [sample(net, blank, Ancestral(steps=200)).tokens for blank in blanks]

    first = run(0)
    run(1)
    known = graphs_of(net).captures
    again = run(0)
    assert graphs_of(net).captures == known
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p) * 0.05)
    changed = run(0)
    assert graphs_of(net).captures == known  # new values in the old place need no new graph
    assert not any(a.equal(b) for a, b in zip(first, changed, strict=True))
    other = DiT(size="nano").build(num_ids=V + 1, mask_id=V).to(CUDA, torch.bfloat16).eval()
    other.load_state_dict(net.state_dict())
    blank = Canvas.blank(num=sizes[2][0], length=sizes[2][1], mask_id=V).to(CUDA)
    assert sample(other, blank, Ancestral(steps=200)).tokens.equal(changed[2])
    net.float()
    assert sample(net, blank, Ancestral(steps=200)).tokens.shape == (5, L)
    assert graphs_of(net).captures < known  # moved weights begin anew


def test_a_rows_text_does_not_depend_on_how_long_its_neighbours_take() -> None:
    net = network()
    alone = sample(net, Canvas.blank(num=1, length=L, mask_id=V, seed=4).to(CUDA), Ancestral(steps=None)).tokens
    tokens = torch.full((3, L), V)
    tokens[1, 5:] = 7  # done long before
    tokens[2, 50:] = 9
    together = sample(net, Canvas.of(tokens, mask_id=V, seed=4).to(CUDA), Ancestral(steps=None)).tokens
    assert together[0].equal(alone[0])


def test_muon_beside_the_one_pass_update_is_the_hosts() -> None:
    """Three updates with clipping and averaging; the matrices are turned in bf16 here, in float32 there."""
    from unmask.config import OptimConfig
    from unmask.training.ema import Ema
    from unmask.training.optim import Updater, make_optimizer

    def weights(device: torch.device) -> dict[str, Tensor]:
        net = network().cpu().to(device)
        ema = Ema(net, 0.9)
        updater = Updater(*make_optimizer(net, OptimConfig(muon=True, weight_decay=0.1)), ema=ema, clip=1.0)
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            for p in net.parameters():
                p.grad = torch.randn(p.shape, generator=generator).to(device)
            updater.update(lr=1e-2, grad_norm=updater.grad_norm(), nonfinite=torch.tensor(False, device=device))
        return {n: p.detach().cpu() for n, p in net.named_parameters()} | {
            f"ema/{n}": s.cpu() for n, s in ema.shadow.items()
        }

    start = dict(network().cpu().named_parameters())
    want, got = weights(torch.device("cpu")), weights(CUDA)
    for name in want:
        moved = want[name] - start[name.removeprefix("ema/")].detach()
        assert float((got[name] - want[name]).norm() / moved.norm()) < 2e-2, name
