"""The content of a report, block by block: best results beside the paper's figures, curves, suites, samples, protocol,
commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from unmask.comparison.quoted import TEXT, Quoted
from unmask.evaluation.by_text import said_of_counts
from unmask.evaluation.measurement import SIGN
from unmask.evaluation.suites import differences
from unmask.evaluation.suites.base import Outcome
from unmask.machine import commands_of, commit, machine, machines_of
from unmask.reporting.blocks import Block, Code, Document, Figure, Replay, Table, Text, Title
from unmask.reporting.curves import ACROSS, panel, series_of
from unmask.reporting.runs import Results, Run

NONE = "—"
# Table 2 of MDLM (arXiv 2406.07524): each trained on 262B tokens.
OPENWEBTEXT = [
    Quoted("AR", 17.54, "exact", "", "262B", "OpenWebText", "Table 2"),
    Quoted("SEDD", 24.10, "upper bound", "", "262B", "OpenWebText", "Table 2"),
    Quoted("MDLM", 23.21, "upper bound", "", "262B", "OpenWebText", "Table 2"),
]
CAVEAT = (
    "Quoted from MDLM (arXiv 2406.07524), not measured here: other data, another vocabulary, larger networks and far "
    "more tokens than most runs have. A perplexity is of its vocabulary's tokens, so these levels do not compare with "
    "a run's; between models of other vocabularies compare bits per byte on the same text."
)
SIGNS = "≤ is an upper bound, = an exact value, ≈ a pseudo-likelihood, which is no perplexity."
FIGURES = (
    ("loss", "nats per token", "Training loss, smoothed; faint: as logged"),
    ("valid", "nats per token", "Validation"),
    ("valid_bits_per_byte", "bits per byte", "Validation in bits per byte, which compares other vocabularies"),
    ("lr", "learning rate", "Learning rate"),
)


def report_of(runs: Sequence[Run], left: Sequence[str], words: Sequence[str]) -> Document:
    """The whole report. left: remarks on results that belong to no run. words: the command that made the report."""
    names = ", ".join(run.name for run in runs)
    blocks: list[Block] = [Text(f"Written by unmask {commit()}.")]
    blocks += [Text(f"{run.name}: {damage}", warning=True) for run in runs for damage in run.damage]
    blocks += [*_bests(runs), *_curves(runs), *_suites(runs, left), *_samples(runs), *_facts(runs)]
    blocks += [*_protocol(runs), *_commands(runs, words), *_recipes(runs)]
    return Document(f"Report: {names}", blocks)


def _bests(runs: Sequence[Run]) -> list[Block]:
    columns = ["system", "perplexity", "95% interval", "bits/byte", "parameters", "data", "tokens", "figure"]
    rows = [_best_row(run) for run in runs]
    for one in (*TEXT.by_recipe.values(), *TEXT.others, *OPENWEBTEXT):
        value = f"{SIGN[one.kind]} {one.ppl:.2f}"
        rows.append(
            [one.name, value, NONE, NONE, one.parameters or NONE, one.data, one.tokens or NONE, f"quoted: {one.table}"]
        )
    quoted = frozenset(range(len(runs), len(rows)))
    over = f" 95% intervals: {_intervals(runs)}." if any(run.best for run in runs) else ""
    caption = f"Perplexity per token at each run's best validation. {SIGNS}{over} {CAVEAT}"
    return [Title("Best so far, beside the paper's figures"), Table(columns, rows, caption, quoted)]


def _best_row(run: Run) -> list[str]:
    best = run.best
    if best is None:
        return [run.name, "no validation", NONE, NONE, _count(run.parameters), _data(run), NONE, "measured here"]
    key = "valid_pseudo_ppl" if "valid_pseudo_ppl" in best else "valid_ppl"
    spread = best.get(f"{key}_ci95")
    interval = f"{_number(spread[0])} – {_number(spread[1])}" if isinstance(spread, list) and len(spread) == 2 else NONE
    value = f"{run.sign or '?'} {_number(best.get(key))}"
    bits = _number(best.get("valid_bits_per_byte"), 4)
    tokens = _count(run.tokens_at(best["step"]) or None)
    name = (
        f"{run.name} ({run.recipe.get('objective', {}).get('name', '?')})" if _is_table(run, "objective") else run.name
    )
    measured = f"measured here, step {best['step']:,}"
    return [name, value, interval, bits, _count(run.parameters), _data(run), tokens, measured]


def _intervals(runs: Sequence[Run]) -> str:
    """What the intervals of the validations are over, by run where runs differ."""
    found: dict[str, list[str]] = {}
    for run in runs:
        if run.best is not None:
            found.setdefault(_over(run.best), []).append(run.name)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(names)} {over}" for over, names in found.items())


def _over(validation: Mapping[str, Any]) -> str:
    """What a validation's interval is over, which its counts tell: `texts` only where rows begin in the same ones."""
    if not isinstance(validation.get("valid_nats_per_token_ci95"), list):
        return "none (one row, drawn once)"
    rows = validation.get("valid_sequences")
    texts = validation.get("valid_texts", rows)
    return said_of_counts(texts, rows) if type(rows) is type(texts) is int else "over what is not recorded"


def _curves(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = [Title("Learning curves")]
    drawn = [(number, run) for number, run in enumerate(runs) if run.metrics.points]
    names = [run.name for run in runs]
    for what, up, caption in FIGURES:
        panels = []
        for across in ACROSS:
            series = [series_of(number, run.metrics.points, what, across) for number, run in drawn]
            panels.append(panel([one for one in series if one.points], across=across, up=up, names=names))
        if any(panels):
            if what == "valid":
                caption = f"{caption}; 95% intervals: {_intervals(runs)}"
            blocks.append(Figure(caption, [one for one in panels if one], names))
        elif what != "valid_bits_per_byte":
            blocks.append(Text(f"{caption}: no run here has written any down.", warning=True))
    blocks.append(
        Text("Tokens are those trained on, prompts included; seconds those of the run's processes, validations too.")
    )
    said = [(run.name, step, note) for run in runs for step, note in run.metrics.notes[-5:]]
    if said:
        rows = [[name, f"{step:,}", note] for name, step, note in said]
        blocks.append(Table(["run", "step", "what the run noted"], rows, "The last five of each run."))
    return blocks


def _suites(runs: Sequence[Run], left: Sequence[str]) -> list[Block]:
    blocks: list[Block] = [Title("Suites")]
    blocks += [Text(sentence, warning=True) for sentence in left]
    for run in runs:
        for results in run.results:
            blocks += _suite(run, results, {one.fingerprint: one.name for one in runs})
    if len(blocks) == 1:
        blocks.append(
            Text("No results of a suite: unmask eval RUN --suite zero-shot --out RUN/zero-shot measures them.")
        )
    return blocks


def _suite(run: Run, results: Results, names: Mapping[str, str]) -> list[Block]:
    """names: the report's run names, by the hash of their weights."""
    blocks: list[Block] = [Title(f"{run.name}: {results.suite.name}, from {results.folder}", 3)]
    if not results.same_model:
        blocks.append(Text("These results are of other weights than the run's model has now.", warning=True))
    outcomes, layout = [], results.suite.layout
    for name, one in results.suite.sets.items():
        if name in results.numbers:
            outcome = Outcome(set=one, numbers=results.numbers[name])
            try:  # damage only shows when the results are laid out
                layout.columns_and_rows(results.suite, [outcome])
                layout.notes(results.suite, [outcome])
                layout.protocol_line(results.numbers[name])
                differences.markdown([outcome] if _other(outcome) else [])
            except (KeyError, TypeError, ValueError, AttributeError):
                outcome = Outcome(set=one, failure=f"{name}.json is damaged")
            outcomes.append(outcome)
    blocks.append(Table(*layout.columns_and_rows(results.suite, outcomes), " ".join(_sentences(results, outcomes))))
    lines = dict.fromkeys(layout.protocol_line(one.numbers) for one in outcomes if one.numbers is not None)
    blocks += [Text(f"Protocol: {line}.") for line in lines]
    blocks += [Text(line) for line in machines_of(one.get("made_with") for one in results.numbers.values())]
    for other in dict.fromkeys(_other(one) for one in outcomes if _other(one)):
        of = [one for one in outcomes if _other(one) == other]
        name = names.get(other, f"the model of sha256 {other[:12]}")
        rows = differences.rows_of(of)
        notes = " ".join(f"{note}." for note in differences.notes_of(of))
        blocks += [Title(f"{run.name} − {name}", 3), Table(differences.COLUMNS, rows, notes)]
    return blocks


def _other(outcome: Outcome) -> str:
    """The hash of the weights that a set was compared with, or an empty string."""
    if outcome.numbers is None or "differences" not in outcome.numbers:
        return ""
    return str(outcome.numbers["identity"]["against"]["model"])


def _sentences(results: Results, outcomes: Sequence[Outcome]) -> list[str]:
    return [line if line.endswith(".") else f"{line}." for line in results.suite.layout.notes(results.suite, outcomes)]


def _samples(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = [Title("Samples")]
    for run in runs:
        blocks.append(Title(run.name, 3))
        blocks += [Text(sentence, warning=True) for sentence in run.model_damage]
        if run.samples is not None:
            blocks += [Replay(f"How {run.name} wrote its samples", run.samples.replay)]
            blocks += [Code(text, f"Sample {i} of {run.name}") for i, text in enumerate(run.samples.texts, 1)]
        for record in run.metrics.samples[-1:]:
            blocks.append(Code(record["sample"], f"Written in training, step {record['step']:,}"))
        if isinstance(blocks[-1], Title):
            blocks.append(Text("No samples: none were asked for, and the run has written none down."))
    return blocks


def _facts(runs: Sequence[Run]) -> list[Block]:
    def of(run: Run, *path: str) -> str:
        value: Any = run.recipe
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        return NONE if value is None else str(value)

    def rows_of(run: Run, number: int) -> str:
        try:
            one = run.data[number]
            return f"{one['documents']:,} documents, {one['rows']:,} rows, {one['tokens']:,} tokens"
        except (IndexError, KeyError, TypeError, ValueError):
            return NONE

    last = [run.metrics.points[-1] if run.metrics.points else None for run in runs]
    rows = [
        ["folder", *(run.given for run in runs)],
        ["steps", *(NONE if p is None else f"{p.step:,}" for p in last)],
        ["steps asked for", *(of(run, "steps") for run in runs)],
        ["tokens", *(NONE if p is None else _count(p.tokens or None) for p in last)],
        ["seconds", *(NONE if p is None else f"{p.seconds:,.0f}" for p in last)],
        ["parameters", *(_count(run.parameters) for run in runs)],
        ["objective", *(of(run, "objective", "name") for run in runs)],
        ["network", *(of(run, "denoiser", "name") for run in runs)],
        ["tokenizer", *(of(run, "tokenizer") for run in runs)],
        ["row length", *(of(run, "data", "length") for run in runs)],
        ["batch", *(of(run, "batch") for run in runs)],
        ["learning rate", *(of(run, "optim", "lr") for run in runs)],
        ["precision", *(of(run, "precision") for run in runs)],
        ["seed", *(of(run, "seed") for run in runs)],
        ["trained on", *(rows_of(run, 0) for run in runs)],
        ["held out", *(rows_of(run, 1) for run in runs)],
        ["model, sha256", *(run.fingerprint[:16] or NONE for run in runs)],
    ]
    return [Title("The runs side by side"), Table(["", *(run.name for run in runs)], rows)]


def _protocol(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = [Title("Protocol, hardware and version")]
    for run in runs:
        if (best := run.best) is not None:
            counts = [best.get(f"valid_{name}") for name in ("sequences", "tokens")]
            rows, tokens = (_count(value if isinstance(value, int) else None) for value in counts)
            blocks.append(
                Text(
                    f"{run.name}: validated on {rows} of the rows held out from training, {tokens} tokens, spread "
                    "evenly, with one draw of time and masks a row, the same rows and draws every time, by the "
                    "averaged weights. The best of several validations is a little too good."
                )
            )
        made = machines_of(run.made_with) or ["Its checkpoints do not say on which machine."]
        blocks.append(Text(f"{run.name}, training: {' '.join(made)}"))
    blocks.append(Text(f"The machine that wrote this report: {machine()}."))
    return blocks


def _commands(runs: Sequence[Run], words: Sequence[str]) -> list[Block]:
    blocks: list[Block] = [Title("Commands that repeat these numbers")]
    for run in runs:
        lines = [["unmask", "train", f"{run.given}/recipe.json", "--out", f"{run.given}-again"]]
        if run.best is not None:
            rows = run.recipe.get("valid_rows")
            most = ["--max-rows", str(rows)] if isinstance(rows, int) else []
            lines.append(["unmask", "eval", run.given, "--num-samples", "1", *most])
        said = [shlex.join(line) for line in lines]
        made = [one.get("made_with") for results in run.results for one in results.numbers.values()]
        said += commands_of(made)
        said += [] if run.samples is None else [shlex.join(run.samples.command)]
        blocks.append(Code("\n".join(said), f"{run.name}: training, its best validation, suites, samples"))
    blocks.append(Code(shlex.join(["unmask", *words]), "This report"))
    blocks.append(
        Text("The same numbers bit by bit need the same data, device and version; model/ is the best validation's.")
    )
    return blocks


def _recipes(runs: Sequence[Run]) -> list[Block]:
    blocks: list[Block] = [Title("Recipes in full")]
    for run in runs:
        if run.recipe:
            blocks.append(
                Code(json.dumps(run.recipe, indent=1, ensure_ascii=False), f"Recipe of {run.name}", folded=True)
            )
        else:
            blocks.append(Text(f"{run.name}: the recipe is missing or damaged.", warning=True))
    return blocks


def _is_table(run: Run, key: str) -> bool:
    return isinstance(run.recipe.get(key), dict)


def _data(run: Run) -> str:
    data = run.recipe.get("data")
    train = data.get("train") if isinstance(data, dict) else None
    if not isinstance(train, dict):
        return NONE
    return " ".join(str(train[key]) for key in ("name", "path", "dataset") if train.get(key))


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def _number(value: Any, digits: int = 2) -> str:
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
    return f"{value:,.{digits}f}" if good else NONE
