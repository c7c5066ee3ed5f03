"""A network on several processes: alone, replicated (DDP) or sharded (FSDP2), and tensors that are sharded with it."""

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
    """Runs any function of a network as one forward pass, which DDP and FSDP hook into."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, f: Callable[[Network], T]) -> T:
        return f(self.network)


class ParallelNetwork:
    """A network in this process: on its own, as one of several replicas (ddp), or a shard of each tensor (fsdp).

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
        """f(network), set up so that its backward pass reduces the gradients over all processes."""
        if self.kind == "alone":
            return f(self.network)
        with self.world.together():
            result = cast(T, self.work(f))
        if self.kind == "ddp" and isinstance(result, Tensor):
            return cast(T, _Reaching.apply(result, *self.network.parameters()))  # type: ignore[no-untyped-call]
        return result

    def look(self, f: Callable[[Network], T]) -> T:
        """f(network) without gradients. With fsdp all processes must call it, with the same number of network calls."""
        return cast(T, self.work(f)) if self.kind == "fsdp" else f(self.network)

    @contextlib.contextmanager
    def accumulating(self, more: bool) -> Iterator[None]:
        """If more micro-batches follow, accumulate gradients locally; they are exchanged once, with the last one."""
        if isinstance(self.work, nn.parallel.DistributedDataParallel) and more:
            with self.work.no_sync():
                yield
            return
        if self.kind == "fsdp":
            cast(Any, self.work).set_requires_gradient_sync(not more)
        yield


class _Reaching(torch.autograd.Function):
    """The identity, with a backward pass that reaches every parameter, including those that the loss does not use.

    DDP waits for every parameter in the backward pass; without this, a parameter that a step does not use would hang
    all processes. Nothing is added to a gradient: an undefined one passes through.
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
    # Weights, gradients, two moments and an average, 4 bytes each; the other half is left for activations.
    state = 20 * sum(p.numel() for p in network.parameters())
    return "fsdp" if state > torch.cuda.get_device_properties(world.device).total_memory / 2 else "ddp"


def _shard(work: nn.Module, network: Network, world: World, bf16: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for name, parameter in network.named_parameters():
        if not parameter.ndim:
            raise UsageError(f"{name} has no axis and cannot be sharded: make it a tensor of one number, shape (1,)")
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Parameters that stay in the root keep their precision: the head's gradient is a sum over chunks. Inputs are not
    # cast, since times are float64 on purpose.
    full = MixedPrecisionPolicy(cast_forward_inputs=False)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for part in network.parts():
        fully_shard(part, mesh=mesh, mp_policy=half if bf16 else full, reshard_after_forward=True)
    fully_shard(work, mesh=mesh, mp_policy=full, reshard_after_forward=True)
    network.sharded, network.capturable = True, False


def _is_cut(tensor: Tensor) -> bool:
    """Whether it is a DTensor, checked without importing its module."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a tensor; the tensor itself if it is not sharded."""
    return cast(Any, tensor).to_local() if _is_cut(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor. If it is sharded, all processes must call this."""
    return cast(Any, tensor).full_tensor() if _is_cut(tensor) else tensor


def like(full: Tensor, place: Tensor) -> Tensor:
    """A full tensor, moved to the device of `place` and sharded in the same way."""
    if not _is_cut(place) or _is_cut(full):
        return full.to(place.device)
    from torch.distributed.tensor import distribute_tensor  # takes seconds: imported only if needed

    cut = cast(Any, place)
    return distribute_tensor(full.to(place.device), cut.device_mesh, cut.placements, src_data_rank=None)


def rows_here(tensor: Tensor) -> slice | None:
    """The rows of the full tensor in this process's fsdp shard; None if the tensor is not sharded."""
    if not _is_cut(tensor):
        return None
    mesh = cast(Any, tensor).device_mesh
    part = -(-tensor.shape[0] // mesh.size())  # rounded up, so the last shards may be smaller
    begin = min(tensor.shape[0], mesh.get_local_rank() * part)
    return slice(begin, begin + local(tensor).shape[0])


def share_like(share: Tensor, place: Tensor) -> Tensor:
    """One tensor, sharded like `place`, from the shards that the processes have computed."""
    if not _is_cut(place):
        return share
    from torch.distributed.tensor import DTensor

    cut = cast(Any, place)
    where = (cut.device_mesh, cut.placements)
    return DTensor.from_local(share, *where, run_check=False, shape=place.shape, stride=place.stride())
