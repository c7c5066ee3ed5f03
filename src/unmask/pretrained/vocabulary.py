"""The vocabulary of a pretrained model: a tokenizer.json, else what its older files say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.data.subwords import (
    byte_level_vocabulary,
    residue_vocabulary,
    special_token,
    vocabulary_of,
    word_piece_vocabulary,
)
from unmask.errors import ModelFolderError
from unmask.storage.untrusted import read_json

if TYPE_CHECKING:
    import tokenizers


def read_vocabulary(folder: Path, model_type: str, special: dict[str, str]) -> tokenizers.Tokenizer:
    """special: the spellings of the model's special tokens, which older files do not mark."""
    if (folder / "tokenizer.json").exists():
        try:
            inner = vocabulary_of(read_json(folder / "tokenizer.json"))
        except ModelFolderError as e:
            raise ModelFolderError(f"{folder / 'tokenizer.json'}: {e}") from None
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        inner = byte_level_vocabulary(folder / "vocab.json", folder / "merges.txt")
    elif (folder / "vocab.txt").exists() and model_type == "esm":
        inner = residue_vocabulary(folder / "vocab.txt")
    elif (folder / "vocab.txt").exists():
        inner = word_piece_vocabulary(folder / "vocab.txt", _lower(folder))
    else:
        pieces = sorted(path.name for path in folder.glob("*.model"))
        hint = f"; of {pieces[0]} make one with transformers: AutoTokenizer.from_pretrained(...)" if pieces else ""
        raise ModelFolderError(
            f"{folder} holds no tokenizer.json, no vocab.json with merges.txt and no vocab.txt{hint}"
        )
    known = inner.get_vocab(with_added_tokens=True)
    inner.add_special_tokens([special_token(text) for text in special.values() if text in known])
    return inner


def _lower(folder: Path) -> bool | None:
    path = folder / "tokenizer_config.json"
    said: Any = read_json(path).get("do_lower_case") if path.exists() else None
    return said if isinstance(said, bool) else None
