"""The scan's kernels at the sizes they are for, and the recurrent denoisers' ways on a GPU. Skipped without one.

`python -m pytest --noconftest tests/gpu/test_recurrent.py`
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmask.data.batch import make_batch
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.hyena import Hyena
from unmask.denoisers.mamba import Mamba, MambaNetwork
from unmask.denoisers.recurrent.scan import selective_scan
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample
from unmask.training.compiling import compile_trunk

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its numerics are not tested here"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
CUDA = torch.device("cuda")
IDS, MASK, OTHER = 7, 6, (3, 2, 1, 0, 4, 5, 6)
EACH = {
    "mamba": Mamba(hidden=64, blocks=2),
    "hyena": Hyena(hidden=64, blocks=2, length=256),
    "caduceus": Caduceus(hidden=64, blocks=2, equivariance="ps", complement=OTHER),
}


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want.double().cpu()).norm() / want.double().norm())


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("rows", "length", "channels", "dtype"),
    [
        (64, 1024, 256, torch.bfloat16),
        (1, 16384, 256, torch.float32),
        (3, 1000, 236, torch.float32),
        (2, 1, 64, torch.float32),
    ],
)
def test_the_kernel_is_the_recurrence(rows: int, length: int, channels: int, dtype: torch.dtype, reverse: bool) -> None:
    torch.manual_seed(0)
    shapes = (
        [(rows, length, channels)] * 2
        + [(channels, 16)]
        + [(rows, length, 16)] * 2
        + [(channels,), (rows, 16, channels)]
    )
    given = [torch.randn(*shape, device=CUDA) for shape in shapes]
    given[1], given[2] = 0.1 * given[1].abs(), -4 * given[2].abs()
    for i in (0, 3, 4):
        given[i] = given[i].to(dtype)
    mine = [t.clone().requires_grad_() for t in given]
    plain = [t.double().requires_grad_() for t in given]  # in float64 there is no kernel
    weights = torch.randn(rows, length, channels, device=CUDA), torch.randn(rows, 16, channels, device=CUDA)
    outputs = []
    for tensors in (mine, plain):
        y, state = selective_scan(*tensors[:6], state_BNE=tensors[6], reverse=reverse)
        ((y * weights[0]).sum() + (state * weights[1]).sum()).backward()
        outputs.append((y.detach(), state.detach(), *(t.grad for t in tensors)))
    near = 1e-2 if dtype == torch.bfloat16 else 1e-4
    for got, want in zip(*outputs, strict=True):
        assert relative(got, want) < near


@pytest.mark.parametrize("name", EACH)
def test_compiled_training_is_training_as_it_is_written(name: str) -> None:
    denoiser: Denoiser = EACH[name]
    objective = AR() if denoiser.causal else MDLM(form="count")
    grads = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = denoiser.build(num_ids=IDS, mask_id=MASK).to(CUDA).train()
        if compiled:
            compile_trunk(net)
        x_BL = torch.randint(0, 4, (8, 256), generator=torch.Generator().manual_seed(1))
        loss = objective.loss(net, make_batch(x_BL, seed=1, step=0))
        (loss.nats / loss.tokens).backward()
        grads.append([p.grad for p in net.parameters()])
    for got, want in zip(*grads, strict=True):
        assert got is not None
        assert want is not None
        assert relative(got, want) < 1e-3


def test_replayed_steps_write_what_the_network_says() -> None:
    torch.manual_seed(0)
    net = EACH["mamba"].build(num_ids=IDS, mask_id=MASK).to(CUDA).eval()
    assert isinstance(net, MambaNetwork)
    canvas = Canvas.blank(num=5, length=48, mask_id=MASK, seed=1)
    on_gpu = sample(net, canvas.to(CUDA), LeftToRight()).tokens.cpu()
    assert not bool((on_gpu == MASK).any())
    with torch.no_grad():
        z_BL = on_gpu.to(CUDA)
        cache = net.new_cache(*z_BL.shape)
        before = torch.nn.functional.pad(z_BL, (1, 0), value=MASK)
        each = [net.decode(before[:, i], torch.tensor([i], device=CUDA), cache, 48) for i in range(48)]
        assert relative(torch.stack(each, dim=1), net.trunk(z_BL)) < 1e-4
    assert float((on_gpu == sample(net.cpu(), canvas, LeftToRight()).tokens).float().mean()) > 0.95
