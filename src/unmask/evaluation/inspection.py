"""Inspecting a model: its logits, its trunk's vectors, and its predictions for the masks of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unmask.denoisers.network import evaluating
from unmask.errors import UsageError
from unmask.sampling.canvas import Canvas
from unmask.sampling.query import ask_about, masked_share
from unmask.text.arguments import check_whole
from unmask.text.prompts import parse_gaps

if TYPE_CHECKING:
    from unmask.model import Model

Looked = str | Sequence[int] | Tensor


@dataclass(frozen=True)
class Candidate:
    """A candidate token for a mask, and its probability."""

    token: int
    text: str
    prob: float

    def __repr__(self) -> str:
        return f"{self.text!r} {self.prob:.1%}"


@dataclass(frozen=True)
class MaskPrediction:
    """The predictions for one mask, most likely first. position: an index into the text's tokens.

    >>> MaskPrediction(3, (Candidate(7, "cat", 0.5), Candidate(9, "dog", 0.25)))
    MaskPrediction(position 3: 'cat' 50.0%, 'dog' 25.0%)
    """

    position: int
    candidates: tuple[Candidate, ...]

    def __repr__(self) -> str:
        return f"MaskPrediction(position {self.position}: {', '.join(map(repr, self.candidates))})"


def logits(model: Model, text: Looked, *, level: float | None = None, label: int | str | None = None) -> Tensor:
    """The network's logits [L, I] at every token of a text, in which `[MASK]` is a mask; for ids [B, L]: [B, L, I].

    This is `Model.logits`. A text is framed by the model's anchors, which are not part of the result; ids are used as
    they are. Row l of a causal network is its prediction of token l from the tokens before it. level: the noise level,
    for networks conditioned on it; None: the share of masked tokens.

    >>> model.logits("The [MASK] sat").shape  # doctest: +SKIP
    """
    return _look(model, text, level, label, head=True)


def hidden(model: Model, text: Looked, *, level: float | None = None, label: int | str | None = None) -> Tensor:
    """The trunk's vectors [L, D], from which the head computes the logits; see `logits`. This is `Model.hidden`.

    >>> model.hidden("The cat sat").mean(dim=0)  # one vector for the text  # doctest: +SKIP
    """
    return _look(model, text, level, label, head=False)


def predict(
    model: Model, text: str, *, top: int = 5, level: float | None = None, label: int | str | None = None
) -> list[MaskPrediction]:
    """The `top` most likely tokens for every mask of a text, each given the visible tokens only. This is
    `Model.predict`.

    These are the network's own probabilities, before temperature, truncation and constraints.

    >>> model.predict("The [MASK] sat on the mat")  # doctest: +SKIP
    [MaskPrediction(position 4: 'c' 41.2%, 'd' 12.0%, 'b' 8.3%, 'm' 7.7%, 'r' 4.0%)]
    """
    check_whole(top=top)
    if not isinstance(text, str) or top < 1:
        raise UsageError("predict takes a text with masks, as in 'The [MASK] sat', and top of at least 1")
    ids_1L, label_1 = _ids(model, text, label)
    masked_1L = ids_1L == model.tokenizer.mask_id
    if not bool(masked_1L.any()):
        raise UsageError("there is no mask in the text: write [MASK] where a token is asked for, [MASK:3] for three")
    level_1 = _level(model, ids_1L, level)
    log_p_NI = ask_masks(model, ids_1L, level_1, masked_1L, label_B=label_1)
    best = log_p_NI.float().exp().topk(min(top, log_p_NI.shape[1]), dim=1)
    show = model.tokenizer.token_text
    predictions = []
    for position, probs, tokens in zip(
        masked_1L[0].nonzero().squeeze(1).tolist(), best.values.tolist(), best.indices.tolist(), strict=True
    ):
        candidates = tuple(Candidate(token, show(token), prob) for token, prob in zip(tokens, probs, strict=True))
        predictions.append(MaskPrediction(position - len(model.begin), candidates))
    return predictions


def ask_masks(
    model: Model,
    z_BL: Tensor,
    level_B: Tensor,
    masked_BL: Tensor,
    *,
    valid_BL: Tensor | None = None,
    label_B: Tensor | None = None,
) -> Tensor:
    """log p [N, I] at the masked positions, row by row, as the model's objective interprets the network's output.

    >>> ask_masks(model, z_BL, level_B, z_BL == model.tokenizer.mask_id)  # doctest: +SKIP
    """
    predictor = model.objective.predictor(model.denoiser)
    process = predictor.process
    if process is None or process.name != "absorbing":
        reason = "reads from left to right" if process is None else f"knows no masks: its process is {process.name}"
        raise UsageError(f"this model {reason}, so it cannot be asked about them: use Model.logits")
    canvas = Canvas(z_BL, model.denoiser.mask_id, torch.zeros_like(z_BL[:, 0]), valid_BL=valid_BL, label_B=label_B)
    query = ask_about(canvas, z_BL, masked_BL, level_B)
    if query is None:
        raise UsageError("there is no mask to ask about")
    with evaluating(model.denoiser):
        log_p_NI = predictor(query)
    return torch.log_softmax(log_p_NI, dim=-1) if predictor.gives == "score" else log_p_NI  # a score need not sum to 1


@torch.no_grad()
def _look(model: Model, text: Looked, level: float | None, label: int | str | None, *, head: bool) -> Tensor:
    ids_BL, label_B = _ids(model, text, label)
    network, process = model.denoiser, model.process
    if process is not None and process.vectors:
        raise UsageError(f"this model reads noised vectors, not tokens: its process is {process.name}; ask for a score")
    with evaluating(network):
        h_BLD = network.trunk(ids_BL, _level(model, ids_BL, level), cond=label_B)
        out = network.head(h_BLD.flatten(0, 1)).view(*ids_BL.shape, -1) if head else h_BLD
    if isinstance(text, str):
        return out[0, len(model.begin) : out.shape[1] - len(model.end)]
    return out if isinstance(text, Tensor) and text.ndim == 2 else out[0]


def _ids(model: Model, text: Looked, label: int | str | None) -> tuple[Tensor, Tensor | None]:
    if isinstance(text, str):
        row = [*model.begin, *parse_gaps(text, model.tokenizer), *model.end]
        ids = torch.tensor([row])
    else:
        try:
            ids = torch.as_tensor(text)
        except (TypeError, ValueError, RuntimeError):
            raise UsageError("give one text, a list of ids or a tensor of ids [B, L]") from None
        ids = ids[None] if ids.ndim == 1 else ids
        if ids.ndim != 2 or ids.dtype.is_floating_point or ids.dtype == torch.bool or not ids.numel():
            raise UsageError("give a text, a list of ids or a tensor of ids [B, L]")
        if int(ids.min()) < 0 or int(ids.max()) >= model.tokenizer.num_ids:
            raise UsageError(f"ids lie in 0..{model.tokenizer.num_ids - 1}, got {int(ids.min())}..{int(ids.max())}")
    if not 1 <= ids.shape[1] <= model.length:
        raise UsageError(f"{ids.shape[1]} tokens do not fit the model's window of {model.length}: give a shorter text")
    number = model.class_of(label)
    label_B = None if number is None else torch.full((len(ids),), number, device=model.device)
    return ids.long().to(model.device), label_B


def _level(model: Model, ids_BL: Tensor, level: float | None) -> Tensor:
    """[B] the noise level that the network is conditioned on."""
    if level is not None:
        if not 0 <= level <= 1:
            raise UsageError(f"the noise level lies in [0, 1], got {level}")
        return torch.full((len(ids_BL),), float(level), device=ids_BL.device)
    canvas = Canvas(ids_BL, model.denoiser.mask_id, torch.zeros_like(ids_BL[:, 0]))
    return masked_share(canvas, ids_BL).float()
