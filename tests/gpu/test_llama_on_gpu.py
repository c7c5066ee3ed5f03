"""The Llama-like network where only a GPU can show it: captured sampling and decoding, bf16 with attention over ragged
rows, compiled training. Skipped without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from unmask.data.batch import make_batch
from unmask.denoisers.llama import Llama, LlamaNetwork
from unmask.denoisers.ragged import ragged
from unmask.devices import fast_attention
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.objectives.mdlm_opening import MDLMOpening
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.canvas import Canvas
from unmask.sampling.captured import graphs_of
from unmask.sampling.loop import sample
from unmask.training.compiling import compile_trunk

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: its numerics are not tested here"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch's own compiler warns of torch
]
CUDA = torch.device("cuda")
V, L = 300, 96
READINGS: dict[str, dict[str, Any]] = {"both": {}, "shifted": {"shifted": True, "begin": 3}, "causal": {"causal": True}}


def network(device: torch.device = CUDA, dtype: torch.dtype = torch.float32, **options: Any) -> LlamaNetwork:
    torch.manual_seed(0)
    net = Llama(size="nano", groups=2, **options).build(num_ids=V + 1, mask_id=V)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.05 * torch.randn_like(p))
    return net.to(device, dtype).eval()


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("padded", [False, True])
def test_captured_sampling_writes_what_the_cpu_writes(reading: str, padded: bool) -> None:
    net, cpu = (network(device, **READINGS[reading]) for device in (CUDA, torch.device("cpu")))
    torch.manual_seed(1)
    rows = [torch.randint(0, V, (n,)).tolist() for n in (70, 70, 41 if padded else 70, 70)]
    for i, row in enumerate(rows):
        row[3 + i :] = [V] * (len(row) - 3 - i)
    canvas = Canvas.of_rows(rows, mask_id=V, pad_id=0, seed=3)
    sampler = LeftToRight() if net.causal else Ancestral(steps=32)
    got = sample(net, canvas.to(CUDA), sampler).tokens.cpu()
    assert graphs_of(net).captures > 0
    assert not (got == V).any()
    assert int((got == sample(cpu, canvas, sampler).tokens).all(dim=1).sum()) >= 3  # a u may sit on an edge


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_bf16_loss_and_gradients_against_fp32(reading: str, qk_norm: bool, padded: bool) -> None:
    """Padded: rows end to end, by the kernel that knows where they begin."""
    net = network(qk_norm=qk_norm, **READINGS[reading]).train()
    objective = AR() if net.causal else MDLMOpening(form="count", share=0.5, until=1.0)
    lengths = torch.tensor([L, 40, 7, 60, L, 3, 20, 90]) if padded else None
    batch = make_batch(torch.randint(0, V, (8, L)), lengths, seed=0, step=0, done=0.5)

    def run(bf16: bool) -> tuple[float, Tensor]:
        net.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=bf16), fast_attention():
            nats = objective.loss(net, batch).nats
            nats.backward()  # type: ignore[no-untyped-call]
        return float(nats.detach()), torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    (few, grad_few), (full, grad) = run(True), run(False)
    assert few == pytest.approx(full, rel=0.01)
    assert float((grad_few - grad).norm() / grad.norm()) < 0.05


@pytest.mark.parametrize("reading", READINGS)
def test_compiled_training_breaks_nowhere(reading: str) -> None:
    net = network(**READINGS[reading]).train()
    z, flat = torch.randint(0, V, (4, L), device=CUDA), torch.arange(50, device=CUDA)
    rows = ragged(torch.ones(4, L, dtype=torch.bool, device=CUDA).tril())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch._dynamo.explain(net.trunk_at)(z, None, flat).graph_break_count == 0
        few = torch.arange(4, device=CUDA)
        assert torch._dynamo.explain(net.trunk_ragged)(z[0, :10], None, rows, few).graph_break_count == 0
    compile_trunk(net)
    objective = AR() if net.causal else MDLM(form="count")
    for step in range(3):
        batch = make_batch(torch.randint(0, V, (4, L)), torch.tensor([L, 40, 7, 60]), seed=0, step=step)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            objective.loss(net, batch).nats.backward()  # type: ignore[no-untyped-call]
