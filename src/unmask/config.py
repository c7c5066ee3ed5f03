"""The run's dataclasses, and how they are read from TOML, JSON and the command line.

A recipe names plug-ins and gives their options; it never holds code. Reading is strict: an unknown key or a value of
the wrong type is an error that names the key and the closest known one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from unmask.corpora import Corpus
from unmask.corpora.stdlib import Stdlib
from unmask.denoisers import Denoiser
from unmask.denoisers.dit import DiT
from unmask.errors import ConfigError, UsageError, did_you_mean
from unmask.objectives import Objective
from unmask.objectives.mdlm import MDLM

RECIPE_FILE = "recipe.json"  # what a run writes into its folder


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on, and how documents become rows."""

    train: Corpus = Stdlib()
    valid: Corpus | None = None  # None: a part of train's documents is held out, chosen by their content
    held_out: float = 0.02
    packing: Literal["wrap", "pad", "sentence"] = "wrap"
    length: int = 256
    cache: str | None = None  # None: the user's cache folder


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and the learning rate's course; the defaults are the paper's."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: int = 2500
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    decay_fraction: float = 0.2  # wsd: the last part of the run, in which the rate falls to min_ratio
    min_ratio: float = 0.0
    clip: float = 1.0
    ema: float = 0.9999  # 0: none


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
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    checkpoint_activations: bool = False
    log_every: int = 10
    valid_every: int = 250
    valid_rows: int = 256
    sample_every: int = 0  # 0: none
    save_every: int = 250
    keep: int = 2  # last checkpoints kept, beside the best

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
        if not 0 <= self.optim.ema < 1:
            raise ConfigError(f"optim.ema must lie in [0, 1), got {self.optim.ema}")
        self.objective.check(self.denoiser)


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


def from_dict(kind: Any, data: Any, where: str = "", *, text: bool = False) -> Any:
    """Build `kind` (a dataclass, a plug-in base, a plain type) from plain data; `text` reads numbers from strings.

    >>> from unmask.noise import Noise
    >>> from_dict(Noise, "cosine")
    Cosine()
    """
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        options = [a for a in typing.get_args(kind) if a is not type(None)]
        if data is None or (text and data == "none"):
            return None
        return from_dict(options[0], data, where, text=text)
    if origin is Literal:
        if data in typing.get_args(kind):
            return data
        raise ConfigError(
            f"{where}: {data!r} is not a choice; {did_you_mean(str(data), map(str, typing.get_args(kind)))}"
        )
    if origin is tuple:
        return _tuple(kind, data, where, text)
    if isinstance(kind, type) and hasattr(kind, "room"):
        return _plugin(kind, data, where, text)
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), data, where, text)
    return _plain(kind, data, where, text)


def _plugin(kind: Any, data: Any, where: str, text: bool) -> Any:
    data = {"name": data} if isinstance(data, str) else data
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ConfigError(f"{where}: needs a name, one of {', '.join(kind.room.names())}")
    options = {k: v for k, v in data.items() if k != "name"}
    return _dataclass(kind.room.get(data["name"]), options, where, text)


def _dataclass(kind: type, data: Any, where: str, text: bool) -> Any:
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a table of options, got {data!r}")
    hints = typing.get_type_hints(kind)
    known = [f.name for f in dataclasses.fields(kind)]
    values = {}
    for key, value in data.items():
        path = f"{where}.{key}" if where else key
        if key not in known:
            raise ConfigError(f"unknown key {path!r}; {did_you_mean(key, known)}")
        values[key] = from_dict(hints[key], value, path, text=text)
    for f in dataclasses.fields(kind):
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and f.name not in values:
            raise ConfigError(f"{where + '.' if where else ''}{f.name} is missing: {kind.__name__} needs it")
    try:
        return kind(**values)
    except UsageError as e:
        raise ConfigError(f"{where}: {e}" if where else str(e)) from None


def _tuple(kind: Any, data: Any, where: str, text: bool) -> tuple[Any, ...]:
    parts = data.split(",") if text and isinstance(data, str) else data
    args = typing.get_args(kind)
    if not isinstance(parts, list | tuple):
        raise ConfigError(f"{where}: expected a list, got {data!r}")
    if args[-1] is Ellipsis:
        args = (args[0],) * len(parts)
    if len(parts) != len(args):
        raise ConfigError(f"{where}: expected {len(args)} values, got {len(parts)}")
    return tuple(from_dict(a, p, where, text=text) for a, p in zip(args, parts, strict=True))


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


def _plain(kind: Any, data: Any, where: str, text: bool) -> Any:
    bad = ConfigError(f"{where}: expected {kind.__name__}, got {data!r}")
    if kind is bool:
        if isinstance(data, bool):
            return data
        if text and str(data).lower() in _TRUE + _FALSE:
            return str(data).lower() in _TRUE
        raise bad
    if isinstance(data, bool):
        raise bad
    if kind is str:
        if isinstance(data, str):
            return data
        raise bad
    if kind in (int, float):
        try:
            number = float(data) if isinstance(data, int | float) or text else None
        except ValueError:
            number = None
        if number is None or not math.isfinite(number) or (kind is int and number != int(number)):
            raise bad
        return int(data) if kind is int and isinstance(data, int) else kind(number)
    raise bad


# --- recipes ----------------------------------------------------------------------------------------------------------


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The plain data of a recipe file (TOML, or JSON by its ending); a bare name is a built-in one; a run's folder is its own."""
    path = Path(path)
    if (path / RECIPE_FILE).is_file():
        path = path / RECIPE_FILE  # a run's own folder
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
    return data


def load_config(path: str | Path, overrides: dict[str, str] | None = None) -> RunConfig:
    """A recipe with typed overrides, e.g. `load_config("demo", {"optim.lr": "1e-3", "objective.noise": "cosine"})`."""
    data = to_dict(from_dict(RunConfig, read_recipe(path)))
    for key, value in (overrides or {}).items():
        _set(data, key, value)
    return typing.cast(RunConfig, from_dict(RunConfig, data, text=True))


def _set(data: dict[str, Any], key: str, value: str) -> None:
    """Set a dotted key. Naming a plug-in replaces the table, so that the old one's options do not linger."""
    *path, last = key.split(".")
    for i, part in enumerate(path):
        if part not in data:
            raise ConfigError(f"unknown key {'.'.join(path[: i + 1])!r}; {did_you_mean(part, data)}")
        if isinstance(data[part], str):
            data[part] = {"name": data[part]}  # a plug-in named by an earlier override gets its options here
        if not isinstance(data[part], dict):
            raise ConfigError(f"{key!r}: {'.'.join(path[: i + 1])} has no options")
        data = data[part]
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
