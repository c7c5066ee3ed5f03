"""What several processes are asked to do, in one group of them. A program of test_parallel.py:

    python worlds.py FOLDER 4:reshard,muon 2:gradients,losses ...

It forks one world after another from one process that has loaded torch; torchrun's processes join torchrun's world.
Every scenario leaves its results in FOLDER/NAME.json or .safetensors, written by the first process.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any, Literal

import learned_power
import torch
import torch.distributed as dist
import torch.distributed.fsdp  # once, before worlds are forked
from forking import forked
from safetensors.torch import save_file
from torch import Tensor

import quick_gc
from matrix import ALL, pairwise
from unmask.config import DataConfig, OptimConfig, RunConfig
from unmask.corpora.text import Text
from unmask.denoisers.dit import DiT, DiTNetwork
from unmask.distributed.parallel import whole
from unmask.distributed.world import World, join_world
from unmask.errors import NonFiniteError, Stopped, UnmaskError, UsageError
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.training.callbacks import Callback
from unmask.training.checkpoint.files import load_checkpoint
from unmask.training.loop import Run, train
from unmask.training.run_view import RunView

SMALL: dict[str, Any] = {"hidden": 16, "blocks": 2, "heads": 2, "dropout": 0.0, "qk_norm": False, "zero_init": False}
KINDS = {
    "count": (DiT(**SMALL), MDLM(form="count")),
    "level": (DiT(**SMALL, conditioning="level", cond_dim=8, tied=True), MDLM()),
    "ar": (DiT(**SMALL, causal=True), AR()),
}
# Matrices of 18, 54 and 72 rows, which four processes do not share alike.
MUON: dict[str, Any] = {
    "denoiser": DiT(hidden=18, blocks=2, heads=3, dropout=0.0, qk_norm=False, zero_init=False),
    "optim": OptimConfig(lr=3e-3, warmup=4, schedule="constant", ema=0.9, muon=True),
}
# On four processes, then on two: how a run is spread, how it saves, and the step that it is stopped at.
RESHARDED = {4: [("fsdp", "auto", 3)], 2: [("fsdp", "auto", 5), ("ddp", "auto", 7), ("fsdp", "whole", 9)]}
COMPILED = [("ddp", "bf16"), ("fsdp", "fp32")]
WAYS = [("ddp", None), ("ddp", 1), ("fsdp", None), ("fsdp", 1)]
SIZES = (2, 4) if ALL else (2,)  # four processes share Muon's matrices and change their number in any case
WAYS_OF = {size: WAYS if ALL else [("ddp", 1), ("fsdp", None)] for size in SIZES}
DTYPES = (torch.float32, torch.float64)
# Seeds, ways and precisions of runs that are stopped and gone on with.
RESUMED: dict[int, list[tuple[int, str, str]]] = {
    2: [(1, "fsdp", "bf16"), (2, "ddp", "bf16"), (0, "fsdp", "fp32")],
}
if ALL:
    RESUMED = {size: list(itertools.product((0, 1, 2), ("ddp", "fsdp"), ("fp32", "bf16"))) for size in SIZES}
# Kinds, ways and dtypes of single steps.
STEPPED = {size: pairwise(list(KINDS), WAYS, DTYPES) for size in SIZES}


# A schedule with parameters of its own, of shapes that two processes do not share alike.
LEARNED: dict[str, Any] = {
    "denoiser": KINDS["level"][0],
    "objective": MDLM(noise=learned_power.LearnedPower()),
    "optim": OptimConfig(lr=3e-2, muon=True, warmup=4, schedule="constant", ema=0.9),
}


def make_config(folder: Path, name: str, kind: str = "count", **changes: Any) -> RunConfig:
    """A run of 12 steps of 8 rows, some shorter than others."""
    text = folder / "text.jsonl.txt"
    denoiser, objective = KINDS[kind]
    config = RunConfig(
        out=str(folder / name),
        steps=12,
        batch=8,
        denoiser=denoiser,
        objective=objective,
        data=DataConfig(
            train=Text(path=str(text), separator="|"),
            length=24,
            packing="pad",
            held_out=0.2,
            cache=str(folder / "cache"),
        ),
        optim=OptimConfig(lr=3e-3, muon=False, warmup=4, schedule="constant", ema=0.9),
        log_every=1,
        valid_every=6,
        valid_rows=20,
        sample_every=12,
        save_every=4,
        keep=5,
    )
    return dataclasses.replace(config, **changes)


def write_text(folder: Path) -> None:
    rows = (f"{i * i % 97}: the cat sat"[: 8 + i * 7 % 15] for i in range(160))
    (folder / "text.jsonl.txt").write_text("|".join(rows), encoding="utf-8")


def windows(folder: Path, name: str, how: Literal["fixed", "shifted"] = "shifted") -> RunConfig:
    """A run of three epochs of one stream."""
    config = make_config(folder, name, steps=20)
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, packing="wrap", windows=how, length=48, held_out=0.1)
    )


def one_step(config: RunConfig, world: World, dtype: torch.dtype) -> dict[str, Tensor]:
    """Loss, norm and gradients of a first step, whole."""
    shutil.rmtree(config.out, ignore_errors=True) if world.first else None
    world.barrier()
    torch.set_default_dtype(dtype)
    try:
        run = Run(config, world, resume=False, init=None)
        with torch.no_grad():  # away from the start, where a zero head hides everything below it
            for i, p in enumerate(run.network.parameters()):
                p.add_(0.05 * torch.sin(torch.arange(1, 2) + i).to(dtype))
        loss, norm, _ = run.forward_backward(run.loader.fetch(0, *run.share))
    finally:
        torch.set_default_dtype(torch.float32)
    grads = {name: whole(p.grad).detach().clone() for name, p in run.network.named_parameters() if p.grad is not None}
    return grads | {"loss": loss.detach().clone(), "norm": norm.detach().clone()}


class Losses(Callback):
    """Remembers; asks this process, and it alone, to stop after a step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.stop_at = stop_at
        self.losses: dict[int, float] = {}
        self.bounds: dict[int, float] = {}
        self.notes: list[str] = []
        self.skipped: list[str] = []

    def on_start(self, config: RunConfig, info: dict[str, Any]) -> None:
        self.skipped = info["skipped"]

    def on_step(self, report: Any) -> None:
        self.losses[report.step] = report.loss
        if report.step == self.stop_at:
            os.kill(os.getpid(), signal.SIGUSR1)

    def on_valid(self, step: int, bound: Any) -> None:
        self.bounds[step] = bound.nats_per_token

    def on_note(self, step: int, text: str) -> None:
        self.notes.append(text)


def losses(config: RunConfig, *, stop_at: int | None = None, resume: bool = False) -> dict[str, Any]:
    seen = Losses(stop_at)
    stopped = False
    try:
        train(config, callbacks=[seen], device="cpu", resume=resume)
    except Stopped:
        stopped = True
    told = {"losses": seen.losses, "bounds": seen.bounds, "notes": seen.notes, "skipped": seen.skipped}
    return told | {"stopped": stopped}


def same_state(a: str, b: str) -> bool:
    """Weights, averages and moments of the newest checkpoints, to the last bit."""
    one, other = load_checkpoint(Path(a)), load_checkpoint(Path(b))
    assert one is not None
    assert other is not None
    return one.step == other.step and all(
        group.keys() == other.tensors[name].keys()
        and all(torch.equal(t, other.tensors[name][k]) for k, t in group.items())
        for name, group in one.tensors.items()
    )


def resumed(
    folder: Path, world: World, seed: int, way: str, precision: str, name: str = "resume", **more: Any
) -> dict[str, Any]:
    """A whole run against one that was stopped after steps 3 and 7, and against one that lost what it saved last."""
    changes: dict[str, Any] = {"seed": seed, "parallel": way, "precision": precision, **more}
    name = f"{name}-{seed}-{way}-{precision}-{world.size}"
    straight = make_config(folder, name, **changes)
    reference = losses(straight)
    broken = make_config(folder, f"{name}-broken", **changes)
    parts = [losses(broken, stop_at=3), losses(broken, stop_at=7, resume=True)]
    if world.first:  # as if killed before the save at the stop was durable
        shutil.rmtree(Path(broken.out) / "checkpoints" / f"step-{8:08d}")
    world.barrier()
    parts.append(losses(broken, resume=True))
    joined = {k: v for part in parts for k, v in part["losses"].items()}
    return {
        "stops": [part["stopped"] for part in parts],
        "same losses": not world.first or joined == reference["losses"],
        "same state": same_state(straight.out, broken.out),
    }


class Unused(DiTNetwork):
    """A network with a parameter that no step uses."""

    def __init__(self, config: DiT, *, num_ids: int, mask_id: int) -> None:
        super().__init__(config, num_ids=num_ids, mask_id=mask_id)
        self.nobodys = torch.nn.Parameter(torch.ones(3))


def learned(folder: Path, world: World, way: str) -> dict[str, Any]:
    """A schedule with parameters: stopped and resumed, beside a weight of the denoiser that no step uses; then for
    another objective, which uses none of the schedule's parameters."""
    real, DiT.build = DiT.build, lambda self, *, num_ids, mask_id: Unused(self, num_ids=num_ids, mask_id=mask_id)  # type: ignore[assignment,method-assign]
    try:
        facts = resumed(folder, world, 0, way, "fp32", "learned", **LEARNED)
        count = LEARNED | {
            "objective": MDLM(noise=learned_power.LearnedPower(), form="count"),
            "denoiser": DiT(**SMALL),
        }
        unused = make_config(folder, f"unused-{way}", parallel=way, **count)
        facts["unused"] = losses(unused)["losses"]
    finally:
        DiT.build = real  # type: ignore[method-assign]
    begun, ended = (load_checkpoint(Path(unused.out, "checkpoints", f"step-{step:08d}")) for step in (4, 12))
    assert begun is not None
    assert ended is not None
    names = ["objective.noise.log_powers", "objective.noise.mixture", "nobodys"]
    facts["still"] = all(begun.tensors["model"][k].equal(ended.tensors["model"][k]) for k in names)
    return facts


class Ends(Callback):
    def on_run(self, run: RunView) -> None:
        self.run = run

    def on_step(self, report: Any) -> None:
        if report.step == 3:
            self.run.stop("enough")


def ended(folder: Path, world: World) -> dict[str, Any]:
    """A callback of the first process ends the run: all leave at the same step, without an error."""
    config = make_config(folder, f"ends-{world.size}", parallel="ddp")
    model = train(config, callbacks=[Ends()], device="cpu")
    last = load_checkpoint(Path(config.out))
    return {"step": last.step if last is not None else None, "parameters": model.num_parameters}


def fallback(folder: Path, world: World) -> dict[str, Any]:
    """The newest checkpoint has a bad bit in the second process's share: all go on from the one before it."""
    config = make_config(folder, f"fallback-{world.size}", parallel="fsdp")
    whole = losses(config)
    checkpoints = Path(config.out) / "checkpoints"
    shard = checkpoints / "step-00000012" / "shard-00002-model-00001-of-00001.safetensors"
    before = {path.name: path.read_bytes() for path in shard.parent.glob("shard-*")}
    world.barrier()
    if world.first:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    world.barrier()
    again = losses(config, resume=True)
    world.barrier()
    after = {path.name: path.read_bytes() for path in shard.parent.glob("shard-*")}
    return {"losses": again["losses"], "skipped": again["skipped"], "before": whole["losses"], "same": before == after}


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def nonfinite(folder: Path, world: World) -> dict[str, Any]:
    """A gradient that is no number on one process alone: all skip the step; at the limit all stop."""
    real = Run._nats

    def poisoned(self: Run, part: Any, network: Any) -> Tensor:
        bad = self.world.rank == self.world.size - 1 and self.step in (2, 5)
        return real(self, part, network) * (float("nan") if bad else 1.0)

    Run._nats = poisoned  # type: ignore[method-assign]
    try:
        found: dict[str, Any] = losses(make_config(folder, "skip", on_nonfinite="skip", max_nonfinite=2))
        for name, limit in (("stop", 0), ("limit", 1)):
            how = {"on_nonfinite": "skip", "max_nonfinite": 1} if limit else {}
            try:
                losses(make_config(folder, name, **how))
            except NonFiniteError as e:
                found[name] = str(e)
    finally:
        Run._nats = real  # type: ignore[method-assign]
    return found


def work(folder: Path, asked: list[str]) -> None:
    with join_world("cpu") as world:

        def leave(name: str, found: dict[str, Any]) -> None:
            everybody = world.gather(found)
            if world.first:
                (folder / f"{name}-{world.size}.json").write_text(json.dumps(everybody))

        if "gradients" in asked:
            for kind, (way, micro), dtype in STEPPED[world.size]:
                config = make_config(folder, "gradients", kind, parallel=way, micro_batch=micro)
                found = one_step(config, world, dtype)
                if world.first:
                    name = f"gradients-{world.size}-{kind}-{way}-{micro}-{str(dtype)[6:]}"
                    save_file(found, folder / f"{name}.safetensors")
        if "losses" in asked:
            for way, micro in WAYS_OF[world.size]:
                name = f"losses-{way}-{micro}"
                config = make_config(folder, f"{name}-{world.size}", steps=20, parallel=way, micro_batch=micro)
                leave(name, losses(config))
            checkpointed = make_config(folder, f"ac-{world.size}", parallel="fsdp", checkpoint_activations=True)
            leave("checkpointed", losses(checkpointed))
        if "resume" in asked:
            for seed, way, precision in RESUMED[world.size]:
                leave(f"resume-{seed}-{way}-{precision}", resumed(folder, world, seed, way, precision))
        if "learned" in asked:
            for way in ("ddp", "fsdp"):
                leave(f"learned-{way}", learned(folder, world, way))
        if "ends" in asked:
            leave("ends", ended(folder, world))
        if "reshard" in asked:
            for way, save_as, stop_at in RESHARDED[world.size]:
                config = make_config(folder, "reshard", parallel=way, save_as=save_as)
                resume = (folder / "reshard" / "checkpoints").exists()
                world.barrier()
                leave(f"reshard-{stop_at}", losses(config, stop_at=stop_at, resume=resume))
        if "fallback" in asked:
            leave("fallback", fallback(folder, world))
        if "muon" in asked:
            for way in ("ddp", "fsdp"):
                leave(f"muon-{way}", losses(make_config(folder, f"muon-{way}", parallel=way, **MUON)))
            stopped = make_config(folder, "muon-stopped", parallel="fsdp", **MUON)
            losses(stopped, stop_at=6)
            leave("muon-resumed", losses(stopped, resume=True))
        if "windows" in asked:
            leave("windows", losses(windows(folder, f"windows-{world.size}")))
        if "compile" in asked:
            for way, precision in COMPILED:
                changes = {"precision": precision, "checkpoint_activations": True, "compile": True}
                config = make_config(folder, f"compile-{way}", parallel=way, **changes)
                torch._dynamo.reset()
                leave(f"compile-{way}", losses(config) | {"graphs": compiled_graphs()})
        if "nonfinite" in asked:
            leave("nonfinite", nonfinite(folder, world))
        if "errors" in asked:
            try:
                losses(make_config(folder, "uneven", batch=world.size * 2 + 1))
            except UsageError as e:
                leave("uneven", {"said": str(e)})
            try:
                losses(make_config(folder, "held"))
            except UnmaskError as e:
                leave("held", {"said": str(e)})
    assert not dist.is_initialized()


def main() -> None:
    learned_power.install()
    quick_gc.install()
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)  # a process that is forked must have no threads
    if "RANK" not in os.environ:
        Run(make_config(folder, "warm"), World(), resume=False, init=None)  # imports and packs, once for all
    for words in sys.argv[2:]:
        size, asked = words.split(":")
        if "RANK" in os.environ:
            work(folder, asked.split(","))
        else:
            forked(int(size), lambda asked=asked: work(folder, asked.split(",")))


if __name__ == "__main__":
    main()
