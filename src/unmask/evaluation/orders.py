"""The likelihood of a text in the order in which a sampler opens its positions.

If the order follows from what is visible (left to right, most confident first), network and sampler define an exact
distribution: -log p is the sum of -log x_theta[x_l | visible] along that order, followed on the text itself. If a
sampler draws its order, each order has its own distribution, and p is their mean: -log of the mean over K drawn orders
is, in expectation, an upper bound of -log p that falls with K (Jensen; Burda et al. 2016, arXiv 1509.00519, for other
latents). With K = 1 and one token per call its expectation is MDLM's count form.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unmask.data.batch import Batch
from unmask.errors import UsageError
from unmask.rng import fold
from unmask.samplers import Sampler
from unmask.samplers.drawing import forbid
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import bound as bound_to
from unmask.sampling.predictor import Predictor

GIVES = ("x0", "next")  # predictions for which the tokens do not decide which positions open


def check_order(sampler: Sampler, predictor: Predictor) -> None:
    """Refuse a sampler whose likelihood cannot be computed by following its order on a given text.

    >>> check_order(unmask.samplers.Confidence(top_p=0.9), predictor)  # doctest: +SKIP
    Traceback (most recent call last):
    unmask.errors.UsageError: a likelihood is of the model's own law: leave out temperature, top_k, top_p and draw
    """
    name = type(sampler).__name__
    if not sampler.final or predictor.gives not in GIVES:
        raise UsageError(
            f"the texts of the sampler {name} have no likelihood along its order: use confidence, margin, entropy, "
            "left_to_right or ancestral, on a model that predicts clean tokens"
        )
    if sampler.context is not None:
        raise UsageError(f"{name} reads a window at a time: name the sampler inside it")
    if not (sampler.drawing.draws_whole_law and sampler.drawing.temperature == 1):
        raise UsageError("a likelihood is of the model's own law: leave out temperature, top_k, top_p and draw")


def order_nats(predictor: Predictor, canvas: Canvas, sampler: Sampler, x_BL: Tensor) -> Tensor:
    """[B] -log of the probability that the sampler writes x at the canvas's open positions, given the order from its
    keys.

    >>> import math, torch, unmask
    >>> coin = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> canvas = unmask.Canvas.blank(num=1, length=4, mask_id=2)
    >>> predictor = unmask.objectives.MDLM().predictor(coin)
    >>> nats_B = order_nats(predictor, canvas, unmask.samplers.Confidence(), torch.zeros(1, 4, dtype=torch.long))
    >>> round(float(nats_B) / math.log(2), 6)
    4.0
    """
    return follow_order(predictor, canvas, sampler, x_BL)[0]


@torch.no_grad()
def follow_order(
    predictor: Predictor, canvas: Canvas, sampler: Sampler, x_BL: Tensor, *, while_likeliest: bool = False
) -> tuple[Tensor, Tensor]:
    """`order_nats`, and [B] whether each token of x was the most likely one when it opened.

    In a fixed order the latter says whether greedy decoding would write x. while_likeliest: stop once this is False for
    all rows; the nats are then incomplete.
    """
    sampler = bound_to(predictor, sampler, canvas)
    nats_B = torch.zeros(len(x_BL), dtype=torch.float64)
    likeliest_B = torch.ones(len(x_BL), dtype=torch.bool)
    state = sampler.start(canvas)
    while (query := sampler.ask(state)) is not None:
        prediction = predictor(query)
        opens_N = sampler.select(state, prediction)
        row_N, position_N = sampler.opened(state, opens_N)
        token_N = x_BL[row_N, position_N]
        lines = forbid(prediction if sampler.planned else prediction[opens_N], canvas.never)
        log_prob_N = torch.log_softmax(lines.to(torch.promote_types(lines.dtype, torch.float32)), dim=-1)
        log_prob_N = log_prob_N.gather(1, token_N[:, None]).squeeze(1)
        nats_B.index_add_(0, row_N.cpu(), -log_prob_N.cpu().double())
        likeliest_B[row_N[lines.argmax(dim=-1) != token_N].cpu()] = False
        if while_likeliest and not bool(likeliest_B.any()):
            break
        sampler.write(state, opens_N, token_N, log_prob_N)
    return nats_B, likeliest_B


def mixture_nats(
    predictor: Predictor, batch: Batch, sampler: Sampler, *, mask_id: int, orders: int = 1, draw: int = 0
) -> Tensor:
    """[B] -log of the mean over `orders` orders of the probability of each row's scored tokens, given the others.

    draw: the index of an independent set of orders.
    """
    z_BL = batch.x_BL.masked_fill(batch.scored_BL, mask_id)
    nats = []
    for k in range(orders):
        key_B = fold(batch.key_B, draw, k)
        canvas = Canvas(z_BL, mask_id, key_B, batch.valid_BL, label_B=batch.label_B, open_BL=batch.scored_BL)
        nats.append(order_nats(predictor, canvas, sampler, batch.x_BL))
    return math.log(len(nats)) - torch.logsumexp(-torch.stack(nats), dim=0)
