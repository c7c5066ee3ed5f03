"""Every kernel against the plain torch it stands for: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed: the kernels are not tested")

from unmask import kernels
from unmask.config import OptimConfig
from unmask.denoisers.dit import DiT
from unmask.denoisers.dit.dropout import hashed_dropout
from unmask.denoisers.dit.rotary import rotary, rotate
from unmask.denoisers.recurrent.scan import plain_scan, plain_scan_grad
from unmask.kernels.adamw import adamw_
from unmask.kernels.add_norm import add_norm
from unmask.kernels.cross_entropy import cross_entropy_grad_
from unmask.kernels.draw import draw
from unmask.kernels.linear_gelu import linear_gelu
from unmask.kernels.residual_norm import residual_norm
from unmask.kernels.rope import rope_
from unmask.kernels.rope_norm import rope_norm
from unmask.kernels.selective_scan import CHAIN, cut, scan, scan_grad
from unmask.kernels.split_rope import split_rope
from unmask.rng import categorical
from unmask.sampling.captured import Lines
from unmask.training import muon, optim
from unmask.training.ema import Ema

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, L, H, K = 2, 5, 3, 8  # K: a head's width
D = H * K


@pytest.fixture(autouse=True)
def on_device() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def test_cross_entropy_and_its_gradient() -> None:
    logits = 3 * randn(5, 5000)
    logits[:, 7] = -torch.inf
    x, weight = torch.tensor([1, 2, 3, 4999, 0], device=DEVICE), torch.rand(5, device=DEVICE)
    plain = logits.clone().requires_grad_()
    want = weight * F.cross_entropy(plain, x, reduction="none")
    want.sum().backward()  # type: ignore[no-untyped-call]
    got = cross_entropy_grad_(logits, x, weight)
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(logits, plain.grad)  # the gradient has taken the logits' place


@pytest.mark.parametrize("lines", [1, B], ids=["one condition", "one a row"])
def test_residual_norm(lines: int) -> None:
    x, y, weight, bias = randn(B * L, D), randn(B * L, D), randn(D), randn(D)
    torch.testing.assert_close(
        residual_norm(x.clone(), weight, bias_D=bias), F.layer_norm(x + bias, (D,), weight, None, 1e-5)
    )
    gate, scale, shift = randn(lines, 3 * D).chunk(3, dim=-1)
    wide = [t.repeat_interleave(B * L // lines, dim=0) for t in (gate, scale, shift)]
    got_x = x.clone()
    got = residual_norm(got_x, weight, bias_D=bias, y_MD=y, gate=gate, scale=scale, shift=shift, rows_per_cond=L)
    want_x = x + wide[0] * (y + bias)
    torch.testing.assert_close(got_x, want_x)
    want = F.layer_norm(want_x, (D,), weight, None, 1e-5) * (1 + wide[1]) + wide[2]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in tensors]


def same_gradients(
    got: list[torch.Tensor], want: list[torch.Tensor], *pairs: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Of the sum of all outputs, each weighted at random; the outputs, too, are the same."""
    for mine, plain in pairs:
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
        weight = randn(*mine.shape)
        for output, inputs in ((mine, got), (plain, want)):
            (output * weight).sum().backward(inputs=inputs, retain_graph=True)  # type: ignore[no-untyped-call]
    for a, b in zip(got, want, strict=True):
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("lines", [B * L, 70], ids=["few lines", "several programs"])
def test_add_norm_and_its_gradient(dropout: float, gated: bool, lines: int) -> None:
    tensors = [randn(lines, D), randn(lines, D), 1 + 0.1 * randn(D), *(randn(D) for _ in range(2 + gated))]
    got, want = leaves(*tensors), leaves(*tensors)
    torch.manual_seed(1)
    gate = {"gate_D": got[5]} if gated else {}
    total, h = add_norm(*got[:3], shift_D=got[3], bias_D=got[4], dropout=dropout, **gate)
    torch.manual_seed(1)
    branch = want[1] + want[4]
    branch = hashed_dropout(branch, dropout) if dropout else branch
    plain = want[0] + (branch * want[5] if gated else branch)
    same_gradients(got, want, (total, plain), (h, F.layer_norm(plain, (D,), want[2], want[3], 1e-5)))
    if dropout:
        assert 0.3 < float((total == tensors[0]).float().mean()) < 0.5


@pytest.mark.parametrize("lines", [5, 64])
def test_each_condition_has_lines_of_its_own(lines: int) -> None:
    x, y, bias = randn(3 * lines, D), randn(3 * lines, D), randn(D)
    tensors = [x, y, bias, *(randn(3, D) for _ in range(3))]
    got, want = leaves(*tensors), leaves(*tensors)
    total, h = add_norm(got[0], got[1], got[3], bias_D=got[2], shift_D=got[4], gate_D=got[5])
    weight, shift, gate = (t.repeat_interleave(lines, dim=0) for t in want[3:])
    plain = want[0] + gate * (want[1] + want[2])
    same_gradients(got, want, (total, plain), (h, F.layer_norm(plain, (D,), None, None, 1e-5) * weight + shift))


def test_a_norm_with_nothing_to_add() -> None:
    tensors = [randn(7, D), randn(D)]
    got, want = leaves(*tensors), leaves(*tensors)
    total, h = add_norm(got[0], None, got[1])
    assert total is got[0]
    same_gradients(got, want, (h, F.layer_norm(want[0], (D,), want[1], None, 1e-5)))
    assert add_norm(randn(0, D), randn(0, D), got[1])[1].shape == (0, D)


@pytest.mark.parametrize("conditions", [None, 0, 2])
def test_no_lines_have_no_gradient(conditions: int | None) -> None:
    """A batch in which nothing is masked: on a GPU, reading a line that is not there ends the process."""
    shape = (D,) if conditions is None else (conditions, D)
    x, y, *rest = leaves(randn(0, D), randn(0, D), *(randn(*shape) for _ in range(3)))
    total, h = add_norm(x, y, rest[0], shift_D=rest[1], gate_D=rest[2])
    (total.sum() + h.sum()).backward()
    assert total.shape == h.shape == (0, D)
    for leaf in rest:
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, torch.zeros(shape))


@pytest.mark.parametrize("width", [24, 1100])
def test_linear_gelu_and_its_gradient(width: int) -> None:
    tensors = [randn(150, D), randn(width, D), randn(width)]
    got, want = leaves(*tensors), leaves(*tensors)
    plain = F.gelu(F.linear(*want), approximate="tanh")
    same_gradients(got, want, (linear_gelu(*got), plain))


@pytest.mark.parametrize("more", [False, True], ids=["last", "others follow"])
@pytest.mark.parametrize("lines", [3, 150])
def test_mix_values_and_its_gradient(lines: int, more: bool) -> None:
    from unmask.kernels.mix_values import mix_values

    torch.manual_seed(0)
    qkv, first, share = torch.randn(lines, 72), torch.randn(lines, 24), torch.tensor([0.3])
    up, beside = torch.randn(lines, 24), torch.randn(lines, 24)
    found = []
    for by_kernel in (False, True):
        leaves = [t.clone().requires_grad_() for t in (qkv, first, share)]
        v = leaves[0][:, 48:]
        mixed, kept = mix_values(v, *leaves[1:]) if by_kernel else (torch.lerp(v, leaves[1], leaves[2]), leaves[1])
        ((mixed * up).sum() + ((kept * beside).sum() if more else 0)).backward()
        found.append([mixed.detach(), *(leaf.grad for leaf in leaves)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("listed", [False, True], ids=["whole rows", "positions told"])
def test_rope_norm_and_its_gradient(norm: bool, listed: bool) -> None:
    (got,), (want,) = (leaves(qkv := randn(B * L, 3 * D)), leaves(qkv))
    cos, sin = (table[0, 0] for table in rotary(K, None, L, DEVICE, torch.float32))
    position_M = torch.randint(0, L, (B * L,), device=DEVICE) if listed else torch.arange(L, device=DEVICE).repeat(B)
    told = {"position_M": position_M} if listed else {}
    parts = rope_norm(1 * got, cos, sin, heads=H, rows=B, norm=norm, **told)  # 1 x: it writes where it reads
    pairs = []
    for i, part in enumerate(parts):
        plain = want.view(B, L, 3, H, K)[:, :, i]
        if i < 2:
            turned = rotate(plain, (cos[position_M].view(B, L, 1, -1), sin[position_M].view(B, L, 1, -1)))
            plain = F.rms_norm(turned, (K,), eps=1e-6) if norm else turned
        pairs.append((part.transpose(1, 2), plain.transpose(1, 2)))  # gradients come in another layout
    weights = [randn(B, H, L, K) for _ in pairs]
    for i, inputs in ((0, got), (1, want)):
        sum((pair[i] * weight).sum() for pair, weight in zip(pairs, weights, strict=True)).backward(inputs=[inputs])
    for mine, plain in pairs:
        torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_muon_by_kernels_is_muon(weight_decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params, parts = [randn(9, 4), randn(3, 4), randn(5, 3)], [3, 1, 1]
    emas = [randn(*p.shape) for p in params]
    sides = [
        [[t.clone() for t in ts] for ts in (params, [torch.zeros_like(p) for p in params], emas)] for _ in range(2)
    ]
    for _ in range(3):
        grads = [randn(*p.shape) for p in params]
        for by_kernels, (own, momenta, averages) in zip((True, False), sides, strict=True):
            monkeypatch.setattr(muon, "_plain", lambda tensor, by_kernels=by_kernels: by_kernels)
            for bad in (True, False):  # a bad one changes no weight
                muon.muon_(
                    own,
                    grads,
                    momenta,
                    parts=parts,
                    scale=torch.tensor(0.7, device=DEVICE),
                    nonfinite=torch.tensor(float(bad), device=DEVICE),
                    lr=0.1,
                    momentum=0.9,
                    rms=0.2,
                    weight_decay=weight_decay,
                    averages=None if bad else averages,
                    towards=0.25,
                )
    tolerance = 1e-5 if DEVICE.type == "cpu" else 1e-2  # a GPU orthogonalises in bfloat16
    for mine, plain in zip(*(side for side in sides), strict=True):
        for a, b in zip(mine, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def rotated(x_MD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return rotate(x_MD.view(B, L, H, K).transpose(1, 2), rope).transpose(1, 2).reshape(B * L, D)


def test_rope_in_place() -> None:
    qkv = randn(B * L, 3 * D)
    rope = rotary(K, None, L, DEVICE, torch.float32)
    want = torch.cat([rotated(part, rope) for part in qkv.chunk(3, dim=-1)[:2]] + [qkv[:, 2 * D :]], dim=-1)
    got = qkv.clone()
    rope_(got, rope[0][0, 0], rope[1][0, 0], 2 * H, length=L)
    torch.testing.assert_close(got, want)
    some = torch.tensor([7, 3], device=DEVICE)  # of the flat rows: positions 2 and 3
    got = qkv[some, :D].clone()
    rope_(got, rope[0][0, 0], rope[1][0, 0], H, length=L, position_M=some % L)
    torch.testing.assert_close(got, want[some, :D])


def test_split_rope_and_its_gradient() -> None:
    rope = rotary(K, None, L, DEVICE, torch.float32)
    qkv = randn(B * L, 3 * D).requires_grad_()
    plain = qkv.detach().clone().requires_grad_()
    q, k, v = plain.chunk(3, dim=-1)
    want = (rotated(q, rope), rotated(k, rope), v)
    got = split_rope(qkv, rope[0][0, 0], rope[1][0, 0])
    torch.testing.assert_close(got, want)
    factors = [randn(B * L, D) for _ in range(3)]
    for parts in (got, want):
        sum((p * f).sum() for p, f in zip(parts, factors, strict=True)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(qkv.grad, plain.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [3, 70])
def test_draw(dtype: torch.dtype, rows: int) -> None:
    """The same token as the plain inverse CDF, for the same uniforms; written where the plan's line says."""
    if rows > 64 and DEVICE.type == "cpu" and dtype == torch.float16:
        pytest.skip("a product of 16-bit numbers into 32 is a GPU's alone")
    h, weight = randn(rows, 64).to(dtype), (0.3 * randn(1500, 64)).to(dtype)
    block = torch.zeros(1500, device=DEVICE)
    block[5:900] = -torch.inf
    lines = Lines.void(3, rows, 100, DEVICE)
    lines.line.fill_(1)
    lines.target[1] = torch.randperm(100, device=DEVICE)[:rows]
    lines.u[:-1] = torch.rand(100, dtype=torch.float64, device=DEVICE)
    draw(h, weight, block, torch.tensor([1 / 0.7], dtype=torch.float64, device=DEVICE), lines)
    log_p = torch.log_softmax((h.double() @ weight.double().T + block) / 0.7, dim=-1)
    want = categorical(log_p, lines.u[lines.target[1]])
    assert (lines.token[1] == want).float().mean() > 0.98  # a u on the edge between two tokens may fall either way
    torch.testing.assert_close(lines.text[lines.target[1]], lines.token[1])
    got_log_p = log_p.gather(1, lines.token[1][:, None]).squeeze(1)
    torch.testing.assert_close(lines.log_prob[1].double(), got_log_p, rtol=1e-3, atol=1e-3)
    assert not lines.token[[0, 2]].any()  # other lines are left alone


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_one_pass_update_is_clipping_adamw_and_the_average(weight_decay: float) -> None:
    p, ema = randn(3, 700), randn(3, 700)
    parameter = torch.nn.Parameter(p.clone())
    plain = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.98), eps=1e-8, weight_decay=weight_decay)
    want_ema, state = ema.clone(), [torch.zeros_like(p), torch.zeros_like(p)]
    for count in (1, 2, 3):
        grad = randn(3, 700)
        parameter.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        plain.step()
        want_ema.lerp_(parameter.detach(), 0.25)
        for bad in (True, False):  # a bad one changes nothing
            adamw_(
                p,
                grad,
                state[0],
                state[1],
                ema,
                scale=(1.0 / (norm + 1e-6)).clamp(max=1.0),
                nonfinite=torch.tensor(bad, device=DEVICE),
                count=count,
                lr=0.1,
                betas=(0.9, 0.98),
                eps=1e-8,
                weight_decay=weight_decay,
                towards=0.25,
            )
    torch.testing.assert_close(p, parameter.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ema, want_ema, rtol=1e-5, atol=1e-6)


def test_a_draw_at_either_end_of_the_law() -> None:
    """u = 0 and u just under 1 give the first and the last token that may be drawn, across empty chunks."""
    logits = torch.zeros(2, 5000, device=DEVICE)
    block = torch.full((5000,), -torch.inf, device=DEVICE)
    block[2500:2600] = 0
    lines = Lines.void(1, 2, 2, DEVICE)
    lines.target[0] = torch.tensor([0, 1])
    lines.u[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    draw(logits, None, block, torch.ones(1, dtype=torch.float64, device=DEVICE), lines)
    assert lines.token[0].tolist() == [2500, 2599]
    torch.testing.assert_close(lines.log_prob[0].cpu(), torch.full((2,), -4.6051702))


@pytest.mark.parametrize("by_muon", [False, True], ids=["adamw", "muon"])
def test_the_updater_is_the_same_with_kernels_and_without(by_muon: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "FEW", 200)  # some parameters of each kind
    sides = []
    for with_kernels in (True, False):
        monkeypatch.setattr(kernels, "fit", lambda x, fit=with_kernels: fit)
        torch.manual_seed(0)
        net = DiT(hidden=16, blocks=2, heads=2).build(num_ids=11, mask_id=10).to(DEVICE)
        optimizer, names = optim.make_optimizer(net, OptimConfig(muon=by_muon, weight_decay=0.1))
        updater = optim.Updater(optimizer, names, ema=Ema(net, 0.9), clip=1.0)
        for _ in range(3):
            for p in net.parameters():
                p.grad = randn(*p.shape)
            norm = updater.grad_norm()
            updater.update(lr=0.01, grad_norm=norm, nonfinite=~torch.isfinite(norm))
        assert updater.ema is not None
        before = [t.detach().clone() for t in (*net.parameters(), *updater.ema.shadow.values())]
        updater.update(lr=0.01, grad_norm=norm, nonfinite=torch.tensor(True, device=DEVICE))  # changes nothing
        assert all(a.equal(b) for a, b in zip(before, (*net.parameters(), *updater.ema.shadow.values()), strict=True))
        sides.append({**dict(net.named_parameters()), **{f"ema {k}": v for k, v in updater.ema.shadow.items()}})
    tolerance = 1e-6 if DEVICE.type == "cpu" else 1e-3  # a GPU orthogonalises in bfloat16
    for name, tensor in sides[0].items():
        torch.testing.assert_close(
            tensor, sides[1][name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize(
    ("length", "lanes", "programs", "reverse"),
    [(13, 2, 1, True), (30, 4, 40, False), (30, 2, 40, True)],
    ids=["one segment, back", "several, ahead", "several, back"],
)
def test_selective_scan_and_its_gradient(length: int, lanes: int, programs: int, reverse: bool) -> None:
    """Tiles and channels that do not divide, and a state to go on from."""
    width, states, shape = 3, 2, {"time": 3, "lanes": lanes, "programs": programs, "least": 1}
    assert (cut(B, length, width, **shape)[0] > CHAIN) == (programs > 1)
    x, step, A = randn(B, length, width), randn(B, length, width).abs(), -3 * randn(width, states).abs()
    weights = randn(B, length, states), randn(B, length, states)
    inputs = (x, step, A, *weights, randn(width))
    state, dy, dstate = randn(B, states, width), randn(B, length, width), randn(B, states, width)
    y, last, starts = scan(*inputs, state, reverse=reverse, **shape)
    want_y, want_last, want_starts = plain_scan(*inputs, state, reverse)
    torch.testing.assert_close((y, last), (want_y, want_last), rtol=1e-5, atol=1e-5)
    got = scan_grad(dy, dstate, *inputs, starts, reverse=reverse, **shape)
    want = plain_scan_grad(dy, dstate, *inputs, want_starts, reverse)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
