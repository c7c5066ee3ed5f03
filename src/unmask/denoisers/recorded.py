"""A training pass as two CUDA graphs: recorded for a shape once, then replayed by two launches instead of hundreds.

Launching kernels one by one is slower than the GPU itself, especially for small networks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FIRST = 3  # passes of a shape before it is recorded
MOST = 64  # recordings per network: with more shapes than this, they are unlikely to recur

Pass = Callable[..., tuple[Tensor, ...]]


class Recorder:
    """Replays passes of known shapes. It belongs to a network, whose weights must keep their addresses."""

    def __init__(self) -> None:
        self._seen: Counter[Hashable] = Counter()
        self._made: dict[Hashable, Recording | None] = {}  # None: there was no room
        self._places: tuple[int, ...] = ()
        self._left = MOST

    def __reduce__(self) -> Any:
        return Recorder, ()  # a copy of the network has weights of its own

    def __call__(self, run: Pass, inputs: Sequence[Tensor], owner: nn.Module, key: Hashable) -> Any:
        """run(*inputs), which reads the owner's weights and nothing else that changes, save what `key` tells apart."""
        places = tuple(weight.data_ptr() for weight in owner.parameters())
        if places != self._places:
            self._seen, self._made, self._places = Counter(), {}, places
        key = key, tuple((t.shape, t.dtype, t.requires_grad) for t in inputs)
        if self._seen[key] < FIRST:
            # As it is written, at first: kernels are compiled, libraries choose theirs, and a run's first step is told.
            self._seen[key] += 1
            return run(*inputs)
        if any(made is not None and made.busy for made in self._made.values()):
            return run(*inputs)  # one at a time: its activations are still needed
        if key not in self._made and self._left:
            self._made[key] = self._record(run, inputs, owner)
        recording = self._made.get(key)
        return run(*inputs) if recording is None else recording(inputs)

    def _record(self, run: Pass, inputs: Sequence[Tensor], owner: nn.Module) -> Recording | None:
        """Record a pass; None if memory is short. A recording keeps its activations; half of the memory stays free."""
        self._left -= 1
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        while free < total / 2 and any(self._made.values()):
            oldest = next(key for key, made in self._made.items() if made is not None)
            del self._made[oldest]
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
        try:
            return Recording(run, inputs, owner)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None


class Recording:
    """One pass and its backward pass, for one shape."""

    def __init__(self, run: Pass, inputs: Sequence[Tensor], owner: nn.Module) -> None:
        self.weights = [weight for weight in owner.parameters() if weight.requires_grad]
        self.inputs = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs]
        self._user: weakref.ref[_User] | None = None
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads, which load and save, go on meanwhile. A weight that autocast has converted for somebody else
        # would not follow the weight from step to step.
        how: dict[str, Any] = {"capture_error_mode": "thread_local"}
        device, dtype = inputs[0].device.type, torch.get_autocast_dtype(inputs[0].device.type)
        precision = torch.autocast(device, dtype, enabled=torch.is_autocast_enabled(device), cache_enabled=False)
        with precision, _aliases(owner) as aliases:
            with torch.cuda.graph(self._forward, **how):
                outputs = run(*self.inputs)
            self.asked = [torch.zeros_like(t) for t in outputs]  # the gradients of what comes out
            learned = [t for t in (*self.inputs, *aliases) if t.requires_grad]
            # In memory of its own: what it leaves as gradients the next pass must not write over.
            with torch.cuda.graph(self._backward, **how):
                asking: Any = _Asking.apply
                made = iter(torch.autograd.grad(asking(self.asked, *outputs), learned, allow_unused=True))
        self.gradients = [next(made) if t.requires_grad else None for t in (*self.inputs, *aliases)]
        self.outputs = [t.detach() for t in outputs]

    @property
    def busy(self) -> bool:
        """Between a pass and its backward pass, which needs the activations."""
        return self._user is not None and self._user() is not None

    def __call__(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        apply: Any = _Replay.apply
        made: tuple[Tensor, ...] = apply(self, *inputs, *self.weights)
        return made

    def go(self, inputs: Sequence[Tensor]) -> _User:
        for own, given in zip(self.inputs, inputs, strict=False):
            own.detach().copy_(given)
        self._forward.replay()
        user = _User()
        self._user = weakref.ref(user)
        return user

    def back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        for own, given in zip(self.asked, gradients, strict=True):
            own.zero_() if given is None else own.copy_(given)
        for weight, made in zip(self.weights, self.gradients[len(self.inputs) :], strict=True):
            # Autograd takes what it is given as a weight's gradient without copying it; the next one would replace it.
            if weight.grad is not None and made is not None and weight.grad.data_ptr() == made.data_ptr():
                weight.grad = weight.grad.clone()
        self._backward.replay()
        self._user = None
        return [None if made is None else made.detach() for made in self.gradients]


class _Asking(torch.autograd.Function):
    """A number whose gradient by the outputs is what is asked of them.

    If gradients of outputs are given to torch.autograd.grad itself, it imports torch's symbolic shapes: 3 seconds.
    """

    @staticmethod
    def forward(ctx: Any, asked: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.asked = asked
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, *ctx.asked


@contextmanager
def _aliases(owner: nn.Module) -> Iterator[list[Tensor]]:
    """The owner's weights that have gradients, as leaves of their own over the same numbers: a leaf belongs to the
    stream of its first use, and that of the weights themselves is no recording's."""
    places = [
        (module, name)
        for module in owner.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.requires_grad
    ]
    own = [module._parameters[name] for module, name in places]
    aliases = [nn.Parameter(weight.detach()) for weight in own if weight is not None]
    try:
        for (module, name), alias in zip(places, aliases, strict=True):
            module._parameters[name] = alias
        yield list(aliases)
    finally:
        for (module, name), weight in zip(places, own, strict=True):
            module._parameters[name] = weight


class _User:
    """Lives as long as somebody may still ask for the backward pass."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, *tensors: Tensor) -> Any:
        ctx.recording, ctx.user = recording, recording.go(tensors)
        return tuple(t.detach() for t in recording.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, *ctx.recording.back(gradients)
