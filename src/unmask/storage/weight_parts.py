"""A model's weights in one file, model.safetensors, or in parts: model-00001-of-00003.safetensors and so on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from unmask.errors import ModelFolderError
from unmask.storage.tensor_file import write_tensors
from unmask.storage.untrusted import check_plain, printable

WHOLE = "model.safetensors"
_PART = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


def weight_files(folder: Path, *, links: bool = False) -> list[Path]:
    """The files with a model's weights, in order.

    Missing and surplus parts are refused, and so are links, unless `links` says that their creator is trusted.

    >>> weight_files(Path("runs/demo/model"))  # doctest: +SKIP
    [PosixPath('runs/demo/model/model.safetensors')]
    """
    matches = [match for path in sorted(folder.iterdir()) if (match := _PART.fullmatch(path.name))]
    whole = folder / WHOLE
    if not matches:
        if not links:
            check_plain(whole)
        return [whole]
    if whole.exists():
        raise ModelFolderError(f"{folder} holds both {WHOLE} and {matches[0][0]}; remove the one that is not meant")
    num = int(matches[0][2])
    for number, match in enumerate(matches, 1):
        if (int(match[1]), int(match[2])) != (number, num):
            raise ModelFolderError(f"{folder}: {match[0]} is not part {number} of {num}; copy the folder again")
    if len(matches) != num:
        raise ModelFolderError(f"{folder / part_name(len(matches) + 1, num)} is missing; copy the folder again")
    paths = [folder / match[0] for match in matches]
    for path in paths:
        if not links:
            check_plain(path)
    return paths


def joined(read: Callable[[Path], Mapping[str, Tensor]], paths: Sequence[Path]) -> dict[str, Tensor]:
    """The union of what `read` finds in each file; a tensor that occurs in two is refused."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        for name, tensor in read(path).items():
            if name in tensors:
                raise ModelFolderError(
                    f"{path}: the tensor {printable(name)} is in an earlier part already; copy the folder again"
                )
            tensors[name] = tensor
    return tensors


def write_parts(folder: Path, tensors: Mapping[str, Tensor], most: int) -> list[Path]:
    """Write the tensors in order to as few files of at most about `most` bytes as possible; a larger tensor gets its
    own file.

    >>> import tempfile, torch
    >>> parts = write_parts(Path(tempfile.mkdtemp()), {"a": torch.ones(4), "b": torch.ones(3)}, most=16)
    >>> [path.name for path in parts]
    ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    """
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    paths = [folder / part_name(i, len(parts)) for i in range(1, len(parts) + 1)]
    for path, part in zip(paths, parts, strict=True):
        write_tensors(path, part, {"format": "pt"})
    return paths


def part_name(number: int, of: int) -> str:
    return f"model-{number:05d}-of-{of:05d}.safetensors"
