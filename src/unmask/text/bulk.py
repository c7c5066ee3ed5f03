"""Bulk generation into a folder: in parts that are written atomically, by any number of processes.

Text i depends only on the model, the options and (seed, i). The order defines the parts, and the batches of a part, so
a part is the same whichever process writes it: a killed call resumes without a gap or a duplicate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch

from unmask.constraints import Constraint
from unmask.denoisers import Denoiser
from unmask.distributed.stopping import stop_requests
from unmask.distributed.world import World
from unmask.errors import Stopped, UnmaskError, UsageError
from unmask.noise.learned import Detached
from unmask.reader import to_dict
from unmask.samplers import Sampler
from unmask.storage.atomic import atomic_folder, atomic_text, clean
from unmask.storage.digests import weights_digest
from unmask.storage.model_folder import unshared
from unmask.storage.untrusted import printable, read_json
from unmask.text.arguments import check_whole
from unmask.text.parts import Format, Record, check_format, first_wrong, part_name, record_of, write_part

if TYPE_CHECKING:
    from unmask.model import Model

MANIFEST = "generate.json"
FORMAT_VERSION = 1
_PART = re.compile(r"part-\d{5,}\.(jsonl|parquet)")
_ROW = {"jsonl": "line", "parquet": "row"}
Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to generate: `num` texts for each prompt, with the options of `Model.generate`.

    batch: texts to generate at a time. part: texts per file, which is JSON lines or Parquet. All options are part of
    the order, because a matrix product may round differently in a batch of another size.

    >>> Order(num=1000, part=256).parts
    [range(0, 256), range(256, 512), range(512, 768), range(768, 1000)]
    """

    num: int
    length: int | None = None
    prompts: tuple[str, ...] = ("",)
    suffix: str = ""
    sampler: Sampler | None = None
    seed: int = 0
    constraint: tuple[Constraint, ...] | None = None
    label: int | str | None = None
    guidance: float | None = None
    separator: str | None = None
    continuation_only: bool = False
    batch: int = 64
    part: int = 256
    format: Format = "jsonl"

    def __post_init__(self) -> None:
        check_whole(num=self.num, batch=self.batch, part=self.part, length=self.length, seed=self.seed)
        for name in ("num", "batch", "part"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.format not in get_args(Format):
            raise UsageError(f"format must be one of {', '.join(get_args(Format))}, got {self.format!r}")

    @property
    def total(self) -> int:
        return self.num * len(self.prompts)

    @property
    def parts(self) -> list[range]:
        """The text numbers of each file."""
        return [range(lo, min(lo + self.part, self.total)) for lo in range(0, self.total, self.part)]

    def texts(self, model: Model, numbers: range) -> list[str]:
        """The texts with these numbers, generated in one batch."""
        return model.generate(
            self.num,
            self.length,
            self.prompts,
            self.suffix,
            sampler=self.sampler,
            seed=self.seed,
            constraint=self.constraint,
            label=self.label,
            guidance=self.guidance,
            only=numbers,
            separator=self.separator,
            continuation_only=self.continuation_only,
        )

    def check(self, model: Model) -> None:
        """Refuse before the first text whatever would be refused later: a prompt that leaves no room, a label."""
        check_format(self.format)
        model.prompted(
            self.num,
            self.length,
            self.prompts,
            self.suffix,
            self.constraint,
            label=self.label,
            only=range(0, self.total, self.num),
            separator=self.separator,
        )

    def record(self, number: int, text: str) -> Record:
        """A text as stored in its part."""
        return record_of(number, self.seed, self.prompts[number // self.num], text)

    def manifest(self, model: Model) -> dict[str, Any]:
        """Everything that determines the texts, in the form that is stored."""
        length = (model.typical_length or model.length) if self.length is None else self.length
        end = model.separator if self.separator is None else self.separator
        weights = next(model.denoiser.parameters(), torch.empty(0))
        manifest = {
            "format_version": FORMAT_VERSION,
            "num": self.num,
            "part": self.part,
            "batch": min(self.batch, self.part),
            "seed": self.seed,
            "length": length,
            "prompts": self.prompts,
            "suffix": self.suffix,
            "sampler": to_dict(_without_weights(model.fit_sampler(self.sampler, length))),
            "constraint": to_dict(self.constraint),
            "label": model.class_of(self.label),
            "guidance": self.guidance,
            **({"separator": end} if end else {}),
            **({"continuation_only": True} if self.continuation_only else {}),
            **({} if self.format == "jsonl" else {"format": self.format}),
            "model": identity(model),
            "device": weights.device.type,
            "dtype": str(weights.dtype).removeprefix("torch."),
        }
        plain: dict[str, Any] = json.loads(json.dumps(manifest))  # exactly as it is read back, types included
        return plain


def generate_many(
    model: Model,
    order: Order,
    folder: str | Path,
    *,
    world: World | None = None,
    progress: Callable[[int, int], None] | None = None,
    note: Note | None = None,
) -> None:
    """Generate an order into a folder; repeating the call resumes one that was stopped or killed.

    Several processes share the parts. SIGTERM and Ctrl-C drop unfinished parts and raise Stopped. progress receives the
    number of finished texts and the total; note receives messages.

    >>> generate_many(model, Order(num=100_000, length=128), "texts")  # doctest: +SKIP
    """
    folder, world = Path(folder), world or World()
    order.check(model)
    manifest = order.manifest(model)
    others = [rank for rank, other in enumerate(world.gather(manifest)) if other != manifest]
    if others:
        raise UsageError(f"rank {world.rank} and rank {others[0]} differ in their model or options: give all the same")
    with stop_requests() as asked_to_stop:
        missing = world.from_first(lambda: _begin(folder, manifest, order, note))
        if not folder.is_dir():
            raise _not_shared(folder)
        clean(folder)  # files of dead writers: each process recognises those of its own id
        world.barrier()  # a live writer on another machine looks dead
        world.arm()
        parts = order.parts
        done = written = order.total - sum(len(parts[k]) for k in missing)
        for turn in range(0, len(missing), world.size):
            now = missing[turn : turn + world.size]
            mine = parts[now[world.rank]] if world.rank < len(now) else range(0)
            records: list[Record] = []
            stopping = False
            # All processes loop over as many batches as the longest part has, so none waits longer than a batch for
            # the others.
            for lo in range(0, len(parts[now[0]]), order.batch):
                if batch := mine[lo : lo + order.batch]:
                    records += map(order.record, batch, order.texts(model, batch))
                progress_of_ranks = world.gather((len(batch), asked_to_stop()))
                done += sum(count for count, _ in progress_of_ranks)
                if progress is not None:
                    progress(done, order.total)
                if stopping := any(asked for _, asked in progress_of_ranks):
                    break
            whole = len(records) == len(mine)
            if mine and whole:
                place = folder / part_name(now[world.rank], order.format)
                write_part(place, records, order.format, manifest)
            written += sum(world.gather(len(records) if whole else 0))
            if stopping and written < order.total:
                raise Stopped(f"stopped with {written:,} of {order.total:,} texts in {folder}")
        world.from_first(lambda: _finish(folder, manifest, order))


def _begin(folder: Path, manifest: dict[str, Any], order: Order, note: Note | None) -> list[int]:
    """Create the folder, or check that it belongs to this order; returns the parts still to be written."""
    if not folder.exists():
        with atomic_folder(folder) as new:
            (new / MANIFEST).write_text(_json(manifest, complete=False), encoding="utf-8")
        return list(range(len(order.parts)))
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else [folder.name]
    if MANIFEST in names:
        earlier = read_json(folder / MANIFEST)
        differing = [key for key in manifest | earlier if key != "complete" and manifest.get(key) != earlier.get(key)]
        # A call that failed before its first part left nothing that could be lost.
        if differing and any(_PART.fullmatch(name) for name in names):
            raise UsageError(
                f"{folder} was begun with another {differing[0]}, {_quoted(earlier, differing[0])} and not "
                f"{_quoted(manifest, differing[0])}: give the options it was begun with, or another folder"
            )
    elif names:
        raise UsageError(f"{folder} holds {names[0]} and no {MANIFEST}: give a folder of its own")
    missing = []
    for k, numbers in enumerate(order.parts):
        path = folder / part_name(k, order.format)
        if not path.exists():
            missing.append(k)
        elif (wrong := _wrong(path, order, numbers)) is not None:
            missing.append(k)
            if note is not None:
                note(f"{path} is damaged at {_ROW[order.format]} {wrong}: it is written anew")
    if missing:
        atomic_text(folder / MANIFEST, _json(manifest, complete=False))
    return missing


def _finish(folder: Path, manifest: dict[str, Any], order: Order) -> None:
    for path in (folder / part_name(k, order.format) for k in range(len(order.parts))):
        if not path.exists():
            raise _not_shared(path)
    clean(folder)
    if not read_json(folder / MANIFEST).get("complete"):
        atomic_text(folder / MANIFEST, _json(manifest, complete=True))


def _not_shared(path: Path) -> UnmaskError:
    return UnmaskError(f"{path} is not there: processes on several machines must share the folder that they write to")


def _wrong(path: Path, order: Order, numbers: range) -> int | None:
    """The first row that differs from what an order of this kind would write; None if there is none."""
    return first_wrong(path, order.format, len(numbers), lambda at, text: order.record(numbers[at], text))


def identity(model: Model) -> dict[str, Any]:
    """Identifies the model by its content, including all weights; its path does not matter.

    >>> identity(model)["weights"]  # a digest  # doctest: +SKIP
    """
    description = getattr(model.denoiser, "config", None)
    return {
        "weights": weights_digest(unshared(model.denoiser)),
        "denoiser": to_dict(description) if isinstance(description, Denoiser) else None,
        "objective": to_dict(model.objective),
        "tokenizer": model.tokenizer.fingerprint(),
    }


def _without_weights(sampler: Sampler) -> Sampler:
    """The sampler as stored in a file: without a noise schedule if that is the model's learned one, which is part of
    its weights."""
    changes: dict[str, Any] = {"noise": None} if isinstance(getattr(sampler, "noise", None), Detached) else {}
    if isinstance(inner := getattr(sampler, "inner", None), Sampler):
        changes["inner"] = _without_weights(inner)
    return cast(Sampler, replace(cast(Any, sampler), **changes)) if changes else sampler


def _json(manifest: dict[str, Any], *, complete: bool) -> str:
    return json.dumps({"complete": complete} | manifest, indent=1) + "\n"


def _quoted(manifest: dict[str, Any], key: str) -> str:
    return printable(json.dumps(manifest.get(key)), 60)
