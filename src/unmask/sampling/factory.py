"""Samplers from a name and options, created the same way for Python, the command line and the server."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any

from unmask.errors import ConfigError, Public, UsageError, did_you_mean
from unmask.reader import Word, from_dict
from unmask.samplers import Sampler, room
from unmask.samplers.drawing import Drawing


class UnknownOption(UsageError):
    """An option that neither the sampler nor its inner sampler has. known: the sampler's options."""

    def __init__(self, cls: type[Sampler], option: str, known: set[str]) -> None:
        hint = Public(did_you_mean(option, known))
        name = Public(cls.__name__)
        super().__init__("the sampler {sampler} has no option {option}; {hint}", sampler=name, option=option, hint=hint)
        self.cls, self.option, self.known = cls, option, known


def make_sampler(
    name: str | None, options: Mapping[str, Any], *, own: Sampler, drawing: Drawing, window: int
) -> Sampler:
    """Create the sampler of that name, or the model's `own` if it is None, with these options.

    Options that are left out default to the model's: `drawing` for how tokens are drawn, `window` for the width of a
    window. For a wrapper, options that it does not have go to the inner sampler, which `inner` names; its default is
    usually the model's own sampler. Strings are parsed according to the option's type, as on the command line.

    >>> from unmask.samplers import Ancestral
    >>> model = {"own": Ancestral(), "drawing": Drawing(top_p=0.9), "window": 64}
    >>> make_sampler("semi_ar", {"steps": "8", "stride": 16}, **model).inner.steps
    8
    >>> make_sampler("confidence", {"tokns": 2}, **model)
    Traceback (most recent call last):
    unmask.sampling.factory.UnknownOption: the sampler Confidence has no option tokns; did you mean 'tokens'?
    """
    if name is not None and not isinstance(name, str):
        raise UsageError("make_sampler takes the name of a sampler, such as ancestral; an object is used as it is")
    options = dict(options)
    cls = room.get(name) if name else type(own)
    known = _fields(cls)
    if "inner" not in known:
        return _build(cls, options, own, drawing, window)
    inner = options.pop("inner", None)
    outer = {option: options.pop(option) for option in known if option in options}
    if isinstance(inner, Sampler):
        outer |= options  # no inner sampler is built from them: leftover options are refused
    else:
        usual: type[Any] = type(own) if cls.own_inner else type(known["inner"].default)
        try:
            inner = _build(room.get(inner) if inner else usual, options, own, drawing, window)
        except UnknownOption as e:  # it may have been meant for the wrapper
            raise UnknownOption(e.cls, e.option, {*e.known, *known}) from None
    return _build(cls, outer | {"inner": inner}, own, drawing, window)


def _fields(cls: type[Sampler]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}


def _build(cls: type[Sampler], options: dict[str, Any], own: Sampler, drawing: Drawing, window: int) -> Sampler:
    known = _fields(cls)
    hints = typing.get_type_hints(cls) if known else {}
    for option, value in options.items():
        if option not in known:
            raise UnknownOption(cls, option, set(known))
        if value == "inf" and hints[option] is float:  # refused in recipes; here the sampler checks it
            options = options | {option: math.inf}
        elif isinstance(value, str):
            options = options | {option: from_dict(hints[option], Word(value), f"--{option}")}
    # The model's own sampler keeps its options; any other sampler gets its noise.
    usual = {name: getattr(own, name) for name in known if type(own) is cls or (name == "noise" and hasattr(own, name))}
    if issubclass(cls, Drawing):
        usual |= dataclasses.asdict(drawing)
    if "window" in known and known["window"].default is dataclasses.MISSING:
        usual = {"window": window} | usual
    try:
        return cls(**usual | options)
    except TypeError as e:
        raise ConfigError(
            "the sampler {cls} needs more options: {reason}", cls=Public(cls.__name__), reason=e
        ) from None
