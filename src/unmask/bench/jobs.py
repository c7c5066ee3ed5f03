"""The child process of a measurement: `python -m unmask.bench.jobs JOB`, with job and result as JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from unmask import kernels
from unmask.bench import Job, Result, flops, textbook
from unmask.config import OptimConfig
from unmask.data.batch import make_batch
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network
from unmask.denoisers.recorded import Recorder
from unmask.devices import fast_attention, make_current
from unmask.objectives.mdlm import MDLM
from unmask.samplers import Sampler
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.left_to_right import LeftToRight
from unmask.samplers.semi_ar import SemiAR
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample
from unmask.training.compiling import compile_trunk
from unmask.training.ema import Ema
from unmask.training.optim import Updater, make_optimizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def measure(job: Job) -> Result:
    make_current(torch.device(job.device))
    if job.version == "peak":
        return peak(job)
    if job.version == "textbook":
        kernels.HAS_TRITON = False
    torch.manual_seed(0)
    device = torch.device(job.device)
    base = memory(device)
    net = network(job).to(device)
    if job.task == "train":
        return train(job, net, base)
    return draw(job, net.to(DTYPES[job.precision]).eval(), base)


def network(job: Job) -> Network:
    config = DiT(
        hidden=job.hidden,
        blocks=job.blocks,
        heads=job.heads,
        dropout=job.dropout,
        causal=job.task == "ar",
        conditioning=job.conditioning,  # type: ignore[arg-type]
        qk_norm=False,  # the paper's network
        zero_init=False,
    )
    net = config.build(num_ids=job.vocab + 1, mask_id=job.vocab)
    torch.nn.init.normal_(net.output.weight, std=0.02)
    return net


def train(job: Job, net: Network, base: int) -> Result:
    """Forward, backward, clip, AdamW, EMA."""
    device = torch.device(job.device)
    net.train()
    optimizer, names = make_optimizer(net, OptimConfig(muon=False, betas=(0.9, 0.999)))
    ema = Ema(net, 0.9999)
    updater = Updater(optimizer, names, ema=ema, clip=1.0)
    objective = MDLM()
    x_BL = torch.randint(0, job.vocab, (job.batch, job.length))
    x_on_device = x_BL.to(device)
    if job.compile:
        net.can_fuse_training = lambda: False  # type: ignore[method-assign]
        compile_trunk(net)
    if device.type == "cuda" and job.version != "textbook":
        net.recorder = Recorder()

    def step(i: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=DTYPES[job.precision], enabled=job.precision != "fp32"):
            if job.version == "textbook":
                textbook.loss(net, x_on_device).backward()  # type: ignore[no-untyped-call]
            else:
                with fast_attention():
                    total = objective.loss(net, make_batch(x_BL, seed=0, step=i))
                    (total.nats / x_BL.numel()).backward()  # type: ignore[no-untyped-call]
        if job.version == "textbook":
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            ema.update()
        else:
            norm = updater.grad_norm()
            updater.update(lr=3e-4, grad_norm=norm, nonfinite=~torch.isfinite(norm))

    def several(count: int) -> None:
        for i in range(count):
            step(i)

    # GPU steps are timed several at a time, because the next one is queued before the last is done.
    group = 20 if device.type == "cuda" else 1
    warm_up = clocked(device, lambda: several(3))
    seconds = [clocked(device, lambda: several(group)) / group for _ in range(job.repeats)]
    tokens = x_BL.numel()
    sizes = {"length": job.length, "hidden": job.hidden, "blocks": job.blocks, "vocab": job.vocab}
    return Result(
        seconds=seconds,
        tokens=tokens,
        flops=flops.train(tokens=tokens, masked=tokens // 2, **sizes),
        peak_bytes=memory(device) - base,
        warm_up=warm_up,
        profile=profiled(job, lambda: step(0)),
    )


def draw(job: Job, net: Network, base: int) -> Result:
    """Generate a batch of samples from nothing."""
    device = torch.device(job.device)
    length = job.total if job.task == "semi-ar" else job.length
    canvas = Canvas.blank(num=job.batch, length=length, mask_id=job.vocab).to(device)
    sampler: Sampler = LeftToRight() if job.task == "ar" else Ancestral(steps=job.steps)
    if job.task == "semi-ar":
        sampler = SemiAR(window=job.length, stride=job.stride, inner=sampler)
    windows = 1 + max(0, -(-(length - job.length) // job.stride)) if job.task == "semi-ar" else 1
    calls = job.length if job.task == "ar" else job.steps
    note, scale = "", 1.0
    if job.version == "unmask":

        def work() -> Tensor:
            return sample(net, canvas, sampler).tokens

        row_calls = count_row_calls(canvas.to("cpu"), sampler)
    else:
        timed = min(job.calls or calls, calls)
        scale, row_calls = windows * calls / timed, windows * calls * job.batch
        if timed < calls or windows > 1:
            note = f"{timed} of its {windows * calls} equal calls timed, scaled up"

        def work() -> Tensor:
            z_BL = torch.full((job.batch, job.length), job.vocab, device=device)
            if job.task == "ar":
                return textbook.next_tokens(net, z_BL, timed)
            return textbook.sample(net, z_BL, job.steps, timed)

    warm_up = clocked(device, work) if device.type == "cuda" else 0.0
    repeats = job.repeats if job.version == "unmask" and device.type == "cuda" else 1
    seconds = [clocked(device, work) * scale for _ in range(repeats)]
    sizes = {"length": job.length, "hidden": job.hidden, "blocks": job.blocks, "vocab": job.vocab}
    tokens = job.batch * length
    if job.task == "ar":
        needed = flops.decode(rows=job.batch, **sizes)
    else:
        needed = flops.denoise(row_calls=row_calls, tokens=tokens, **sizes)
    return Result(
        seconds=seconds,
        tokens=tokens,
        flops=needed,
        peak_bytes=memory(device) - base,
        warm_up=warm_up,
        note=note,
        profile=profiled(job, work),
    )


def count_row_calls(canvas: Canvas, sampler: Sampler) -> int:
    """Rows that the network sees over all calls; determined by the plan alone."""
    state, rows = sampler.start(canvas.to("cpu")), 0
    while (query := sampler.ask(state)) is not None:
        rows += len(query.level_R)
        num = int(query.wanted_RK.sum())
        sampler.write(state, torch.ones(num, dtype=torch.bool), torch.zeros(num, dtype=torch.long), torch.zeros(num))
    return rows


def profiled(job: Job, work: Callable[[], object]) -> list[tuple[str, int, float]]:
    """One more run under the profiler: kernels (on a CPU, operations) by their own time."""
    if not job.profile:
        return []
    on_gpu = job.device.startswith("cuda")
    kind = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[kind]) as trace:
        clocked(torch.device(job.device), work)
    spent: dict[str, tuple[int, float]] = {}
    for event in trace.events() or []:
        if on_gpu and event.device_type.name != "CUDA":
            continue  # the host side of a launch
        micros = event.device_time if on_gpu else event.self_cpu_time_total
        count, total = spent.get(event.name, (0, 0.0))
        spent[event.name] = count + 1, total + micros
    order = sorted(spent.items(), key=lambda entry: -entry[1][1])
    return [(name, count, micros / 1e3) for name, (count, micros) in order]


def peak(job: Job) -> Result:
    """The rate of a large matrix product on random numbers, repeated: under such a load a GPU soon lowers its clock to
    its power limit, as it does in training."""
    device = torch.device(job.device)
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device, dtype=DTYPES[job.precision]) for _ in range(2))

    def products(count: int) -> float:
        return clocked(device, lambda: [torch.mm(a, b) for _ in range(count)]) / count

    products(3)
    count = max(10, round(1 / products(10)))  # as many as fit in a second
    products(count)
    seconds = [products(count) for _ in range(3)]
    return Result(seconds=seconds, tokens=0, flops=2.0 * n**3, peak_bytes=0, warm_up=0.0)


def clocked(device: torch.device, work: Callable[[], object]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def memory(device: torch.device) -> int:
    """Peak memory: on a GPU that allocated by tensors, on a CPU that of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    print(json.dumps(asdict(measure(Job(**json.loads(sys.argv[1]))))))
