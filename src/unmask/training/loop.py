"""Training: text → tokens → packed rows → noise → denoiser → loss. The loop is `train`, read from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from unmask.config import RunConfig
from unmask.data.batch import Batch, batch_of
from unmask.data.rows import RowBatch
from unmask.denoisers.network import Network
from unmask.devices import fast_attention, few_threads
from unmask.distributed.stopping import stop_requests
from unmask.distributed.world import join_world
from unmask.errors import UsageError
from unmask.evaluation.bound import Bound
from unmask.model import Model, load
from unmask.reader import adopt_plugins
from unmask.rng import row_keys
from unmask.training.callbacks import Announcer, Callback, StepReport
from unmask.training.checkpoint.resume import mark_begun, stopped
from unmask.training.monitor import steady_gc
from unmask.training.optim import learning_rate
from unmask.training.run_lock import one_writer
from unmask.training.run_view import RunView
from unmask.training.state import NATS_PER_TOKEN, RunState, Unread
from unmask.training.weights_and_biases import check_installed


def train(
    config: RunConfig,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    init: str | Path | None = None,
    device: str | None = None,
    timeout: float = 600.0,
) -> Model:
    """Train a model and return the best one, by default by its validation bound; `unmask train` calls this function.

    Everything random depends only on (seed, step, row), so a resumed run repeats the uninterrupted one bit for bit, and
    a run on several processes (torchrun) is the same run. timeout: seconds to wait for a hanging process.

    >>> train(load_config("demo", {"steps": "10"}))  # doctest: +SKIP
    """
    if not isinstance(cast(object, config), RunConfig):
        raise UsageError(f"train takes a RunConfig, such as unmask.load_config('demo'), got {str(config)[:60]!r}")
    if isinstance(cast(object, callbacks), str) or not isinstance(cast(object, callbacks), Iterable):
        raise UsageError("callbacks must be a list of unmask.Callback objects")
    if wrong := [one for one in callbacks if not hasattr(one, "on_end")]:
        raise UsageError(f"a callback is an object of a subclass of unmask.Callback, got {str(wrong[0])[:60]!r}")
    adopt_plugins(config)
    check_installed(config.wandb)
    config = replace(config, data=config.data.absolute())  # the run may be read from another directory
    with join_world(device, timeout=timeout) as world, one_writer(Path(config.out), world) as note:
        run = Run(config, world, resume=resume, init=init)
        tell = Announcer([*run.listeners(), *callbacks] if world.first else [])
        try:
            tell.on_run(RunView(run, tell))
            tell.on_start(run.config, run.info())
            for text in filter(None, (note, run.init_note)):
                tell.on_note(run.step, text)
            mark_begun(config, world)
            with world.together():
                _loop(run, tell)
        finally:
            for step, path in run.saver.close():
                tell.on_save(step, path)
            if run.saver.failed is not None:
                tell.on_note(run.step, f"the last save failed: {run.saver.failed}")
            tell.on_end()
        world.barrier()  # the first process has written what the others load
        return load(run.folder, device=str(world.device))


def _loop(run: Run, tell: Announcer) -> None:
    config, world = run.config, run.world
    ahead = run.loader.prefetch(run.step, config.steps - run.step, lo=run.share[0], hi=run.share[1])
    with stop_requests() as asked_to_stop, steady_gc(), few_threads(world.device), ahead as batches:
        if run.step == 0:
            run.look(tell)
        if run.parallel.kind == "ddp":
            # DDP rearranges its buckets after the first backward pass, and sums in another order from then on. A
            # discarded pass makes a resumed run sum in the same order as the run that it continues.
            run.forward_backward(run.loader.fetch(run.step, *run.share))
        run.began = time.perf_counter()
        run.clock.go()
        for rows in batches:
            lr = learning_rate(config.optim, run.step, config.steps)
            numbers = run.forward_backward(rows, asked_to_stop)
            run.update(lr, *numbers[:2])
            run.note(lr, *numbers)
            world.arm()
            if run.step == run.resumed + 1:
                run.prepare_saving()
            # The next step is queued on the GPU before the last one's numbers are read, so it never waits for the host.
            looks = run.looks_now()
            run.announce(tell, keep=0 if looks else 1)
            last = run.step == config.steps or run.ends(tell)
            if looks or last:
                run.clock.stop()  # the device has done all steps: no training time from here on

            improved = False
            if run.step % config.valid_every == 0 or last:
                bound = run.look(tell)
                last = last or run.ends(tell)  # a callback may ask for it at a validation
                improved = run.note_best(bound, last=last)
                if last and world.first and config.best not in (NATS_PER_TOKEN, *run.metrics):
                    tell.on_note(run.step, f"nobody logged the metric {config.best!r}: the last model is kept")
            if config.sample_every and (run.step % config.sample_every == 0 or last):
                tell.on_sample(run.step, run.sample())
            # Several processes stop at the step at which all of them have read that one was asked to.
            stopping = (run.stopping or (world.size == 1 and asked_to_stop())) and not last
            if stopping:
                run.announce(tell)
            if run.step % run.saver.every == 0 or improved or last or stopping:
                run.save(best=improved)
            for step, path in run.saver.finished(wait=last or stopping):
                tell.on_save(step, path)
            if stopping:
                world.barrier()  # the first process may still be writing, and a process that exits would end it
                raise stopped(config, world, run.step)
            if last:
                return
            run.clock.go()


class Run(RunState):
    """A run, executed step by step."""

    def forward_backward(
        self, rows: RowBatch, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of a step.

        Returns the loss in nats per token of the global batch, the gradient norm before clipping, and how many
        processes were asked to stop [0] and to end early [1]; all on the device. Batches are noised on the host, so the
        number of masked tokens is known without a device synchronisation.
        """
        batch, (first, _) = self.config.batch, self.share
        indices = self.loader.indices(self.step)
        scored, tokens_seen = self.rows.counts(indices)
        self.global_rows = indices, tokens_seen  # for the report of this step
        tokens = max(scored, 1)
        micro = self.config.micro_batch or batch
        total = torch.zeros((), device=self.device)
        self.optimizer.zero_grad(set_to_none=True)
        for lo in range(0, len(rows), micro):
            hi = min(lo + micro, len(rows))
            part = batch_of(
                rows.part(lo, hi),
                seed=self.config.seed,
                step=self.step,
                first_row=first + lo,
                num_rows=batch,
                done=self.step / self.config.steps,
                epoch=self.loader.epoch(self.step),
            )
            # Dropout, too, depends only on the step and the micro-batch, so resuming needs no generator state.
            torch.manual_seed(int(row_keys(self.config.seed, torch.tensor(self.step * batch + first + lo))))
            with self._autocast(), fast_attention(), self.parallel.accumulating(more=hi < len(rows)):
                nats = self.parallel(partial(self._nats, part))
                # Processes average their gradients, but the batch's gradient is a sum.
                with self.world.together():
                    (nats * self.world.size / tokens).backward()  # type: ignore[no-untyped-call]
            total += nats.detach()
        flags = [total.new_full((), float(flag)) for flag in (asked_to_stop(), bool(self.end_reason))]
        summed = self.world.sum_(torch.stack([total / tokens, *flags]))
        return summed[0], self.updater.grad_norm(), summed[1:]

    def _nats(self, part: Batch, network: Network) -> Tensor:
        nats = self.config.objective.loss(network, part).nats
        if network.objective is None:
            return nats
        # Parameters of the objective that a step does not use get a zero gradient on every process, since the others
        # would wait for a process without one.
        return nats + sum(0.0 * p.sum() for p in network.objective.parameters() if p.requires_grad)

    def update(self, lr: float, loss: Tensor, grad_norm: Tensor) -> None:
        # A non-finite loss or gradient would destroy the weights: the device leaves them unchanged, and the guard
        # decides as soon as the host reads the numbers.
        self.updater.update(lr=lr, grad_norm=grad_norm, nonfinite=~torch.isfinite(loss + grad_norm))
        self.step += 1

    # --- reading a step's numbers ---

    def note(self, lr: float, loss: Tensor, grad_norm: Tensor, flags: Tensor) -> None:
        """Send the step's numbers to the host without waiting for them."""
        numbers = torch.cat([torch.stack([loss, grad_norm]), flags])
        arrived = None
        if self.device.type == "cuda":
            numbers = numbers.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self.unread.append(Unread(self.step, lr, *self.global_rows, numbers, arrived))

    def looks_now(self) -> bool:
        """Whether the weights are read after this step; always on a CPU, where steps are synchronous."""
        config, step = self.config, self.step
        every = (config.valid_every, self.saver.every, config.sample_every)
        return self.device.type != "cuda" or step == config.steps or any(e and step % e == 0 for e in every)

    def announce(self, tell: Callback, keep: int = 0) -> None:
        """Report the numbers of all steps except the newest `keep`; the guard may end the run here."""
        while len(self.unread) > keep:
            unread = self.unread.popleft()
            if unread.arrived is not None:
                unread.arrived.synchronize()
            loss, grad_norm, stops, ends = unread.numbers.tolist()
            self.stopping, self.ending = self.stopping or stops > 0, self.ending or ends > 0
            word, fine = self.guard.look(unread.step, loss, grad_norm, unread.indices, self.folder)
            if word:
                tell.on_note(unread.step, word)
            now = self.clock.seconds
            rate, self.last_read = unread.tokens / (now - self.last_read), now
            if fine:
                seconds = time.perf_counter() - self.began
                report = StepReport(unread.step, loss, unread.lr, grad_norm, rate, seconds, unread.tokens, now)
                self.metrics |= {"loss": loss, "lr": unread.lr, "grad_norm": grad_norm, "tokens_per_second": rate}
                tell.on_step(report)

    def look(self, tell: Callback) -> Bound:
        """Validate, and report the results."""
        bound = self.validate()
        numbers = {f"valid_{name}": value for name, value in bound.summary().items()}
        self.metrics |= {name: value for name, value in numbers.items() if isinstance(value, int | float)}
        measured = self.measure()
        self.metrics |= {f"valid_{name}": one.value for name, one in measured.items()}
        tell.on_valid(self.step, bound)
        for name, one in measured.items():
            tell.on_measured(self.step, name, one)
        return bound

    def ends(self, tell: Callback) -> bool:
        """Whether the run ends with this step because a callback requested it; the same on all processes.

        Several processes end at the step at which all of them have read the first process's request.
        """
        if not self.ending and not (self.world.size == 1 and self.end_reason):
            return False
        if not self.ended:
            self.ended = True
            self.announce(tell)
            tell.on_note(self.step, f"ended early: {self.end_reason}")
        return True
