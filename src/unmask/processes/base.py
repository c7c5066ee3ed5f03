"""The interface of a forward process: q(z_t | x), q(z_s | z_t, x) and the prior, shared by objective and sampler.

This file has the two equations for any prior pi over ids (MDLM's equations 4 and 5); `absorbing.py` and `uniform.py`
define pi. `gaussian.py` implements the same three methods on vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from unmask.noise import Noise
from unmask.noise.learned import Detached, LearnedNoise


class Process(ABC):
    """A forward process bound to a vocabulary.

    An objective creates it (`Objective.process`), with the schedule's learned parameters if there are any. The model's
    predictor passes it to the samplers, which start from its prior and use its noise (`Sampler.bind`), so training and
    sampling cannot disagree.

    States are ids or vectors. Ids are [B, L] and include the fixed positions unchanged. Vectors are lines [N, E] of the
    open positions only, row by row: a fixed position is a token and has no state.

    >>> from unmask.noise.log_linear import LogLinear
    >>> from unmask.processes.absorbing import Absorbing
    >>> Absorbing(LogLinear(), num_ids=3, mask_id=2).name
    'absorbing'
    """

    name: ClassVar[str]
    vectors: ClassVar[bool] = False

    def __init__(self, *, num_ids: int, mask_id: int) -> None:
        self.num_ids, self.mask_id = num_ids, mask_id

    @property
    def num_tokens(self) -> int:
        """V: the number of ids that a text can contain, without the mask."""
        return self.num_ids - 1

    @property
    def schedule(self) -> Noise | None:
        """alpha(t), the probability that a token is still visible, without gradients; None if there is no schedule."""
        return None

    @abstractmethod
    def level(self, t: Tensor) -> Tensor:
        """The noise level in [0, 1] that a conditioned network gets for time t, without gradients."""

    @abstractmethod
    def prior(self, key_B: Tensor, open_BL: Tensor, tokens_BL: Tensor, *, offset: int = 0) -> Tensor:
        """z_1 ~ pi at the open positions, tokens_BL elsewhere. offset: the absolute position of column 0."""

    @abstractmethod
    def corrupt(self, x_BL: Tensor, t: Tensor, key_B: Tensor, open_BL: Tensor) -> Tensor:
        """z_t ~ q(z_t | x) at the open positions, x elsewhere; t is [B], or [B, L] if it differs by position."""

    @abstractmethod
    def posterior(self, z_N: Tensor, x_hat: Tensor, s: Tensor, t: Tensor) -> Any:
        """q(z_s | z_t, x_hat): the distribution of the reverse step from t to s; s and t are [N] or one number.

        For ids the probabilities [N, I], for vectors mean [N, E] and standard deviation.
        """


def q_marginal(x_NI: Tensor, alpha_t: Tensor, pi_I: Tensor) -> Tensor:
    """q(z_t | x) = Cat(alpha_t x + (1 - alpha_t) pi) (MDLM, 4). x_NI is one-hot, or a distribution such as x_theta.

    >>> import torch
    >>> q_marginal(torch.tensor([[1.0, 0.0]]), torch.tensor([0.25]), torch.tensor([0.0, 1.0]))
    tensor([[0.2500, 0.7500]])
    """
    alpha_t = alpha_t[:, None]
    return alpha_t * x_NI + (1 - alpha_t) * pi_I


def q_posterior(z_N: Tensor, x_NI: Tensor, alpha_s: Tensor, alpha_t: Tensor, pi_I: Tensor) -> Tensor:
    """q(z_s | z_t, x) ∝ [alpha_ts z_t + (1 - alpha_ts) 1 (pi·z_t)] ⊙ [alpha_s x + (1 - alpha_s) pi] (MDLM, 5).

    alpha_ts = alpha_t / alpha_s is the probability that a token visible at s is still visible at t.

    >>> import torch
    >>> mask = torch.tensor([0.0, 1.0])
    >>> q_posterior(torch.tensor([1]), torch.tensor([[1.0, 0.0]]), torch.tensor([0.5]), torch.tensor([0.0]), mask)
    tensor([[0.5000, 0.5000]])
    """
    alpha_ts = (alpha_t / alpha_s)[:, None]
    one_hot = F.one_hot(z_N, len(pi_I)).to(x_NI.dtype)
    reached = alpha_ts * one_hot + (1 - alpha_ts) * pi_I[z_N][:, None]
    joint = reached * q_marginal(x_NI, alpha_s, pi_I)
    return joint / joint.sum(dim=-1, keepdim=True)


class CategoricalProcess(Process):
    """A process on ids that moves each position independently to a prior pi, by a noise schedule."""

    def __init__(self, noise: Noise, *, num_ids: int, mask_id: int) -> None:
        super().__init__(num_ids=num_ids, mask_id=mask_id)
        self.noise = noise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.noise!r}, num_ids={self.num_ids}, mask_id={self.mask_id})"

    @property
    def schedule(self) -> Noise:
        """The noise without gradients, for corruption, for the network's conditioning and for sampling."""
        return Detached(self.noise) if isinstance(self.noise, LearnedNoise) else self.noise

    def level(self, t: Tensor) -> Tensor:
        """1 - alpha(t), without gradients."""
        return self.schedule.level(t)

    def alpha(self, t: Tensor) -> Tensor:
        """alpha(t), without gradients."""
        return self.schedule.alpha(t)

    @abstractmethod
    def pi(self, like: Tensor) -> Tensor:
        """[I] the prior, in the type and on the device of `like`."""

    def posterior(self, z_N: Tensor, x_hat_NI: Tensor, s: Tensor, t: Tensor) -> Tensor:
        alpha_s, alpha_t = (self.alpha(time).to(x_hat_NI).expand(len(z_N)) for time in (s, t))
        return q_posterior(z_N, x_hat_NI, alpha_s, alpha_t, self.pi(x_hat_NI))


def per_position(t: Tensor) -> Tensor:
    """Times [B] or [B, L] in a shape that broadcasts over [B, L].

    >>> import torch
    >>> per_position(torch.zeros(2)).shape, per_position(torch.zeros(2, 3)).shape
    (torch.Size([2, 1]), torch.Size([2, 3]))
    """
    return t[:, None] if t.ndim == 1 else t
