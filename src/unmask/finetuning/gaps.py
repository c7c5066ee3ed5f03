"""The gaps of a finished fine-tuning: to the same network from random weights, and to other models on the same
examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unmask.errors import UsageError
from unmask.evaluation.paired import Interval
from unmask.finetuning.answers import read_answers
from unmask.finetuning.differences import differences
from unmask.finetuning.results import ABOUT
from unmask.finetuning.scores import TITLES
from unmask.finetuning.splits import Labelled, targets
from unmask.finetuning.table import NAMES, percent


@dataclass(frozen=True)
class Gap:
    """A score minus another one, with its interval. ours, theirs: the model and start of each."""

    metric: str
    ours: str
    theirs: str
    interval: Interval

    @property
    def within(self) -> float | None:
        """The largest difference, in absolute value, that the interval allows."""
        ci95 = self.interval.ci95
        return None if ci95 is None else max(map(abs, ci95))

    def plain(self) -> dict[str, Any]:
        """Plain data for JSON.

        >>> Gap("accuracy", "a", "b", Interval(0.01, 0.03, 0.04, "paired seeds")).plain()["verdict"]
        'not visible'
        """
        interval = self.interval
        return {
            "metric": self.metric,
            "ours": self.ours,
            "theirs": self.theirs,
            "value": interval.value,
            "ci95": None if interval.ci95 is None else list(interval.ci95),
            "examples_half": interval.texts_half,
            "seeds_half": interval.seeds_half,
            "within": self.within,
            "verdict": interval.verdict,
        }

    def cells(self) -> list[str]:
        """Metric, the other model, difference, interval, verdict, and the bound of `within`, in hundredths.

        >>> Gap("f1", "a", "b", Interval(0.01, 0.03, 0.04, "paired seeds")).cells()
        ['F1', 'b', '+1.0', '-4.0 – +6.0', 'not visible', '6.0']
        """
        interval, within = self.interval, self.within
        between = "" if interval.ci95 is None else " – ".join(signed(x) for x in interval.ci95)
        furthest = "" if within is None or interval.seeds_half is None else percent(within)
        return [TITLES[self.metric], self.theirs, signed(interval.value), between, interval.verdict, furthest]


GAP_COLUMNS = ["metric", "gap to", "difference", "95%", "", "within"]
GAP_NOTE = (
    "Gaps are paired, example by example and seed by seed; the interval is over both. Not visible: it holds 0. One "
    "seed: it does not, but nobody knows what another seed would give. Within: no further apart than that, as far as "
    "the interval says. Each is 95% by itself: of twenty gaps that are none one is expected to look visible."
)


def signed(value: float) -> str:
    """Format in hundredths, with a sign.

    >>> signed(0.0123), signed(-0.2), signed(-0.0001)
    ('+1.2', '-20.0', '+0.0')
    """
    return f"{100 * value:+z.1f}"


def gaps(folder: str | Path, against: Sequence[str | Path] = ()) -> list[Gap]:
    """Every metric's gaps: to random weights if the folder has them, then to each other folder.

    >>> [gap.interval.verdict for gap in gaps("runs/a", ["runs/b"])]  # doctest: +SKIP
    ['visible']
    """
    ours = read_answers(folder)
    others = [read_answers(one) for one in against]
    names = unique_names({str(one.folder): one.model for one in (ours, *others)})
    sides = {}
    if "scratch" in ours.runs:
        sides[f"{names[0]}, {NAMES['scratch']}"] = differences(ours, ours, ours.metrics, their_start="scratch")
    for name, other in zip(names[1:], others, strict=True):
        sides[f"{name}, {NAMES['model']}"] = differences(ours, other, ours.metrics)
    mine = f"{names[0]}, {NAMES['model']}"
    return [Gap(metric, mine, theirs, found[metric]) for metric in ours.metrics for theirs, found in sides.items()]


def gaps_of_folders(folder: str | Path, against: Sequence[str | Path]) -> dict[str, list[Gap]]:
    """The gaps between finished folders, of fine-tunings or of suites: by task, for the tasks that all of them have.

    >>> [*gaps_of_folders("runs/glue", ["runs/other-glue"])]  # doctest: +SKIP
    ['cola', 'rte']
    """
    every = [check_against(folder), *check_others(folder, against)]
    if all((one / ABOUT).is_file() for one in every):
        return {"": gaps(every[0], every[1:])}
    tasks = [{path.parent.name for path in one.glob(f"*/{ABOUT}")} for one in every]
    shared = sorted(set.intersection(*tasks))
    if not shared:
        raise UsageError(
            f"{', '.join(map(str, every))} have no fine-tuning of the same name in them: nothing to compare"
        )
    return {name: gaps(every[0] / name, [one / name for one in every[1:]]) for name in shared}


def unique_names(models: Mapping[str, str]) -> list[str]:
    """The model names of folders; names that occur twice include the folder.

    >>> unique_names({"runs/a": "stories", "runs/b": "mine", "runs/c": "mine"})
    ['stories', 'mine in runs/b', 'mine in runs/c']
    """
    names = [*models.values()]
    return [name if names.count(name) == 1 else f"{name} in {folder}" for folder, name in models.items()]


def check_others(own: str | Path, against: Sequence[str | Path]) -> list[Path]:
    """The folders to compare with, without duplicates; the folder itself is refused.

    >>> check_others("runs/a", ["runs/b"])  # doctest: +SKIP
    [PosixPath('runs/b')]
    """
    others = {folder.resolve(): folder for folder in map(check_against, against)}
    if Path(own).expanduser().resolve() in others:
        raise UsageError(f"{own} cannot be compared with itself: give another folder to --against")
    return [*others.values()]


def check_examples(labelled: Labelled, others: Sequence[str | Path]) -> None:
    """Refuse, before anything is trained, fine-tunings that report examples other than those of these files.

    >>> check_examples(read_labelled(config), ["runs/b"])  # doctest: +SKIP
    """
    config, files = labelled.config, labelled.files
    examples = files.get("test", files["train"])
    if "test" not in files and config.folds is None:
        parts = labelled.splits().parts
        examples = parts.get("test", parts["valid"]).examples
    labels = targets(examples, "regression", ()) if config.kind == "regression" else [one.label for one in examples]
    ours = Counter((one.text, one.pair, label) for one, label in zip(examples, labels, strict=True))
    for other in others:
        if Counter(key[:3] for key in read_answers(other).keys) != ours:
            raise UsageError(f"{other} reports other examples than {config.out} will: fine-tune both on the same files")


def check_against(folder: str | Path) -> Path:
    """A folder to compare with; anything else is refused before training.

    >>> check_against("runs/b")  # doctest: +SKIP
    PosixPath('runs/b')
    """
    folder = Path(folder).expanduser()
    if not (folder / ABOUT).is_file() and not any(folder.glob(f"*/{ABOUT}")):
        raise UsageError(f"{folder} is no folder of a fine-tuning or of a suite of them: nothing to compare with")
    return folder
