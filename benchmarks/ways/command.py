"""How these commands end: what somebody asked for wrongly is one sentence, as `unmask` says it."""

from __future__ import annotations

import sys
from collections.abc import Callable

from unmask.errors import UnmaskError


def run_command(main: Callable[[], None]) -> None:
    """Run it; an error of ours is told in one line, and the exit code says which kind it is."""
    try:
        main()
    except UnmaskError as e:
        print(e, file=sys.stderr)
        sys.exit(e.exit_code)
