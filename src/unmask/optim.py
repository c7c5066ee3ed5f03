"""AdamW and the course of its learning rate."""

from __future__ import annotations

import math

import torch

from unmask.config import OptimConfig
from unmask.denoisers._network import Network


def make_optimizer(network: Network, config: OptimConfig) -> tuple[torch.optim.AdamW, list[str]]:
    """AdamW over all parameters, and their names in its order; weight decay, where there is any, only on matrices."""
    named = list(network.named_parameters())
    matrices = [(name, p) for name, p in named if p.ndim > 1]
    others = [(name, p) for name, p in named if p.ndim <= 1]
    groups = [
        {"params": [p for _, p in matrices], "weight_decay": config.weight_decay},
        {"params": [p for _, p in others], "weight_decay": 0.0},
    ]
    # One kernel for all parameters; on the CPU too it is several times faster than a loop over them.
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return optimizer, [name for name, _ in matrices + others]


def learning_rate(config: OptimConfig, step: int, num_steps: int) -> float:
    """The rate of step `step` (from 0): linear warm-up, then constant, cosine, or warm-up–stable–decay.

    >>> learning_rate(OptimConfig(lr=1.0, warmup=10), 4, 100)
    0.5
    """
    warm = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    done = (step + 1 - config.warmup) / max(1, num_steps - config.warmup)
    fall = 1.0
    if config.schedule == "cosine":
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
    elif config.schedule == "wsd":
        left = (num_steps - step) / max(1.0, config.decay_fraction * num_steps)
        fall = min(1.0, left)
    return config.lr * warm * (config.min_ratio + (1 - config.min_ratio) * fall)
