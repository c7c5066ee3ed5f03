"""A discarded training step on a GPU while the host still reads and packs the texts.

The first step on a GPU loads libraries and compiles kernels. This takes several seconds and needs no text. Kernels are
compiled several at once, in a first pass that runs none of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

import numpy as np
import torch

from unmask.config import RunConfig
from unmask.data.batch import batch_of
from unmask.data.rows import Report, Rows, dtypes
from unmask.data.tokenizers import Tokenizer
from unmask.denoisers.network import Network
from unmask.devices import fast_attention
from unmask.distributed.world import World
from unmask.evaluation.evaluate import evaluate_rows
from unmask.kernels.ahead import compiling_ahead
from unmask.training.ema import Ema
from unmask.training.optim import Updater, make_optimizer

Autocast = Callable[[], AbstractContextManager[object]]


@contextmanager
def warming_up(
    config: RunConfig,
    tokenizer: Tokenizer,
    build: Callable[[], Network],
    autocast: Autocast,
    world: World,
) -> Iterator[None]:
    """Take the discarded step in a thread while the block runs. No random number may be drawn in the block.

    Only for a single process on a GPU without `compile`: a compiled trunk does not use these kernels. Errors of the
    step are ignored here: the run's own first step reports them. After an error in the block no further part begins.
    """
    device = world.device
    if device.type != "cuda" or world.size > 1 or config.compile:
        yield
        return
    packed, failed = threading.Event(), threading.Event()
    chosen = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]

    def attempt() -> None:
        try:
            torch.cuda.set_device(chosen)  # a new thread begins with the first GPU
            step = partial(discarded_step, config, tokenizer, build, autocast, device)
            ahead = _compile_ahead(step, failed, chosen)
            if failed.is_set() or (packed.is_set() and ahead):
                return
            for part in step():
                if failed.is_set() or (packed.is_set() and (ahead or part == "network")):
                    return  # there is nothing to gain
        except Exception:
            return
        finally:
            torch.cuda.empty_cache()

    thread = threading.Thread(target=attempt, name="warm-up", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        failed.set()
        raise
    finally:
        packed.set()
        thread.join()


def _compile_ahead(step: Callable[[], Iterator[str]], failed: threading.Event, gpu: int) -> bool:
    """Whether the step's kernels could be compiled ahead: if not, the step itself compiles them."""
    with suppress(Exception), compiling_ahead(gpu) as ahead:  # its numbers are arbitrary: some are refused
        for _ in step() if ahead else ():
            if failed.is_set():
                break
        return ahead
    return False


def discarded_step(
    config: RunConfig, tokenizer: Tokenizer, build: Callable[[], Network], autocast: Autocast, device: torch.device
) -> Iterator[str]:
    """A step of a new network on rows of one token, then a validation; yields the name of each part that is done.

    The network and everything made for it are dropped at the end.

    >>> list(discarded_step(config, tokenizer, build, contextlib.nullcontext, torch.device("cuda")))  # doctest: +SKIP
    ['network', 'gradients', 'update', 'validation']
    """
    with device:
        network = build().train()
    network.checkpoint_activations = config.checkpoint_activations  # otherwise it may need more memory than the run
    yield "network"
    rows = _rows(config, tokenizer)
    with autocast(), fast_attention():
        batch = batch_of(rows.take(np.arange(len(rows))), seed=0, step=0, done=0.0)
        config.objective.loss(network, batch).nats.backward()  # type: ignore[no-untyped-call]
    yield "gradients"
    average = Ema(network, config.optim.ema) if config.optim.ema else None
    updater = Updater(*make_optimizer(network, config.optim), ema=average, clip=config.optim.clip)
    grad_norm = updater.grad_norm()
    updater.update(lr=0.0, grad_norm=grad_norm, nonfinite=torch.isnan(grad_norm))
    yield "update"
    with autocast():
        evaluate_rows(network, config.objective, rows, num_samples=1, max_rows=16)
    yield "validation"


def _rows(config: RunConfig, tokenizer: Tokenizer) -> Rows:
    """A micro-batch of full rows; where texts have rows of their own, one of them is shorter, as texts are."""
    num, length = config.micro_batch or config.batch, config.data.length
    token = next(i for i in range(tokenizer.num_ids) if i != tokenizer.mask_id and i not in tokenizer.fixed_ids)
    lengths = np.full(num, length)
    if config.data.packing != "wrap":
        lengths[-1] = max(1, length // 2)
    report = Report(policy=config.data.packing, length=length, rows=num, tokens=int(lengths.sum()))
    kinds = dtypes(tokenizer.num_ids)
    parts = {
        "tokens": np.full(lengths.sum(), token, kinds["tokens"]),
        "ends": np.cumsum(lengths).astype(kinds["ends"]),
        "prefixes": np.zeros(num, kinds["prefixes"]),
        "bytes": lengths.astype(kinds["bytes"]),
    }
    return Rows(parts, report, tokenizer.eot_id, tokenizer.num_ids, fixed_ids=tokenizer.fixed_ids)
