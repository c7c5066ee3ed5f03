"""Particles: several canvases in parallel, steered by a user-defined score and resampled by their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from unmask.data.batch import DRAW_PARTICLE
from unmask.denoisers.network import Network
from unmask.devices import widest
from unmask.errors import UsageError
from unmask.rng import categorical, fold, uniform
from unmask.samplers import Sampler, Step
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import bound, default_objective, drive
from unmask.sampling.observe import Observer
from unmask.sampling.predictor import Query

if TYPE_CHECKING:
    from unmask.objectives import Objective

Score = Callable[[Tensor], Tensor]  # log-scores [B] of partly masked rows [B, L]


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
    """One text for each row of the canvas, from the model's distribution tilted by a score: p(x) exp(score(x)) / Z.

    `score` gets partly masked rows and returns their log-scores; on finished rows it is the tilt itself, on others a
    guess of the final one. `num` particles per row run in parallel, each weighted by exp(increase of its score so far).
    When the effective number of the weights falls below threshold x num, the particles are resampled by their weights,
    and copies continue independently. The weights are correct for any guess: as `num` grows, the distribution tends to
    the tilted one. threshold 0 never resamples (importance sampling). greedy: copies the best particle and returns the
    best one (best of n over partial canvases); no distribution is claimed then. A row of score -inf does not survive
    resampling: return it only if no completion can help, or keep threshold 0. `objective`: the one that the denoiser
    was trained with.

    >>> import torch, unmask
    >>> coin = unmask.as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> blank = unmask.Canvas.blank(num=1, length=8, mask_id=2)
    >>> ones = lambda z: 20.0 * (z == 1).sum(dim=1)
    >>> int(particles(coin, blank, unmask.samplers.Ancestral(), ones, num=64, greedy=True).tokens.sum()) > 4
    True
    """
    if num < 1 or not 0 <= threshold <= 1:
        raise UsageError(f"num must be at least 1 and threshold in [0, 1], got {num} and {threshold}")
    if canvas.constraint is not None:
        raise UsageError("particles hold no constraint: give a constraint or a score, not both")
    predictor = (objective or default_objective(denoiser)).predictor(denoiser)
    crowd = _crowd(canvas, num)
    sampler = bound(predictor, sampler, crowd)
    if predictor.left_to_right:
        raise UsageError(
            "an autoregressive model's cache cannot follow particles that are copied: use a diffusion model"
        )
    if threshold and not sampler.copies_rows:
        raise UsageError(
            f"the sampler {type(sampler).__name__} cannot copy rows, as particles do: use ancestral or left_to_right, "
            "or threshold=0"
        )
    weights = _Weights(canvas, crowd, sampler, score, num, threshold, greedy)
    for _ in drive(predictor, crowd, sampler, observer=weights):
        pass
    return dataclasses.replace(canvas, tokens=weights.chosen())


class _Weights(Observer):
    """Weights the particles after each step, and resamples them when the effective number of particles is small."""

    def __init__(
        self, canvas: Canvas, crowd: Canvas, sampler: Sampler, score: Score, num: int, threshold: float, greedy: bool
    ) -> None:
        self.canvas, self.crowd, self.sampler, self.score = canvas, crowd, sampler, score
        self.num, self.threshold, self.greedy, self.groups = num, threshold, greedy, len(canvas.tokens)
        self.tokens_BL = crowd.tokens
        self.last_B = _scores(score, self.tokens_BL)
        self.base_B = _finite(self.last_B)  # score at the last resampling; the weight is exp(increase since)

    @property
    def log_w_GP(self) -> Tensor:
        return (self.last_B - self.base_B).view(self.groups, self.num)

    def on_step(self, query: Query, prediction: Tensor, step: Step) -> Step:
        self.tokens_BL = step.tokens_BL
        self.last_B = _scores(self.score, self.tokens_BL)
        return step

    def on_state(self, state: Any) -> Any:
        groups, num, tokens_BL = self.groups, self.num, self.tokens_BL
        w_GP = torch.softmax(self.log_w_GP, dim=1)  # NaN if a whole group is ruled out: it continues
        poor_G = 1 / w_GP.square().sum(dim=1) < self.threshold * num
        if not bool(poor_G.any()):
            return state
        # The number of masks left identifies the moment within a group, independently of the other groups.
        left_G = (tokens_BL == self.canvas.mask_id).view(groups, -1).sum(dim=1)
        u_G = uniform(self.canvas.key_B, DRAW_PARTICLE, left_G + 1)
        best_G1 = self.last_B.view(groups, num).argmax(dim=1, keepdim=True)
        chosen_GP = best_G1.expand(-1, num) if self.greedy else _systematic(w_GP, u_G)
        chosen_GP = torch.where(poor_G[:, None], chosen_GP, torch.arange(num, device=w_GP.device))
        rows_B = (chosen_GP + num * torch.arange(groups, device=w_GP.device)[:, None]).flatten()
        # Copies must diverge: every particle of a resampled group gets new random numbers from here on.
        poor_B, left_B = (x.repeat_interleave(num) for x in (poor_G, left_G))
        key_B = torch.where(poor_B, fold(self.crowd.key_B, left_B), self.crowd.key_B)
        self.crowd = dataclasses.replace(self.crowd, key_B=key_B)
        self.tokens_BL, self.last_B = tokens_BL[rows_B], self.last_B[rows_B]
        self.base_B = torch.where(poor_B, _finite(self.last_B), self.base_B)
        return self.sampler.copy_rows(state, rows_B.cpu().numpy(), self.crowd)

    def chosen(self) -> Tensor:
        """[G, L] one particle of each group, drawn by weight, or the best one."""
        lost_G = (self.log_w_GP == -torch.inf).all(dim=1)
        if bool(lost_G.any()):
            raise UsageError(
                f"no particle of row {int(lost_G.nonzero()[0])} ended with a score above -inf: use more particles"
            )
        u_G = uniform(self.canvas.key_B, DRAW_PARTICLE, 0)
        last_GP = self.last_B.view(self.groups, self.num)
        best_G = last_GP.argmax(dim=1) if self.greedy else categorical(self.log_w_GP, u_G)
        rows_G = best_G + self.num * torch.arange(self.groups, device=best_G.device)
        return self.tokens_BL[rows_G]


def _crowd(canvas: Canvas, num: int) -> Canvas:
    """A canvas with every row `num` times, each copy with its own key."""
    index_P = torch.arange(num, device=canvas.tokens.device)
    key_B = fold(canvas.key_B[:, None], DRAW_PARTICLE, index_P + 1).flatten()
    copies = {
        name: value.repeat_interleave(num, dim=0)
        for name in ("tokens", "open_BL", "valid_BL", "draft_BL", "label_B")
        if (value := getattr(canvas, name)) is not None
    }
    return dataclasses.replace(canvas, key_B=key_B, **copies)


def _scores(score: Score, tokens_BL: Tensor) -> Tensor:
    score_B = score(tokens_BL)
    if score_B.shape != tokens_BL.shape[:1]:
        raise UsageError(f"the score must be one number a row, [{len(tokens_BL)}], got {list(score_B.shape)}")
    score_B = score_B.to(tokens_BL.device, widest(tokens_BL.device))
    if bool(score_B.isnan().any() | (score_B == torch.inf).any()):
        raise UsageError("the score is not a number or infinite for some row: let it return finite numbers or -inf")
    return score_B


def _finite(score_B: Tensor) -> Tensor:
    """The score with -inf replaced by 0: if a row that was ruled out recovers, its weight is its new score."""
    return score_B.masked_fill(score_B == -torch.inf, 0.0)


def _systematic(w_GP: Tensor, u_G: Tensor) -> Tensor:
    """Systematic resampling: P draws from each row of weights with a single uniform number."""
    num = w_GP.shape[1]
    points_GP = (u_G[:, None] + torch.arange(num, device=w_GP.device)) / num
    cdf_GP = torch.cumsum(w_GP, dim=1)
    return torch.searchsorted(cdf_GP / cdf_GP[:, -1:], points_GP, right=True).clamp_(max=num - 1)
