"""A constraint that takes for ever to compile. The compiling process imports it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

from unmask.constraints import Constraint
from unmask.constraints.automaton import Automaton
from unmask.data.tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Slow(Constraint):
    """busy: it computes; else it waits for a process that it has started."""

    busy: bool = False

    def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Automaton:
        while self.busy:
            pass
        subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=True)
        raise AssertionError("it ended")
