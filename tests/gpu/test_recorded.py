"""Training passes as CUDA graphs: what is replayed is what is written. Skipped without a GPU.

Needs torch, triton and pytest alone: `python -m pytest --noconftest tests/gpu`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.denoisers.recorded import FIRST, Recorder
from unmask.devices import fast_attention
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.objectives.mdlm_warm import MDLMWarm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA graphs are not tested")

V, L = 300, 64


def network(*, recorded: bool, **options: Any) -> DiTNetwork:
    torch.manual_seed(0)
    net = DiT(hidden=128, blocks=3, heads=2, zero_init=False, **options).build(num_ids=V + 1, mask_id=V)
    net = net.to("cuda").train()
    net.recorder = Recorder() if recorded else None
    return net


def learn(net: DiTNetwork, objective: Any, steps: int, micro: int = 1) -> tuple[list[float], list[Tensor]]:
    """The losses of a few steps of plain gradient descent, and the last gradients."""
    losses, generator = [], torch.Generator().manual_seed(1)
    for step in range(steps):
        net.zero_grad(set_to_none=True)
        x_BL = torch.randint(0, V, (8, L), generator=generator)
        total = 0.0
        for part in range(micro):
            torch.manual_seed(step * micro + part)
            with torch.autocast("cuda", dtype=torch.bfloat16), fast_attention():
                batch = make_batch(x_BL, seed=0, step=step * micro + part, done=0.0)
                nats = objective.loss(net, batch).nats / x_BL.numel()
                nats.backward()
            total += float(nats.detach())
        losses.append(total)
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
    return losses, [p.grad for p in net.parameters() if p.grad is not None]


CASES = {
    "mdlm": (MDLM(), {}),
    "next token first": (MDLMWarm(share=0.5), {}),
    "ar": (AR(), {"causal": True}),
    "level": (MDLM(), {"conditioning": "level"}),
    "constant": (MDLM(), {"conditioning": "constant"}),
    "value residual": (MDLM(), {"value_residual": True}),
    "next token first, value residual": (MDLMWarm(share=0.5), {"value_residual": True}),
    "dropout": (MDLM(), {"dropout": 0.2}),
    "dropout and level": (MDLM(), {"conditioning": "level", "dropout": 0.2}),
}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_what_is_replayed_is_what_is_written(case: str, micro: int) -> None:
    """Bit for bit, over steps that change the weights; gradients add up over micro-batches."""
    objective, options = CASES[case]
    plain = learn(network(recorded=False, **options), objective, FIRST + 4, micro)
    net = network(recorded=True, **options)
    recorded = learn(net, objective, FIRST + 4, micro)
    assert net.recorder is not None
    assert any(net.recorder._made.values())
    assert recorded[0] == plain[0]
    assert len(recorded[1]) == len(plain[1])
    assert all(a.equal(b) for a, b in zip(recorded[1], plain[1], strict=True))


def test_a_pass_that_waits_for_its_backward_pass_is_left_alone() -> None:
    """A second one of the same shape runs as it is written; one that nobody can ask any more blocks nothing."""
    found = []
    for recorded in (False, True):
        net = network(recorded=recorded)
        with torch.autocast("cuda", dtype=torch.bfloat16), fast_attention():
            batches = [make_batch(torch.full((4, L), i), seed=0, step=i) for i in range(FIRST + 3)]
            for batch in batches[: FIRST + 1]:
                MDLM().loss(net, batch).nats.backward()
            lost = MDLM().loss(net, batches[-2]).nats
            del lost
            net.zero_grad()
            (MDLM().loss(net, batches[-2]).nats + MDLM().loss(net, batches[-1]).nats).backward()
        if net.recorder is not None:
            (made,) = net.recorder._made.values()
            assert made is not None
            assert not made.busy
        found.append([p.grad for p in net.parameters()])
    assert all((a - b).abs().max() <= 1e-6 * a.abs().max() for a, b in zip(*found, strict=True))


def test_a_copy_and_weights_that_have_moved_are_recorded_anew() -> None:
    net = network(recorded=True)
    learn(net, MDLM(), FIRST + 1)
    copied = copy.deepcopy(net)
    assert copied.recorder is not None
    assert copied.recorder is not net.recorder
    net.blocks[0].qkv.weight.data = net.blocks[0].qkv.weight.data.clone()
    assert learn(net, MDLM(), FIRST + 2)[0] == learn(copied, MDLM(), FIRST + 2)[0]
