"""What a run begins with: a recipe that takes over a pretrained model's network, tokenizer and window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path

from unmask.config import RunConfig
from unmask.denoisers import Denoiser
from unmask.denoisers.dit import DiT
from unmask.errors import UsageError
from unmask.pretrained.base import PREFIX, Pretrained
from unmask.pretrained.families import denoiser_of
from unmask.pretrained.source import open_source

WHOLE = ("denoiser", "denoiser.name")  # the words that name a network


def is_pretrained(init: str | Path | None) -> bool:
    """Whether --init names a model of others.

    >>> is_pretrained("hf:bert-base-uncased"), is_pretrained("runs/demo")
    (True, False)
    """
    return isinstance(init, str) and init.startswith(PREFIX)


def adopted(config: RunConfig, pretrained: Pretrained, init: str) -> RunConfig:
    """The recipe with the network, the tokenizer and, where its rows are longer, the window of a pretrained model.

    What the recipe's own denoiser says beside the network's shape (dropout, low-rank adaptation) stays, where it is of
    the same kind. A recipe of the default denoiser, dit, has nothing to say of it; one of another kind than the
    weights is refused. The run needs the source no more once it has begun: all of it is in the run's folder.
    """
    spec = absolute(init)
    unset = next(f.default for f in fields(RunConfig) if f.name == "tokenizer")
    assert unset is not MISSING
    if config.tokenizer not in (unset, init, spec):
        raise UsageError(
            f"the recipe names the tokenizer {config.tokenizer!r}, {init} comes with its own: leave tokenizer out, or "
            f"set tokenizer = {init!r}"
        )
    denoiser = pretrained.denoiser
    if type(config.denoiser) not in (DiT, type(denoiser)):
        names = [Denoiser.room.name_of(one) for one in (config.denoiser, denoiser)]
        raise UsageError(
            f"the recipe's denoiser is {names[0]}, {init} holds {names[1]}: leave the recipe's denoiser out, or name "
            f"{names[1]}"
        )
    if type(config.denoiser) is type(denoiser):
        chosen = {name: getattr(config.denoiser, name) for name in denoiser.chosen_by_recipe}
        denoiser = replace(denoiser, **chosen)  # type: ignore[type-var]
    elif "causal" in denoiser.chosen_by_recipe:  # of another kind, it still says which sides are seen
        denoiser = replace(denoiser, causal=config.denoiser.causal)  # type: ignore[type-var]
    data = replace(config.data, length=min(config.data.length, pretrained.length))
    return replace(config, denoiser=denoiser, tokenizer=spec, data=data)


def check_said(init: str, words: Mapping[str, str]) -> None:
    """Refuse what the command line says of a network that comes with its weights, in words such as `denoiser.hidden`.

    >>> check_said("hf:bert-base-uncased", {"denoiser": "dit"})  # doctest: +SKIP
    Traceback (most recent call last):
    unmask.errors.UsageError: --denoiser dit does not fit hf:bert-base-uncased, whose network is encoder: ...
    """
    said = {key.removeprefix("denoiser").removeprefix("."): word for key, word in words.items() if key in WHOLE}
    options = [key.split(".")[1] for key in words if key.startswith("denoiser.") and key not in WHOLE]
    if not said and not options:
        return
    kind = denoiser_of(open_source(init))
    if not kind:  # who reads it says what it is
        return
    for name in said.values():
        if name != kind:
            raise UsageError(
                f"--denoiser {name} does not fit {init}, whose network is {kind}: leave --denoiser out, or say {kind}"
            )
    chosen = Denoiser.room.get(kind).chosen_by_recipe
    for option in options:
        if option not in chosen:
            those = f"; a recipe may say its {', '.join(chosen)}" if chosen else ""
            raise UsageError(f"denoiser.{option} comes with the weights of {init}: leave it out{those}")
        if not said and option != "causal":
            raise UsageError(f"denoiser.{option} is of the network of {init}: give --denoiser {kind} beside it")


def taken_over(config: RunConfig, pretrained: Pretrained, init: str) -> str:
    """What the run says of it."""
    rows = f"rows have {config.data.length} tokens, {pretrained.length} is the most that it reads"
    return f"network, weights and tokenizer are those of {init}; {rows}"


def absolute(init: str) -> str:
    """The same source from any working directory."""
    path = Path(init.removeprefix(PREFIX)).expanduser()
    return f"{PREFIX}{path.absolute()}" if path.exists() else init
