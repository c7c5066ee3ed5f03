"""The vocabulary of a pretrained model: its tokenizer.json, otherwise the older files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from unmask.data.subwords import (
    MAX_IDS,
    byte_level_vocabulary,
    residue_vocabulary,
    special_token,
    vocabulary_of,
    word_piece_vocabulary,
)
from unmask.data.tokenizers import MASK_TEXT
from unmask.errors import ModelFolderError
from unmask.pretrained.sentencepiece import sentence_pieces
from unmask.storage.untrusted import printable, read_json

if TYPE_CHECKING:
    import tokenizers

ADDED = "added_tokens.json"
PIECES = {"deberta-v2": ("spm.model",), "llama": ("tokenizer.model",)}  # files in which the index of a piece is its id


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
    elif file := next((folder / name for name in PIECES.get(model_type, ()) if (folder / name).exists()), None):
        inner = _sentence_pieces(file, model_type, special)
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
    said = _config(folder).get("do_lower_case")
    return said if isinstance(said, bool) else None


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def _sentence_pieces(file: Path, model_type: str, special: dict[str, str]) -> tokenizers.Tokenizer:
    """The pieces, followed by the folder's added tokens: at least DeBERTa's mask, which is not a piece."""
    if _config(file.parent).get("split_by_punct"):
        raise ModelFolderError(
            f"{file} is split at punctuation first (split_by_punct in tokenizer_config.json), which is not read: make "
            "a tokenizer.json of it with transformers"
        )
    inner = sentence_pieces(file, lower=_lower(file.parent) is True)
    added = _added(file.parent)
    if model_type == "deberta-v2":
        mask = special.get("mask_token", MASK_TEXT)
        added = added if mask in added.values() else added | {max(added, default=inner.get_vocab_size() - 1) + 1: mask}
    for id, text in sorted(added.items()):
        known = inner.token_to_id(text)
        if known != id and (known is not None or id != inner.get_vocab_size()):
            raise ModelFolderError(
                f"{file.parent}: the added token {printable(text, 40)!r} has the id {id}, which does not follow the "
                f"pieces of {file.name}"
            )
        inner.add_special_tokens([special_token(text)])
    return inner


def _added(folder: Path) -> dict[int, str]:
    """Tokens that a folder adds to its pieces, by id, from both files that may list them."""
    plain = read_json(folder / ADDED) if (folder / ADDED).exists() else {}
    table = _config(folder).get("added_tokens_decoder", {})
    said: list[tuple[Any, Any]] = [(id, text) for text, id in plain.items()]
    if isinstance(table, dict):
        said += [(_id(id), token.get("content") if isinstance(token, dict) else None) for id, token in table.items()]
    for id, text in said:
        if type(id) is not int or not 0 <= id < MAX_IDS or not isinstance(text, str) or not text:
            raise ModelFolderError(f"{folder}: the added token {printable(repr(text), 40)} has no id")
    return dict(said)


def _id(key: str) -> int | str:
    """The number that a key spells; a far too long one stays a string, which is not a valid id."""
    return int(key) if key.isdecimal() and len(key) <= len(str(MAX_IDS)) else key
