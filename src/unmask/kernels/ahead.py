"""Compiles the kernels of a computation several at once, before it is computed.

Most of a kernel's compilation is another program's or holds no lock of Python's. One after another, each at its first
launch, the kernels of a training step take 10 seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from unmask.kernels import HAS_TRITON

AT_ONCE = 8


@contextmanager
def compiling_ahead(gpu: int) -> Iterator[bool]:
    """In the block, kernels that this thread launches are compiled in others and not run; at its end they are ready.

    What they would have written is uninitialised memory: only for numbers that nobody reads. Other threads are not
    affected; backward passes run in this one. False if this version of Triton cannot do it: then kernels run as usual.

    >>> with compiling_ahead(torch.cuda.current_device()) as ahead:  # doctest: +SKIP
    ...     loss(network, batch).backward()
    """
    if not HAS_TRITON:
        yield False
        return
    import triton

    mode: Any = getattr(triton, "AsyncCompileMode", None)
    if mode is None or "ignore_errors" not in inspect.signature(mode).parameters:
        yield False
        return

    class CompileOnly(mode):  # type: ignore[misc]
        def submit(self, key: str, compile_one: Callable[[], Any], finish: Callable[[Any], None]) -> None:
            """A launch that gets no kernel returns."""
            super().submit(key, lambda: _ready(compile_one()), finish)

    backward_here = torch.autograd.set_multithreading_enabled(False)
    executor = ThreadPoolExecutor(AT_ONCE, "compile", torch.cuda.set_device, (gpu,))
    with executor, backward_here, CompileOnly(executor, ignore_errors=True):
        yield True


def _ready(kernel: Any) -> Any:
    """The kernel on the GPU, with the C function that launches it, which some versions of Triton compile."""
    kernel.run  # noqa: B018
    return kernel
