"""A device without float64 that is not there: what is computed is the CPU's, what torch would refuse there is refused.

Inside `Pretended()` the parameters of every network, and what `there` moves, are said to be on an Apple GPU; so is what
is computed from them. A float64 there, or a tensor of the CPU beside one of that device, is an error, as it is with
torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

MPS, CPU = torch.device("mps"), torch.device("cpu")
_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]
# Copies go from device to device, and indices may be on the CPU.
_COPIES = {Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__}


class There(Tensor):
    """A tensor of that device."""


def there(t: Tensor) -> Tensor:
    if t.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64.")
    return t.as_subclass(There)


def move(network: nn.Module) -> nn.Module:
    """Its buffers too are there; the parameters are anyway."""
    for module in network.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else there(buffer)
    return network


def _is_there(t: object) -> bool:
    return isinstance(t, There | nn.Parameter)


class Pretended(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        ours = any(map(_is_there, tensors))
        if func == _DEVICE:
            return MPS if ours else func(*args)
        if func in (Tensor.to, Tensor.cpu):
            return self._moved(func, args, kwargs, ours)
        target = kwargs.pop("device", None)
        if target is not None:
            ours = torch.device(target).type == "mps"
        elif ours and func not in _COPIES:
            for t in [args[0], args[2]] if func is Tensor.index_put else tensors:
                assert _is_there(t) or t.ndim == 0, f"{func.__name__}: a tensor is on cpu, another one is on mps"
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        given = {id(t) for t in tensors}  # what is changed in place stays what it is
        return tree_map(lambda x: there(x) if ours and isinstance(x, Tensor) and id(x) not in given else x, out)

    def _moved(self, func: Any, args: Any, kwargs: Any, ours: bool) -> Any:
        """`.to` of a device, a dtype or both, or as another tensor, and `.cpu`."""
        rest, goes_there = [], ours and func is not Tensor.cpu
        dtype = kwargs.pop("dtype", None)
        for one in (*args[1:], *([kwargs.pop("device")] if "device" in kwargs else [])):
            if isinstance(one, Tensor):
                goes_there, dtype = _is_there(one), one.dtype
            elif isinstance(one, torch.dtype):
                dtype = one
            elif isinstance(one, str | torch.device):
                goes_there = torch.device(one).type == "mps"
            else:
                rest.append(one)
        if ours and dtype is not None:
            there(torch.empty(0, dtype=dtype))  # it is cast where it is
        with torch._C.DisableTorchFunctionSubclass():
            made = args[0].to(*rest, dtype=dtype or args[0].dtype)
        if made is args[0] and ours == goes_there:
            return made
        return there(made) if goes_there else made.as_subclass(Tensor)
