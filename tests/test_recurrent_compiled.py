"""Training compiles a recurrent network as one graph, in which the selective scan is an operator."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unmask.data.batch import make_batch
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.mamba import Mamba
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.training.compiling import compile_trunk

EACH = {
    "mamba": Mamba(hidden=16, blocks=1, states=4),
    "ps": Caduceus(hidden=16, blocks=1, states=4, equivariance="ps", complement=(3, 2, 1, 0, 4, 5, 6)),
}


@pytest.mark.parametrize("name", EACH)
def test_a_network_is_one_graph_with_the_gradients_of_the_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the compiler did not know the sizes of what the scan returns, it would split the graph at every scan."""
    from torch._dynamo.utils import counters

    counters.clear()
    denoiser: Denoiser = EACH[name]
    objective = AR() if denoiser.causal else MDLM(form="count")
    plain: Callable[..., Any] = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: plain(f, backend="aot_eager"))
    x_BL, lengths_B = (
        torch.randint(0, 4, (3, 24), generator=torch.Generator().manual_seed(0)),
        torch.tensor([24, 9, 17]),
    )
    grads = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = denoiser.build(num_ids=7, mask_id=6).train()
        if compiled:
            compile_trunk(net, padding=True)
        for rows in (3, 3, 2):  # for another size it compiles once more, with sizes that it knows by name
            loss = objective.loss(net, make_batch(x_BL[:rows], lengths_B[:rows], seed=1, step=0))
            (loss.nats / loss.tokens).backward()
        grads.append([p.grad for p in net.parameters()])
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)


def test_a_compiled_step_leaves_what_was_warned_of_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning is shown once for each place, unless somebody has changed the filters since."""
    monkeypatch.setattr(torch, "compile", lambda f: f)
    net = EACH["mamba"].build(num_ids=7, mask_id=6)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        compile_trunk(net)
        for _ in range(3):
            net.trunk_at(torch.zeros(1, 4, dtype=torch.long), None, torch.arange(4))
            warnings.warn("of the same place", UserWarning, stacklevel=1)
        warnings.warn("Torchinductor does not support code generation for complex operators", UserWarning, stacklevel=1)
    assert [str(one.message) for one in shown] == ["of the same place"]
