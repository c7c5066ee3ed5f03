"""How far the reading of a corpus is, for whoever looks at a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def reading_bar(label: str = "reading the corpus") -> Iterator[Callable[[int], None] | None]:
    """A progress bar for `build_rows` on stderr; None where stderr is no terminal.

    >>> with reading_bar() as progress:  # doctest: +SKIP
    ...     rows = build_rows(corpus, tokenizer, progress=progress)
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda amount: bar.advance(task, amount)
