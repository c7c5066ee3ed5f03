"""Starting from a pretrained model: its network, tokenizer and window are put into the recipe."""

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

WHOLE = ("denoiser", "denoiser.name")  # the options that choose a network


def is_pretrained(init: str | Path | None) -> bool:
    """Whether --init names a third-party model.

    >>> is_pretrained("hf:bert-base-uncased"), is_pretrained("runs/demo")
    (True, False)
    """
    return isinstance(init, str) and init.startswith(PREFIX)


def adopted(config: RunConfig, pretrained: Pretrained, init: str) -> RunConfig:
    """The recipe with the network and tokenizer of a pretrained model, and its window if the recipe's rows are longer.

    If the recipe's denoiser is of the same kind, its options besides the network's shape (dropout, low-rank adaptation)
    are kept. The default denoiser, dit, is replaced; any other kind is refused. Once the run has begun, the source is
    no longer needed: everything is in the run's folder.
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
    elif "causal" in denoiser.chosen_by_recipe:  # for another kind, `causal` still applies
        denoiser = replace(denoiser, causal=config.denoiser.causal)  # type: ignore[type-var]
    data = replace(config.data, length=min(config.data.length, pretrained.length))
    return replace(config, denoiser=denoiser, tokenizer=spec, data=data)


def check_said(init: str, words: Mapping[str, str]) -> None:
    """Refuse command-line options, such as `denoiser.hidden`, that contradict a network loaded with its weights.

    >>> check_said("hf:bert-base-uncased", {"denoiser": "dit"})  # doctest: +SKIP
    Traceback (most recent call last):
    unmask.errors.UsageError: --denoiser dit does not fit hf:bert-base-uncased, whose network is encoder: ...
    """
    said = {key.removeprefix("denoiser").removeprefix("."): word for key, word in words.items() if key in WHOLE}
    options = [key.split(".")[1] for key in words if key.startswith("denoiser.") and key not in WHOLE]
    if not said and not options:
        return
    kind = denoiser_of(open_source(init))
    if not kind:  # its reader determines the kind
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
    """The message that the run prints about it."""
    rows = f"rows have {config.data.length} tokens, {pretrained.length} is the most that it reads"
    return f"network, weights and tokenizer are those of {init}; {rows}"


def absolute(init: str) -> str:
    """The source with an absolute path, valid from any working directory."""
    path = Path(init.removeprefix(PREFIX)).expanduser()
    return f"{PREFIX}{path.absolute()}" if path.exists() else init
