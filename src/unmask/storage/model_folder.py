"""A model's folder: config.json, tokenizer.json and its weights.

Written atomically; reading checks everything in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from unmask.corpora import MAX_SEPARATOR
from unmask.data.packing import Anchor, Policy
from unmask.data.tokenizers import Tokenizer, tokenizer_from_json
from unmask.denoisers import Denoiser
from unmask.denoisers.network import Network
from unmask.errors import ConfigError, ModelFolderError, UsageError
from unmask.heads.task import Task
from unmask.objectives import Objective
from unmask.reader import from_dict, to_dict
from unmask.samplers.drawing import Drawing
from unmask.storage.atomic import write_file
from unmask.storage.tensor_file import read_shapes, read_tensors, write_tensors
from unmask.storage.untrusted import check_plain, parse_json, printable, read_text
from unmask.storage.weight_parts import joined, weight_files

if TYPE_CHECKING:
    from unmask.model import Model

FORMAT_VERSION = 2
FILES = ("config.json", "model.safetensors", "tokenizer.json")
MAX_LENGTH = 1 << 20  # maximum window; a config with a larger one is considered damaged
MAX_CONFIG = 1 << 20  # bytes


def write_folder(
    folder: Path, model: Model, weights: dict[str, Tensor] | None = None, task: Task | None = None
) -> None:
    """Write a model's three files into an existing folder. task: the task it is fine-tuned for, with its head attached.

    >>> write_folder(Path("models/mine"), model)  # doctest: +SKIP
    """
    config, weights = described(model, weights, task)
    write_file(folder / "config.json", [json.dumps(config, indent=2).encode(), b"\n"])
    write_file(folder / "tokenizer.json", [model.tokenizer.to_json().encode()])
    write_tensors(folder / "model.safetensors", weights, {"format": "pt"})


def described(
    model: Model, weights: dict[str, Tensor] | None = None, task: Task | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The content of config.json for a model, as plain data, and its tensors.

    >>> described(model)[0]["format_version"]  # doctest: +SKIP
    2
    """
    description, given = getattr(model.denoiser, "config", None), weights is not None
    if isinstance(description, Denoiser):
        description, weights = model.denoiser.saved(weights or unshared(model.denoiser))
    else:
        raise UsageError("only a denoiser made by a plug-in can be saved: this one has no description to write")
    if (task is None) != (model.denoiser.task is None):
        raise UsageError("a network with a task head is saved with its task: make a Classifier of both, and save that")
    own = [] if given or model.denoiser.objective is None else model.denoiser.objective.named_buffers()
    for name, buffer in own:
        if not bool(torch.isfinite(buffer).all()):  # such a folder could not be loaded
            raise UsageError(
                f"{name} of the objective is not made yet: train it by a recipe, or call objective.prepare(network, "
                "token_counts) first"
            )
    config = {
        "format_version": FORMAT_VERSION,
        "denoiser": to_dict(description),
        "objective": to_dict(model.objective),
        "length": model.length,
        "num_ids": model.tokenizer.num_ids,
        "mask_id": model.tokenizer.mask_id,
        "packing": model.packing,
        "anchor": model.anchor,
        **({} if model.typical_length is None else {"typical_length": model.typical_length}),
        **({} if model.drawing == Drawing() else {"drawing": to_dict(model.drawing)}),
        **({} if not model.separator else {"separator": model.separator}),
        **({"labels": list(model.labels)} if model.labels else {}),
        **({} if task is None else {"task": to_dict(task)}),
    }
    return config, weights


@dataclass(frozen=True)
class Folder:
    """The content of a model's folder, checked."""

    network: Network
    tokenizer: Tokenizer
    objective: Objective
    length: int
    packing: Policy
    anchor: Anchor
    typical_length: int | None
    drawing: Drawing
    separator: str
    labels: tuple[str, ...]
    task: Task | None


@dataclass(frozen=True)
class Weights:
    """Untrusted tensors. where: their name in messages; read: called once their shapes are checked."""

    where: str
    shapes: dict[str, Tensor]
    read: Callable[[], dict[str, Tensor]]


def read_folder(folder: Path, *, links: bool = False) -> Folder:
    """Read a model's folder, with the network on the CPU. Nothing in it is executed.

    links: whether its files may be links, as in the cache of the hub's client, which creates them itself.

    >>> read_folder(Path("runs/demo/model")).length  # doctest: +SKIP
    """
    for name in ("config.json", "tokenizer.json"):
        if not links:
            check_plain(folder / name)
    said = str(folder / "config.json")
    try:
        config = parse_json(read_text(folder / "config.json", MAX_CONFIG))
    except (ValueError, RecursionError) as e:
        raise ModelFolderError(f"{said} is not valid JSON; the folder is damaged ({printable(e)})") from None
    config = checked(config, said)
    try:
        tokenizer = tokenizer_from_json(read_text(folder / "tokenizer.json"))
    except ModelFolderError as e:
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: {e}") from None

    def weights() -> Weights:
        paths = weight_files(folder, links=links)
        where = str(paths[0] if len(paths) == 1 else folder)
        return Weights(where, joined(read_shapes, paths), lambda: joined(read_tensors, paths))

    return read_described(config, tokenizer, weights, said)


def read_described(config: dict[str, Any], tokenizer: Tokenizer, weights: Callable[[], Weights], said: str) -> Folder:
    """Build the model of a description from `checked`, with its weights. said: the description's name in messages.

    >>> read_described(checked(config, "config.json"), tokenizer, weights, "config.json").length  # doctest: +SKIP
    """
    try:
        description = cast(Denoiser, from_dict(Denoiser, config["denoiser"], "denoiser", saved=True))
        objective = cast(Objective, from_dict(Objective, config["objective"], "objective", saved=True))
        drawing = cast(Drawing, from_dict(Drawing, config.get("drawing", {}), "drawing", saved=True))
        task = None
        if "task" in config:
            task = cast(Task, from_dict(Task, config["task"], "task", saved=True))
    except ConfigError as e:
        raise ModelFolderError(f"{said}: {printable(e, 300)}") from None
    if config["packing"] == "wrap" and config["anchor"] != "none" and tokenizer.ends_texts:
        raise ModelFolderError(f"{said}: anchor is {config['anchor']}, but rows of the packing wrap have none")
    if config["num_ids"] != tokenizer.num_ids or config["mask_id"] != tokenizer.mask_id:
        raise ModelFolderError(
            f"{said} says {printable(config['num_ids'])} ids with mask {printable(config['mask_id'])}, "
            f"tokenizer.json has {tokenizer.num_ids} with mask {tokenizer.mask_id}; the files do not belong together"
        )
    if task is not None and task.length > config["length"]:
        raise ModelFolderError(f"{said}: task.length is {task.length}, beyond the model's {config['length']}")
    network = _build(description, objective, task, tokenizer, weights(), said)
    labels = tuple(config.get("labels", ()))
    if len(labels) > network.num_classes:
        raise ModelFolderError(f"{said}: {len(labels)} labels for {network.num_classes} classes")
    return Folder(
        network=network,
        tokenizer=tokenizer,
        objective=objective,
        length=config["length"],
        packing=config["packing"],
        anchor=config["anchor"],
        typical_length=config.get("typical_length"),
        drawing=drawing,
        separator=config.get("separator", ""),
        labels=labels,
        task=task,
    )


def unshared(network: Network) -> dict[str, Tensor]:
    """The state dict without duplicate names of a shared tensor (a tied head), which a weights file cannot store."""
    names = {name for name, _ in network.named_parameters()} | {name for name, _ in network.named_buffers()}
    return {k: v for k, v in network.state_dict().items() if k in names}


def load_weights(network: Network, tensors: dict[str, Tensor], where: str) -> None:
    """Copy the tensors in; missing, unexpected or misshapen ones are refused by name."""
    check_weights(network, tensors, where)
    network.load_state_dict(tensors, strict=False)


def check_weights(network: Network, tensors: dict[str, Tensor], where: str) -> None:
    """Refuse tensors that do not match this network, by name; the network may be on the meta device."""
    wanted = unshared(network)
    for name in sorted(wanted.keys() - tensors.keys()):
        raise ModelFolderError(f"{where}: the tensor {printable(name)} is missing; the file belongs to another model")
    for name in sorted(tensors.keys() - wanted.keys()):
        raise ModelFolderError(
            f"{where}: the tensor {printable(name)} is unexpected; the file belongs to another model"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise ModelFolderError(
                f"{where}: {name} has shape {tuple(tensor.shape)}, the config asks for {tuple(wanted[name].shape)}"
            )
        known = tensor.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
        if not known or not (tensor.is_meta or bool(torch.isfinite(tensor).all())):
            raise ModelFolderError(f"{where}: {name} holds numbers that are not finite floats; the weights are damaged")


def _build(
    description: Denoiser, objective: Objective, task: Task | None, tokenizer: Tokenizer, weights: Weights, said: str
) -> Network:
    """The network with its weights. False sizes in a config or a file cost neither memory nor time."""
    check_sizes(description, weights.shapes, said, weights.where)

    def build() -> Network:
        try:
            network = description.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
            objective.attach(network)
            if task is not None:
                task.attach(network)
        except UsageError as e:
            raise ModelFolderError(f"{said}: {printable(e, 300)}") from None
        return network

    try:
        with torch.device("meta"), NoStart():  # only names and shapes
            network = build()
    except (RuntimeError, OverflowError, TypeError):  # the product of the sizes overflows
        raise ModelFolderError(f"{said}: the denoiser's sizes are beyond any network") from None
    check_weights(network, weights.shapes, weights.where)
    tensors = weights.read()
    with NoStart():
        network = build()
    description.describe(network)
    load_weights(network, tensors, weights.where)
    return network


_LAYERS = ("blocks", "num_hidden_layers", "n_layers")


def check_sizes(description: Denoiser, shapes: dict[str, Tensor], said: str, where: str) -> None:
    """Refuse a description with sizes that its weights cannot have, before a network is built from it.

    said: the file with the description. where: the weights file, to which the shapes belong.
    """
    for name, value in _sizes(to_dict(description)):
        # Every block has its own tensors, and no other size exceeds the total number of parameters.
        most = len(shapes) if name in _LAYERS else max(1 << 16, sum(t.numel() for t in shapes.values()))
        if type(value) is int and value > most:
            raise ModelFolderError(f"{said}: denoiser.{name} is {printable(value)}, far more than {where} holds")


def _sizes(described: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and values, including those of nested tables."""
    flat: list[tuple[str, Any]] = []
    for name, value in described.items():
        flat += _sizes(value) if isinstance(value, dict) else [(name, value)]
    return flat


class NoStart(TorchFunctionMode):
    """Within the block, weights are not randomly initialised, because they are overwritten: this saves most of the
    loading time.

    On the meta device a random draw would also import torch's compiler, which takes seconds.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            drawn = kwargs["tensor"] if "tensor" in kwargs else args[0]
            # Rejection sampling, as in a truncated normal, might never end on uninitialised memory.
            again = func.__name__ == "normal_" and not torch.is_grad_enabled() and not drawn.is_meta
            return drawn.zero_() if again else drawn
        return func(*args, **kwargs)


def checked(config: Any, path: str) -> dict[str, Any]:
    """Check an untrusted description of the form that `described` returns. path: its name in messages.

    >>> checked({"format_version": 9}, "config.json")
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: config.json: format_version is 9, this unmask reads 1 and 2
    """
    version = config.get("format_version") if isinstance(config, dict) else None
    if version is None and isinstance(config, dict) and "model_type" in config:
        raise ModelFolderError(f"{path} is of a folder of transformers': write hf: before its name")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise ModelFolderError(f"{path}: format_version is {printable(repr(version))}, this unmask reads 1 and 2")
    assert isinstance(config, dict)
    wanted = {
        "format_version": int,
        "denoiser": dict,
        "objective": dict,
        "length": int,
        "num_ids": int,
        "mask_id": int,
        **({"bos": bool} if version == 1 else {"packing": str, "anchor": str}),
    }
    for key, kind in wanted.items():
        if type(config.get(key)) is not kind:
            raise ModelFolderError(f"{path}: {key} is missing or not {kind.__name__}; the folder is damaged")
    if not 1 <= config["length"] <= MAX_LENGTH:
        raise ModelFolderError(f"{path}: length is {printable(config['length'])}, not between 1 and {MAX_LENGTH}")
    typical = config.get("typical_length", 1)
    if type(typical) is not int or not 1 <= typical <= config["length"]:
        raise ModelFolderError(f"{path}: typical_length is {printable(repr(typical))}, not between 1 and length")
    for key in ("drawing", "task"):
        if type(config.get(key, {})) is not dict:
            raise ModelFolderError(f"{path}: {key} is not dict; the folder is damaged")
    separator = config.get("separator", "")
    if type(separator) is not str or len(separator) > MAX_SEPARATOR:
        raise ModelFolderError(f"{path}: separator is no text of at most {MAX_SEPARATOR} characters")
    labels = config.get("labels", [])
    if type(labels) is not list or not all(type(word) is str for word in labels) or len(set(labels)) < len(labels):
        raise ModelFolderError(f"{path}: labels is not a list of different words; the folder is damaged")
    if others := config.keys() - wanted.keys() - {"typical_length", "drawing", "separator", "labels", "task"}:
        raise ModelFolderError(f"{path}: unknown key {printable(min(others))!r}")
    plain: dict[str, Any] = _from_version_1(config) if version == 1 else config
    for key, choices in (("packing", get_args(Policy)), ("anchor", get_args(Anchor))):
        if plain[key] not in choices:
            raise ModelFolderError(f"{path}: {key} is {printable(plain[key])!r}, not one of {', '.join(choices)}")
    return plain


def _from_version_1(config: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no anchors and did not store the packing, which follows from the other keys.

    >>> _from_version_1({"bos": False, "typical_length": 174})["packing"]
    'pad'
    """
    alone = "pad" if "typical_length" in config else "wrap"
    return config | {"packing": "sentence" if config["bos"] else alone, "anchor": "none"}
