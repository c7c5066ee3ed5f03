"""Settings of a CPU's matrix library that make a row's result independent of the other rows."""

from __future__ import annotations

import os
import platform
from pathlib import Path

VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"


def ask_for_same_bits() -> None:
    """Call this before torch multiplies anything, because MKL then reads the variable; an existing value is kept.

    With AVX-512 MKL sums products of few rows in another order than those of many, and if several threads share a
    product, the order may depend on the number of rows. Its strict mode avoids both. Other vendors' processors are left
    alone: MKL's strict mode is for Intel's.
    """
    if _is_intel():
        os.environ.setdefault(VARIABLE, STRICT)


def _is_intel() -> bool:
    if "GenuineIntel" in platform.processor():  # Windows
        return True
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            return "GenuineIntel" in file.read(4096)
    except OSError:
        return False
