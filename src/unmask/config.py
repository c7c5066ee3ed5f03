"""The dataclasses of a run, and how recipes are read: TOML, JSON and the command line.

A recipe names plug-ins and gives their options; it never contains code. `unmask.reader` parses it strictly.
"""

from __future__ import annotations

import dataclasses
import json
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union

from unmask.corpora import Corpus
from unmask.corpora.stdlib import Stdlib
from unmask.data.rows import Anchor, Windows
from unmask.denoisers import Denoiser
from unmask.denoisers.dit import DiT
from unmask.errors import ConfigError, did_you_mean
from unmask.metrics import Metric
from unmask.metrics.base import metric_names
from unmask.objectives import Objective
from unmask.objectives.mdlm import MDLM
from unmask.reader import CLASS, overlay
from unmask.reader import Word as Word
from unmask.reader import from_dict as from_dict
from unmask.reader import to_dict as to_dict
from unmask.registry import came_later, check_fields
from unmask.samplers.drawing import Drawing

RECIPE_FILE = "recipe.json"  # the file that a run writes into its folder
OF_A_BOUND = ("nats_per_token", "bits_per_byte", "ppl", "pseudo_ppl", "nats")  # measured by every validation
BASE = "base"  # key for the recipe that a recipe extends; a run's own recipe has none, because it is complete


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The training data, and how documents become rows."""

    train: Corpus = Stdlib()
    valid: Corpus | None = None  # None: hold out a part of train's documents, chosen by content
    held_out: float = 0.02
    share: float = came_later(1.0, before=1.0)  # share of train's documents to train on, chosen by content
    packing: Literal["wrap", "pad", "fill", "sentence"] = "wrap"
    augment: Literal["none", "reverse_complement"] = came_later("none", before="none")  # every second time, of DNA
    split_tokens: float = came_later(0.0, before=0.0)  # share of a BPE's tokens that are read as the two parts of each
    windows: Windows = "fixed"  # shifted: from the second epoch on, wrap's stream is cut into rows at different places
    # Fixed tokens around each row of pad and sentence; auto: both, if the denoiser sees both sides of a token.
    anchor: Literal["auto", "none", "begin", "both"] = came_later("auto", before="none")
    length: int = 256
    cache: str | None = None  # None: the user's cache folder

    def __post_init__(self) -> None:
        check_fields(self)

    def absolute(self) -> DataConfig:
        """The same data, independent of the working directory.

        >>> DataConfig(cache="/data/./cache").absolute().cache
        '/data/cache'
        """
        valid = None if self.valid is None else self.valid.absolute()
        cache = None if self.cache is None else os.path.abspath(os.path.expanduser(self.cache))
        return dataclasses.replace(self, train=self.train.absolute(), valid=valid, cache=cache)


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, or Muon for the blocks' matrices, and the learning-rate schedule.

    The defaults suit short runs and small networks; the recipe `paper` has the paper's values.
    """

    lr: float = 5e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    muon: bool = came_later(True, before=False)  # for the blocks' matrices; AdamW for the rest
    momentum: float = 0.95  # of muon
    muon_rms: float = 0.2  # root mean square of muon's update, in units of lr; AdamW's own is about this
    warmup: float = 0.05  # steps; below 1: a share of the run's
    schedule: Literal["constant", "cosine", "wsd"] = "wsd"
    decay_fraction: float = 0.3  # wsd: the last part of the run, in which the learning rate falls to min_ratio
    min_ratio: float = 0.0
    clip: float = 1.0  # 0: none
    ema: float = 0.999  # 0: none

    def __post_init__(self) -> None:
        check_fields(self)
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
    """Everything that a training run depends on."""

    out: str = "runs/unmask"
    seed: int = 0
    steps: int = 1000
    batch: int = 64  # rows of the global batch
    micro_batch: int | None = None  # rows per forward pass; None: the whole batch
    tokenizer: str = "bytes"  # bytes, chars, bpe:SIZE, a folder or file with a tokenizer.json, or a hub name
    data: DataConfig = DataConfig()
    denoiser: Denoiser = DiT()
    objective: Objective = MDLM()
    optim: OptimConfig = OptimConfig()
    drawing: Drawing = Drawing()  # the model's default for drawing tokens
    precision: Literal["auto", "fp32", "bf16"] = "fp32"  # auto: bf16 if native; the run records which
    compile: bool = False
    checkpoint_activations: bool = False
    log_every: int = 10
    valid_every: int = 250
    valid_rows: int = 256
    sample_every: int = 1000  # 0: none
    valid_metrics: tuple[Metric, ...] = ()  # also measured at each validation, such as valid_masked_accuracy
    best: str = "valid_nats_per_token"  # the metric that selects RUN/model; from a validation, or a callback's own
    best_is: Literal["least", "most"] = "least"
    wandb: str | None = None  # a project of Weights & Biases that also receives the metrics
    save_every: int = 250  # maximum steps lost by a kill
    keep: int = 2  # number of latest checkpoints to keep, in addition to the best
    keep_every: int = 0  # also keep those at multiples of this many steps; 0: none
    parallel: Literal["auto", "ddp", "fsdp"] = "auto"  # with several processes; auto: ddp unless the GPU is too small
    on_nonfinite: Literal["stop", "skip"] = "stop"  # for a non-finite loss or gradient, which never reaches the weights
    max_nonfinite: int = 10  # maximum number of skipped steps
    # Write models and checkpoints in the background, from a copy in host memory, twice as often; None: on a GPU, where
    # one process writes them.
    async_save: bool | None = None
    # whole: written by the first process; sharded: each writes its share; auto: sharded with fsdp, unless async_save
    # is true
    save_as: Literal["auto", "whole", "sharded"] = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("steps", "batch", "log_every", "valid_every", "valid_rows", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.micro_batch is not None and not 1 <= self.micro_batch <= self.batch:
            raise ConfigError(f"micro_batch must lie between 1 and batch ({self.batch}), got {self.micro_batch}")
        if self.data.length < 2:
            raise ConfigError(f"data.length must be at least 2, got {self.data.length}")
        if not 0 < self.data.held_out < 1:
            raise ConfigError(f"data.held_out must lie between 0 and 1, got {self.data.held_out}")
        if not 0 < self.data.share <= 1:
            raise ConfigError(f"data.share must lie above 0 and be 1 (all of it) at most, got {self.data.share}")
        if not 0 <= self.data.split_tokens < 1:
            raise ConfigError(f"data.split_tokens must lie in [0, 1), got {self.data.split_tokens}")
        if self.data.split_tokens and self.data.augment != "none":
            raise ConfigError(f"data.augment = {self.data.augment} is for letters, which are not split: leave out one")
        if self.data.split_tokens and self.data.packing != "wrap":
            raise ConfigError(
                "data.split_tokens leaves out what no longer fits a row, and only rows of the packing wrap may end "
                "anywhere: set data.packing = wrap, or leave it out"
            )
        if self.data.valid is not None and self.data.valid.is_test():
            raise ConfigError("data.valid is a test split: validate on another one, so that the test stays a test")
        for name in ("sample_every", "keep_every", "max_nonfinite"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 (none) or more, got {getattr(self, name)}")
        self._check_best()
        if self.save_as == "sharded" and self.async_save:
            raise ConfigError("sharded checkpoints are not written in the background: set save_as = whole or auto")
        self.objective.check(self.denoiser)
        if self.data.packing == "wrap" and self.data.anchor not in ("auto", "none") and not self.denoiser.framed:
            raise ConfigError("data.anchor frames rows of the packings pad and sentence: leave it out, or set packing")
        if self.anchor != "none" and self.data.windows != "fixed" and self.data.packing == "wrap":
            raise ConfigError("rows that begin and end with fixed tokens are not shifted: set data.windows = fixed")
        if self.data.packing != "wrap" and self.data.windows != "fixed":
            raise ConfigError(
                "only rows of the packing wrap are shifted, others hold whole texts: set data.windows = fixed"
            )
        if self.denoiser.causal and self.data.anchor == "both":
            raise ConfigError("data.anchor = both tells where a text ends, which autoregression must learn: use begin")

    def _check_best(self) -> None:
        """Validation metrics are known beforehand, and mostly which values are better; anything else comes from
        callbacks."""
        better: dict[str, str | None] = dict.fromkeys((f"valid_{name}" for name in OF_A_BOUND), "least")
        if self.best not in better and (self.best.startswith("valid_") or self.valid_metrics):
            names = [f"valid_{name}" for name in metric_names(self.valid_metrics)]
            better |= {name: metric.best_is for name, metric in zip(names, self.valid_metrics, strict=True)}
        if f"valid_{self.best}" in better or (self.best.startswith("valid_") and self.best not in better):
            hint = did_you_mean(self.best, better)
            raise ConfigError(f"best: no validation measures {self.best!r}; {hint}; valid_metrics may add it")
        known = better.get(self.best)
        if known is not None and known != self.best_is:
            change = "leave out best_is" if known == "least" else "set best_is = most"
            raise ConfigError(f"the best {self.best} is the {known}: {change}, or name another best")
        if self.wandb is not None and not self.wandb.strip():
            raise ConfigError("wandb names a project: give it a name, or leave it out")

    @property
    def anchor(self) -> Anchor:
        """The anchors of rows, with `data.anchor = "auto"` resolved.

        Relative positions need them if nothing else is fixed. A causal denoiser knows where its rows begin, and must
        not see where they end.

        >>> RunConfig().anchor, RunConfig(data=DataConfig(packing="pad")).anchor
        ('none', 'both')
        """
        if self.data.anchor != "auto":
            return self.data.anchor
        if self.denoiser.framed:
            return "both"
        return "none" if self.data.packing == "wrap" or self.denoiser.causal else "both"


# --- recipes ----------------------------------------------------------------------------------------------------------


def read_recipe(path: str | Path) -> dict[str, Any]:
    """The plain data of a recipe, merged over its `base`: a TOML or JSON file, a built-in name, or a run's folder."""
    path = Path(path)
    if (path / RECIPE_FILE).is_file():  # a run's location is its folder, also after it was moved
        return read_table(path / RECIPE_FILE) | {"out": str(path)}
    if not path.exists() and not path.suffix and path.name == str(path):
        path = built_in_recipe(path.name)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder without {RECIPE_FILE}: no run has begun there; name a recipe instead")
    if path.suffix not in (".toml", ".json"):
        if not path.exists():
            raise ConfigError(f"there is no run folder or recipe file {path}")
        if path.is_file():  # not a pipe
            example = f"unmask train demo --data.train text --data.train.path {path}"
            raise ConfigError(f"{path} is no recipe, which is a TOML or JSON file; to train on a text: {example}")
    return _over_base(path, read_table(path))


def built_in_recipe(name: str) -> Path:
    """The file of a built-in recipe, even if the current folder contains something of that name.

    >>> built_in_recipe("fast").name
    'fast.toml'
    """
    built_in = Path(__file__).parent / "recipes" / f"{name}.toml"
    if not built_in.exists():
        known = sorted(p.stem for p in built_in.parent.glob("*.toml"))
        raise ConfigError(f"no recipe file or built-in recipe {name!r}; {did_you_mean(name, known)}")
    return built_in


def read_table(path: Path) -> dict[str, Any]:
    """The content of a TOML or JSON file, a table of options."""
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


def _over_base(path: Path, data: dict[str, Any], above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's data merged over that of its base, recursively; above: the files that led here."""
    if BASE not in data:
        return data
    chain, base = (*above, path), data[BASE]
    try:
        found = _base_file(path, base)
        if found.resolve() in [file.resolve() for file in chain]:
            chain += (found,)
            raise ConfigError("the bases lead around in a circle: take one of them out")
        under = read_table(found)
    except ConfigError as e:
        raise ConfigError(f"{' → '.join(map(str, chain))}: {e}") from None
    own = {key: value for key, value in data.items() if key != BASE}
    merged: dict[str, Any] = overlay(RunConfig, _over_base(found, under, chain), own)
    return merged


def _base_file(path: Path, base: object) -> Path:
    """The file of the base named in the recipe at `path`: a file next to it, or a built-in recipe."""
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{BASE} must be a built-in recipe's name or the path of a TOML or JSON file, got {base!r}")
    if Path(base).suffix in (".toml", ".json"):
        return path.parent / base
    if Path(base).suffix or Path(base).name != base:
        raise ConfigError(f"{BASE} = {base!r} is no TOML or JSON file, which a recipe is")
    return built_in_recipe(base)


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Load a recipe, with overrides: strings as typed on the command line, numbers, or objects.

    The order of the overrides does not matter: plug-ins are selected before their options are set.

    >>> import unmask
    >>> texts = unmask.corpora.Memory(texts=["one text", "another"])
    >>> load_config("demo", {"optim.lr": "1e-3", "steps": 10, "objective.noise": "cosine", "data.train": texts}).steps
    10
    """
    saved = (Path(path) / RECIPE_FILE).is_file()
    data = to_dict(from_dict(RunConfig, read_recipe(path), saved=saved))
    return typing.cast(RunConfig, overridden(RunConfig, data, overrides))


def overridden(kind: type, data: dict[str, Any], overrides: Mapping[str, Any] | None) -> Any:
    """The dataclass `kind` built from plain data with dotted keys set to strings, numbers or objects."""
    values = {key.removesuffix(".name"): _word(value) for key, value in (overrides or {}).items()}
    for key in sorted(values, key=lambda key: key.count(".")):
        _set(data, key, values[key])
    return from_dict(kind, data)


def _word(value: Any) -> Any:
    """A plain value as it would be typed; objects are unchanged."""
    if isinstance(value, bool) or value is None:
        return Word(str(value).lower())
    return Word(value) if isinstance(value, str | int | float) else value


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. Naming another plug-in replaces the table, so that no options of the old one remain."""
    *path, last = key.split(".")
    for i, part in enumerate(path):
        inner = data.get(part)
        if inner is None:  # such as an option of the plug-in just named; an unknown key is reported when it is read
            inner = {}
        elif isinstance(inner, Word):
            inner = {"name": inner}
        elif not isinstance(inner, dict):
            raise ConfigError(f"{key!r}: {'.'.join(path[: i + 1])} has no options")
        data[part] = inner
        data = inner
    if isinstance(data.get(last), dict) and data[last].get("name") == value:
        return  # the same plug-in again keeps the recipe's options
    data[last] = value


def option_paths(config: Any) -> dict[str, Any]:
    """Every dotted key of a config, or of its plain data, with its value: the keys that can be overridden."""

    def walk(data: dict[str, Any], prefix: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in data.items():
            if isinstance(value, dict):
                if "name" in value:
                    flat[prefix + key] = value["name"]
                flat |= walk({k: v for k, v in value.items() if k not in ("name", CLASS)}, f"{prefix}{key}.")
            elif isinstance(value, list) and all(isinstance(part, dict) and "name" in part for part in value):
                flat[prefix + key] = [part["name"] for part in value]  # a recipe says more about them
            else:
                flat[prefix + key] = value
        return flat

    return walk(config if isinstance(config, dict) else to_dict(config), "")


def option_choices(config: Any) -> dict[str, list[str]]:
    """The dotted keys with a fixed set of values, and these: names of plug-ins, choices, true and false.

    >>> "cosine" in option_choices(RunConfig())["objective.noise"]
    True
    """

    def walk(value: Any, prefix: str) -> dict[str, list[str]]:
        choices: dict[str, list[str]] = {}
        hints = typing.get_type_hints(type(value))
        for f in dataclasses.fields(value):
            if words := _choices(hints[f.name]):
                choices[prefix + f.name] = words
            if dataclasses.is_dataclass(inner := getattr(value, f.name)):
                choices |= walk(inner, f"{prefix}{f.name}.")
        return choices

    return walk(config, "")


def _choices(kind: Any) -> list[str]:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        members = typing.get_args(kind)
        words = [word for member in members if member is not type(None) for word in _choices(member)]
        return [*words, "none"] if words and type(None) in members else words
    if origin is Literal:
        return [str(choice) for choice in typing.get_args(kind)]
    if kind is bool:
        return ["true", "false"]
    return list(kind.room.names()) if hasattr(kind, "room") else []
