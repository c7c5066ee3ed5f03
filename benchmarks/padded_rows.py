"""What padding costs a training step: one text per row (`packing = pad`), with its padding and without, in one run.

    python benchmarks/padded_rows.py [--device cuda] [--rows 512] [--hidden 512 --blocks 6 --heads 8]

The lengths are those of short stories: 174 tokens of 256 on average. A step is forward, backward, clipping, update and
weight average, in bf16 and compiled on a GPU. The host's own share is the time until a step is submitted while the
device is idle.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import torch

from unmask.config import OptimConfig
from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT
from unmask.devices import fast_attention, few_threads, pick_device
from unmask.objectives.mdlm import MDLM
from unmask.training.ema import Ema
from unmask.training.optim import Updater, make_optimizer

L, V, MEAN = 256, 8191, 174


def measure(args: argparse.Namespace, device: torch.device, ragged: bool) -> tuple[list[float], float]:
    """Seconds of groups of steps, a step each; and the host's share of one."""
    torch.manual_seed(0)
    dit = DiT(hidden=args.hidden, blocks=args.blocks, heads=args.heads, tied=True, dropout=0.0, qk_norm=True)
    net = dit.build(num_ids=V + 1, mask_id=V).to(device).train()
    if not ragged:
        net.takes_ragged = lambda: False  # type: ignore[method-assign]
    cuda = device.type == "cuda"
    optimizer, names = make_optimizer(net, OptimConfig(lr=1e-3, muon=True, ema=0.998))
    updater = Updater(optimizer, names, ema=Ema(net, 0.998), clip=1.0)
    draws = torch.Generator().manual_seed(0)
    x_BL = torch.randint(0, V, (args.rows, L), generator=draws)

    def step(i: int) -> None:
        lengths = (MEAN + 30 * torch.randn(args.rows, generator=draws)).long().clamp(60, L)
        batch = make_batch(x_BL, lengths, seed=0, step=i)
        optimizer.zero_grad(set_to_none=True)
        precision = torch.autocast("cuda", dtype=torch.bfloat16) if cuda else contextlib.nullcontext()
        with precision, fast_attention():
            nats = MDLM(form="count").loss(net, batch).nats
            (nats / (args.rows * MEAN)).backward()  # type: ignore[no-untyped-call]
        norm = updater.grad_norm()
        updater.update(lr=1e-3, grad_norm=norm, nonfinite=~torch.isfinite(norm))

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    for i in range(args.warm_up):
        step(i)
    groups, alone = [], []
    for group in range(args.groups):
        wait()
        began = time.perf_counter()
        for i in range(args.steps):
            step(1000 * group + i)
        wait()
        groups.append((time.perf_counter() - began) / args.steps)
        began = time.perf_counter()
        step(0)
        alone.append(time.perf_counter() - began)
    return groups, min(alone)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device")
    for name, value in {
        "rows": 512,
        "hidden": 512,
        "blocks": 6,
        "heads": 8,
        "warm-up": 20,
        "groups": 5,
        "steps": 20,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    device = pick_device(args.device)
    print(
        f"{args.rows} rows of {L}, {MEAN} tokens each on average; "
        f"DiT {args.hidden}×{args.blocks}×{args.heads} on {device}"
    )
    seconds = {}
    with few_threads(device):
        for name in ("with padding", "without"):
            groups, alone = measure(args, device, ragged=name == "without")
            torch.compiler.reset()
            seconds[name] = statistics.median(groups)
            rate = args.rows * MEAN / seconds[name]
            print(
                f"{name:14s} {seconds[name] * 1e3:8.1f} ms a step ({min(groups) * 1e3:.1f}–{max(groups) * 1e3:.1f}), "
                f"{rate:,.0f} tokens of text/s, host alone {alone * 1e3:.1f} ms",
                flush=True,
            )
    print(f"without padding {seconds['with padding'] / seconds['without']:.2f}× as fast")


if __name__ == "__main__":
    main()
