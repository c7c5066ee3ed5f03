"""The guides of CONTRIBUTING.md as the files that they tell a reader to save."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@dataclass(frozen=True)
class Guide:
    """One numbered guide: its heading, and the file that stands in it."""

    heading: str
    file: str
    source: str

    @property
    def code_lines(self) -> int:
        """Lines that are neither empty nor an import nor a docstring."""
        lines = [line.strip() for line in self.source.splitlines()]
        return sum(bool(line) and not line.startswith(("from ", "import ", '"""')) for line in lines)


def read_guides() -> list[Guide]:
    """Every section `### n. Add a ...`, with its one Python block, whose first line is the file's name."""
    guides = []
    for section in re.split(r"^### (?=\d+\. )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        section = re.split(r"^## ", section, flags=re.MULTILINE)[0]
        [block] = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
        first, _, source = block.partition("\n")
        guides.append(Guide(section.partition("\n")[0], first.removeprefix("# "), source))
    return guides


def write_guides(folder: Path) -> list[str]:
    """Save the guides as a reader would; the words that give all of them to a command."""
    words = []
    for guide in read_guides():
        path = folder / guide.file
        path.write_text(guide.source, encoding="utf-8")
        words += ["--plugin", str(path)]
    return words
