"""Gaussian diffusion of embedded tokens: q(z_t | x) = N(alpha_t e_x, sigma_t² I), a vector for each position.

Variational Diffusion Models (arXiv 2107.00630) has the equations, with c = 1 - e^{gamma_s - gamma_t} = -expm1(.):
q(z_s | z_t, x) = N(alpha_s (z_t (1 - c) / alpha_t + c e_x), sigma_s² c I). The divergence between this posterior and
the one with x_hat in place of e_x is (SNR_s - SNR_t) / 2 ‖e_x - x_hat‖². Here x_hat is always Σ_v x_theta[v] e_v.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from unmask.data.batch import DRAW_LATENT
from unmask.devices import widest
from unmask.processes.base import Process, per_position
from unmask.processes.gamma import Gamma
from unmask.rng import normal


def alpha_of(gamma: Tensor) -> Tensor:
    """alpha, the factor of the embedding.

    >>> alpha_of(torch.tensor([0.0])) ** 2
    tensor([0.5000])
    """
    return torch.sigmoid(-gamma).sqrt()


def sigma_of(gamma: Tensor) -> Tensor:
    """sigma, the standard deviation of the noise."""
    return torch.sigmoid(gamma).sqrt()


def snr_drop(gamma_s: Tensor, gamma_t: Tensor) -> Tensor:
    """SNR_s - SNR_t = e^{-gamma_s} - e^{-gamma_t}, without cancellation.

    >>> snr_drop(torch.tensor(0.0), torch.tensor(1.0))
    tensor(0.6321)
    """
    return torch.exp(-gamma_s) * -torch.expm1(gamma_s - gamma_t)


class Gaussian(Process):
    """The Gaussian process given by embeddings e_IE, one for each id, and gamma(t).

    reads_z0: if True, p(x | z_0) is x_theta(z_0), computed by the network; otherwise it is proportional to
    N(z_0; alpha_0 e_v, sigma_0²). The methods take lines: N positions of any rows, each with the gamma of its time.

    >>> from unmask.processes.gamma import Sqrt
    >>> process = Gaussian(Sqrt(), torch.tensor([[-1.0], [1.0], [0.0]]), num_ids=3, mask_id=2)
    >>> process.mean(torch.tensor([[0.25, 0.75, 0.0]]))
    tensor([[0.5000]])
    """

    name = "gaussian"
    vectors = True
    noise_std = 1.0

    def __init__(
        self, gamma: Gamma, e_IE: Tensor | None, *, num_ids: int, mask_id: int, reads_z0: bool = False
    ) -> None:
        super().__init__(num_ids=num_ids, mask_id=mask_id)
        self.gamma, self.reads_z0 = gamma, reads_z0
        self._e_IE = e_IE

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.gamma!r}, num_ids={self.num_ids}, mask_id={self.mask_id})"

    @property
    def e_IE(self) -> Tensor:
        assert self._e_IE is not None
        return self._e_IE

    @property
    def width(self) -> int:
        """E: the size of a state."""
        return self.e_IE.shape[1]

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the states."""
        return self.e_IE

    def level(self, t: Tensor) -> Tensor:
        return self.gamma.level(t)

    # --- the embeddings ---

    def points(self, x_N: Tensor) -> Tensor:
        """[N, E] e_x."""
        return F.embedding(x_N, self.e_IE)

    def mean(self, p_NI: Tensor) -> Tensor:
        """[N, E] x_hat = Σ_v p[v] e_v."""
        return p_NI.to(self.e_IE) @ self.e_IE

    def squared_error(self, p_NI: Tensor, x_N: Tensor) -> Tensor:
        """[N] ‖e_x - x_hat‖², in units of `noise_std`²."""
        return (self.points(x_N) - self.mean(p_NI)).square().sum(dim=1)

    def log_likelihood(self, z_NE: Tensor, gamma_N: Tensor) -> Tensor:
        """[N, I] log N(z; alpha e_v, sigma²) up to a constant that does not depend on v; I includes the mask."""
        alpha_N1, snr_N1 = alpha_of(gamma_N)[:, None].to(z_NE), torch.exp(-gamma_N)[:, None].to(z_NE)
        # alpha z·e_v / sigma² - alpha² |e_v|² / (2 sigma²), where alpha / sigma² = SNR / alpha
        return snr_N1 / alpha_N1 * (z_NE @ self.e_IE.T) - snr_N1 / 2 * self.e_IE.square().sum(dim=1)

    def prior_nats(self, x_N: Tensor) -> Tensor:
        """[N] KL(q(z_1 | x) ‖ N(0, 1))."""
        device = self.like.device
        gamma_1 = self.gamma.gamma(torch.ones((), dtype=widest(device), device=device))
        # -log sigma² - alpha² per coordinate, as wide as can be: with sigma² near 1 the two nearly cancel
        spread = (F.softplus(-gamma_1) - torch.sigmoid(-gamma_1)).clamp(min=0)
        return (torch.sigmoid(-gamma_1) * self._squared_norm(x_N).to(gamma_1) + self.width * spread) / 2

    def _squared_norm(self, x_N: Tensor) -> Tensor:
        return self.points(x_N).square().sum(dim=1)

    # --- the noise ---

    def noise(self, key_N: Tensor, position_N: Tensor, visit: int) -> Tensor:
        """[N, E] standard normal numbers times `noise_std`; visit: the number of the draw at this position."""
        at_E = torch.arange(self.width, device=key_N.device)
        return self.noise_std * normal(key_N[:, None], DRAW_LATENT, position_N[:, None], visit, at_E).to(self.like)

    def noised(self, x_N: Tensor, gamma_N: Tensor, noise_NE: Tensor) -> Tensor:
        """[N, E] z_t ~ q(z_t | x), given the noise."""
        alpha_N1, sigma_N1 = (f(gamma_N)[:, None].to(noise_NE) for f in (alpha_of, sigma_of))
        return alpha_N1 * self.points(x_N) + sigma_N1 * noise_NE

    def prior(self, key_B: Tensor, open_BL: Tensor, tokens_BL: Tensor, *, offset: int = 0) -> Tensor:
        row_N, position_N = open_BL.nonzero(as_tuple=True)
        return self.noise(key_B[row_N], position_N + offset, 0)

    def corrupt(self, x_BL: Tensor, t: Tensor, key_B: Tensor, open_BL: Tensor) -> Tensor:
        row_N, position_N = open_BL.nonzero(as_tuple=True)
        gamma_N = self.gamma.gamma(per_position(t)).expand(x_BL.shape)[open_BL]
        return self.noised(x_BL[open_BL], gamma_N, self.noise(key_B[row_N], position_N, 0))

    def posterior(self, z_N: Tensor, x_hat: Tensor, s: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Mean [N, E] and standard deviation [N, 1] of q(z_s | z_t, x_hat)."""
        gamma_s, gamma_t = (self.gamma.gamma(time).expand(len(z_N))[:, None] for time in (s, t))
        c_N1 = -torch.expm1(gamma_s - gamma_t)
        old, new = alpha_of(gamma_s) * (1 - c_N1) / alpha_of(gamma_t), alpha_of(gamma_s) * c_N1
        std_N1 = self.noise_std * sigma_of(gamma_s) * c_N1.sqrt()
        return old.to(z_N) * z_N + new.to(z_N) * x_hat.to(z_N), std_N1.to(z_N)


class Simplex(Gaussian):
    """Fixed embeddings e_v = K (2·1_v - 1), a corner for each id, with noise of standard deviation K (SSD-LM).

    ‖e_x - x_hat‖² = 4 K² ‖1_x - x_theta‖², so in units of the noise K cancels: it only determines how sharp softmax(z)
    is, which the network reads. block: how many positions are noised at a time, given all preceding positions.
    like: a tensor with the dtype and device of the states.

    >>> from unmask.processes.gamma import Cosine
    >>> process = Simplex(Cosine(), torch.zeros(()), scale=5.0, block=25, num_ids=3, mask_id=2)
    >>> process.points(torch.tensor([1]))
    tensor([[-5.,  5., -5.]])
    """

    name = "simplex"

    def __init__(self, gamma: Gamma, like: Tensor, *, scale: float, block: int, num_ids: int, mask_id: int) -> None:
        super().__init__(gamma, None, num_ids=num_ids, mask_id=mask_id)
        self.noise_std, self.block, self._like = scale, block, like

    @property
    def width(self) -> int:
        return self.num_ids

    @property
    def like(self) -> Tensor:
        return self._like

    def points(self, x_N: Tensor) -> Tensor:
        return self.mean(F.one_hot(x_N, self.num_ids))

    def mean(self, p_NI: Tensor) -> Tensor:
        return self.noise_std * (2 * p_NI.to(self.like) - 1)

    def squared_error(self, p_NI: Tensor, x_N: Tensor) -> Tensor:
        """[N] 4 ‖1_x - p‖²."""
        return 4 * (p_NI - F.one_hot(x_N, self.num_ids)).square().sum(dim=1)

    def log_likelihood(self, z_NE: Tensor, gamma_N: Tensor) -> Tensor:
        """As in `Gaussian`, with z·e_v = K (2 z_v - Σ z); all e_v have the same length."""
        scale_N1 = 2 * torch.exp(-gamma_N) / alpha_of(gamma_N) / self.noise_std
        return scale_N1[:, None].to(z_NE) * z_NE

    def _squared_norm(self, x_N: Tensor) -> Tensor:
        return torch.full(x_N.shape, float(self.width), device=x_N.device)
