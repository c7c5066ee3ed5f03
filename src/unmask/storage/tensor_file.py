"""Safetensors files: written through `write_file`, so that every byte is counted and hashed while writing; and read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from unmask.distributed.parallel import local, rows_here
from unmask.errors import ModelFolderError, UsageError
from unmask.storage.atomic import write_file
from unmask.storage.untrusted import printable

# The format's names for torch's dtypes.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Write tensors to one safetensors file; returns its size and SHA-256.

    Shared tensors are written in full for each name.

    >>> import tempfile, torch
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> write_tensors(path, {"weight": torch.ones(2, 3)})[0]
    96
    >>> read_tensors(path)["weight"].shape
    torch.Size([2, 3])
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    # Widest dtypes first, so that each tensor is aligned to its width, which readers that map the file prefer.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in order:
        value = tensors[name]
        if value.dtype not in _NAMES:
            raise UsageError(f"the tensor {name} has dtype {value.dtype}, which a safetensors file cannot hold")
        begin, end = end, end + value.numel() * value.element_size()
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    head = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    head += b" " * (-len(head) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(head)) + head
        for name in order:  # one at a time, so that a GPU's tensors are never all in host memory
            flat = tensors[name].detach().to("cpu").contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data

    return write_file(path, parts())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, copied to memory on the CPU, so that the file may be removed afterwards.

    >>> read_tensors(Path("nowhere.safetensors"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.safetensors is missing
    """
    return {name: tensor.clone() for name, tensor in _tensors(path, only_shapes=False)}


def read_one(path: Path, name: str) -> Tensor:
    """One tensor of a safetensors file, copied to memory on the CPU.

    >>> read_one(Path("nowhere.safetensors"), "weight")
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.safetensors is missing
    """
    return next(tensor for _, tensor in _tensors(path, only_shapes=False, only=name)).clone()


def read_shapes(path: Path) -> dict[str, Tensor]:
    """The tensors on the meta device, without data: sizes are checked before they cost memory.

    >>> read_shapes(Path("nowhere.safetensors"))
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.safetensors is missing
    """
    return dict(_tensors(path, only_shapes=True))


def read_into(path: Path, into: Mapping[str, Tensor]) -> None:
    """Fill tensors from a file that holds exactly these; of a sharded tensor only the local rows are read.

    >>> read_into(Path("nowhere.safetensors"), {})
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: nowhere.safetensors is missing
    """
    stored = read_shapes(path)
    if odd := sorted(stored.keys() ^ into.keys()):
        raise ModelFolderError(f"{path}: the tensor {printable(odd[0])} is missing or unexpected")
    for name, place in into.items():
        if (stored[name].shape, stored[name].dtype) != (place.shape, place.dtype):
            said = f"{tuple(stored[name].shape)} of {stored[name].dtype}"
            raise ModelFolderError(f"{path}: {printable(name)} is {said}, not {tuple(place.shape)} of {place.dtype}")
    with safe_open(path, framework="pt", device="cpu") as file, torch.no_grad():
        for name, place in into.items():
            rows = rows_here(place)
            local(place).copy_(file.get_tensor(name) if rows is None else file.get_slice(name)[rows])


def _tensors(path: Path, *, only_shapes: bool, only: str | None = None) -> Iterator[tuple[str, Tensor]]:
    if not path.is_file():
        raise ModelFolderError(f"{path} is {'no plain file' if path.exists() else 'missing'}")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys() if only is None else [only]:
                if not only_shapes:
                    yield name, file.get_tensor(name)
                    continue
                part = file.get_slice(name)
                if part.get_dtype() not in DTYPES:
                    raise ValueError(f"{name[:80]} has dtype {part.get_dtype()}")
                yield name, torch.empty(part.get_shape(), dtype=DTYPES[part.get_dtype()], device="meta")
    except (SafetensorError, OSError, ValueError, RuntimeError, OverflowError, TypeError, MemoryError) as error:
        reason = printable(error, 200)
        raise ModelFolderError(f"{path} is damaged or no safetensors file ({reason}); copy it again") from error
