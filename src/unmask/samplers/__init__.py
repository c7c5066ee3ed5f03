"""Samplers: the order in which positions open, and how tokens are drawn. They refer to no network and no text."""

from __future__ import annotations

from typing import Any

from unmask.samplers.base import MAX_STEPS as MAX_STEPS
from unmask.samplers.base import RunnersUp as RunnersUp
from unmask.samplers.base import Sampler as Sampler
from unmask.samplers.base import State as State
from unmask.samplers.base import Step as Step
from unmask.samplers.base import Wrapper as Wrapper
from unmask.samplers.base import check_counts as check_counts
from unmask.samplers.base import fitting as fitting
from unmask.samplers.base import room as room


def __getattr__(name: str) -> Any:
    return room.attribute(name)


def __dir__() -> list[str]:
    return room.attributes()
