"""The points of a frontier as a readable table and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]
FAR = 1.5  # factor by which lengths must differ from the real texts' to be mentioned
COLUMNS = {
    "judge_ppl": "judge's perplexity (95%)",
    "entropy": "unigram entropy",
    "distinct_4": "distinct 4-grams",
    "repeated_4": "repeated 4-grams",
    "longest_repeat": "longest repeat",
    "self_bleu": "self-BLEU",
    "mauve": "MAUVE",
    "length": "tokens",
}


def table(lines: Iterable[Line]) -> str:
    """A Markdown table: each number with its interval, and the perplexity also as a multiple of the real texts'.

    The first line is that of the real texts. A star marks less variety than theirs, with separate intervals. Seconds
    are shown if the texts were written here.

    >>> one = {"name": "real", "numbers": {"judge_ppl": {"value": 8.0, "ci95": [7.5, 8.5], "n": 9}}, "less_varied": []}
    >>> print(table([one]).splitlines()[-1])
    | real | 8.00 (7.50–8.50) | 1.00 |
    """
    lines = list(lines)
    shown = [name for name in COLUMNS if any(name in line["numbers"] for line in lines)]
    heads = [head for name in shown for head in ([COLUMNS[name]] + (["to real"] if name == "judge_ppl" else []))]
    timed = [_seconds(line) for line in lines]
    heads += ["seconds a text"] if any(timed) else []
    out = ["| texts | " + " | ".join(heads) + " |", "|" + " --- |" * (len(heads) + 1)]
    for line, seconds in zip(lines, timed, strict=True):
        cells = [called(line)]
        for name in shown:
            cells.append(_cell(line, name))
            if name == "judge_ppl":
                mine, real = (of["numbers"][name]["value"] for of in (line, lines[0]))
                cells.append(f"{mine / real:.2f}" if mine and real and not line.get("quoted") else "")
        cells += [seconds] if any(timed) else []
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def called(line: Line) -> str:
    """A point by its model and options, as in the picture's legend; others by their name.

    >>> called({"name": "a-steps=4-0f", "model": "runs/a", "options": {"steps": "4", "sampler": "remdm"}})
    'runs/a, steps 4, sampler remdm'
    """
    if "model" not in line:
        return str(line["name"])
    return ", ".join([line["model"], *(f"{key} {value}" for key, value in line.get("options", {}).items())])


def empty(lines: Iterable[Line]) -> str:
    """Which sets have empty texts, which no number covers; otherwise empty.

    >>> empty([{"name": "a", "protocol": {"empty texts": 3, "texts": 7}}])
    'Empty texts are in no number: a has 3 beside 7 others.'
    """
    counts = [(called(line), line.get("protocol", {})) for line in lines]
    said = [
        f"{name} has {how['empty texts']:,} beside {how['texts']:,} others"
        for name, how in counts
        if how.get("empty texts")
    ]
    return f"Empty texts are in no number: {'; '.join(said)}." if said else ""


def _seconds(line: Line) -> str:
    """Seconds per text, measured when the texts were written or reported by a paper."""
    seconds = line.get("protocol", {}).get("seconds_per_text") if "model" in line or "quoted" in line else None
    return "" if seconds is None else f"{seconds:,.3g}" if seconds < 100 else f"{seconds:,.1f}"


def timing(lines: Iterable[Line]) -> str:
    """What the table's seconds measure, in a sentence; empty if no texts were timed.

    >>> how = {"seconds_per_text": 2.0, "timed": "the sampler alone", "batch": 8, "device": "cpu", "dtype": "float32"}
    >>> timing([{"name": "a", "model": "a", "protocol": how}])
    'Seconds a text: the sampler alone, 8 at a time on cpu in float32.'
    """
    said = []
    for line in lines:
        how = line.get("protocol", {})
        if "model" in line and "timed" in how:
            said.append(f"{how['timed']}, {how['batch']} at a time on {how['device']} in {how['dtype']}")
    return f"Seconds a text: {'; '.join(dict.fromkeys(said))}." if said else ""


def lengths(lines: Iterable[Line]) -> str:
    """A warning if texts are much shorter or longer than the real ones; otherwise empty.

    >>> of = [{"name": name, "numbers": {"length": {"value": n}}} for name, n in (("real", 200.0), ("a", 50.0))]
    >>> lengths(of)[:44]
    'Texts of other lengths cannot be compared by'
    """
    real, *others = [line for line in lines if not line.get("quoted")]
    long = real["numbers"].get("length", {}).get("value")
    sizes = [line["numbers"].get("length", {}).get("value") for line in others]
    far = [size for size in sizes if size and long and not 1 / FAR < size / long < FAR]
    if not far:
        return ""
    least, most = f"{min(far):,.0f}", f"{max(far):,.0f}"
    reach = least if least == most else f"{least} to {most}"
    return (
        "Texts of other lengths cannot be compared by entropy, n-grams and self-BLEU, and stars mean little: real "
        f"texts have {long:,.0f} tokens in the mean, {len(far)} of {len(others)} other sets {reach}. Leave out "
        "--length, or give real texts that are as long."
    )


NARROW = {"entropy": "entropy", "distinct_4": "dist-4", "repeated_4": "rep-4", "self_bleu": "s-BLEU", "mauve": "MAUVE"}


def narrow(lines: Iterable[Line]) -> str:
    """The table for a terminal of 80 columns: an interval for the perplexity only, and long names on a line of their
    own.

    >>> one = {"name": "real", "numbers": {"judge_ppl": {"value": 8.0, "ci95": [7.5, 8.5], "n": 9}}, "less_varied": []}
    >>> print(narrow([one]).splitlines()[1])
    real               8.00 7.50–8.50
    """
    lines = list(lines)
    shown = [name for name in NARROW if any(name in line["numbers"] for line in lines)]
    heads = "".join(f"{NARROW[name]:>8}" for name in shown)
    out = [f"{'texts':<14}{'PPL':>9} {'95% interval':<15}{heads}".rstrip()]
    for line in lines:
        ppl = line["numbers"]["judge_ppl"]
        name, value = called(line), "not finite" if ppl["value"] is None else _few(ppl["value"])
        spread = "" if ppl["ci95"] is None else "–".join(map(_few, ppl["ci95"]))
        numbers = [(line["numbers"].get(key), key in line["less_varied"]) for key in shown]
        cells = "".join(
            f"{'' if one is None or one['value'] is None else format(one['value'], '.3f') + '*' * star:>8}"
            for one, star in numbers
        )
        if len(name) > 13:
            out.append(name)
            name = ""
        out.append(f"{name:<14}{value:>9} {spread:<15}{cells}".rstrip())
    return "\n".join([*out, "* less variety than the real texts have, the 95% intervals apart"])


def _few(value: float) -> str:
    """Format a value with about three digits.

    >>> [_few(x) for x in (8.456, 84.56, 2778.4, 1e7)]
    ['8.46', '84.6', '2,778', '1e+07']
    """
    return f"{value:.2g}" if value >= 1e6 else f"{value:,.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def _cell(line: Line, name: str) -> str:
    one = line["numbers"].get(name)
    if one is None:
        return ""
    if one["value"] is None:
        return "not finite"
    digits = 2 if name in ("judge_ppl", "longest_repeat") else 0 if name == "length" else 3
    interval = "" if one["ci95"] is None else " ({:.{d}f}–{:.{d}f})".format(*one["ci95"], d=digits)
    star = " *" if name in line["less_varied"] else ""
    return f"{one['value']:.{digits}f}{interval}{star}"


def as_csv(lines: Iterable[Line]) -> str:
    """One row per set of texts: its options, how it was written, each number with both ends of its interval.

    >>> one = {"name": "real", "numbers": {"entropy": {"value": 4.1, "ci95": None, "n": 9}}, "less_varied": []}
    >>> as_csv([one]).splitlines()[0]
    'texts,model,calls,seconds_per_text,processor_seconds_per_text,batch,device,dtype,entropy,entropy_low,entropy_high,less_varied,lost'
    """
    lines = list(lines)
    options = list(dict.fromkeys(key for line in lines for key in line.get("options", {})))
    options = [key for key in options if key != "dtype"]  # the dtype always has a column
    names = list(dict.fromkeys(name for line in lines for name in line["numbers"]))
    how = ["calls", "seconds_per_text", "processor_seconds_per_text", "batch", "device", "dtype"]
    ends = [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["texts", "model", *options, *how, *ends, "less_varied", "lost"])
    for line in lines:
        protocol = line.get("protocol", {}) if "model" in line else {}  # for real texts this is only the judge's device
        row = [line["name"], line.get("model", ""), *(line.get("options", {}).get(key, "") for key in options)]
        row += [protocol.get(key, "") for key in how]
        for name in names:
            one = line["numbers"].get(name) or {"value": None, "ci95": None}
            row += ["" if value is None else value for value in (one["value"], *(one["ci95"] or (None, None)))]
        writer.writerow([*row, " ".join(line["less_varied"]), len(line.get("lost", []))])
    return out.getvalue()
