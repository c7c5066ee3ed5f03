"""Steering a finished model: classifier-free guidance, and particles that follow a score of one's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unmask.data.batch import DRAW_PARTICLE
from unmask.denoisers.network import Network
from unmask.errors import UsageError
from unmask.objectives import Objective
from unmask.rng import categorical, fold, uniform
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.predictor import Predictor, Query
from unmask.sampling.query import masked_share

Score = Callable[[Tensor], Tensor]  # log-scores [B] of partly masked rows [B, L]


@dataclass(frozen=True)
class Guidance:
    """How strongly the condition is followed: p ∝ p(x | c)^(1 + weight) p(x)^(-weight).

    condition_BL says what the condition is; None: everything that is given. A row's label is always part of it.
    weight 0 changes nothing, -1 ignores it.
    """

    weight: float
    condition_BL: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weight, int | float) or not math.isfinite(self.weight):
            raise UsageError(f"the guidance weight must be a number, got {self.weight!r}")


class Guided:
    """A predictor that asks twice, with and without the condition, and goes further in the direction of the first.

    It acts on x_theta, renormalised over the tokens, so how many positions open stays the sampler's affair.
    """

    left_to_right = False

    def __init__(self, predictor: Predictor, canvas: Canvas, guidance: Guidance) -> None:
        if predictor.gives != "x0" or predictor.left_to_right:
            raise UsageError("guidance needs a masked diffusion model with zero masking: leave it out")
        condition_BL = canvas.given_BL if guidance.condition_BL is None else guidance.condition_BL
        if canvas.valid_BL is not None:
            condition_BL = condition_BL & canvas.valid_BL
        hides = bool(condition_BL.any())
        if not hides and (canvas.label_B is None or bool((canvas.label_B < 0).all())):
            raise UsageError("guidance needs a condition: give a prompt or a label, or leave guidance out")
        self.process, self.gives = predictor.process, predictor.gives
        self.predictor, self.weight = predictor, guidance.weight
        self.canvas, self.mask_id = canvas, canvas.mask_id
        self.condition_BL = condition_BL if hides else None  # None: the label alone

    def __call__(self, query: Query) -> Tensor:
        without = self._without(query)
        given, free = self.predictor(query), self.predictor(without)
        mixed = (1 + self.weight) * given - self.weight * free
        # What is impossible either way stays impossible; -inf - -inf would be no number.
        mixed = mixed.masked_fill((given == -torch.inf) | (free == -torch.inf), -torch.inf)
        return torch.log_softmax(mixed, dim=-1)

    def _without(self, query: Query) -> Query:
        """The same question where nothing is given. A conditioned network is told that more of the row is masked."""
        query = dataclasses.replace(query, label_B=None)
        if self.condition_BL is None:
            return query
        if query.tokens_BL.shape != self.condition_BL.shape:
            raise UsageError("guidance works within one window: ask for no more tokens than the model's window")
        tokens_BL = query.tokens_BL.masked_fill(self.condition_BL, self.mask_id)
        # The sampler's clock counts what it opens; of a canvas with more hidden it says nothing, its masks do.
        share_B = masked_share(self.canvas, tokens_BL).to(query.level_R)
        less_B = self.condition_BL.any(dim=1)
        if query.rows_R is not None:
            share_B, less_B = share_B[query.rows_R], less_B[query.rows_R]
        return dataclasses.replace(query, tokens_BL=tokens_BL, level_R=torch.where(less_B, share_B, query.level_R))


def particles(
    denoiser: Network,
    canvas: Canvas,
    sampler: Sampler,
    score: Score,
    *,
    num: int = 16,
    threshold: float = 0.5,
    greedy: bool = False,
    objective: Objective | None = None,
) -> Canvas:
    """One text for each row of the canvas, from the model's law tilted by a score: p(x) exp(score(x)) / Z.

    `score` gets partly masked rows and returns their log-scores; on finished rows it is the tilt itself, on others a
    guess of what they will come to. `num` particles a row run side by side, each weighted by exp(score's rise) so far.
    When the weights' effective number falls under threshold x num, particles are drawn anew by their weights, copies
    going their own ways from there. The weights are right at any guess: as `num` grows the law tends to the tilted one.
    threshold 0 never draws anew (importance sampling). greedy: the best is copied, and the best is returned (best of n
    over partial canvases); no law is claimed then. A row of score -inf is not drawn anew: say it only of what no
    completion can save, or keep threshold 0. `objective` is what the denoiser was trained with.

    >>> import torch, unmask
    >>> coin = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> blank = unmask.Canvas.blank(num=1, length=8, mask_id=2)
    >>> ones = lambda z: 20.0 * (z == 1).sum(dim=1)
    >>> int(particles(coin, blank, unmask.samplers.Ancestral(), ones, num=64, greedy=True).tokens.sum()) > 4
    True
    """
    from unmask.sampling.loop import check_pair, default_objective

    if num < 1 or not 0 <= threshold <= 1:
        raise UsageError(f"num must be at least 1 and threshold in [0, 1], got {num} and {threshold}")
    if canvas.constraint is not None:
        raise UsageError("particles hold no constraint: give a constraint or a score, not both")
    groups = len(canvas.tokens)
    crowd = _crowd(canvas, num)
    predictor = (objective or default_objective(denoiser)).predictor(denoiser)
    check_pair(predictor, sampler, crowd)
    if predictor.left_to_right:
        raise UsageError(
            "an autoregressive model's cache cannot follow particles that are copied: use a diffusion model"
        )
    state = sampler.start(crowd)
    tokens_BL = crowd.tokens
    last_B = _scores(score, tokens_BL)
    base_B = _finite(last_B)  # the score when a particle was last drawn anew: its weight is exp(score - base)
    log_w_GP = torch.zeros(groups, num, dtype=torch.float64, device=tokens_BL.device)
    while (query := sampler.ask(state)) is not None:
        tokens_BL = sampler.tell(state, predictor(query)).tokens_BL
        last_B = _scores(score, tokens_BL)
        log_w_GP = (last_B - base_B).view(groups, num)
        w_GP = torch.softmax(log_w_GP, dim=1)  # no numbers where all of a group are ruled out so far: they go on
        poor_G = 1 / w_GP.square().sum(dim=1) < threshold * num
        if not bool(poor_G.any()):
            continue
        # How much a group has left tells its moments apart, whatever goes on in other groups.
        left_G = (tokens_BL == canvas.mask_id).view(groups, -1).sum(dim=1)
        u_G = uniform(canvas.key_B, DRAW_PARTICLE, left_G + 1)
        best_G1 = last_B.view(groups, num).argmax(dim=1, keepdim=True)
        chosen_GP = best_G1.expand(-1, num) if greedy else _systematic(w_GP, u_G)
        chosen_GP = torch.where(poor_G[:, None], chosen_GP, torch.arange(num, device=w_GP.device))
        rows_B = (chosen_GP + num * torch.arange(groups, device=w_GP.device)[:, None]).flatten()
        # Copies go their own ways: every particle of a group that was drawn anew gets new numbers from here on.
        poor_B, left_B = (x.repeat_interleave(num) for x in (poor_G, left_G))
        key_B = torch.where(poor_B, fold(crowd.key_B, left_B), crowd.key_B)
        crowd = dataclasses.replace(crowd, key_B=key_B)
        state = sampler.select(state, rows_B.cpu().numpy(), crowd)
        tokens_BL, last_B = tokens_BL[rows_B], last_B[rows_B]
        base_B = torch.where(poor_B, _finite(last_B), base_B)
        log_w_GP = (last_B - base_B).view(groups, num)
    lost_G = (log_w_GP == -torch.inf).all(dim=1)
    if bool(lost_G.any()):
        raise UsageError(
            f"no particle of row {int(lost_G.nonzero()[0])} ended with a score above -inf: use more particles"
        )
    u_G = uniform(canvas.key_B, DRAW_PARTICLE, 0)
    best_G = last_B.view(groups, num).argmax(dim=1) if greedy else categorical(log_w_GP, u_G)
    rows_G = best_G + num * torch.arange(groups, device=best_G.device)
    return dataclasses.replace(canvas, tokens=tokens_BL[rows_G])


def _crowd(canvas: Canvas, num: int) -> Canvas:
    """Every row `num` times, each copy with a key of its own."""
    index_P = torch.arange(num, device=canvas.tokens.device)
    key_B = fold(canvas.key_B[:, None], DRAW_PARTICLE, index_P + 1).flatten()
    copies = {
        name: value.repeat_interleave(num, dim=0)
        for name in ("tokens", "valid_BL", "label_B")
        if (value := getattr(canvas, name)) is not None
    }
    return dataclasses.replace(canvas, key_B=key_B, **copies)


def _scores(score: Score, tokens_BL: Tensor) -> Tensor:
    found_B = score(tokens_BL)
    if found_B.shape != tokens_BL.shape[:1]:
        raise UsageError(f"the score must be one number a row, [{len(tokens_BL)}], got {list(found_B.shape)}")
    found_B = found_B.to(tokens_BL.device, torch.float64)
    if bool(found_B.isnan().any() | (found_B == torch.inf).any()):
        raise UsageError("the score is not a number or infinite for some row: let it return finite numbers or -inf")
    return found_B


def _finite(score_B: Tensor) -> Tensor:
    """A row that was ruled out may come back: what it then scores is its weight."""
    return score_B.masked_fill(score_B == -torch.inf, 0.0)


def _systematic(w_GP: Tensor, u_G: Tensor) -> Tensor:
    """P draws from each row of weights with one uniform: each is taken its expected number of times, or one more."""
    num = w_GP.shape[1]
    points_GP = (u_G[:, None] + torch.arange(num, device=w_GP.device)) / num
    cdf_GP = torch.cumsum(w_GP, dim=1)
    return torch.searchsorted(cdf_GP / cdf_GP[:, -1:], points_GP, right=True).clamp_(max=num - 1)
