"""The frontier: a judge's perplexity against the variety of the texts, over temperature, steps, samplers, schedules.

A sampler's perplexity is meaningless by itself: a lower temperature reduces it at the cost of variety. So samplers are
compared as curves: perplexity against unigram entropy (arXiv 2409.02908), and perplexity against network calls and
seconds (MDLM, arXiv 2406.07524, Figure 2). A point is a model with options for its sampler. Its texts have the lengths
of the real texts, one each, if the model can be asked for a length; texts of autoregressive models end by themselves.

Everything is in one folder. texts/NAME.jsonl holds a point's texts and is written atomically. points.jsonl has one line
for the real texts and one for each judged point. Repeating a call continues where it was stopped or killed; texts may
be written on one machine and judged on another, and later calls may add points.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from unmask.errors import DataError, Stopped, UnmaskError, UsageError, did_you_mean
from unmask.evaluation.judging.generated_text import Described, describe
from unmask.evaluation.judging.written_text import BATCH, save_texts, saved_texts, write_texts
from unmask.machine import made_with
from unmask.samplers import Sampler
from unmask.sampling.factory import UnknownOption
from unmask.storage.atomic import atomic_text
from unmask.storage.untrusted import read_json
from unmask.text.bulk import identity

if TYPE_CHECKING:
    from unmask.evaluation.judging.judge import Judge
    from unmask.model import Model

FORMAT_VERSION = 1
MANIFEST, POINTS, TEXTS = "frontier.json", "points.jsonl", "texts"
ONE_AT_A_TIME = ("sampler", "steps", "tokens", "random")  # options that do not apply to autoregressive models
Note = Callable[[str], None]


@dataclass(frozen=True)
class Point:
    """A model and the options of its sampler, as strings; the option `sampler` is the sampler's name.

    >>> Point("stories", (("sampler", "remdm"), ("steps", "64"))).name
    'stories-sampler=remdm-steps=64'
    """

    model: str
    options: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """The name of its file. Characters that file names cannot contain are replaced, and a digest is then added."""
        spelled = "-".join([Path(self.model).name or self.model, *(f"{key}={value}" for key, value in self.options)])
        plain = re.sub(r"[^\w.=+-]", "_", spelled)[:120]
        whole = json.dumps([self.model, self.options])
        short = plain == spelled and Path(self.model).name == self.model
        return plain if short else f"{plain}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


# --- which points -----------------------------------------------------------------------------------------------------


def product(over: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """All combinations of the values; the last option varies fastest.

    >>> product({"steps": ["16", "64"], "top_p": ["0.9"]})
    [{'steps': '16', 'top_p': '0.9'}, {'steps': '64', 'top_p': '0.9'}]
    """
    return [dict(zip(over, values, strict=True)) for values in itertools.product(*over.values())]


def points_of(
    models: Mapping[str, Model], over: Mapping[str, Sequence[str]], note: Note | None = None
) -> dict[Point, Sampler]:
    """Each point with its sampler.

    Options that a point's sampler does not have are dropped, such as steps for an autoregressive model, and points that
    become equal are merged. An option that no sampler has is refused.

    >>> points_of({"stories": model}, {"steps": ["16", "64"]})  # doctest: +SKIP
    """
    found: dict[Point, Sampler] = {}
    known, told = set[str](), set[str]()
    for (name, model), options in itertools.product(models.items(), product(over)):
        kept = dict(options)
        for option in [option for option in ONE_AT_A_TIME if option in kept and model.process is None]:
            told.add(f"{name} writes from left to right, a token a call: its points are without {option}")
            del kept[option]
        while True:
            try:
                made = _make(model, kept)
                break
            except UnknownOption as e:
                if e.option not in kept:
                    raise
                known |= e.known
                told.add(f"{e.cls.__name__} has no option {e.option}: its points of {name} are without it")
                del kept[e.option]
        known |= {field.name for field in fields(cast(Any, made))}
        found.setdefault(Point(name, tuple(kept.items())), made)
    for option in over:
        if not any(option in dict(point.options) for point in found):
            hint = "leave it out" if option in ONE_AT_A_TIME else did_you_mean(option, known)
            raise UsageError(f"no sampler of these models has the option {option}: {hint}")
    if note is not None:
        for sentence in sorted(told):
            note(sentence)
    return found


def _make(model: Model, options: Mapping[str, str]) -> Sampler:
    rest: dict[str, Any] = {key: value for key, value in options.items() if key != "sampler"}
    if rest.get("steps") in ("inf", "none"):
        rest["steps"] = None
    return model.make_sampler(options.get("sampler"), **rest)


# --- the folder -------------------------------------------------------------------------------------------------------


class Frontier:
    """The folder of a frontier: its manifest, the texts of its points and their numbers. words: of the command line.

    >>> frontier = Frontier("judged", real, seed=0)  # doctest: +SKIP
    >>> frontier.write(points_of(models, over), models); frontier.judge(judge)  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | Path,
        real: Sequence[str],
        *,
        length: int | None = None,
        full: bool = False,
        seed: int = 0,
        words: Sequence[str] = (),
    ) -> None:
        if not real:
            raise DataError("there is no real text to compare with: give a file that holds some")
        self.folder, self.real = Path(folder), list(real)
        self.how: dict[str, Any] = {"length": length, "seed": seed} | ({"full": True} if full else {})
        self.seed, self.words = seed, words
        digest = hashlib.sha256(json.dumps(self.real).encode()).hexdigest()
        self.manifest: dict[str, Any] = {"format_version": FORMAT_VERSION, "real": digest, "num": len(self.real)}
        self.manifest |= self.how | {"models": {}}
        names = sorted(path.name for path in self.folder.iterdir()) if self.folder.is_dir() else []
        if MANIFEST in names:
            self._check(read_json(self.folder / MANIFEST))
        elif names or self.folder.is_file():
            raise UsageError(f"{self.folder} holds other things and no {MANIFEST}: give a folder of its own")

    def _check(self, earlier: dict[str, Any]) -> None:
        for key in ("format_version", "real", "num", "length", "seed", "full"):
            if earlier.get(key) != self.manifest.get(key):
                what = {"real": "real texts", "num": "number of texts", "full": "answer to --full"}.get(key, key)
                raise UsageError(f"{self.folder} was begun with another {what}: give the same, or another folder")
        self.manifest = earlier

    def lines(self) -> list[dict[str, Any]]:
        """The judged sets of texts, the real texts first.

        >>> frontier.lines()[0]["numbers"]["entropy"]["value"]  # doctest: +SKIP
        """
        return read_points(self.folder / POINTS) if (self.folder / POINTS).exists() else []

    def points(self) -> list[Point]:
        """The points that this folder was asked to write, for judging without the models.

        >>> frontier.points()[0].name  # doctest: +SKIP
        'stories-steps=16'
        """
        try:
            kept = self.manifest.get("points", {}).values()
            return [Point(one["model"], tuple((key, value) for key, value in one["options"])) for one in kept]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise DataError(f"{self.folder / MANIFEST} is damaged: it does not say what was asked for") from None

    def written(self, point: Point) -> bool:
        """Whether the texts of a point exist."""
        return self._path(point).exists()

    def _begin(self, models: Mapping[str, Model], variant: str, points: Iterable[Point]) -> None:
        begun = {point.model for point in self.points() if self.written(point)}
        if "points" not in self.manifest and any((self.folder / TEXTS).glob("*.jsonl")):
            begun |= models.keys()  # texts in the folder of an earlier version, whose model is unknown
        for name, model in models.items():
            found = json.loads(json.dumps(identity(model)))
            if self.manifest["models"].get(name + variant, found) != found and name in begun:
                raise UsageError(f"{self.folder} was begun with another model {name}{variant}: give another folder")
            self.manifest["models"][name + variant] = found  # it may have been replaced since if it has written nothing
        asked = {
            point.name: {"model": point.model, "options": [list(one) for one in point.options]} for point in points
        }
        self.manifest["points"] = self.manifest.get("points", {}) | asked
        self._keep()

    def made(self) -> list[dict[str, str]]:
        """The commands that have written and judged here, with version and machine.

        >>> frontier.made()[0]["command"]  # doctest: +SKIP
        """
        kept = self.manifest.get("made_with")
        return kept if isinstance(kept, list) else []

    def _keep(self) -> None:
        if (now := made_with(self.words)) not in self.made():
            self.manifest["made_with"] = [*self.made(), now]
        (self.folder / TEXTS).mkdir(parents=True, exist_ok=True)
        atomic_text(self.folder / MANIFEST, json.dumps(self.manifest, indent=1) + "\n")

    def take(self, written: Frontier) -> None:
        """Take over the texts of another folder, so that a second judge reads the texts that a first one has read.

        >>> Frontier("judged-again", real).take(Frontier("judged", real))  # doctest: +SKIP
        """
        if not written.points():
            raise UsageError(f"{written.folder} holds no texts of a frontier: give a folder that unmask frontier wrote")
        for name, found in written.manifest["models"].items():
            if self.manifest["models"].setdefault(name, found) != found:
                raise UsageError(f"{self.folder} was begun with another model {name}: give another folder")
        self.manifest["points"] = self.manifest.get("points", {}) | written.manifest["points"]
        self._keep()
        for point in written.points():
            here, there = self._path(point), written._path(point)
            if there.exists() and not here.exists():
                atomic_text(here, there.read_text(encoding="utf-8"))

    def write(
        self,
        points: Mapping[Point, Sampler],
        models: Mapping[str, Model],
        *,
        batch: int = BATCH,
        warm: bool = False,
        variant: str = "",
        note: Note | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[str]:
        """Write the texts of the points that have none yet; returns one sentence for each failure.

        variant: names the variant of the models if there are several, such as " in bf16".

        >>> frontier.write(points_of(models, over), models)  # doctest: +SKIP
        []
        """
        self._begin(models, variant, points)
        wrong = []
        for number, (point, sampler) in enumerate(points.items(), 1):
            if self.written(point):
                continue
            try:
                how: dict[str, Any] = self.how | {"batch": batch, "warm": warm, "progress": progress}
                written = write_texts(models[point.model], sampler, self.real, **how)
            except Stopped:
                raise
            except UnmaskError as e:
                wrong.append(f"{point.name} is not written: {e}")
                continue
            save_texts(self._path(point), written)
            if note is not None:
                said = f"{len(written.texts)} texts, {written.how['seconds_per_text']:.3g} s each"
                note(f"{point.name}: {said}; {number} of {len(points)} points")
        return wrong

    def judge(
        self,
        judge: Judge,
        points: Sequence[Point],
        *,
        note: Note | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[str]:
        """Judge the real texts and all points that are written but not judged; returns one sentence for each failure.

        >>> frontier.judge(load_judge("gpt2"), list(points))  # doctest: +SKIP
        []
        """
        protocol = {key: value for key, value in judge.protocol().items() if key != "judge_device"}
        if self.manifest.setdefault("judge", protocol) != protocol:
            raise UsageError(
                f"{self.folder} was judged by another judge, or otherwise: give another --out, and --written "
                f"{self.folder} to have these texts read"
            )
        self._keep()
        lines = self.lines()
        done = {line["name"] for line in lines}
        missing = [point for point in points if point.name not in done and self.written(point)]
        if lines and not missing:
            return []
        how: dict[str, Any] = {"seed": self.seed, "progress": progress}
        real = describe(judge, self.real, about={"source": "real texts"}, **how)
        wrong = [f"real texts: {sentence}" for sentence in real.lost]
        lines = [line_of("real", real), *lines[1:]]
        self._keep_lines(lines)
        for number, point in enumerate(missing, 1):
            try:
                written = saved_texts(self._path(point))
                found = describe(judge, written.texts, real, about=written.how, **how)
            except UnmaskError as e:
                wrong.append(f"{point.name}: {e}")
                continue
            wrong += [f"{point.name}: {sentence}" for sentence in found.lost]
            lines.append(line_of(point.name, found, real) | {"model": point.model, "options": dict(point.options)})
            self._keep_lines(lines)
            if note is not None:
                note(f"{point.name}: {found.numbers['judge_ppl']}; {number} of {len(missing)} points")
        return wrong

    def _keep_lines(self, lines: Sequence[dict[str, Any]]) -> None:
        atomic_text(self.folder / POINTS, "".join(json.dumps(line) + "\n" for line in lines))

    def _path(self, point: Point) -> Path:
        return self.folder / TEXTS / f"{point.name}.jsonl"


def line_of(name: str, found: Described, real: Described | None = None) -> dict[str, Any]:
    """The line of points.jsonl for a set of texts; less_varied: the numbers that show less variety than the real texts.

    >>> line_of("mine", described, real)["less_varied"]  # doctest: +SKIP
    ['entropy']
    """
    return {"name": name} | found.summary() | {"less_varied": [] if real is None else found.beyond(real)}


def read_points(path: Path) -> list[dict[str, Any]]:
    """The lines of a points.jsonl, the real texts first.

    >>> read_points(Path("judged/points.jsonl"))[0]["name"]  # doctest: +SKIP
    'real'
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if any(not isinstance(line[key], kind) for line in lines for key, kind in (("name", str), ("numbers", dict))):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not what unmask frontier writes"
        raise DataError(f"cannot read {path}: {reason}") from None
    return lines
