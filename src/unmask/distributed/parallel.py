"""A network on several processes: alone, copied (DDP) or sharded (FSDP2), and tensors that are sharded with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn

from unmask.denoisers.network import Network
from unmask.distributed.world import World
from unmask.errors import UsageError

Parallel = Literal["auto", "ddp", "fsdp"]
T = TypeVar("T")


class Work(nn.Module):
    """Something done with a network as one forward pass, which is what DDP and FSDP hook into."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, f: Callable[[Network], T]) -> T:
        return f(self.network)


class ParallelNetwork:
    """A network in this process: whole and alone, whole beside copies of it (ddp), or a share of each tensor (fsdp).

    >>> net = torch.nn.Linear(2, 2)
    >>> ParallelNetwork(net, World(), "auto")(lambda n: n(torch.ones(2))).shape  # type: ignore[arg-type]
    torch.Size([2])
    """

    def __init__(self, network: Network, world: World, parallel: Parallel, *, bf16: bool = False) -> None:
        self.network, self.world = network, world
        self.kind = _choose(network, world, parallel)
        self.work: nn.Module = Work(network)
        if self.kind == "ddp":
            ids = [world.device.index] if world.device.type == "cuda" else None
            self.work = nn.parallel.DistributedDataParallel(self.work, device_ids=ids, gradient_as_bucket_view=True)
        elif self.kind == "fsdp":
            _shard(self.work, network, world, bf16)

    def __call__(self, f: Callable[[Network], T]) -> T:
        """f(network), where a backward pass after it adds up the gradients of all processes."""
        if self.kind == "alone":
            return f(self.network)
        with self.world.together():
            result = cast(T, self.work(f))
        if self.kind == "ddp" and isinstance(result, Tensor):
            return cast(T, _Reaching.apply(result, *self.network.parameters()))  # type: ignore[no-untyped-call]
        return result

    def look(self, f: Callable[[Network], T]) -> T:
        """f(network) without gradients. Under fsdp all processes must do it, with the same number of network calls."""
        return cast(T, self.work(f)) if self.kind == "fsdp" else f(self.network)

    @contextlib.contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        """While more micro-batches follow, gradients stay here; they are exchanged once, with the last."""
        if isinstance(self.work, nn.parallel.DistributedDataParallel) and more:
            with self.work.no_sync():
                yield
            return
        if self.kind == "fsdp":
            cast(Any, self.work).set_requires_gradient_sync(not more)
        yield


class _Reaching(torch.autograd.Function):
    """The same number, whose backward pass reaches every parameter, those included that it does not depend on.

    DDP waits for each parameter's turn in the backward pass; one that a step does not use would never come, and all
    processes would stop. Nothing is added to a gradient: an undefined one passes through.
    """

    @staticmethod
    def forward(ctx: Any, result: Tensor, *parameters: Tensor) -> Tensor:
        ctx.count = len(parameters)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (grad, *[None] * ctx.count)


def _choose(network: Network, world: World, parallel: Parallel) -> Literal["alone", "ddp", "fsdp"]:
    if world.size == 1:
        return "alone"
    if parallel != "auto":
        return parallel
    if world.device.type != "cuda":
        return "ddp"
    # Weights, gradients, two moments and an average, 4 bytes each; the other half is left to activations.
    state = 20 * sum(p.numel() for p in network.parameters())
    return "fsdp" if state > torch.cuda.get_device_properties(world.device).total_memory / 2 else "ddp"


def _shard(work: nn.Module, network: Network, world: World, bf16: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for name, parameter in network.named_parameters():
        if not parameter.ndim:
            raise UsageError(f"{name} has no axis and cannot be sharded: make it a tensor of one number, shape (1,)")
    mesh = init_device_mesh(world.device.type, (world.size,))
    # What is left to the root keeps its precision: its head's gradient is a sum over chunks. Nothing is cast on its way
    # in: times are float64 on purpose.
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for part in network.parts():
        fully_shard(part, mesh=mesh, mp_policy=half if bf16 else full, reshard_after_forward=True)
    fully_shard(work, mesh=mesh, mp_policy=full, reshard_after_forward=True)
    network.sharded, network.capturable = True, False


def _is_cut(tensor: Tensor) -> bool:
    """Is it a DTensor? Asked so, its module is not imported."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This process's share of a tensor; the tensor itself where it is not shared."""
    return cast(Any, tensor).to_local() if _is_cut(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be shared among processes, which then must all ask."""
    return cast(Any, tensor).full_tensor() if _is_cut(tensor) else tensor


def like(full: Tensor, place: Tensor) -> Tensor:
    """A whole tensor as `place` is: on its device, and cut as it is cut."""
    if not _is_cut(place) or _is_cut(full):
        return full.to(place.device)
    from torch.distributed.tensor import distribute_tensor  # takes seconds: where nothing is cut nobody waits for it

    cut = cast(Any, place)
    return distribute_tensor(full.to(place.device), cut.device_mesh, cut.placements, src_data_rank=None)


def rows_here(tensor: Tensor) -> slice | None:
    """Which rows of all this process's share is, cut as fsdp cuts; None where the tensor is not shared."""
    if not _is_cut(tensor):
        return None
    mesh = cast(Any, tensor).device_mesh
    part = -(-tensor.shape[0] // mesh.size())  # as large as can be, so that the last may have less
    begin = min(tensor.shape[0], mesh.get_local_rank() * part)
    return slice(begin, begin + local(tensor).shape[0])


def share_like(share: Tensor, place: Tensor) -> Tensor:
    """What each process has worked out for its own share of `place`, as the shares of one tensor."""
    if not _is_cut(place):
        return share
    from torch.distributed.tensor import DTensor

    cut = cast(Any, place)
    where = (cut.device_mesh, cut.placements)
    return DTensor.from_local(share, *where, run_check=False, shape=place.shape, stride=place.stride())
