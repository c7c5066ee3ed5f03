"""A request's fields as library objects: sampler, constraint, gaps."""

from __future__ import annotations

import json
from typing import Any

from unmask.constraints import Constraint
from unmask.constraints.json_schema import JsonSchema
from unmask.constraints.regex import Regex
from unmask.errors import Public, UsageError, did_you_mean
from unmask.model import Model
from unmask.reader import from_dict
from unmask.samplers import Sampler, room
from unmask.server.limits import Limits
from unmask.server.schemas import Constrained, Sampling
from unmask.text.editing import MAX_CANDIDATES
from unmask.text.prompts import MASK_SPELLING, known_lengths, parse_gaps

_FIELDS = ("steps", "temperature", "top_p", "top_k")
MAX_SCHEMA = 16_000  # characters


def sampler_of(asked: Sampling, model: Model) -> Sampler:
    """The sampler that the fields describe (see `Model.make_sampler`)."""
    if asked.sampler is not None and asked.sampler not in room.names():
        raise UsageError("unknown sampler; {hint}", hint=Public(did_you_mean(asked.sampler, room.names())))
    if taken := [name for name in _FIELDS if name in asked.options]:
        raise UsageError("{name} is a field of its own, not one of options", name=Public(taken[0]))
    options: dict[str, Any] = {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in asked.options.items()
    }
    options |= {name: value for name in _FIELDS if (value := getattr(asked, name)) is not None}
    if asked.steps == "inf":
        options["steps"] = None
    return model.make_sampler(asked.sampler, **options)


def constraints_of(asked: Constrained) -> list[Constraint] | None:
    """The constraints in the fields; None if there are none."""
    over: dict[str, Any] = {"over": asked.over}
    made: list[Constraint] = []
    if asked.regex is not None:
        made.append(Regex(pattern=asked.regex, **over))
    if asked.json_schema is not None:
        made.append(schema_of(asked.json_schema, **over))
    if asked.choices is not None:
        made.append(from_dict(Constraint, over | {"name": "choices", "options": asked.choices}))
    for options in asked.constraints or ():
        if len(json.dumps(options)) > MAX_SCHEMA:
            raise UsageError("a constraint may have {most} characters: use a shorter one", most=Public(MAX_SCHEMA))
        made.append(from_dict(Constraint, over | options, "constraints"))
    return made or None


def schema_of(schema: dict[str, Any], **over: Any) -> JsonSchema:
    """A schema of limited size."""
    made = JsonSchema.of(schema, **over)
    if len(made.schema) > MAX_SCHEMA:
        raise UsageError("a schema may have {most} characters: use a smaller one", most=Public(MAX_SCHEMA))
    return made


def check_gaps(text: str, model: Model, limits: Limits, *, exact: bool) -> tuple[int, int]:
    """Refuse gaps, or a text with them, that do not fit in a row, before any row is created.

    Returns the number of combinations of lengths for gaps of unknown length, and the tokens of the longest. exact: as
    in parse_gaps.
    """
    most = [max(int(n[:8]) for n in gap.groups(default="1")) for gap in MASK_SPELLING.finditer(text)]
    limits.check_length(sum(most))
    longest = MASK_SPELLING.sub(lambda gap: f"[MASK:{gap[2] or gap[1] or 1}]", text)
    length = len(model.begin) + len(parse_gaps(longest, model.tokenizer, exact=exact)) + len(model.end)
    limits.check_length(length)
    return len(known_lengths(text, MAX_CANDIDATES)), length
