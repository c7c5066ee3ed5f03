"""Small labelled files that tests fine-tune on, and the smallest models for it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tiny import TINY
from unmask.config import OptimConfig
from unmask.data.tokenizers import Tokenizer, load_tokenizer
from unmask.denoisers import Denoiser
from unmask.denoisers.dit import DiT
from unmask.finetuning.config import FinetuneConfig, TaskData
from unmask.model import Model
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM

CAUSAL = DiT(size="nano", hidden=32, blocks=1, heads=2, qk_norm=False, zero_init=False, causal=True)
QUICK = OptimConfig(lr=1e-2, muon=False, warmup=0.1, schedule="constant", ema=0.0)


def small_model(denoiser: Denoiser = TINY, tokenizer: Tokenizer | None = None, **how: Any) -> Model:
    """A model that has learned nothing yet, of bytes."""
    torch.manual_seed(0)
    tokenizer = tokenizer or load_tokenizer("bytes")
    network = denoiser.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    denoiser.describe(network)
    objective = AR() if denoiser.causal else MDLM()
    return Model(denoiser=network, tokenizer=tokenizer, objective=objective, **{"length": 32, **how})


def write_tsv(path: Path, rows: Sequence[Sequence[Any]]) -> str:
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def letters(count: int, seed: int) -> list[tuple[str, str]]:
    """A few letters; the class says whether there is an x among them."""
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        text = [draw.choice("abcdef") for _ in range(draw.randint(4, 9))]
        if i % 2:
            text[draw.randrange(len(text))] = "x"
        rows.append(("".join(text), "with" if i % 2 else "without"))
    return rows


def letters_config(folder: Path, *, train: int = 96, **options: Any) -> FinetuneConfig:
    """A fine-tuning on `letters`, written to the folder."""
    data = TaskData(
        train=write_tsv(folder / "train.tsv", [("text", "label"), *letters(train, 0)]),
        valid=write_tsv(folder / "valid.tsv", [("text", "label"), *letters(32, 1)]),
        test=write_tsv(folder / "test.tsv", [("text", "label"), *letters(32, 2)]),
    )
    how: dict[str, Any] = {
        "data": data,
        "out": str(folder / "out"),
        "optim": QUICK,
        "batch": 16,
        "epochs": 2,
        "precision": "fp32",  # what is learned of so little is the same on every CPU
        "seeds": 1,
    }
    return FinetuneConfig(**how | options)


def numbers_of(folder: Path, start: str, seed: int | str) -> dict[str, Any]:
    """What a finished seed wrote down, without what two runs of it differ in."""
    numbers: dict[str, Any] = json.loads((folder / "seeds" / f"{start}-{seed}.json").read_text())
    return {key: value for key, value in numbers.items() if key != "seconds"}
