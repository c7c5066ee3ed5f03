"""canvas → sampler → canvas: the sampling loop shared by the library, the terminal and particles.

The server's engine schedules the same parts for many canvases at once (see unmask.server.rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.denoisers.network import Network
from unmask.errors import NonFiniteError, Public, UsageError
from unmask.samplers import Sampler, Step, fitting
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import constrained
from unmask.sampling.cuda_graphs import can_replay, replay
from unmask.sampling.guidance import Guidance, Guided
from unmask.sampling.observe import Observer, RunnersUpObserver
from unmask.sampling.predictor import Predictor

if TYPE_CHECKING:
    from unmask.objectives import Objective


def steps(
    denoiser: Network,
    canvas: Canvas,
    sampler: Sampler,
    *,
    objective: Objective | None = None,
    guidance: Guidance | None = None,
    runners_up: int = 0,
) -> Iterator[Step]:
    """Run the sampler and yield a `Step` per network call (two calls with guidance).

    objective: the one that the denoiser was trained with. runners_up: the number of likeliest other tokens that each
    step reports.

    >>> import torch, unmask
    >>> coin = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> canvas = unmask.Canvas.blank(num=1, length=4, mask_id=2)
    >>> len(list(steps(coin, canvas, unmask.samplers.Ancestral(steps=None))))
    4
    """
    if runners_up < 0:
        raise UsageError("runners_up must be 0 (none) or more, got {num}", num=runners_up)
    predictor, sampler = _pair(denoiser, canvas, sampler, objective, guidance)
    observer = RunnersUpObserver(canvas, predictor, runners_up) if runners_up else None
    yield from drive(predictor, canvas, sampler, observer=observer)


def drive(
    predictor: Predictor,
    canvas: Canvas,
    sampler: Sampler,
    *,
    observer: Observer | None = None,
    quiet: bool = False,
) -> Iterator[Step]:
    """Alternate ask, predict and tell until the sampler is done, and yield its steps; it must be bound to the model.

    On a GPU the rounds of a planned sampler are replayed instead, unless there is an observer, since a replayed graph
    keeps no predictions. quiet: all steps but the last may then be left out.
    """
    if canvas.constraint is not None:
        sampler = constrained(sampler)
    state = sampler.start(begun(predictor, canvas))
    while (query := sampler.ask(state)) is not None:
        if observer is None and (part := sampler.replayable(state)) is not None and can_replay(predictor, *part):
            yield from _replay(predictor, sampler, state, part, quiet=quiet)
            continue
        prediction = predictor(query)
        step = sampler.tell(state, prediction)
        if observer is not None:
            step = observer.on_step(query, prediction, step)
            state = observer.on_state(state)
        yield step


def _replay(
    predictor: Predictor, sampler: Sampler, state: Any, part: tuple[Any, Any], *, quiet: bool
) -> Iterator[Step]:
    """The steps of all planned rounds; for a sampler in windows, those of one window."""
    last: Step | None = None
    for step in replay(predictor, *part, quiet=quiet):
        if last is not None:
            yield last
        last = sampler.replayed(state, step)
    sampler.go_on(state)
    if last is not None:  # an end-of-text is certain to stay only after a window's last step
        yield replace(last, tokens_BL=state.tokens_BL)


def _pair(
    denoiser: Network, canvas: Canvas, sampler: Sampler, objective: Objective | None, guidance: Guidance | None
) -> tuple[Predictor, Sampler]:
    predictor = (objective or default_objective(denoiser)).predictor(denoiser)
    sampler = bound(predictor, sampler, canvas)
    return (predictor if guidance is None else Guided(predictor, canvas, guidance)), sampler


def bound(predictor: Predictor, sampler: Sampler, canvas: Canvas) -> Sampler:
    """The sampler bound to the model's process; raises if it does not fit the model.

    >>> bound(model.objective.predictor(model.denoiser), unmask.samplers.Ancestral(), canvas)  # doctest: +SKIP
    """
    check_pair(predictor, sampler, canvas)
    return sampler.bind(predictor.process)


def begun(predictor: Predictor, canvas: Canvas) -> Canvas:
    """The canvas at time 1: open positions are drawn from the process's prior, which for absorbing states is the mask.

    If states are vectors, the canvas cannot hold them: open positions stay masked until they are written, and the
    sampler keeps the states.
    """
    process = predictor.process
    if process is None or process.vectors:
        return canvas
    tokens_BL = process.prior(canvas.key_B, canvas.open_BL, canvas.tokens, offset=canvas.offset)
    return replace(canvas, tokens=tokens_BL)


def sample(
    denoiser: Network,
    canvas: Canvas,
    sampler: Sampler,
    *,
    objective: Objective | None = None,
    guidance: Guidance | None = None,
) -> Canvas:
    """Run the sampler to the end and return the canvas with a token at every position that was open.

    >>> import torch, unmask
    >>> coin = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> out = sample(coin, unmask.Canvas.blank(num=2, length=4, mask_id=2), unmask.samplers.Ancestral())
    >>> bool((out.tokens < 2).all())
    True
    """
    predictor, sampler = _pair(denoiser, canvas, sampler, objective, guidance)
    tokens = canvas.tokens
    for step in drive(predictor, canvas, sampler, quiet=True):
        tokens = step.tokens_BL
    if bool((tokens == canvas.mask_id).any()):  # a captured run is checked only at its end
        raise NonFiniteError("the model's prediction is not a number: check the weights")
    return replace(canvas, tokens=tokens)


def check_pair(predictor: Predictor, sampler: Sampler, canvas: Canvas) -> None:
    """Refuse a sampler that cannot use these predictions (naming those that can), or an order the network cannot read.

    >>> import torch, unmask
    >>> net = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> predictor = unmask.objectives.MDLM(zero_masking=False, steps=4).predictor(net)
    >>> check_pair(predictor, unmask.samplers.Confidence(), unmask.Canvas.blank(num=1, length=2, mask_id=2))
    Traceback (most recent call last):
    unmask.errors.UsageError: the sampler Confidence cannot follow this model, which predicts clean tokens and the \
mask of an absorbing process: use posterior
    """
    check_accepts(sampler, predictor)
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


def check_accepts(sampler: Sampler, predictor: Predictor) -> None:
    """Refuse a sampler that cannot use these predictions, naming those that can."""
    if accepts(sampler, predictor):
        return
    pair = _pair_of(predictor)
    names = fitting(*pair)
    which = f"use {', '.join(names)}" if names else "no sampler here can"
    raise UsageError(
        "the sampler {sampler} cannot follow this model, {said}: {which}",
        sampler=Public(type(sampler).__name__),
        said=Public(_said(*pair)),
        which=Public(which),
    )


def accepts(sampler: Sampler, predictor: Predictor) -> bool:
    """Whether the sampler can use predictions of this kind, of this process.

    >>> accepts(unmask.samplers.Ancestral(), model.objective.predictor(model.denoiser))  # doctest: +SKIP
    True
    """
    return _pair_of(predictor) in sampler.accepts


def _pair_of(predictor: Predictor) -> tuple[str | None, str]:
    return None if predictor.process is None else predictor.process.name, predictor.gives


_GIVES = {
    "x0": "clean tokens",
    "x0_and_mask": "clean tokens and the mask",
    "x0_by_rates": "clean tokens with rates of their own",
    "score": "ratios of probabilities",
    "next": "the next token from left to right",
}


def _said(process: str | None, gives: str) -> str:
    what = f"which predicts {_GIVES.get(gives, gives)}"
    article = "an" if process is not None and process[0] in "aeio" else "a"
    return what if process is None else f"{what} of {article} {process} process"


def _valid(canvas: Canvas) -> Tensor:
    return torch.ones_like(canvas.tokens, dtype=torch.bool) if canvas.valid_BL is None else canvas.valid_BL


def default_objective(denoiser: Network) -> Objective:
    from unmask.objectives.ar import AR
    from unmask.objectives.mdlm import MDLM

    return AR() if denoiser.causal else MDLM()
