"""A page that replays the denoising: a single file with data, style and script, which loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from unmask.data.tokenizers import Tokenizer
from unmask.samplers import Step
from unmask.storage.atomic import atomic_text


class Page:
    """Records every step of every row, and writes the page."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.rows: list[list[int]] = []  # before anything was written
        self.steps: list[dict[str, Any]] = []
        self.before_BL = torch.empty(0)
        self.chosen: list[int] = []  # rows that became the result, if several candidates were tried

    def __call__(self, step: Step) -> None:
        if not self.rows:
            given_BL = step.tokens_BL.clone()
            given_BL[step.row_N, step.position_N] = self.tokenizer.mask_id
            self.rows, self.before_BL = given_BL.tolist(), given_BL
        lists = [x.tolist() for x in (step.row_N, step.position_N, step.token_N)]
        lists.append([_prob(x) for x in step.log_prob_N.cpu().double().exp().tolist()])
        if step.others is None:
            lists += [[None] * len(lists[0])] * 2
        else:
            pairs = zip(step.others.token_NK.tolist(), step.others.prob_NK.tolist(), strict=True)
            lists.append([_prob(x) for x in step.others.prob_N.tolist()])
            lists.append([[[t, _prob(p)] for t, p in zip(*pair, strict=True)] for pair in pairs])
        opened = [list(one) for one in zip(*lists, strict=True)]
        # The masks after the end of a row are closed: the network is not asked about them.
        closed_BL = (self.before_BL == self.tokenizer.mask_id) & (step.tokens_BL != self.tokenizer.mask_id)
        closed_BL[step.row_N, step.position_N] = False
        for row, position in closed_BL.nonzero().tolist():
            opened.append([row, position, int(step.tokens_BL[row, position]), None, None, None])
        self.before_BL = step.tokens_BL
        remasked = [] if step.remasked is None else [x.tolist() for x in step.remasked]
        self.steps.append(
            {
                "opened": opened,
                "remasked": [list(one) for one in zip(*remasked, strict=True)],
            }
        )

    def data(self) -> dict[str, Any]:
        tok = self.tokenizer
        rows = [_without_padding(row, tok.eot_id) for row in self.rows]
        ids = {id for row in rows for id in row}
        for step in self.steps:
            for _, _, token, _, _, others in step["opened"]:
                ids.update([token, *(t for t, _ in others or ())])
        words = {str(id): tok.token_text(id) for id in sorted(ids)}
        data = {"rows": rows, "steps": self.steps, "words": words, "mask": tok.mask_id, "eot": tok.eot_id}
        return data | {"chosen": self.chosen}

    def html(self) -> str:
        """The page. Text is included only as data, and the policy allows no script but the page's own."""
        page = files("unmask.reporting").joinpath("replay.html").read_text(encoding="utf-8")
        script, style = (re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0] for tag in ("script", "style"))
        policy = (
            f"default-src 'none'; script-src {hash_source(script)}; style-src {hash_source(style)}; base-uri 'none'"
        )
        page = page.replace("@CSP@", policy).replace("@TITLE@", f"unmask: a text in {len(self.steps)} steps")
        before, _, after = page.partition("@DATA@")
        return before + _for_script(self.data()) + after

    def save(self, path: Path) -> None:
        atomic_text(path, self.html())


def _for_script(data: Any) -> str:
    """JSON for a script element: nothing in it can close the element or start a comment."""
    text = json.dumps(data, separators=(",", ":"))  # ASCII: no line separators either
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def hash_source(content: str) -> str:
    """The hash of an inline script or style in the notation of Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _prob(p: float) -> float | None:
    return round(p, 4) if math.isfinite(p) else None  # JSON has no NaN


def _without_padding(row: list[int], eot_id: int) -> list[int]:
    """Remove the end-of-text padding of a shorter row, which is not part of it."""
    end = len(row)
    while end and row[end - 1] == eot_id:
        end -= 1
    return row[:end]
