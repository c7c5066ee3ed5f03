"""Selecting devices and precision, moving tensors, and choosing attention kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from unmask.errors import UsageError


def pick_device(name: str | torch.device | None = None) -> torch.device:
    """The device of that name; None: a GPU if there is one, otherwise the CPU.

    A missing device is an error, never a silent CPU.

    >>> pick_device("cpu")
    device(type='cpu')
    """
    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {str(name)!r}; use cpu, cuda, cuda:N or mps") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"{device} was asked for, but this machine has {torch.cuda.device_count()} CUDA GPUs; use cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("mps was asked for, but this machine has no Apple GPU that PyTorch can use; use cpu")
    if device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device {str(name)!r} is not supported; use cpu, cuda or mps")
    return device


def make_current(device: torch.device) -> None:
    """Make a GPU that was chosen by number the one that this thread works on; each thread begins with the first.

    Triton's kernels, events and recorded graphs go to the current GPU, wherever their tensors are.

    >>> make_current(torch.device("cpu"))
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def is_current(device: torch.device) -> bool:
    """Whether this thread works on that device, if it is a GPU.

    >>> is_current(torch.device("cpu"))
    True
    """
    return device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device()


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on an Apple GPU, which has no wider numbers.

    >>> widest(torch.device("cpu")), widest(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64


def pick_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of that name; None: float32. float64 is refused on mps, which does not support it."""
    names = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
    dtype = names.get(name) if isinstance(name, str) else name
    if isinstance(name, str) and dtype is None:
        raise UsageError(f"unknown dtype {name!r}; known: {', '.join(names)}")
    if dtype == torch.float64 and widest(device) != torch.float64:
        raise UsageError("mps has no float64; use fp32")
    return dtype or torch.float32


def pick_precision(name: Literal["auto", "fp32", "bf16"], device: torch.device) -> Literal["fp32", "bf16"]:
    """The precision of a run. auto: bf16 if the device multiplies it natively; otherwise it would not be faster.

    >>> pick_precision("fp32", torch.device("cpu")), pick_precision("bf16", torch.device("cpu"))
    ('fp32', 'bf16')
    """
    if name != "auto":
        return name
    if device.type == "cpu":
        return "bf16" if _cpu_multiplies_bf16() else "fp32"
    if device.type != "cuda":
        return "fp32"
    with torch.cuda.device(device):
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def _cpu_multiplies_bf16() -> bool:
    """AMX, or AVX-512's dot products; an older torch may not report these features, then fp32 is used."""
    known: Callable[[], Mapping[str, object]] = getattr(torch.cpu, "get_capabilities", dict)
    return any(known().get(instructions) for instructions in ("amx_bf16", "avx512_bf16"))


def put(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy the tensor to the device; from host to GPU the copy is asynchronous. On mps, float64 becomes float32.

    >>> put(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    if tensor.dtype == torch.float64 and widest(device) != torch.float64:
        tensor = tensor.float()  # such as times and noise levels, which the host draws
    return tensor.to(device)


def put_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the type and on the device of `like`; moved first, since mps cannot convert to float64.

    >>> put_like(torch.ones(1), torch.zeros(2, dtype=torch.float64))
    tensor([1.], dtype=torch.float64)
    """
    if tensor.device.type == "mps":
        tensor = tensor.to(like.device)
    return tensor.to(like)


@contextmanager
def fast_attention() -> Iterator[None]:
    """Set the order in which a GPU's attention kernels are tried: cuDNN's is the fastest where it applies."""
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


@contextmanager
def few_threads(device: torch.device) -> Iterator[None]:
    """Limit the host's threads beside a GPU: the host's work is small, and many threads would only spin."""
    before = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(min(before, 2))
    try:
        yield
    finally:
        torch.set_num_threads(before)
