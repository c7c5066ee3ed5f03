"""Every sampler with every objective's predictions: it runs, or is refused with the names of those that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import unmask
from unmask import objectives, samplers
from unmask.denoisers.network import Network, as_denoiser
from unmask.errors import UsageError
from unmask.objectives._gaussian import GaussianObjective
from unmask.objectives.terms import subs_log_probs
from unmask.samplers import fitting, room
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import check_pair, sample

MODELS: dict[str, Any] = {
    "mdlm": objectives.MDLM(),
    "mdlm without zero masking": objectives.MDLM(zero_masking=False, steps=4),
    "d3pm": objectives.D3PM(steps=4),
    "mlm": objectives.MLM(),
    "ar": objectives.AR(),
    "udlm": objectives.UDLM(),
    "sedd": objectives.SEDD(),
    "sedd of uniform states": objectives.SEDD(state="uniform"),
    "token rates": objectives.TokenRates(rates="power"),
    "plaid": objectives.Plaid(dim=2),
    "diffusion-lm": objectives.DiffusionLM(dim=2, steps=4),
    "ssd-lm": objectives.SSDLM(block=3),
}
ABSORBING_X0 = ("absorbing", "x0")
ACCEPTS = {name: room.get(name).accepts for name in room.names()}
# Those that say so, and wrappers, which accept what their inner one does.
SUBS = {name for name, pairs in ACCEPTS.items() if not isinstance(pairs, tuple) or ABSORBING_X0 in pairs}
FITS = {
    "mdlm": SUBS,
    "mdlm without zero masking": {"posterior"},
    "d3pm": {"posterior"},
    "mlm": SUBS,
    "ar": {"left_to_right"},
    "udlm": {"uniform_posterior"},
    "sedd": {"tweedie", "euler"},
    "sedd of uniform states": {"tweedie", "euler"},
    "token rates": {"token_posterior"},
    "plaid": {"gaussian"},
    "diffusion-lm": {"gaussian"},
    "ssd-lm": {"simplex"},
}


def network(objective: Any) -> Network:
    if isinstance(objective, objectives.AR):
        return unmask.denoisers.DiT(hidden=8, blocks=1, heads=2, causal=True).build(num_ids=4, mask_id=3).eval()
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    if isinstance(objective, GaussianObjective):
        torch.manual_seed(0)  # of its embeddings
        return as_denoiser(lambda z, level: torch.zeros(*z.shape[:2], 4) + z.sum(), vocab_size=3, mask_id=3)
    return as_denoiser(
        lambda z, level: table[z] + table[z].sum(dim=1)[:, None], vocab_size=3, mask_id=3, uses_level=False
    )


def make(name: str) -> Any:
    if name == "simplex":
        return samplers.Simplex(steps=4)
    return samplers.SemiAR(window=4) if name == "semi_ar" else room.get(name)()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", room.names())
def test_a_sampler_runs_or_is_refused_with_those_that_fit(name: str, model: str) -> None:
    objective, canvas = MODELS[model], Canvas.blank(num=2, length=4, mask_id=3)
    if name in FITS[model]:
        assert (sample(network(objective), canvas, make(name), objective=objective).tokens < 3).all()
        return
    with pytest.raises(UsageError) as refused:
        sample(network(objective), canvas, make(name), objective=objective)
    assert any(fits in str(refused.value) for fits in FITS[model])


def test_a_prediction_of_another_process_is_refused() -> None:
    class Uniform:
        process = type("Process", (), {"name": "uniform", "noise": None})
        gives, left_to_right = "x0", False

        def __call__(self, query: Any) -> torch.Tensor:
            return subs_log_probs(torch.zeros(int(query.wanted_RK.sum()), 4), 3)

    canvas = Canvas.blank(num=1, length=4, mask_id=3)
    for name in room.names():
        if ("uniform", "x0") not in make(name).accepts:
            with pytest.raises(UsageError, match="uniform"):
                check_pair(Uniform(), make(name), canvas)  # type: ignore[arg-type]
    assert fitting("absorbing", "x0_and_mask") == ["posterior"]
    assert "left_to_right" in fitting(None, "next")


def test_a_wrapper_takes_what_its_inner_sampler_takes() -> None:
    inside = samplers.Posterior(steps=3)
    assert samplers.Block(inner=inside).accepts == samplers.SemiAR(window=4, inner=inside).accepts == inside.accepts
    canvas, objective = Canvas.blank(num=2, length=4, mask_id=3), MODELS["d3pm"]
    assert (
        sample(network(objective), canvas, samplers.Block(size=2, inner=inside), objective=objective).tokens < 3
    ).all()
    with pytest.raises(UsageError, match="use posterior"):
        sample(network(objective), canvas, samplers.Refine(inner=inside), objective=objective)


def test_a_block_is_of_masks() -> None:
    """What is left of a row is read off its masks: a process without any is refused, also in a window."""
    canvas = Canvas.blank(num=1, length=4, mask_id=3)
    for sampler in (
        samplers.Block(size=2, inner=samplers.UniformPosterior(steps=2)),
        samplers.SemiAR(window=4, inner=samplers.Block(size=2, inner=samplers.UniformPosterior(steps=2))),
    ):
        with pytest.raises(UsageError, match="uniform_posterior"):
            sample(network(MODELS["udlm"]), canvas, sampler, objective=MODELS["udlm"])
    inner = samplers.Tweedie(steps=2)
    sample(network(MODELS["sedd"]), canvas, samplers.Block(size=2, inner=inner), objective=MODELS["sedd"])


@pytest.mark.parametrize(("model", "state"), [("sedd", "uniform"), ("sedd of uniform states", "absorbing")])
def test_the_states_are_the_model_s(model: str, state: Any) -> None:
    canvas = Canvas.blank(num=1, length=4, mask_id=3)
    with pytest.raises(UsageError, match="state"):
        sample(network(MODELS[model]), canvas, samplers.Tweedie(state=state), objective=MODELS[model])


@pytest.mark.parametrize("options", [{"temperature_end": 0.0}, {"draw": "hybrid"}])
def test_uniform_states_have_one_temperature(options: dict[str, Any]) -> None:
    canvas = Canvas.blank(num=1, length=4, mask_id=3)
    with pytest.raises(UsageError, match="temperature"):
        sample(network(MODELS["udlm"]), canvas, samplers.UniformPosterior(**options), objective=MODELS["udlm"])
