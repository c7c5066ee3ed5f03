"""Add a trained model to the built-in ones, with a card of measured figures.

    python benchmarks/card.py stories --model FOLDER --recipe stories \\
        --eval eval.json --metrics metrics.jsonl --judge judged/points.jsonl --opponent eval_ar.json

--model: a model folder, with weights whole or in parts. --eval, --opponent: the output of `unmask eval --json` for the
model and for its autoregressive opponent on the validation texts. --metrics: the run's metrics, or those of several
runs, each started from the weights of the previous one. --judge: points.jsonl of `unmask frontier`, one for each way of
sampling. The samples are those of seeds 0 to 3, without selection. What is not given is left out. With --card-only the
weights stay unchanged. The text beside the figures comes from cards/NAME.toml.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from unmask.config import load_config
from unmask.evaluation.judging.frontier import read_points
from unmask.evaluation.judging.frontier_report import table
from unmask.model import Model, load
from unmask.samplers.ancestral import Ancestral
from unmask.samplers.drawing import Drawing
from unmask.samplers.remdm import ReMDM
from unmask.storage.atomic import write_file
from unmask.storage.built_in import CARD, MODELS
from unmask.storage.model_folder import unshared, write_folder
from unmask.storage.weight_parts import WHOLE, weight_files, write_parts

MOST = 15 << 20  # bytes of a part
SEEDS = (0, 1, 2, 3)
STEPS, BEST_STEPS = 128, 256


def place(model: Model, folder: Path) -> None:
    """The model's files, its weights as bf16 parts; what was there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    write_folder(folder, model)
    (folder / WHOLE).unlink()
    write_parts(folder, {name: t.to(torch.bfloat16) for name, t in unshared(model.denoiser).items()}, MOST)


def card(name: str, model: Model, folder: Path, args: argparse.Namespace) -> str:
    words = tomllib.loads((Path(__file__).parent / "cards" / f"{name}.toml").read_text(encoding="utf-8"))
    parts = [f"# {name}", words["summary"], facts(model, folder, args)]
    parts += ["## Data", words["data"].strip(), "## Licence", words["licence"]]
    if args.eval:
        parts += ["## Bound", bound(_json(args.eval), _json(args.opponent))]
    if args.metrics:
        parts += ["Validation over training (some of its rows, one draw each):", curve(_course(args.metrics))]
    if args.judge:
        parts += ["## Texts under a judge", *(judged(read_points(Path(path))) for path in args.judge)]
    return "\n\n".join([*parts, "## Samples", samples(model), "## Limits", words["limits"].strip()]) + "\n"


def facts(model: Model, folder: Path, args: argparse.Namespace) -> str:
    size = sum(path.stat().st_size for path in weight_files(folder))
    kind = "autoregressive" if model.denoiser.causal else "masked diffusion"
    rows = {
        "kind": f"{kind}, {model.num_parameters / 1e6:.1f} M parameters, {size / 1e6:.1f} MB in bf16",
        "vocabulary": f"{model.tokenizer.num_ids} ids, the mask among them",
        "window": f"{model.length} tokens; a text has {model.typical_length or model.length} unless told otherwise",
    }
    own, plain = asdict(model.drawing), asdict(Drawing())
    if changed := [key for key in own if own[key] != plain[key]]:
        said = " and ".join(f"{key} = {own[key]}" for key in changed)
        back = " ".join(f"--{key.replace('_', '-')} {plain[key]}" for key in changed)
        rows["drawing"] = f"{said} unless told otherwise; `{back}` is the model's own law"
    if args.recipe and args.metrics:
        config = load_config(args.recipe)
        done = max(line["step"] for line in _course(args.metrics))
        texts = done * config.batch
        tokens = f", about {texts * model.typical_length / 1e9:.2f} G tokens" if model.typical_length else ""
        rows["training"] = f"recipe `{args.recipe}`: {done:,} steps of {config.batch} texts{tokens}"
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())])


def bound(found: dict[str, Any], opponent: dict[str, Any] | None) -> str:
    """On validation texts, one text a row; with its interval."""

    def line(name: str, got: dict[str, Any], sign: str) -> str:
        (lo, hi), (ppl_lo, ppl_hi) = got["bits_per_byte_ci95"], got["ppl_ci95"]
        return (
            f"| {name} | {sign} {got['bits_per_byte']:.4f} ({lo:.4f}–{hi:.4f}) | {sign} {got['ppl']:.3f} "
            f"({ppl_lo:.3f}–{ppl_hi:.3f}) | {got['sequences']:,} | {got['tokens']:,} |"
        )

    head = "| | bits per byte (95%) | perplexity of a token (95%) | texts | tokens |"
    lines = [head, "| --- | --- | --- | --- | --- |", line("this model", found, "≤")]
    if opponent is not None:
        lines.append(line("autoregressive, same size", opponent, "="))
    note = "The bound is given each text's number of tokens, which the autoregressive value is not."
    return "\n".join(lines) + f"\n\n{note}"


def judged(lines: list[dict[str, Any]]) -> str:
    """A frontier's table below what its points share."""
    real, *points = lines
    shared = dict(set.intersection(*(set(point["options"].items()) for point in points)))
    said = [f"the sampler {shared['sampler']}"] if "sampler" in shared else []
    said += [f"{key} {float(shared[key]):g}" for key in ("temperature", "top_p") if float(shared.get(key, 1)) != 1]
    names = [", ".join(_named(*one) for one in point["options"].items() if one[0] not in shared) for point in points]
    rows = [real, *(point | {"name": name or point["name"]} for point, name in zip(points, names, strict=True))]
    judge = f"Judge: {real['protocol']['judge']}; {real['protocol']['texts']} texts."
    return f"{'With ' + ' and '.join(said) if said else 'As it is, nothing cut'}. {judge}\n\n{table(rows)}"


def _named(option: str, value: str) -> str:
    return f"T = {value}" if option == "steps" else f"{option} {value}"


def curve(lines: list[dict[str, Any]]) -> str:
    points = [line for line in lines if line.get("valid_bits_per_byte") is not None]
    chosen = points if len(points) <= 10 else [points[round(i * (len(points) - 1) / 9)] for i in range(10)]
    steps = " | ".join(f"{point['step']:,}" for point in chosen)
    values = " | ".join(f"{point['valid_bits_per_byte']:.3f}" for point in chosen)
    return f"| step | {steps} |\n|{' --- |' * (len(chosen) + 1)}\n| bits per byte | {values} |"


def samples(model: Model) -> str:
    own = model.sampler
    ways: list[tuple[str, Any]] = [("as it writes by itself", own)]
    if isinstance(own, Ancestral):
        ways = [(f"{STEPS} steps", replace(own, steps=STEPS))]
        best = ReMDM(steps=BEST_STEPS, noise=own.noise, **asdict(model.drawing))
        ways.append((f"with remasking (`--sampler remdm --steps {BEST_STEPS}`)", best))
    parts = []
    for said, sampler in ways:
        parts.append(f"Seeds {SEEDS[0]} to {SEEDS[-1]}, {said}, nothing else set and none picked by hand.")
        parts += [_quoted(model.generate(sampler=sampler, seed=seed)[0]) for seed in SEEDS]
    return "\n\n".join(parts)


def _quoted(text: str) -> str:
    return "\n>\n".join(f"> {line.strip()}" for line in text.splitlines() if line.strip())


def _json(path: str | None) -> Any:
    return None if path is None else json.loads(Path(path).read_text(encoding="utf-8"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _course(metrics: list[str]) -> list[dict[str, Any]]:
    """The lines of runs that went on from one another, their steps counted through."""
    found: list[dict[str, Any]] = []
    for path in metrics:
        before = max((line["step"] for line in found), default=0)
        later = [line for line in _lines(Path(path)) if not found or line["step"] > 0]
        found += [line | {"step": line["step"] + before} for line in later]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--model", help="the trained model's folder")
    parser.add_argument("--card-only", action="store_true", help="the model is in place: write its card anew")
    for name in ("recipe", "eval", "opponent"):
        parser.add_argument(f"--{name}")
    for name in ("metrics", "judge"):
        parser.add_argument(f"--{name}", nargs="+")
    args = parser.parse_args()
    folder = MODELS / args.name
    if not args.card_only:
        if not args.model:
            parser.error("give --model, or --card-only")
        model = load(args.model, device="cpu")
        if args.recipe:
            model.drawing = load_config(args.recipe).drawing
        place(model, folder)
    text = card(args.name, load(folder, device="cpu"), folder, args)  # as users get it: bf16
    (folder / CARD).unlink(missing_ok=True)
    write_file(folder / CARD, [text.encode()])
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
