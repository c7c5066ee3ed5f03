"""A report on runs: read, laid out, written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from unmask.errors import UsageError
from unmask.reporting.as_html import as_html
from unmask.reporting.as_markdown import as_markdown, picture_of
from unmask.reporting.blocks import Document
from unmask.reporting.content import report_of
from unmask.reporting.runs import check_runs, read_model, read_results, read_run
from unmask.storage.atomic import atomic_text

Format = Literal["html", "md", "both"]
NAME = "report"


def make_report(
    runs: Sequence[str],
    *,
    results: Sequence[str] = (),
    samples: int = 2,
    length: int | None = None,
    seed: int = 0,
    device: str | None = None,
    words: Sequence[str] = (),
) -> Document:
    """Build the report on the runs. results: folders of suites. samples: number of texts that each model writes, 0 to
    4.

    words: the command line that requested the report, quoted in it.

    >>> make_report(["runs/demo"], samples=0).title  # doctest: +SKIP
    'Report: demo'
    """
    check_runs(runs)
    if not 0 <= samples <= 4:
        raise UsageError(f"--samples must be 0 to 4, got {samples}")
    if length is not None and length < 1:
        raise UsageError(f"--length must be at least 1, got {length}")
    names = [Path(run).resolve().name for run in runs]
    names = names if len(set(names)) == len(names) else list(runs)
    read = [read_run(run, name) for run, name in zip(runs, names, strict=True)]
    for run in read:
        read_model(run, num=samples, length=length, seed=seed, device=device)
    left = read_results(read, results)
    return report_of(read, left, words or ["report", *runs])


def write_report(document: Document, folder: Path, form: Format) -> list[Path]:
    """Write the report, each file atomically; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if form in ("html", "both"):
        written.append(folder / f"{NAME}.html")
        atomic_text(written[-1], as_html(document))
    if form in ("md", "both"):
        picture = picture_of(document)
        if picture is not None:
            atomic_text(folder / f"{NAME}.svg", picture)
        written.append(folder / f"{NAME}.md")
        atomic_text(written[-1], as_markdown(document, f"{NAME}.svg"))
    return written
