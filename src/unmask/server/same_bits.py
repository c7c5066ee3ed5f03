"""What a CPU's matrix library is told, so that a row's answer does not depend on what stands beside it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

VARIABLE, STRICT = "MKL_CBWR", "AUTO,STRICT"


def ask_for_same_bits() -> None:
    """To be called before torch multiplies anything, which is when MKL reads the variable; what is set already stays.

    With AVX-512 MKL sums products of few rows in another order than those of many, and where several threads share a
    product every number of rows may have its own. Its strict mode does not. Processors of others are left alone: MKL's
    strict mode is for Intel's.
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
