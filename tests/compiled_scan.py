"""Compiles the scan's kernels for an H100 or H200, which needs no GPU, and prints what each takes: registers, and bytes
of the stack, to which what does not fit into registers is spilled. The test starts it outside of the interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from unmask.kernels import selective_scan as scans

HALF = ("x_ptr", "dy_ptr", "value_ptr", "y_ptr", "dx_ptr")
WHOLE = ("L", "E", "tiles", "segments", "row_stride", "stride")
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compiled(kernel: Any, **chosen: Any) -> bytes:
    constants = {"N": 16, "TIME": scans.TIME, "LANES": scans.LANES, "AHEAD": scans.CHAIN, **chosen}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {name: "*bf16" if name in HALF else "i32" if name in WHOLE else "*fp32" for name in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    return bytes(made.asm["cubin"])


def usage(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and its bytes of stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"\b(REG|STACK):(\d+)", said))
    return {"registers": int(numbers["REG"]), "stack": int(numbers["STACK"])}


if __name__ == "__main__":
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "forward": (scans._forward, {"REVERSE": False}),
        "backward": (scans._backward, {"REVERSE": True}),
        "ends": (scans._ends, {"REVERSE": False, "GRADIENT": True}),
        "chain": (scans._chain, {"GRADIENT": False}),
    }
    print(json.dumps({name: usage(compiled(kernel, **chosen)) for name, (kernel, chosen) in ways.items()}))
