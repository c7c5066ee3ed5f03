"""What must not change by itself: texts of every sampler on a table network, and losses of every objective.

`python tests/golden/cases.py` writes golden.json anew. A change of it changes what people get for their seeds, and is
listed in CHANGES below.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import unmask

GOLDEN = Path(__file__).with_name("golden.json")
V, L, STEPS = 11, 14, 20

# Intended changes since the file was first written, newest last: what changed, and why.
CHANGES: tuple[str, ...] = ()

SAMPLERS: dict[str, dict[str, Any]] = {
    "ancestral": {},
    "ancestral steps=4": {"steps": 4},
    "ancestral steps=none": {"steps": None},
    "ancestral tokens=3": {"tokens": 3},
    "ancestral cosine": {"steps": 6, "noise": "cosine"},
    "ancestral top_p": {"top_p": 0.6, "temperature": 0.8},
    "ancestral hybrid": {"draw": "hybrid", "sure": 0.3},
    "ancestral cooling": {"temperature_end": 0.2},
    "block": {"size": 4},
    "confidence": {"steps": 5},
    "confidence random": {"tokens": 2, "random": 0.5},
    "entropy": {"tokens": 2},
    "entropy_bounded": {"gamma": 2.0},
    "left_to_right": {},
    "left_to_right random": {"random": 0.4, "tokens": 2},
    "margin": {"steps": 4},
    "posterior": {"steps": 9},
    "predictor_corrector": {"steps": 7},
    "refine": {"rounds": 2, "share": 0.3},
    "remdm": {"steps": 12, "eta": 0.2},
    "remdm rescale": {"steps": 12, "variant": "rescale", "eta": 0.3},
    "remdm confidence": {"steps": 12, "variant": "confidence", "eta": 0.6},
    "remdm loop": {"steps": 8, "variant": "loop", "loop": 6},
    "semi_ar": {"window": 8},
    "threshold": {"tokens": 3},
}
OBJECTIVES = {
    "mdlm": {},
    "mdlm count": {"objective.form": "count"},
    "mdlm T=8": {"objective.steps": "8"},
    "mdlm cosine": {"objective.noise": "cosine"},
    "mdlm conditioned": {"denoiser.conditioning": "level"},
    "d3pm": {"objective": "d3pm", "objective.steps": "8"},
    "ar": {"objective": "ar", "denoiser.causal": "true"},
}


def table() -> Any:
    """x_theta from a hash of what is visible: every draw depends on every choice before it, in float64."""
    generator = torch.Generator().manual_seed(5)
    per_token = torch.randn(V + 1, L, V + 1, generator=generator, dtype=torch.float64)
    bias = torch.randn(L, V + 1, generator=generator, dtype=torch.float64)

    def logits(z_BL: torch.Tensor, level_B: torch.Tensor) -> torch.Tensor:
        position_L = torch.arange(z_BL.shape[1])
        seen_BI = per_token[z_BL, position_L].sum(dim=1) / 2
        return seen_BI[:, None] + bias[position_L] + level_B.double()[:, None, None]

    return unmask.as_denoiser(logits, vocab_size=V, mask_id=V)


def texts() -> dict[str, list[list[int]]]:
    """The tokens that each sampler writes into an empty canvas and into one with a prompt and a gap."""
    net, found = table(), {}
    given = torch.full((3, L), V)
    given[:, :3], given[:, 9] = torch.tensor([1, 4, 2]), 7
    for name, options in SAMPLERS.items():
        plugin = unmask.samplers.room.get(name.split()[0])
        if "noise" in options:
            options = options | {"noise": unmask.noise.room.get(options["noise"])()}
        sampler = plugin(**options)
        rows = []
        for canvas in (
            unmask.Canvas.blank(num=3, length=L, mask_id=V, seed=1),
            unmask.Canvas.of(given, mask_id=V, seed=2),
        ):
            rows += unmask.sample(net, canvas, sampler).tokens.tolist()
        found[name] = rows
    return found


class Losses(unmask.Callback if hasattr(unmask, "Callback") else object):  # type: ignore[misc]
    """Collects what every step reports."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.bounds: list[float] = []

    def on_step(self, report: Any) -> None:
        self.losses.append(report.loss)

    def on_valid(self, step: int, bound: Any) -> None:
        self.bounds.append(bound.nats_per_token)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            return lambda *given, **more: None
        raise AttributeError(name)


def config(out: Path, overrides: dict[str, str]) -> Any:
    text = out.parent / "text.txt"
    lines = (f"the {a} {b} {c}" for a in ("old", "new") for b in ("red", "blue", "grey") for c in ("cat", "dog", "hen"))
    text.write_text("\n".join(lines) * 8)
    small = {
        "out": str(out),
        "steps": str(STEPS),
        "batch": "8",
        "data.length": "24",
        "valid_every": "10",
        "data.train": "text",
        "data.train.path": str(text),
        "data.cache": str(out.parent / "cache"),
        "tokenizer": "bytes",
        "denoiser": "dit",
        "denoiser.hidden": "32",
        "denoiser.blocks": "2",
        "denoiser.heads": "2",
        "log_every": "1",
        "sample_every": "0",
    }
    return unmask.load_config("demo", small | overrides)


def losses(only: tuple[str, ...] | None = None, keep: Path | None = None) -> dict[str, list[float]]:
    """Of every step, then the validation bounds, for each objective."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in OBJECTIVES.items():
            if only is not None and name not in only:
                continue
            seen = Losses()
            unmask.train(
                config((keep or Path(folder)) / name.replace(" ", "-"), overrides), callbacks=[seen], device="cpu"
            )
            found[name] = seen.losses + seen.bounds
    return found


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({"texts": texts(), "losses": losses()}, indent=None, separators=(",", ":")) + "\n")
