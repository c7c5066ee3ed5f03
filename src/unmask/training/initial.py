"""What a run begins with: a recipe that takes over a pretrained model's network, tokenizer and window."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from pathlib import Path

from unmask.config import RunConfig
from unmask.errors import UsageError
from unmask.pretrained.base import PREFIX, Pretrained


def is_pretrained(init: str | Path | None) -> bool:
    """Whether --init names a model of others.

    >>> is_pretrained("hf:bert-base-uncased"), is_pretrained("runs/demo")
    (True, False)
    """
    return isinstance(init, str) and init.startswith(PREFIX)


def adopted(config: RunConfig, pretrained: Pretrained, init: str) -> RunConfig:
    """The recipe with the network, the tokenizer and, where its rows are longer, the window of a pretrained model.

    What the recipe's own denoiser says beside the network's shape (dropout, low-rank adaptation) stays, where it is of
    the same kind. The run needs the source no more once it has begun: all of it is in the run's folder.
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
    if type(config.denoiser) is type(denoiser):
        chosen = {name: getattr(config.denoiser, name) for name in denoiser.chosen_by_recipe}
        denoiser = replace(denoiser, **chosen)  # type: ignore[type-var]
    elif "causal" in denoiser.chosen_by_recipe:  # of another kind, it still says which sides are seen
        denoiser = replace(denoiser, causal=config.denoiser.causal)  # type: ignore[type-var]
    data = replace(config.data, length=min(config.data.length, pretrained.length))
    return replace(config, denoiser=denoiser, tokenizer=spec, data=data)


def taken_over(config: RunConfig, pretrained: Pretrained, init: str) -> str:
    """What the run says of it."""
    rows = f"rows have {config.data.length} tokens, {pretrained.length} is the most that it reads"
    return f"network, weights and tokenizer are those of {init}; {rows}"


def absolute(init: str) -> str:
    """The same source from any working directory."""
    path = Path(init.removeprefix(PREFIX)).expanduser()
    return f"{PREFIX}{path.absolute()}" if path.exists() else init
