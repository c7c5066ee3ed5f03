"""The guides of CONTRIBUTING.md as the files that they tell a reader to save, and runs made with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from unmask.cli import run

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@dataclass(frozen=True)
class Guide:
    """One numbered guide: its heading, and the file that stands in it."""

    heading: str
    file: str
    source: str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py")

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


# --- runs -------------------------------------------------------------------------------------------------------------

RECIPE = """
batch = 8
log_every = 4
valid_every = 4
valid_rows = 8
save_every = 4
sample_every = 0
data = { train = { name = "sums", num = 120 }, length = 24, held_out = 0.2 }
optim = { muon = true, lr = 5e-3, warmup = 2, schedule = "constant", ema = 0.9 }
"""
MODELS = {
    "sums": """
objective = { name = "clipped", most = 3.0, noise = { name = "power_law", k = 1.5 } }
denoiser = { name = "dit", hidden = 16, blocks = 1, heads = 2, dropout = 0.1 }
""",
    "gru": """
objective = { name = "ar" }
denoiser = { name = "gru", hidden = 16 }
""",
}


@dataclass(frozen=True)
class Bench:
    """A folder with the guides' files and with runs, and the words that name the files to a command."""

    folder: Path
    plugins: list[str]

    def run(self, *words: str) -> int:
        return run([*words, *self.plugins])

    def recipe(self, name: str) -> Path:
        path = self.folder / f"{name}.toml"
        path.write_text(RECIPE + MODELS[name], encoding="utf-8")
        return path

    def trained(self, name: str) -> Path:
        """4 steps, an end, and 4 more in a second call."""
        out = self.folder / "runs" / name
        assert self.run("train", str(self.recipe(name)), "--out", str(out), "--steps", "4", "--device", "cpu") == 0
        assert self.run("train", str(out), "--resume", "--steps", "8", "--device", "cpu") == 0
        return out
