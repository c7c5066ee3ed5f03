"""A lean loop out of the library's parts: one way, one seed, measured on fixed rows under fixed masks."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unmask.data.batch import Batch, make_batch
from unmask.denoisers.network import Network, evaluating
from unmask.devices import fast_attention
from unmask.objectives import Objective
from unmask.objectives.draws import bound_draws
from unmask.processes.absorbing import Absorbing
from unmask.rng import row_keys
from unmask.training.optim import learning_rate
from ways.catalogue import Setting, Way
from ways.data import Tokens
from ways.objectives import Counts, NextToken, NoisedBatch
from ways.schedules import Moment, Part

AHEAD = 4  # steps whose texts and masks are drawn before the network asks
WARM_STEPS = 5  # not timed
VALID_SEED = 20_240


def autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else contextlib.nullcontext()


class HeldOut:
    """Rows and masks that are the same for every way and seed."""

    def __init__(self, tokens: Tokens, setting: Setting) -> None:
        x_BL = tokens.held_out(setting.valid_rows, setting.length)
        scored_BL = torch.ones_like(x_BL, dtype=torch.bool)
        key_B = row_keys(VALID_SEED, torch.arange(len(x_BL)))
        process = Absorbing(Counts().noise, num_ids=tokens.num_ids, mask_id=tokens.mask_id)
        self.draws: list[NoisedBatch] = []
        for group in bound_draws(key_B, setting.valid_draws):
            for key_j_B, time_B in group:
                self.draws.append(Counts().ahead(Batch(x_BL, None, scored_BL, key_j_B, time_B), process))

    @torch.no_grad()
    def nats(self, network: Network, objective: Objective) -> float:
        """Nats a token by the network's own forward pass, never the fused one: under autocast, on a GPU.

        The bound; of autoregression itself, which does not predict a row's first token, the mean over the others.
        """
        total = 0.0
        if isinstance(objective, NextToken):
            x_BL = self.draws[0].x_BL
            with evaluating(network), autocast(network.device_for(torch.empty(0))):
                loss = objective.loss(network, make_batch(x_BL, seed=VALID_SEED, step=0))
            return float(loss.nats) / (x_BL.numel() - len(x_BL))
        with evaluating(network), fast_attention(), autocast(network.device_for(torch.empty(0))):
            for batch in self.draws:
                total += float(Counts().row_nats(network, batch).sum())
        return total / sum(batch.x_BL.numel() for batch in self.draws)


class Learner:
    """A network on its way, a step at a time."""

    def __init__(self, way: Way, seed: int, setting: Setting, tokens: Tokens, device: torch.device) -> None:
        self.way, self.seed, self.setting, self.device = way, seed, setting, device
        self.tokens = replace(tokens, split=way.split)
        torch.manual_seed(seed)
        self.network = way.build(setting, tokens).to(device).train()
        self.optim = way.rates(setting)
        self.updater = way.updater(self.network, self.optim)
        self.steps = round(setting.steps * way.work)
        self.moments = way.plan.moments(self.steps, setting.batch, setting.length)

    def parts(self, moment: Moment) -> list[Part]:
        """Texts and masks of a step; a thread of its own may ask."""
        parts = self.way.plan.parts(self.way.objective, self.tokens, moment, self.seed)
        return [
            (one, one.ahead(batch, one.process(self.network)) if isinstance(one, Counts) else batch)
            for one, batch in parts
        ]

    def learn(self, moment: Moment, parts: list[Part]) -> None:
        self.updater.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.device)
        for objective, batch in parts:
            with autocast(self.device), fast_attention():
                nats = objective.loss(self.network, batch).nats / moment.work
                nats.backward()  # type: ignore[no-untyped-call]
            total += nats.detach()
        norm = self.updater.grad_norm()
        # by tokens: a way of smaller steps goes through the same rates
        rate = learning_rate(self.optim, int(moment.done * self.steps), self.steps)
        self.updater.update(lr=rate, grad_norm=norm, nonfinite=~torch.isfinite(total + norm))

    def ahead(self, moments: Sequence[Moment]) -> Iterator[tuple[Moment, list[Part]]]:
        """The steps, the next few drawn by a thread."""
        with ThreadPoolExecutor(1) as pool:
            waiting: deque[tuple[Moment, Future[list[Part]]]] = deque()
            try:
                for moment in moments:
                    waiting.append((moment, pool.submit(self.parts, moment)))
                    if len(waiting) > AHEAD:
                        first, future = waiting.popleft()
                        yield first, future.result()
                while waiting:
                    first, future = waiting.popleft()
                    yield first, future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def run_way(
    way: Way, seed: int, setting: Setting, tokens: Tokens, device: torch.device, held_out: HeldOut
) -> dict[str, Any]:
    """One run: the curve [tokens, seconds of training, nats a token], and what it cost."""
    learner = Learner(way, seed, setting, tokens, device)
    moments = learner.moments
    looks = look_steps(moments, setting.looks)
    curve, seconds, began = [], 0.0, time.perf_counter()
    for moment, parts in learner.ahead(moments):
        learner.learn(moment, parts)
        if moment.step in looks:
            learner.wait()
            seconds += time.perf_counter() - began
            assert learner.updater.ema is not None
            with learner.updater.ema.applied():
                nats = held_out.nats(learner.network, way.objective)
            curve.append([moment.tokens + moment.work, round(seconds, 3), nats])
            began = time.perf_counter()
    return {"steps": len(moments), "curve": curve, **sizes(learner.network)}


def look_steps(moments: Sequence[Moment], looks: Sequence[float]) -> set[int]:
    """The steps after which a run is measured: the first with at least each share of the work done."""
    whole = moments[-1].tokens + moments[-1].work
    return {next(m.step for m in moments if m.tokens + m.work >= share * whole) for share in looks}


def time_way(way: Way, setting: Setting, tokens: Tokens, device: torch.device, steps: int) -> dict[str, Any]:
    """Seconds of a whole run, from so many of its steps, taken evenly, with nothing beside it on the device."""
    learner = Learner(way, 0, setting, tokens, device)
    every = max(1, len(learner.moments) // steps)
    chosen = [*learner.moments[:WARM_STEPS], *learner.moments[every // 2 :: every]]
    began, work = 0.0, 0
    for i, (moment, parts) in enumerate(learner.ahead(chosen)):
        if i == WARM_STEPS:
            learner.wait()
            began = time.perf_counter()
        learner.learn(moment, parts)
        work += moment.work if i >= WARM_STEPS else 0
    learner.wait()
    seconds = time.perf_counter() - began
    whole = sum(moment.work for moment in learner.moments)
    return {"alone_seconds": seconds * whole / work, "steps": len(learner.moments)}


def sizes(network: Network) -> dict[str, int]:
    """How many numbers are learned, those of embeddings and head apart."""

    def count(some: Sequence[Tensor]) -> int:
        return sum(p.numel() for p in some)

    named = dict(network.named_parameters())
    embeddings = [p for name, p in named.items() if name.endswith("embed.weight") or name.startswith("output.")]
    return {"embeddings": count(embeddings), "parameters": count(list(named.values())) - count(embeddings)}
