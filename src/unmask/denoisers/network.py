"""What every denoiser module offers, and the wrapper that makes one of a plain function."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library, nn

from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.denoisers.ragged import Ragged


class KVCache:
    """Keys and values of a causal network's finished positions, allocated once.

    The caller sets `stop` and calls `trunk`, which computes positions `length..stop-1` and moves `length` up to `stop`.
    """

    def __init__(self) -> None:
        self.length = 0
        self.stop = 0
        self.blocks: list[tuple[Tensor, Tensor]] = []


class Network(nn.Module):
    """A denoiser: `trunk` makes one vector a position, `head` turns chosen vectors into logits.

    `h[:, l]` predicts position l; a causal network shifts inside. Logits are asked for only where somebody needs them.
    """

    num_ids: int
    mask_id: int
    causal: bool = False
    uses_level: bool = False
    num_classes: int = 0  # classes that `cond` may name, a number for each row; -1 names none
    label_dropout: float = 0.0  # the share of rows that lose their class in training
    checkpoint_activations: bool = False
    sharded: bool = False  # each process holds a share of each weight: only a part's own forward pass may touch them
    takes_padding: bool = True  # rows of different lengths may share a call, by valid_BL
    capturable: bool = False  # no call looks at a value on the host, so that a CUDA graph may replay it
    objective: nn.Module | None  # what the objective has built beside it: trained, averaged and saved with it

    def __init__(self) -> None:
        super().__init__()
        self.register_module("objective", None)

    @abstractmethod
    def trunk(
        self,
        z_BL: Tensor,
        level_B: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        positions_BL: Tensor | None = None,
        cond: Tensor | None = None,
        cache: KVCache | None = None,
        at_BK: Tensor | None = None,
    ) -> Tensor:
        """h_BLD, or h_BKD at the positions `at_BK`."""

    def trunk_at(
        self,
        z_BL: Tensor,
        level_B: Tensor | None,
        flat_N: Tensor,
        *,
        valid_BL: Tensor | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        """h_ND at distinct positions of the flat batch (row x L + position): what a loss asks for.

        A network that can save work behind its last exchange between positions does so here.
        """
        h_BLD = self.trunk(z_BL, level_B, valid_BL=valid_BL, cond=cond)
        h_ND: Tensor = take_rows(h_BLD.flatten(0, 1), flat_N)
        return h_ND

    def takes_ragged(self) -> bool:
        """Is there a `trunk_ragged`, and is it the shorter way now?"""
        return False

    def trunk_ragged(
        self, z_M: Tensor, level_B: Tensor | None, rows: Ragged, flat_N: Tensor, *, cond: Tensor | None = None
    ) -> Tensor:
        """`trunk_at` for rows without their padding: z_M end to end, flat_N counts in it."""
        raise NotImplementedError

    @abstractmethod
    def head(self, h_ND: Tensor) -> Tensor:
        """logits_NI over all ids, the mask's included."""

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that `head` uses; all of them is always right, fewer is leaner."""
        return list(self.parameters())

    def head_linear(self) -> nn.Linear | None:
        """The head where it is one linear map and nothing else: losses and samplers then take shorter ways."""
        return None

    def parts(self) -> list[nn.Module]:
        """Modules whose weights may be fetched from other processes one after the other, each called as a module."""
        return []

    def before_replay(self) -> None:
        """Called before captured graphs of this network run: what they read besides the weights is made fresh."""

    def can_decode(self) -> bool:
        """Is there a `decode` that a CUDA graph can replay?"""
        return False

    def decode(self, ids_B: Tensor, position_1: Tensor, kv: list[tuple[Tensor, Tensor]], stop: int) -> Tensor:
        """h_BD at one position of a causal network, given the token before it and a cache of `empty_cache`."""
        raise NotImplementedError

    def empty_cache(self, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
        raise NotImplementedError

    def can_step_rows(self) -> bool:
        """Is there a `step_rows`? Without it, rows at different positions are read one after another by `trunk`."""
        return False

    def step_rows(self, ids_M: Tensor, caches: Sequence[KVCache]) -> Tensor:
        """h_MD of a causal network, line b at position `caches[b].length` of a row of its own, given the token before
        it. Each cache is of one row whose beginning `trunk` has read.

        Keys and values are put into the caches, whose lengths the caller moves on: until then nobody reads them, so
        that a call that fails can be made again. Lines behind the last cache are nobody's, there to make whole batches.
        A row's line must not depend on the others.
        """
        raise NotImplementedError

    def device_for(self, tokens: Tensor) -> torch.device:
        """Where the parameters are; a function without any works where its tokens are."""
        return next((p.device for p in self.parameters()), tokens.device)

    def forward(self, z_BL: Tensor, level_B: Tensor | None = None, **options: Any) -> Tensor:
        """logits_BLI at every position: for tests and small tables; training and sampling ask for less."""
        return self.head(self.trunk(z_BL, level_B, **options))


@contextmanager
def evaluating(network: Network) -> Iterator[None]:
    """Dropout off inside the block, as before behind it."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


@library.custom_op("unmask::take_rows", mutates_args=())
def take_rows(h_MD: Tensor, flat_N: Tensor) -> Tensor:
    """h_ND at distinct rows. That they are distinct makes the backward pass a copy instead of a sum.

    >>> take_rows(torch.eye(3), torch.tensor([2]))
    tensor([[0., 0., 1.]])
    """
    return h_MD.index_select(0, flat_N)


@take_rows.register_fake
def _(h_MD: Tensor, flat_N: Tensor) -> Tensor:
    return h_MD.new_empty(flat_N.shape[0], h_MD.shape[1])  # len would fix the number in a compiled graph


@library.custom_op("unmask::put_rows", mutates_args=())
def put_rows(h_ND: Tensor, flat_N: Tensor, rows: int) -> Tensor:
    """Zeros, and h_ND at its distinct rows; take_rows and this are each other's gradient."""
    return h_ND.new_zeros(rows, h_ND.shape[1]).index_copy_(0, flat_N, h_ND)


@put_rows.register_fake
def _(h_ND: Tensor, flat_N: Tensor, rows: int) -> Tensor:
    return h_ND.new_empty(rows, h_ND.shape[1])


def _take_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.rows = inputs[0].shape[0]


def _take_backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None]:
    return put_rows(grad_ND, *ctx.saved_tensors, ctx.rows), None


take_rows.register_autograd(_take_backward, setup_context=_take_setup)


def _put_setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[1])


def _put_backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None, None]:
    return take_rows(grad_MD, *ctx.saved_tensors), None, None


put_rows.register_autograd(_put_backward, setup_context=_put_setup)


def gather_positions(h_BLD: Tensor, at_BK: Tensor) -> Tensor:
    """h_BKD: the vectors at the asked positions."""
    return h_BLD.gather(1, at_BK.unsqueeze(-1).expand(-1, -1, h_BLD.shape[-1]))


class _Wrapped(Network):
    takes_padding = False

    def __init__(self, f: Callable[..., Tensor], num_ids: int, mask_id: int, uses_level: bool, classes: int) -> None:
        super().__init__()
        self.f = f
        self.num_ids, self.mask_id, self.uses_level = num_ids, mask_id, uses_level
        self.num_classes = classes

    def trunk(
        self,
        z_BL: Tensor,
        level_B: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        positions_BL: Tensor | None = None,
        cond: Tensor | None = None,
        cache: KVCache | None = None,
        at_BK: Tensor | None = None,
    ) -> Tensor:
        if valid_BL is not None and not bool(valid_BL.all()):
            raise UsageError("a wrapped function takes no padding: give it rows of one length")
        if positions_BL is not None or cache is not None:
            raise UsageError("a wrapped function takes tokens, a noise level and a class: no positions and no cache")
        cond = check_labels(cond, self.num_classes)
        if level_B is not None and (first := next(self.parameters(), None)) is not None:
            level_B = level_B.to(first.dtype)  # a foreign network wants its own precision
        given = (cond if cond is not None else z_BL.new_full(z_BL.shape[:1], -1),) if self.num_classes else ()
        logits_BLI = self.f(z_BL, level_B, *given)
        if logits_BLI.shape != (*z_BL.shape, self.num_ids):
            raise UsageError(f"the function returned {tuple(logits_BLI.shape)}, not {(*z_BL.shape, self.num_ids)}")
        return logits_BLI if at_BK is None else gather_positions(logits_BLI, at_BK)

    def head(self, h_ND: Tensor) -> Tensor:
        return h_ND


def as_denoiser(
    f: Callable[..., Tensor], *, vocab_size: int, mask_id: int, uses_level: bool = True, classes: int = 0
) -> Network:
    """Wrap a plain `logits_BLI = f(z_BL, level_B)` with I = vocab_size + 1 (the mask): tables, toys, foreign models.

    level_B comes in float64 to a plain function, in the parameters' type to a module.
    `uses_level=False` promises that f ignores the level, which makes the count form of the bound valid.
    With `classes`, f takes the rows' classes as a third argument, -1 for none.

    >>> import torch
    >>> coin = as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> coin.num_ids
    3
    """
    if not 0 <= mask_id <= vocab_size:
        raise UsageError(f"mask_id must lie in 0..{vocab_size} for {vocab_size} tokens and a mask, got {mask_id}")
    return _Wrapped(f, vocab_size + 1, mask_id, uses_level, classes)


def refuse_options(name: str, **options: Tensor | None) -> None:
    """An option that a denoiser does not support raises instead of being ignored."""
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"the denoiser {name} does not support {option}")


def check_labels(label_B: Tensor | None, classes: int) -> Tensor | None:
    """The classes of the rows, for a network that knows some; another is not to be given any.

    >>> check_labels(torch.tensor([0]), 0)
    Traceback (most recent call last):
    unmask.errors.UsageError: this model was trained without classes: give no label
    """
    if label_B is not None and not classes:
        raise UsageError("this model was trained without classes: give no label")
    return label_B


def level_column(level_B: Tensor | None, z_BL: Tensor, uses_level: bool, dtype: torch.dtype) -> Tensor | None:
    """The level as this network wants it: None when it does not look, an error when it must and there is none."""
    if not uses_level:
        return None
    if level_B is None:
        raise UsageError("this denoiser is conditioned on the noise level: give level_B")
    return level_B.to(device=z_BL.device, dtype=dtype)
