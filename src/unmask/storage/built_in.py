"""The models included in the package: one folder each in `models/`, with the files of a model folder and a card."""

from __future__ import annotations

from pathlib import Path

from unmask.errors import ModelFolderError, did_you_mean

MODELS = Path(__file__).parents[1] / "models"
DEFAULT = "stories"  # used if no model is named
CARD = "card.md"


def built_in_names() -> list[str]:
    """The names that `unmask.load` resolves without a folder.

    >>> built_in_names()  # doctest: +SKIP
    ['stories']
    """
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def built_in_folder(name: str) -> Path:
    """The folder of a built-in model.

    >>> built_in_folder("stories").name  # doctest: +SKIP
    'stories'
    """
    names = built_in_names()
    if name not in names:
        known = f", or a built-in model's name: {did_you_mean(name, names)}" if names else ""
        raise ModelFolderError(f"no model folder {name!r}; give a folder with config.json and its weights{known}")
    return MODELS / name


def card(name: str) -> str:
    """The model's card in Markdown: data, licence, figures, samples, limits.

    >>> card("stories").splitlines()[0]  # doctest: +SKIP
    '# stories'
    """
    path = built_in_folder(name) / CARD
    return path.read_text(encoding="utf-8") if path.is_file() else f"# {name}\n\nThis model has no card.\n"
