"""A constraint that takes for ever to compile, in a process that it starts. The compiling process imports it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from unmask.constraints import Constraint
from unmask.constraints._automaton import Automaton
from unmask.tokens import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Slow(Constraint):
    """Its automaton never comes."""

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        subprocess.run([sys.executable, "-c", "while True: pass"], check=True)
        raise AssertionError("it ended")
