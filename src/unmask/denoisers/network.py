"""The interface of denoiser modules, their attention pattern, and the wrapper that turns a function into one."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from unmask.denoisers.flat_rows import gather_positions, take_rows
from unmask.errors import UsageError

if TYPE_CHECKING:
    from unmask.denoisers.base import Denoiser
    from unmask.denoisers.ragged import Ragged
    from unmask.denoisers.recorded import Recorder


Cache = Any  # a network's state for the positions that it has read; opaque to everything else


class Attend(NamedTuple):
    """Which positions a position may see, besides what the network itself forbids (a causal one sees no later ones).

    valid_BL: False at padding, which is at the end of a row and not visible to any position. mask [L, L] or [B, L, L]:
    True where the row's position may see the column's. blocks [L] or [B, L]: each position's block number; a position
    sees its own and earlier blocks. causal: no position sees later ones, for networks with `looks_back`; back: the same
    for the first `back` rows only. All conditions apply together. A position always sees itself.

    >>> Attend(blocks=torch.tensor([0, 0, 1])).allowed()[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    valid_BL: Tensor | None = None
    mask: Tensor | None = None
    blocks: Tensor | None = None
    causal: bool = False
    back: int = 0

    @property
    def unmasked(self) -> bool:
        return self.valid_BL is None and self.mask is None and self.blocks is None

    def allowed(self, shape: tuple[int, int] | None = None) -> Tensor | None:
        """A boolean mask [1 or B, 1, 1 or L, L] for `scaled_dot_product_attention`; None: everything is visible.

        `causal` is included only together with a mask or blocks: attention kernels support it alone without a mask.
        shape (B, L) is needed only for `back`.
        """
        if self.back:
            assert shape is not None
            (B, L), whole = shape, self._replace(back=0).allowed()
            later = torch.ones(B, 1, L, L, dtype=torch.bool) if whole is None else whole.expand(B, 1, L, L).clone()
            later[: self.back] &= torch.ones(L, L, dtype=torch.bool, device=later.device).tril()
            return later | torch.eye(L, dtype=torch.bool, device=later.device)
        valid = None if self.valid_BL is None else self.valid_BL[:, None, None, :]
        if self.mask is None and self.blocks is None:
            return valid
        parts = [] if valid is None else [valid]
        if self.mask is not None:
            parts.append(self.mask.reshape(-1, 1, *self.mask.shape[-2:]))
        if self.blocks is not None:
            parts.append(
                (self.blocks[..., None, :] <= self.blocks[..., :, None]).view(-1, 1, *self.blocks.shape[-1:] * 2)
            )
        both = functools.reduce(torch.logical_and, parts)
        both = both.tril() if self.causal else both
        # Otherwise a padded position might see nothing, and the softmax over nothing is NaN, which spreads.
        return both | torch.eye(both.shape[-1], dtype=torch.bool, device=both.device)


def attending(attend: Attend | None, valid_BL: Tensor | None) -> Attend:
    """`valid_BL` is the short form of `attend`; both at once are refused.

    >>> attending(None, None).allowed() is None
    True
    """
    if attend is not None and valid_BL is not None:
        raise UsageError("give valid_BL or attend, not both: attend has a valid_BL of its own")
    return Attend(valid_BL) if attend is None else attend


class LinearHead(NamedTuple):
    """The weight and bias of a head that is one linear map but whose bias is not simply a parameter."""

    weight: Tensor
    bias: Tensor | None


class Network(nn.Module):
    """A denoiser: `trunk` computes one vector per position, `head` turns selected vectors into logits.

    `h[:, l]` predicts position l; a causal network shifts internally. Logits are computed only where they are needed.

    z is ids [B, L] or vectors [B, L, E], such as `embed` returns; the level is one number per row [B] or position
    [B, L]. Options that a network does not support are refused (`refuse_options`), never ignored. Modules that an
    objective builds are registered as `objective`, a task head as `task`.
    """

    embed: Callable[[Tensor], Tensor]  # ids [B, L] → vectors [B, L, E]; vectors of that width are left as they are

    config: Any  # the Denoiser that built it, if one did
    num_ids: int
    mask_id: int
    width: int = 0  # of the vectors h_ND; 0: unknown
    # For a network that reads both strands of DNA: the width of one strand's vectors. A vector of h_ND is that of the
    # row and, beside it, that of its reverse complement at the same position. Where `width` equals `strand_width`, the
    # second half exists in use only, not in training.
    strand_width: int = 0
    causal: bool = False
    uses_level: bool = False
    looks_back: bool = False  # bidirectional, but supports `Attend.causal` and `Attend.back`
    shifted: bool = False  # position l is predicted by the vector before it, which under `Attend.causal` has not seen l
    num_classes: int = 0  # how many classes `cond` may name, one per row; -1 is none
    label_dropout: float = 0.0  # the share of rows whose class is dropped in training
    checkpoint_activations: bool = False
    recorder: Recorder | None = None  # records and replays training passes, for a single process on a GPU
    sharded: bool = False  # each process holds a shard of each weight, so only a part's own forward pass may read them
    attends: bool = True  # has attention, whose cost is quadratic in the length
    takes_padding: bool = True  # rows of different lengths can share a call through valid_BL
    tells_pairs: bool = False  # `trunk_at` takes second_BL, True at the second text of a pair
    fixed_ids: tuple[int, ...] = ()  # never predicted: their logits are -inf
    capturable: bool = False  # no call reads a value on the host, so a CUDA graph can replay it
    objective: nn.Module | None  # what the objective built: trained, averaged and saved with the network
    task: nn.Module | None  # the task head of a fine-tuned network, likewise

    def __init__(self) -> None:
        super().__init__()
        self.objective = None  # set later, so that it is registered after the network's own modules
        self.task = None

    @abstractmethod
    def trunk(
        self,
        z: Tensor,
        level: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        positions_BL: Tensor | None = None,
        cond: Tensor | None = None,
        cache: Cache | None = None,
        span: tuple[int, int] | None = None,
        at_BK: Tensor | None = None,
    ) -> Tensor:
        """Compute h_BLD, or h_BKD at the positions `at_BK`. `valid_BL` is short for `attend=Attend(valid_BL)`.

        With a cache of `new_cache`, the result is [B, stop - start, D] for positions start..stop-1 of the `span`
        (start, stop). The cache contains the positions before start, and afterwards those before stop. A call may be
        repeated with the same span, so the state at `start` must remain available. start = 0 resets the cache.
        """

    def trunk_at(
        self,
        z: Tensor,
        level: Tensor | None,
        flat_N: Tensor,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        cond: Tensor | None = None,
    ) -> Tensor:
        """Compute h_ND at distinct positions of the flat batch (row x L + position), as losses need it.

        A network that can save work after its last exchange between positions does so here.
        """
        more: dict[str, Any] = {} if attend is None else {"attend": attend}
        h_BLD = self.trunk(z, level, valid_BL=valid_BL, cond=cond, **more)
        h_ND: Tensor = take_rows(h_BLD.flatten(0, 1), flat_N)
        return h_ND

    def takes_ragged(self) -> bool:
        """Whether `trunk_ragged` is implemented and currently the faster way."""
        return False

    def trunk_ragged(
        self, z_M: Tensor, level_B: Tensor | None, rows: Ragged, flat_N: Tensor, *, cond: Tensor | None = None
    ) -> Tensor:
        """`trunk_at` for rows without padding: z_M has them end to end, and flat_N indexes it."""
        raise NotImplementedError

    def can_fuse_training(self) -> bool:
        """Whether `trunk_at` and `trunk_ragged` have their own training kernels, so that nothing is compiled."""
        return False

    @abstractmethod
    def head(self, h_ND: Tensor) -> Tensor:
        """logits_NI over all ids, the mask's included."""

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that `head` uses; returning all of the denoiser's is correct, but less efficient.

        The objective's parameters are not included, since a loss names those that it uses (see `summed_nats`), nor are
        those of a task head.
        """
        return [p for name, p in self.named_parameters() if not name.startswith(("objective.", "task."))]

    def head_linear(self) -> nn.Linear | LinearHead | None:
        """The head, if it is a single linear map: losses and samplers are then faster."""
        return None

    def begins_anew(self) -> dict[str, Tensor]:
        """The parameters that loaded weights may lack, with the values with which they then begin."""
        return {}

    def saved(self, weights: dict[str, Tensor]) -> tuple[Denoiser, dict[str, Tensor]]:
        """The description and the weights to save in a model's folder, given the network's current weights."""
        return self.config, weights

    def parts(self) -> list[nn.Module]:
        """Modules whose weights may be fetched from other processes one after the other, each called as a module."""
        return []

    def before_replay(self) -> None:
        """Called before captured graphs of this network run, to update what they read besides the weights."""

    def matrices(self) -> dict[str, int]:
        """The names of the parameters that Muon takes, and how many maps each stacks (queries, keys and values: 3)."""
        return {}

    def new_cache(self, batch: int, length: int) -> Cache | None:
        """An empty cache for `batch` rows of `length` positions.

        None: a causal network without a cache reads its rows from the beginning each time.
        """
        return None

    def can_decode(self) -> bool:
        """Whether there is a `decode` that a CUDA graph can replay."""
        return False

    def decode(self, ids_B: Tensor, position_1: Tensor, cache: Cache, stop: int) -> Tensor:
        """h_BD of a causal network at one position below `stop`, from the token before it.

        The cache, of `new_cache`, is changed in place; position 0 resets it.
        """
        raise NotImplementedError

    def can_step_rows(self) -> bool:
        """Whether there is a `step_rows`; without it, `trunk` reads rows at different positions one after another."""
        return False

    def step_rows(self, ids_M: Tensor, caches: Sequence[Cache], at: Sequence[int]) -> Tensor:
        """h_MD of a causal network: line b is row b at position `at[b]`, with a cache of the positions before it.

        A call may be repeated with the same `at`. Lines after the last cache are padding to a full batch. A row's line
        must not depend on the others.
        """
        raise NotImplementedError

    def device_for(self, tokens: Tensor) -> torch.device:
        """The device of the parameters; for a function without parameters, that of the tokens."""
        return next((p.device for p in self.parameters()), tokens.device)

    def forward(self, z: Tensor, level: Tensor | None = None, **options: Any) -> Tensor:
        """logits_BLI at every position, for tests and small tables; training and sampling compute fewer."""
        return self.head(self.trunk(z, level, **options))


def read_on(network: Network, z_BL: Tensor, cache: Cache | None, start: int, stop: int) -> Tensor:
    """h_BD of a causal network at position stop - 1, if its cache contains the positions before `start`."""
    if cache is None:
        return network.trunk(z_BL[:, :stop])[:, -1]
    return network.trunk(z_BL, cache=cache, span=(start, stop))[:, -1]


@contextmanager
def evaluating(network: Network) -> Iterator[None]:
    """Switch dropout off inside the block, and restore it afterwards."""
    was_training = network.training
    network.eval()
    try:
        yield
    finally:
        network.train(was_training)


def refuse_options(name: str, **options: object) -> None:
    """Raise if an option is set that the denoiser does not support."""
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"the denoiser {name} does not support {option}")


def check_labels(label_B: Tensor | None, classes: int) -> Tensor | None:
    """The classes of the rows, for a network trained with classes; raises for any other.

    >>> check_labels(torch.tensor([0]), 0)
    Traceback (most recent call last):
    unmask.errors.UsageError: this model was trained without classes: give no label
    """
    if label_B is not None and not classes:
        raise UsageError("this model was trained without classes: give no label")
    return label_B


def level_column(level: Tensor | None, z: Tensor, uses_level: bool, dtype: torch.dtype) -> Tensor | None:
    """The level, [B] or [B, L], as this network expects it; None if it is not conditioned on the level."""
    if not uses_level:
        return None
    if level is None:
        raise UsageError("this denoiser is conditioned on the noise level: give level_B")
    if level.ndim > 1 and level.shape != z.shape[:2]:
        raise UsageError(f"a level for each position must be {tuple(z.shape[:2])}, got {tuple(level.shape)}")
    return level.to(device=z.device, dtype=dtype)


class _Wrapped(Network):
    def __init__(self, f: Callable[..., Tensor], num_ids: int, mask_id: int, uses_level: bool, classes: int) -> None:
        super().__init__()
        self.f = f
        self.num_ids, self.mask_id, self.uses_level = num_ids, mask_id, uses_level
        self.num_classes = classes
        self.takes_padding = _takes_valid(f)

    def trunk(
        self,
        z: Tensor,
        level: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        positions_BL: Tensor | None = None,
        cond: Tensor | None = None,
        cache: Cache | None = None,
        span: tuple[int, int] | None = None,
        at_BK: Tensor | None = None,
    ) -> Tensor:
        attend = attending(attend, valid_BL)
        name = "of a wrapped function"
        refuse_options(name, positions_BL=positions_BL, cache=cache, span=span, mask=attend.mask, blocks=attend.blocks)
        refuse_options(name, causal=attend.causal or None, back=attend.back or None)
        cond = check_labels(cond, self.num_classes)
        if level is not None and (first := next(self.parameters(), None)) is not None:
            level = level.to(first.dtype)  # a foreign network expects its own precision
        if cond is None and self.num_classes:
            cond = z.new_full(z.shape[:1], -1, dtype=torch.long)
        logits_BLI = self._logits(z, level, cond, attend.valid_BL)
        return logits_BLI if at_BK is None else gather_positions(logits_BLI, at_BK)

    def _logits(self, z: Tensor, level: Tensor | None, cond: Tensor | None, valid_BL: Tensor | None) -> Tensor:
        if self.takes_padding:
            all_BL = torch.ones(z.shape[:2], dtype=torch.bool, device=z.device)
            return self._call(z, level, cond, valid_BL=all_BL if valid_BL is None else valid_BL)
        if valid_BL is None or bool(valid_BL.all()):
            return self._call(z, level, cond)
        whole: Tensor | None = None
        length_B = valid_BL.sum(dim=1)
        for length in sorted(set(length_B.tolist())):
            row_R = (length_B == length).nonzero().squeeze(1)
            level_R = None if level is None else level[row_R] if level.ndim == 1 else level[row_R, :length]
            part = self._call(z[row_R, :length], level_R, None if cond is None else cond[row_R])
            whole = part.new_zeros(*z.shape[:2], self.num_ids) if whole is None else whole
            # not in place, so that gradients flow to a function with parameters
            padded = nn.functional.pad(part, (0, 0, 0, z.shape[1] - length))
            whole = whole.index_copy(0, row_R, padded)
        assert whole is not None
        return whole

    def _call(self, z: Tensor, level: Tensor | None, cond: Tensor | None, **valid: Tensor) -> Tensor:
        logits_BLI = self.f(z, level, *(() if cond is None else (cond,)), **valid)
        if logits_BLI.shape != (*z.shape[:2], self.num_ids):
            raise UsageError(f"the function returned {tuple(logits_BLI.shape)}, not {(*z.shape[:2], self.num_ids)}")
        return logits_BLI

    def head(self, h_ND: Tensor) -> Tensor:
        return h_ND


def as_denoiser(
    f: Callable[..., Tensor], *, vocab_size: int, mask_id: int, uses_level: bool = True, classes: int = 0
) -> Network:
    """Wrap a function `logits_BLI = f(z_BL, level_B)` with I = vocab_size + 1 (the mask): tables, toys, other models.

    level_B is float64 for a plain function, of the parameters' type for a module.
    `uses_level=False` promises that f ignores the level, which makes the count form of the bound valid.
    With `classes`, f takes the rows' classes as a third argument, -1 for none.
    If f has a parameter named valid_BL, it gets the positions that are not padding, and rows of different lengths
    share a call. Otherwise it is called with rows of one length at a time.

    >>> import torch
    >>> coin = as_denoiser(lambda z, level: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2)
    >>> coin.num_ids
    3
    """
    if not 0 <= mask_id <= vocab_size:
        raise UsageError(f"mask_id must lie in 0..{vocab_size} for {vocab_size} tokens and a mask, got {mask_id}")
    return _Wrapped(f, vocab_size + 1, mask_id, uses_level, classes)


def _takes_valid(f: Any) -> bool:
    try:
        return "valid_BL" in inspect.signature(f.forward if isinstance(f, nn.Module) else f).parameters
    except (TypeError, ValueError):  # a built-in has no signature
        return False
