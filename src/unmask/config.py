"""The run's dataclasses, and how they are read from TOML, JSON and the command line.

A recipe names plug-ins and gives their options; it never holds code. Reading is strict: an unknown key or a value of
the wrong type is an error that names the key and the closest known one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from unmask.corpora import Corpus
from unmask.corpora.stdlib import Stdlib
from unmask.data.rows import Anchor
from unmask.denoisers import Denoiser
from unmask.denoisers.dit import DiT
from unmask.errors import ConfigError, UsageError, did_you_mean
from unmask.objectives import Objective
from unmask.objectives.mdlm import MDLM
from unmask.registry import BEFORE, came_later
from unmask.samplers.drawing import Drawing

RECIPE_FILE = "recipe.json"  # what a run writes into its folder


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on, and how documents become rows."""

    train: Corpus = Stdlib()
    valid: Corpus | None = None  # None: a part of train's documents is held out, chosen by their content
    held_out: float = 0.02
    packing: Literal["wrap", "pad", "sentence"] = "wrap"
    # Fixed tokens that frame each row of pad and sentence; auto: both, where the denoiser sees both sides of a token.
    anchor: Literal["auto", "none", "begin", "both"] = came_later("auto", before="none")
    length: int = 256
    cache: str | None = None  # None: the user's cache folder

    def absolute(self) -> DataConfig:
        """The same data from any working directory.

        >>> DataConfig(cache="/data/./cache").absolute().cache
        '/data/cache'
        """
        valid = None if self.valid is None else self.valid.absolute()
        cache = None if self.cache is None else os.path.abspath(os.path.expanduser(self.cache))
        return dataclasses.replace(self, train=self.train.absolute(), valid=valid, cache=cache)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, or Muon for the blocks' matrices, and the learning-rate schedule.

    The defaults serve short runs and small networks; the paper's values are the recipe `paper`.
    """

    lr: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon: bool = came_later(True, before=False)  # for the blocks' matrices; AdamW for the rest
    momentum: float = 0.95  # muon's
    muon_rms: float = 0.2  # root mean square of muon's update, in units of lr; AdamW's own is about this
    warmup: float = 0.05  # steps; below 1 a share of the run's
    schedule: Literal["constant", "cosine", "wsd"] = "wsd"
    decay_fraction: float = 0.3  # wsd: the last part of the run, in which the rate falls to min_ratio
    min_ratio: float = 0.0
    clip: float = 1.0  # 0: none
    ema: float = 0.999  # 0: none

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "warmup", "clip"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("min_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if not 0 <= self.momentum < 1 or not self.muon_rms > 0:
            raise ConfigError(
                f"momentum must lie in [0, 1) and muon_rms above 0, got {self.momentum} and {self.muon_rms}"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must lie in [0, 1), got {self.betas}")
        if not 0 <= self.ema < 1:
            raise ConfigError(f"ema must lie in [0, 1), got {self.ema}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a training run depends on."""

    out: str = "runs/unmask"
    seed: int = 0
    steps: int = 1000
    batch: int = 64  # rows of the global batch
    micro_batch: int | None = None  # rows of one forward pass; None: the whole batch
    tokenizer: str = "bytes"  # bytes, chars, bpe:SIZE, a folder or file with a tokenizer.json, or a hub name
    data: DataConfig = DataConfig()
    denoiser: Denoiser = DiT()
    objective: Objective = MDLM()
    optim: OptimConfig = OptimConfig()
    drawing: Drawing = Drawing()  # how the model draws tokens where nobody says otherwise
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    checkpoint_activations: bool = False
    log_every: int = 10
    valid_every: int = 250
    valid_rows: int = 256
    sample_every: int = 1000  # 0: none
    best: str = "valid_nats_per_token"  # the metric by which RUN/model is kept; any that a callback logs at validations
    best_is: Literal["least", "most"] = "least"
    save_every: int = 250  # steps that a kill costs at most
    keep: int = 2  # last checkpoints kept, beside the best
    keep_every: int = 0  # and those at multiples of this many steps; 0: none
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # on several processes; auto: ddp unless the GPU is too small
    on_nonfinite: Literal["stop", "skip"] = "stop"  # a loss or gradient that is no number; it never reaches the weights
    max_nonfinite: int = 10  # steps that may be skipped
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory, twice as often
    # whole: by the first process; sharded: by each its share; auto: sharded with fsdp, unless in the background
    save_as: Literal["auto", "whole", "sharded"] = "auto"

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "log_every", "valid_every", "valid_rows", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_batch is not None and not 1 <= self.micro_batch <= self.batch:
            raise ConfigError(f"micro_batch must lie between 1 and batch ({self.batch}), got {self.micro_batch}")
        if self.data.length < 2:
            raise ConfigError(f"data.length must be at least 2, got {self.data.length}")
        if not 0 < self.data.held_out < 1:
            raise ConfigError(f"data.held_out must lie between 0 and 1, got {self.data.held_out}")
        if self.data.valid is not None and self.data.valid.is_test():
            raise ConfigError("data.valid is a test split: validate on another one, so that the test stays a test")
        for name in ("sample_every", "keep_every", "max_nonfinite"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 (none) or more, got {getattr(self, name)}")
        if self.best == "valid_nats_per_token" and self.best_is == "most":
            raise ConfigError("the best valid_nats_per_token is the least: leave out best_is, or name another best")
        if self.save_as == "sharded" and self.async_save:
            raise ConfigError("sharded checkpoints are not written in the background: set save_as = whole or auto")
        self.objective.check(self.denoiser)
        if self.data.packing == "wrap" and self.data.anchor not in ("auto", "none"):
            raise ConfigError("data.anchor frames rows of the packings pad and sentence: leave it out, or set packing")
        if self.denoiser.causal and self.data.anchor == "both":
            raise ConfigError("data.anchor = both tells where a text ends, which autoregression must learn: use begin")

    @property
    def anchor(self) -> Anchor:
        """What frames the rows, with `data.anchor = "auto"` decided: relative positions need it where nothing else is
        fixed; a causal denoiser knows where its rows begin, and must not be told where they end.

        >>> RunConfig().anchor, RunConfig(data=DataConfig(packing="pad")).anchor
        ('none', 'both')
        """
        if self.data.anchor != "auto":
            return self.data.anchor
        return "none" if self.data.packing == "wrap" or self.denoiser.causal else "both"

    @property
    def saved_every(self) -> int:
        """Steps from one save to the next, so that a kill costs `save_every` of them at most.

        One that is being written in the background is not there yet: such saves are made twice as often, and each waits
        for the one before.

        >>> RunConfig(save_every=100).saved_every, RunConfig(save_every=100, async_save=True).saved_every
        (100, 50)
        """
        return max(1, self.save_every // 2) if self.async_save else self.save_every


# --- dataclass ↔ plain data -------------------------------------------------------------------------------------------


def to_dict(value: Any) -> Any:
    """Plain data (dict, list, str, numbers, None) that `from_dict` reads back.

    >>> from unmask.noise import Polynomial
    >>> to_dict(Polynomial(power=3.0))
    {'name': 'polynomial', 'power': 3.0}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        room = getattr(value, "room", None)
        head = {"name": room.name_of(value)} if room is not None else {}
        return head | {f.name: to_dict(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [to_dict(v) for v in value]
    return value


class Word(str):
    """A value as it was typed on the command line: the only strings that may stand for a number, a list or none."""

    __slots__ = ()


def from_dict(kind: Any, data: Any, where: str = "", *, default: Any = None, saved: bool = False) -> Any:
    """Build `kind` (a dataclass, a plug-in base, a plain type) from plain data; a `Word` is read as its type asks.

    default: the plug-in that a table without a name means. saved: read from what a run or a model has written, which
    names every option there was; one that it lacks came later and has the value that changes nothing (`came_later`).

    >>> from unmask.noise import Noise, Polynomial
    >>> from_dict(Noise, "cosine")
    Cosine()
    >>> from_dict(Noise, {"power": 3.0}, default=Polynomial())
    Polynomial(power=3.0)
    >>> from_dict(int, Word("1e3"))
    1000
    """
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        options = [a for a in typing.get_args(kind) if a is not type(None)]
        if data is None or (isinstance(data, Word) and data == "none"):
            return None
        if isinstance(data, dict) and any(typing.get_origin(option) is dict for option in options):
            return data  # plain data, such as a schema, is not looked into
        return from_dict(options[0], data, where, default=default, saved=saved)
    if origin is Literal:
        choices = typing.get_args(kind)
        if data in choices:
            return choices[choices.index(data)]
        raise ConfigError(f"{where}: {data!r} is not a choice; {did_you_mean(str(data), map(str, choices))}")
    if origin is tuple:
        return _tuple(kind, data, where)
    if isinstance(kind, type) and hasattr(kind, "room"):
        return _plugin(kind, data, where, default, saved)
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), data, where, saved)
    return _plain(kind, data, where)


def _plugin(kind: Any, data: Any, where: str, default: Any, saved: bool) -> Any:
    data = {"name": data} if isinstance(data, str) else data
    if isinstance(data, dict) and "name" not in data and default is not None and not saved:
        data = {"name": kind.room.name_of(default)} | data
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ConfigError(f"{where}: needs a name, one of {', '.join(kind.room.names())}")
    options = {k: v for k, v in data.items() if k != "name"}
    try:
        plugin = kind.room.get(data["name"])
    except UsageError as e:
        raise ConfigError(f"{where}: {e}" if where else str(e)) from None
    return _dataclass(plugin, options, where, saved)


def _dataclass(kind: type, data: Any, where: str, saved: bool) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a table of options, got {data!r}")
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            raise ConfigError(f"unknown key {path!r}; {did_you_mean(key, known)}")
        default = None if known[key].default is dataclasses.MISSING else known[key].default
        values[key] = from_dict(hints[key], value, path, default=default, saved=saved)
    for f in known.values():
        if saved and f.name not in data and BEFORE in f.metadata:
            values[f.name] = f.metadata[BEFORE]
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"{where + '.' if where else ''}{f.name} is missing: {kind.__name__} needs it")
    try:
        return kind(**values)
    except UsageError as e:
        raise ConfigError(f"{where}: {e}" if where else str(e)) from None


def _tuple(kind: Any, data: Any, where: str) -> tuple[Any, ...]:
    parts = [Word(part) for part in data.split(",")] if isinstance(data, Word) else data
    args = typing.get_args(kind)
    if isinstance(parts, str) and args == (str, ...):
        parts = [parts]  # one text is a list of one
    if not isinstance(parts, list | tuple):
        raise ConfigError(f"{where}: expected a list, got {data!r}")
    if args[-1] is Ellipsis:
        args = (args[0],) * len(parts)
    if len(parts) != len(args):
        raise ConfigError(f"{where}: expected {len(args)} values, got {len(parts)}")
    return tuple(from_dict(a, p, where) for a, p in zip(args, parts, strict=True))


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _plain(kind: Any, data: Any, where: str) -> Any:
    bad = ConfigError(f"{where}: expected {kind.__name__}, got {data!r}")
    if kind is bool:
        if isinstance(data, bool):
            return data
        if isinstance(data, Word) and data.lower() in _TRUE + _FALSE:
            return data.lower() in _TRUE
        raise bad
    if isinstance(data, bool):
        raise bad
    if kind is str:
        if isinstance(data, str):
            return str(data)
        raise bad
    if kind in (int, float):
        if kind is int and isinstance(data, Word) and re.fullmatch(r"[+-]?[0-9]{1,40}", data):
            return int(data)  # not through a float: a large seed keeps every digit
        try:
            number = float(data) if isinstance(data, int | float | Word) else None
        except (ValueError, OverflowError):
            number = None
        if number is None or not math.isfinite(number) or (kind is int and number != int(number)):
            raise bad
        return int(data) if kind is int and isinstance(data, int) else kind(number)
    raise bad


# --- recipes ----------------------------------------------------------------------------------------------------------


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The plain data of a recipe: a TOML or JSON file, a built-in one by its name, or a run's folder."""
    path = Path(path)
    run = path if (path / RECIPE_FILE).is_file() else None
    if run is not None:
        path = run / RECIPE_FILE
    if not path.exists() and not path.suffix and path.name == str(path):
        built_in = Path(__file__).parent / "recipes" / f"{path}.toml"
        if not built_in.exists():
            known = [p.stem for p in built_in.parent.glob("*.toml")]
            raise ConfigError(f"no recipe file or built-in recipe {str(path)!r}; {did_you_mean(str(path), known)}")
        path = built_in
    try:
        raw = path.read_text(encoding="utf-8")
        data = json.loads(raw) if path.suffix == ".json" else tomllib.loads(raw)
    except OSError as e:
        raise ConfigError(f"cannot read the recipe {path}: {e.strerror or e}") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {e}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a recipe is a table of options")
    return data if run is None else data | {"out": str(run)}  # a run is where it is found, also when it was moved


def load_config(path: str | Path, overrides: dict[str, str] | None = None) -> RunConfig:
    """A recipe with typed overrides, e.g. `load_config("demo", {"optim.lr": "1e-3", "objective.noise": "cosine"})`.

    Their order means nothing: a plug-in is named before it gets its options.
    """
    saved = (Path(path) / RECIPE_FILE).is_file()
    data = to_dict(from_dict(RunConfig, read_recipe(path), saved=saved))
    given = {key.removesuffix(".name"): Word(value) for key, value in (overrides or {}).items()}
    for key in sorted(given, key=lambda key: key.count(".")):
        _set(data, key, given[key])
    return typing.cast(RunConfig, from_dict(RunConfig, data))


def _set(data: dict[str, Any], key: str, value: Word) -> None:
    """Set a dotted key. Naming another plug-in replaces the table, so that the old one's options do not linger."""
    *path, last = key.split(".")
    for i, part in enumerate(path):
        inner = data.get(part)
        if inner is None:  # of a plug-in that was just named, say; where there is no such key, reading it tells
            inner = {}
        elif isinstance(inner, Word):
            inner = {"name": inner}
        elif not isinstance(inner, dict):
            raise ConfigError(f"{key!r}: {'.'.join(path[: i + 1])} has no options")
        data[part] = inner
        data = inner
    if isinstance(data.get(last), dict) and data[last].get("name") == value:
        return  # the same plug-in again: it keeps what the recipe gave it
    data[last] = value


def option_paths(config: RunConfig | dict[str, Any]) -> dict[str, Any]:
    """Every dotted key of this config with its value: what `--help` lists and what overrides may name."""

    def walk(data: dict[str, Any], prefix: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in data.items():
            if isinstance(value, dict):
                if "name" in value:
                    flat[prefix + key] = value["name"]
                flat |= walk({k: v for k, v in value.items() if k != "name"}, f"{prefix}{key}.")
            else:
                flat[prefix + key] = value
        return flat

    return walk(config if isinstance(config, dict) else to_dict(config), "")


def option_choices(config: RunConfig) -> dict[str, list[str]]:
    """The dotted keys that take one of a few words, with these: names of plug-ins, choices, true and false.

    >>> "cosine" in option_choices(RunConfig())["objective.noise"]
    True
    """

    def walk(value: Any, prefix: str) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        hints = typing.get_type_hints(type(value))
        for f in dataclasses.fields(value):
            if words := _choices(hints[f.name]):
                found[prefix + f.name] = words
            if dataclasses.is_dataclass(inner := getattr(value, f.name)):
                found |= walk(inner, f"{prefix}{f.name}.")
        return found

    return walk(config, "")


def _choices(kind: Any) -> list[str]:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        words = _choices(next(a for a in typing.get_args(kind) if a is not type(None)))
        return [*words, "none"] if words else []
    if origin is Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    if kind is bool:
        return ["true", "false"]
    return list(kind.room.names()) if hasattr(kind, "room") else []
