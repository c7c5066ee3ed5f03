"""Planning: sums written forward and reversed, by diffusion in several orders and by autoregression.

Trains each recipe in both directions with several seeds, measures each model with the suite `planning`, and writes a
table. An interrupted call resumes: what is trained and measured is not repeated.

    python benchmarks/planning.py --out runs/planning --seeds 2
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from unmask.cli import run
from unmask.storage.atomic import atomic_text

HERE = Path(__file__).parent / "conditional"
DIRECTIONS = ("forward", "reversed")
RECIPES = {"autoregression": "sums_ar.toml", "diffusion": "sums.toml"}
WRITING: dict[str, dict[str, dict[str, Any]]] = {
    "autoregression": {"left to right": {"name": "left_to_right"}},
    "diffusion": {
        "all at once": {"name": "ancestral", "steps": 1},
        "surest first": {"name": "confidence", "tokens": 1},
        "random order": {"name": "ancestral", "steps": None},
        "left to right": {"name": "left_to_right"},
    },
}
NUMBERS = ("exact match", "right digits")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", default="runs/planning")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of each run (default: the recipe's)")
    parser.add_argument("--device", default=None)
    args = parser.parse_args()
    device = [] if args.device is None else ["--device", args.device]
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for seed in range(args.seeds):
        for system, recipe in RECIPES.items():
            for direction in DIRECTIONS:
                folder = Path(args.out) / f"{system}-{direction}-s{seed}"
                if code := train(folder, recipe, direction, seed, args.steps, device):
                    return code
                for order, sampler in WRITING[system].items():
                    out = folder / order.replace(" ", "-")
                    words = ["eval", str(folder), "--suite", "planning", "--out", str(out), *device]
                    if code := run([*words, "--sampler", json.dumps(sampler), "--batch", "250"]):
                        return code
                    numbers = json.loads((out / f"{direction}.json").read_text(encoding="utf-8"))
                    found.setdefault((system, order, direction), []).append(numbers)
        table = as_table(found)
        atomic_text(Path(args.out) / "planning.md", table)
    print(table)
    return 0


def train(folder: Path, recipe: str, direction: str, seed: int, steps: int | None, device: list[str]) -> int:
    """Train, or go on with it; nothing where it is done."""
    done = folder / "trained"
    if done.exists():
        return 0
    words = ["train", str(folder), "--resume"] if (folder / "recipe.json").exists() else ["train", str(HERE / recipe)]
    if words[-1] != "--resume":
        words += ["--out", str(folder), "--seed", str(seed)]
        words += ["--data.train.direction", direction, "--data.valid.direction", direction]
        words += [] if steps is None else ["--steps", str(steps)]
    code = run([*words, *device])
    if not code:
        atomic_text(done, "")
    return code


def as_table(found: dict[tuple[str, str, str], list[dict[str, Any]]]) -> str:
    """A line a system and order: each number of each direction, of every seed."""
    columns = ["system", "order", *(f"{name}, {direction}" for direction in DIRECTIONS for name in NUMBERS)]
    rows = [columns, ["---"] * len(columns)]
    for system, order in dict.fromkeys((system, order) for system, order, _ in found):
        cells = [system, order]
        for direction in DIRECTIONS:
            several = found.get((system, order, direction), [])
            cells += [" / ".join(f"{number(one, name):.1f}" for one in several) for name in NUMBERS]
        rows.append(cells)
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def number(numbers: dict[str, Any], name: str) -> float:
    return float(next(one["value"] for one in numbers["scores"] if (one["of"], one["name"]) == ("all", name)))


if __name__ == "__main__":
    sys.exit(main())
