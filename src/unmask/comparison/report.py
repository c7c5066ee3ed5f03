"""A comparison's files: results.md to read, results.json with everything, results.csv, and results.svg."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unmask.comparison.picture import draw
from unmask.comparison.table import Entry, Table
from unmask.comparison.trial import Trial
from unmask.evaluation.measurement import SIGN
from unmask.evaluation.paired import Interval
from unmask.storage.atomic import atomic_text

MEANING = {
    "visible": "the 95% interval of the gap, over texts and over seeds, does not hold 0",
    "not visible": "it holds 0",
    "one seed": "visible over texts; what another seed would give is not known, for no system has several",
}
HOW = (
    "Gaps are differences in nats per token on the same texts with the same keys, text by text, so that their interval "
    "is that of the difference. Over texts: the ratio estimator; rows that begin in the same text count as one. Over "
    "seeds: Student's t of the seeds' differences, each seed paired with itself; where a system has one seed, the "
    "noise of seeds of the systems with several. The two half-widths add as squares. Each interval is 95% by itself, "
    "not all of them together. Weights are those of the best validation, on rows that are among those measured, for "
    "all systems alike."
)


def write_report(out: Path, table: Table, shared: Mapping[str, Any]) -> None:
    """Write all four files, each atomically."""
    atomic_text(out / "results.json", json.dumps({"shared": shared} | table.plain(), indent=1) + "\n")
    atomic_text(out / "results.csv", as_csv(table))
    atomic_text(out / "results.md", as_markdown(table, shared))
    atomic_text(out / "results.svg", draw(table, shared))


def as_csv(table: Table) -> str:
    """One line per trial, and one with the mean of each system.

    >>> as_csv(Table([], "a", None, [], [])).split(",")[:3]
    ['system', 'seed', 'state']
    """
    head = ["system", "seed", "state", "kind", "ppl", "ppl_low", "ppl_high", "nats_per_token", "gap", "gap_low"]
    head += ["gap_high", "verdict", "parameters", "parameters_without_embeddings", "tokens", "epochs", "best_step"]
    head += ["best_tokens", "best_epochs", "passes", "flops", "seconds", "tokens_per_second", "quoted_ppl", "reason"]
    file = io.StringIO()
    writer = csv.DictWriter(file, head, lineterminator="\n", restval="")
    writer.writeheader()
    for entry in table.entries:
        for trial in (t for t in table.trials if t.system == entry.system):
            known = head if trial.finished else ["system", "seed", "state", "reason"]
            row = {key: getattr(trial, key) for key in known if hasattr(trial, key)}
            is_ppl = trial.kind != "pseudo" and trial.nats_per_token < 700
            writer.writerow(row | ({"ppl": math.exp(trial.nats_per_token)} if is_ppl else {}))
        if entry.nats is not None:
            ppl, gap = entry.ppl_ci95 or ("", ""), (entry.gap.ci95 if entry.gap else None) or ("", "")
            mean: dict[str, Any] = {"system": entry.system, "seed": "mean", "state": "finished", "kind": entry.kind}
            mean |= {"ppl": entry.ppl, "ppl_low": ppl[0], "ppl_high": ppl[1], "nats_per_token": entry.nats.value}
            mean |= {"gap": entry.gap.value if entry.gap else "", "gap_low": gap[0], "gap_high": gap[1]}
            mean |= {key: value for key, value in entry.cost.items() if key in head} | {"verdict": entry.verdict}
            writer.writerow(mean | {"quoted_ppl": entry.quoted.ppl if entry.quoted else ""})
    return file.getvalue()


# --- cells, for Markdown and for the terminal
# ---------------------------------------------------------------------------


def ppl_cell(entry: Entry) -> str:
    """A perplexity with its sign; empty for a pseudo-likelihood.

    >>> from unmask.comparison.trial import Trial
    >>> from unmask.comparison.table import make_table
    >>> trial = Trial(name="a-s0", system="a", seed=0, fingerprint="", state="finished", nats=[2.0], counts=[1])
    >>> ppl_cell(make_table(["a"], [trial], "a").entries[0])
    '≤ 7.389'
    """
    return "–" if entry.ppl is None else f"{entry.sign} {entry.ppl:.4g}"


def ci_cell(ci95: tuple[float, float] | None, form: str = ".4g") -> str:
    return "–" if ci95 is None else f"{ci95[0]:{form}} – {ci95[1]:{form}}"


def gap_cell(entry: Entry) -> str:
    return "–" if entry.gap is None else f"{entry.gap_sign} {entry.gap.value:+.4f}"


def half_cell(interval: Interval | None) -> str:
    return "" if interval is None or interval.half is None else f"± {interval.half:.4f}"


def flops_cell(flops: float) -> str:
    """Format a large number of operations.

    >>> flops_cell(1.234e15)
    '1.23e15'
    """
    return f"{flops:.2e}".replace("e+0", "e").replace("e+", "e")


def best_cell(entry: Entry, key: str, form: str = ",.0f") -> str:
    """Where the best weights were, for each seed; given once if all are equal."""
    values = list(dict.fromkeys(f"{best[key]:{form}}" for best in entry.best))
    return " ".join(values)


# --- Markdown ---------------------------------------------------------------------------------------------------------


def as_markdown(table: Table, shared: Mapping[str, Any]) -> str:
    """The page.

    >>> as_markdown(Table([], "a", None, [], []), {}).splitlines()[0]
    '# Compared'
    """
    lines = ["# Compared", "", *_setting(shared), *_levels(table), *_costs(table)]
    if table.failed or table.waiting:
        lines += ["## Without a result", ""]
        lines += [f"- **{trial.name}** {trial.state}: {trial.reason}" for trial in table.failed]
        lines += [f"- **{name}** is not run yet" for name in table.waiting] + [""]
    lines += [*_slopes(table), *_trials(table.trials), *_quotes(table)]
    return "\n".join(lines).rstrip() + "\n"


def _setting(shared: Mapping[str, Any]) -> list[str]:
    if not shared:
        return []
    protocol, common, size = shared["protocol"], shared["common"], shared["size"]
    network = ", ".join(f"{key} {value}" for key, value in size.items()) or "as each recipe says"
    rows = "all rows" if protocol["valid_rows"] is None else f"at most {protocol['valid_rows']:,} rows"
    return [
        f"All systems: {shared['tokens']:,} tokens ({shared['steps']:,} steps of {common['batch']} rows of "
        f"{common['data.length']}), tokenizer {shared['tokenizer']['spec']}, network: {network}.",
        "",
        f"- trained on {shared['corpus']['train']}",
        f"- measured on {rows} of what is held out: {shared['corpus']['valid']}",
        f"- one protocol: {protocol['draws']} draws of times and masks for each row, seed {protocol['seed']}, "
        "the same keys for all, in float32",
        "",
    ]


def _levels(table: Table) -> list[str]:
    with_quoted = any(entry.quoted for entry in table.entries)
    head = ["system", "seeds", "PPL", "95%", "nats/token", "bits/byte", f"gap to {table.reference}", "95%", ""]
    lines = [_line(head + ["paper's PPL"] * with_quoted), _line(["---"] * (len(head) + with_quoted))]
    for entry in table.entries:
        cells = [entry.system, str(len(entry.seeds)), ppl_cell(entry), ci_cell(entry.ppl_ci95)]
        cells += ["–" if entry.nats is None else f"{entry.nats.value:.4f} {half_cell(entry.nats)}"]
        cells += ["–" if entry.bits_per_byte is None else f"{entry.bits_per_byte:.4f}", gap_cell(entry)]
        cells += [ci_cell(entry.gap.ci95, "+.4f") if entry.gap else "–", _verdict(entry, table)]
        found = entry.quoted
        cells += ["" if found is None else f"{SIGN[found.kind]} {found.ppl:g} ({found.data})"] * with_quoted
        lines.append(_line(cells))
    used = dict.fromkeys(entry.verdict for entry in table.entries if entry.verdict in MEANING)
    lines += ["", *(f"- {word}: {MEANING[word]}" for word in used)]
    lines += [
        f"- {entry.system}: its pseudo-likelihood bounds nothing, so it has no PPL "
        f"(pseudo-perplexity ≈ {entry.pseudo_ppl:.4g})"
        for entry in table.entries
        if entry.pseudo_ppl is not None
    ]
    noise = "not known: no system has several" if table.noise is None else f"{table.noise.deviation:.4f} nats/token"
    freedom = "" if table.noise is None else f" (standard deviation, {table.noise.freedom} degrees of freedom)"
    lines += [f"- noise of seeds: {noise}{freedom}", "", "= exact, ≤ upper bound, ≈ neither.", "", HOW, ""]
    beside = "The paper's PPL is quoted: other data, tokenizer, size and budget, see below."
    return [*lines, *([beside, ""] if with_quoted else [])]


def _verdict(entry: Entry, table: Table) -> str:
    if entry.nats is not None:
        return entry.verdict
    failed = [trial for trial in table.failed if trial.system == entry.system]
    return failed[0].state if failed else "not run yet"


def _costs(table: Table) -> list[str]:
    head = ["system", "parameters", "without embeddings", "tokens", "epochs", "passes", "training FLOP", "seconds"]
    head += ["tokens/s", "best at step", "its tokens", "its epochs", "bound"]
    lines = ["## What it cost", "", _line(head), _line(["---"] * len(head))]
    for entry in table.entries:
        if cost := entry.cost:
            cells = [entry.system, f"{cost['parameters']:,.0f}", f"{cost['parameters_without_embeddings']:,.0f}"]
            cells += [f"{cost['tokens']:,.0f}", f"{cost['epochs']:.2f}", f"{cost['passes']:.3g}"]
            cells += [flops_cell(cost["flops"]), f"{cost['seconds']:.1f}", f"{cost['tokens_per_second']:,.0f}"]
            cells += [best_cell(entry, "step"), best_cell(entry, "tokens"), best_cell(entry, "epochs", ".2f")]
            lines.append(_line([*cells, entry.estimator]))
    return [
        *lines,
        "",
        "Means over seeds, on "
        + ", ".join(sorted({t.device for t in table.trials if t.finished}) or ["nothing"])
        + ". Passes: of the network for each row that is trained on, each with its backward pass; one without "
        "counts a third. FLOP by the formula of `unmask bench train`. Seconds: in training steps alone"
        + _beside(table),
        "",
    ]


def _beside(table: Table) -> str:
    """A note if trials shared a device, because their seconds are not those of a trial alone."""
    most = max((trial.at_once for trial in table.trials if trial.finished), default=1)
    return f", with up to {most} trials at once on the device." if most > 1 else "."


def _slopes(table: Table) -> list[str]:
    lines = []
    for entry in table.entries:
        if entry.slope is not None:
            limit, per = entry.slope
            line = f"{limit.value:.4f} {half_cell(limit)} + ({per.value:.3f} {half_cell(per)}) / T nats/token"
            lines.append(f"- {entry.system}: {line}")
    if not lines:
        return []
    return ["## The same weights in T steps", "", *lines, "", "Least squares in 1/T; intervals over texts.", ""]


def _trials(trials: Sequence[Trial]) -> list[str]:
    if not trials:
        return []
    lines = ["## Every trial", "", _line(["trial", "nats/token", "best at step", "seconds", "tokens/s"])]
    lines.append(_line(["---"] * 5))
    for trial in trials:
        cells = [f"{trial.nats_per_token:.4f}", f"{trial.best_step:,} of {trial.steps:,}"] if trial.finished else []
        cells += [f"{trial.seconds:.1f}", f"{trial.tokens_per_second:,.0f}"] if trial.finished else [trial.state] * 4
        lines.append(_line([trial.name, *cells]))
    return [*lines, ""]


def _quotes(table: Table) -> list[str]:
    found = [entry.quoted for entry in table.entries if entry.quoted is not None]
    if not found:
        return []
    head = ["quoted", "PPL", "parameters", "tokens", "data", "from"]
    lines = ["## What the paper reports", "", table.figures.caveat, "", _line(head), _line(["---"] * len(head))]
    for one in [*found, *table.figures.others]:
        cells = [one.name, f"{SIGN[one.kind]} {one.ppl:g}", one.parameters, one.tokens or "–", one.data, one.table]
        lines.append(_line(cells))
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
