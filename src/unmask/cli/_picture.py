"""A picture of the masks opening: a few moments of one row, as a self-contained SVG."""

from __future__ import annotations

from html import escape
from pathlib import Path

from unmask.data.tokenizers import Tokenizer
from unmask.samplers import Step
from unmask.storage.atomic import atomic_text

COLUMNS = 64  # characters a line
CHAR, LINE, PAD = 8.4, 20, 16
STYLE = """
  text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre; }
  .page { fill: #ffffff; } .mask { fill: #d0d7de; } .new { fill: #1a7f37; font-weight: bold; }
  .given { font-weight: bold; } .note { fill: #6e7781; font-size: 12px; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .page { fill: #0d1117; } .mask { fill: #30363d; } .new { fill: #3fb950; }
    .note { fill: #8b949e; }
  }
"""
Piece = tuple[str, str]  # one character and its class


class Recorder:
    """Remembers the first row at every step and draws `moments` of them, spread over what has opened."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.rows: list[list[int]] = []

    def __call__(self, step: Step) -> None:
        if not self.rows:
            first = step.tokens_BL[0].clone()
            first[step.position_N[step.row_N == 0]] = self.tokenizer.mask_id
            self.rows.append(first.tolist())
        self.rows.append(step.tokens_BL[0].tolist())

    def save(self, path: Path, moments: int = 4) -> None:
        atomic_text(path, self.svg(moments))

    def svg(self, moments: int) -> str:
        mask = self.tokenizer.mask_id
        left = [row.count(mask) for row in self.rows]
        marks = [left[0] * (moments - 1 - i) / (moments - 1) for i in range(moments)]
        # The first moment at which no more than this many masks are left; the same one is not drawn twice.
        chosen = sorted({next(i for i, n in enumerate(left) if n <= mark) for mark in marks})
        body, y = [], PAD
        before: list[int] | None = None
        for i in chosen:
            note = f"call {i} of {len(self.rows) - 1}, {left[i]} masks left"
            body.append(f'<text class="note" x="{PAD}" y="{y + 12}">{note}</text>')
            y += LINE
            for line in _lines(self._pieces(self.rows[i], before)):
                body += _draw(line, y)
                y += LINE
            y += PAD
            before = self.rows[i]
        width = 2 * PAD + COLUMNS * CHAR
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {y}" width="{width:.0f}" height="{y}">'
            f'<style>{STYLE}</style><rect class="page" width="100%" height="100%" rx="6"/>\n'
            + "\n".join(body)
            + "\n</svg>\n"
        )

    def _pieces(self, row: list[int], before: list[int] | None) -> list[Piece]:
        pieces: list[Piece] = []
        for position, token in enumerate(row):
            if token == self.tokenizer.mask_id:
                pieces.append(("", "mask"))
                continue
            if token == self.tokenizer.eot_id:
                break
            fixed = self.rows[0][position] != self.tokenizer.mask_id
            new = before is not None and before[position] == self.tokenizer.mask_id
            kind = "given" if fixed else "new" if new else "old"
            pieces += [(c, kind) for c in self.tokenizer.decode([token])]
        return pieces


def _lines(pieces: list[Piece]) -> list[list[Piece]]:
    lines: list[list[Piece]] = [[]]
    for piece in pieces:
        if piece[0] == "\n" or len(lines[-1]) == COLUMNS:
            lines.append([])
        if piece[0] != "\n":
            lines[-1].append(piece if not piece[0] or piece[0].isprintable() else ("·", piece[1]))
    return lines


def _draw(line: list[Piece], y: float) -> list[str]:
    """Masks as squares, runs of one class as one text element."""
    out, start = [], 0
    while start < len(line):
        end, kind = start, line[start][1]
        while end < len(line) and line[end][1] == kind:
            end += 1
        x = PAD + start * CHAR
        if kind == "mask":
            out += [
                f'<rect class="mask" x="{x + i * CHAR + 0.7:.1f}" y="{y + 2}" width="7" height="13" rx="1.5"/>'
                for i in range(end - start)
            ]
        else:
            text = escape("".join(c for c, _ in line[start:end]))
            length = (end - start) * CHAR
            out.append(f'<text class="{kind}" x="{x:.1f}" y="{y + 13}" textLength="{length:.1f}">{text}</text>')
        start = end
    return out
