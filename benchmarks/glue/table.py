"""Table 4 at small scale, of the folders that benchmarks/glue/table4.toml has made: python benchmarks/glue/table.py OUT

Of each task its first metric, in hundredths, over seeds; of each seed the mean over tasks. The differences to the
masked language model are of those means, with Welch's 95% interval over seeds: another draw of the head, of the order
and of dropout, not of the examples and not of the pretraining, of which there is one. Task by task they are paired, by
example and seed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unmask.evaluation.measurement import student_975
from unmask.finetuning.gaps import GAP_COLUMNS, GAP_NOTE, gaps_of_folders
from unmask.finetuning.results import ABOUT
from unmask.finetuning.suites import find_suite
from unmask.finetuning.table import over_seeds, table

SUITE = find_suite("glue")
MODELS = {"ar": "AR", "mlm": "MLM", "mdlm_ft": "MLM + MDLM-FT"}
NEAR = 1.5  # points


def scores(folder: Path) -> dict[str, dict[int, float]]:
    """Task → seed → its first metric on what is reported, over folds their mean by examples; of finished seeds."""
    found: dict[str, dict[int, float]] = {}
    for task in SUITE.chosen(None):
        runs: dict[int, list[dict[str, Any]]] = {}
        for path in sorted((folder / task.name / "seeds").glob("model-*.json")):
            said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            runs.setdefault(said["seed"], []).append(said)
        folds = max(map(len, runs.values()), default=0)
        for seed, every in runs.items():
            if len(every) == folds:
                scores = [one["scores"]["test"][task.metrics[0]] for one in every]
                sizes = [one["examples"]["test"] for one in every] if folds > 1 else [1]
                mean = sum(score * size for score, size in zip(scores, sizes, strict=True)) / sum(sizes)
                found.setdefault(task.name, {})[seed] = mean
    return found


def means(found: dict[str, dict[int, float]], tasks: Sequence[str]) -> list[float]:
    """Of each seed that has all tasks, their mean."""
    seeds = set.intersection(*(set(found.get(task, {})) for task in tasks)) if tasks else set()
    return [statistics.fmean(found[task][seed] for task in tasks) for seed in sorted(seeds)]


def welch(one: Sequence[float], other: Sequence[float]) -> tuple[float, float] | None:
    """The difference of two means and half its 95% interval.

    >>> welch([1.0, 3.0], [0.0, 0.0])[0]
    2.0
    """
    if min(len(one), len(other)) < 2:
        return None
    parts = [statistics.variance(values) / len(values) for values in (one, other)]
    total = sum(parts)
    sizes = (len(one) - 1, len(other) - 1)
    freedom = total**2 / sum(part**2 / size for part, size in zip(parts, sizes, strict=True)) if total else sum(sizes)
    return statistics.fmean(one) - statistics.fmean(other), student_975(max(1, int(freedom))) * math.sqrt(total)


def cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    found = over_seeds(values)
    half = "" if found["ci95"] is None else f" ± {50 * (found['ci95'][1] - found['ci95'][0]):.1f}"
    return f"{100 * found['mean']:z.1f}{half} ({len(values)})"


def verdicts(by_model: dict[str, list[float]]) -> list[str]:
    """What the table was made to say, each with its interval."""
    said = []
    for name, claim in (("ar", "is behind"), ("mdlm_ft", f"is within {NEAR} points")):
        found = welch(by_model[name], by_model["mlm"])
        if found is None:
            said.append(f"- {MODELS[name]} against MLM: fewer than two seeds with all tasks.")
            continue
        gap, half = 100 * found[0], 100 * found[1]
        if name == "ar":
            word = "yes" if gap + half < 0 else "no" if gap - half > 0 else "not told apart"
        else:
            inside = abs(gap) + half <= NEAR
            word = "yes" if inside else "no" if abs(gap) - half > NEAR else "not decided by these seeds"
        said.append(f"- {MODELS[name]} {claim}: {word}; the difference to MLM is {gap:+.2f} ± {half:.2f} points.")
    return said


def bounds(out: Path) -> list[str]:
    """Bits per byte on the validation articles, and how far the bound falls."""
    said = []
    for name, title in (("ar", "AR, exact"), ("fall", "MLM + MDLM-FT against MLM, both bounds")):
        path = out / "bound" / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))
            said.append(f"- {title}: {_bound(found)}")
    return said


def _bound(found: dict[str, Any]) -> str:
    said = f"{found['bits_per_byte']:.4f} bits per byte, {found['nats_per_token']:.4f} nats per token"
    if "against" not in found:
        return f"{said}."
    other, gap = found["against"], found["difference"]
    half = (gap["ci95"][1] - gap["ci95"][0]) / 2
    return (
        f"{said}, before {other['bits_per_byte']:.4f} and {other['nats_per_token']:.4f}; the difference is "
        f"{gap['value']:+.4f} ± {half:.4f} {gap['unit']} (95% over texts, the same rows and masks)."
    )


def by_task(out: Path) -> list[str]:
    """The paired gaps of each task's first metric, where the folders hold the answers."""
    lines = []
    folders = {name: out / "glue" / name for name in MODELS}
    for name, folder in folders.items():
        if name == "mlm" or not all(any(one.glob(f"*/{ABOUT}")) for one in (folder, folders["mlm"])):
            continue
        for task, gaps in gaps_of_folders(folder, [folders["mlm"]]).items():
            metric, _, *rest = gaps[0].cells()
            lines.append([MODELS[name], SUITE.tasks[task].title, metric, *rest])
    return [table(["to MLM", "task", GAP_COLUMNS[0], *GAP_COLUMNS[2:]], lines), GAP_NOTE] if lines else []


def page(out: Path) -> str:
    by_model = {name: scores(out / "glue" / name) for name in MODELS}
    tasks = [task for task in SUITE.chosen(None) if any(task.name in found for found in by_model.values())]
    names = [task.name for task in tasks]
    seeds = {name: means(found, names) for name, found in by_model.items()}
    columns = ["", *(f"{task.title} ({task.metrics[0]})" for task in tasks), "mean"]
    lines = [
        [title, *(cell(list(by_model[name].get(task, {}).values())) for task in names), cell(seeds[name])]
        for name, title in MODELS.items()
    ]
    for name in SUITE.systems:
        quoted = [task.quoted.get(name) for task in tasks]
        known = [value for value in quoted if value is not None]
        mean = f"{statistics.fmean(known):.1f}" if known and len(known) == len(quoted) else ""
        lines.append([f"{name} (quoted)", *("" if value is None else f"{value:.1f}" for value in quoted), mean])
    legend = "Hundredths, mean ± Student's 95% interval over seeds (how many seeds)."
    parts = ["# Table 4 at small scale", table(columns, lines), legend, "\n".join(verdicts(seeds))]
    parts += [*by_task(out), "\n".join(bounds(out)), SUITE.quotation]
    return "\n\n".join(part for part in parts if part)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the folder of benchmarks/stages.py")
    print(page(parser.parse_args(words).out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
