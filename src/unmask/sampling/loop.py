"""canvas → sampler → canvas: the one loop that the library, the terminal and a server share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from unmask.denoisers.network import Network
from unmask.errors import NonFiniteError, UsageError
from unmask.objectives import Objective
from unmask.samplers import Sampler, Step
from unmask.samplers.planned import PlannedSampler
from unmask.samplers.semi_ar import SemiAR
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import constrained
from unmask.sampling.cuda_graphs import can_replay, replay
from unmask.sampling.guidance import Guidance, Guided
from unmask.sampling.observe import seen
from unmask.sampling.predictor import Predictor


def steps(
    denoiser: Network,
    canvas: Canvas,
    sampler: Sampler,
    *,
    objective: Objective | None = None,
    guidance: Guidance | None = None,
    runners_up: int = 0,
) -> Iterator[Step]:
    """Run the sampler, a network call at a time (two with guidance). `objective` is what the denoiser was trained with.

    runners_up: each step tells so many tokens that the network found likely besides those that were written.

    >>> import torch, unmask
    >>> coin = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> canvas = unmask.Canvas.blank(num=1, length=4, mask_id=2)
    >>> len(list(steps(coin, canvas, unmask.samplers.Ancestral(steps=None))))
    4
    """
    predictor = _predictor(denoiser, canvas, sampler, objective, guidance)
    if runners_up < 0:
        raise UsageError(f"runners_up must be 0 (none) or more, got {runners_up}")
    if runners_up:
        yield from _tell_all(predictor, canvas, sampler, runners_up)
    else:
        yield from _run(predictor, canvas, sampler, quiet=False)


def _tell_all(predictor: Predictor, canvas: Canvas, sampler: Sampler, runners_up: int) -> Iterator[Step]:
    """The same steps with what is to be seen in them; by ask and tell, since a replayed graph keeps no predictions."""
    if canvas.constraint is not None:
        sampler = constrained(sampler)
    state, before_BL = sampler.start(canvas), canvas.tokens
    while (query := sampler.ask(state)) is not None:
        prediction = predictor(query)
        step = sampler.tell(state, prediction)
        yield seen(step, query, prediction, predictor.gives, before_BL, canvas.mask_id, runners_up)
        before_BL = step.tokens_BL


def _predictor(
    denoiser: Network, canvas: Canvas, sampler: Sampler, objective: Objective | None, guidance: Guidance | None
) -> Predictor:
    predictor = (objective or default_objective(denoiser)).predictor(denoiser)
    check_pair(predictor, sampler, canvas)
    return predictor if guidance is None else Guided(predictor, canvas, guidance)


def _run(predictor: Predictor, canvas: Canvas, sampler: Sampler, *, quiet: bool) -> Iterator[Step]:
    """The steps; quiet: a GPU may leave out all but the last."""
    if canvas.constraint is not None:
        sampler = constrained(sampler)
    if can_replay(predictor, sampler, canvas):
        assert isinstance(sampler, PlannedSampler)
        yield from replay(predictor, sampler, sampler.start(canvas), quiet=quiet)
        return
    if isinstance(sampler, SemiAR) and can_replay(predictor, sampler.inner, canvas):
        yield from sampler.run(canvas, lambda window: _run(predictor, window, sampler.inner, quiet=quiet))
        return
    state = sampler.start(canvas)
    while (query := sampler.ask(state)) is not None:
        yield sampler.tell(state, predictor(query))


def sample(
    denoiser: Network,
    canvas: Canvas,
    sampler: Sampler,
    *,
    objective: Objective | None = None,
    guidance: Guidance | None = None,
) -> Canvas:
    """Run the sampler to the end; the canvas that comes back holds no mask.

    >>> import torch, unmask
    >>> coin = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> out = sample(coin, unmask.Canvas.blank(num=2, length=4, mask_id=2), unmask.samplers.Ancestral())
    >>> bool((out.tokens < 2).all())
    True
    """
    predictor = _predictor(denoiser, canvas, sampler, objective, guidance)
    tokens = canvas.tokens
    for step in _run(predictor, canvas, sampler, quiet=True):
        tokens = step.tokens_BL
    if bool((tokens == canvas.mask_id).any()):  # a captured run is not looked at on its way
        raise NonFiniteError("the model's prediction is not a number: check the weights")
    return replace(canvas, tokens=tokens)


def check_pair(predictor: Predictor, sampler: Sampler, canvas: Canvas) -> None:
    """Refuse what cannot be: a sampler that needs another kind of prediction, or an order the network cannot follow."""
    if predictor.gives == "x0_and_mask" and predictor.gives not in sampler.takes:
        raise UsageError(
            "this model was trained without zero masking and may predict the mask: use the posterior sampler"
        )
    if predictor.gives not in sampler.takes:
        raise UsageError(f"the sampler takes {' or '.join(sampler.takes)}, the model predicts {predictor.gives}")
    if not predictor.left_to_right:
        return
    if canvas.constraint is not None:
        raise UsageError("an autoregressive model sees one position at a time: constraints need a diffusion model")
    if not sampler.left_to_right:
        raise UsageError("an autoregressive model opens from left to right: use the left_to_right sampler")
    open_BL = canvas.open_BL
    if bool((open_BL[:, :-1] & ~open_BL[:, 1:] & _valid(canvas)[:, 1:]).any()):
        raise UsageError(
            "an autoregressive model cannot see what stands behind a gap: give a prompt only, or use diffusion"
        )


def _valid(canvas: Canvas) -> torch.Tensor:
    return torch.ones_like(canvas.tokens, dtype=torch.bool) if canvas.valid_BL is None else canvas.valid_BL


def default_objective(denoiser: Network) -> Objective:
    from unmask.objectives.ar import AR
    from unmask.objectives.mdlm import MDLM

    return AR() if denoiser.causal else MDLM()
