"""Opening a pretrained model: a local folder, a name on the Hugging Face hub, or a GGUF file.

A folder is untrusted: only regular files with JSON or safetensors are opened, never a pickle; nothing is executed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from unmask.errors import DataError, MissingExtraError, ModelFolderError, UsageError
from unmask.pretrained.base import PREFIX, Source
from unmask.storage.tensor_file import read_one, read_shapes
from unmask.storage.untrusted import printable, read_json

if TYPE_CHECKING:
    import tokenizers

MAX_CONFIG = 1 << 20
MAX_FILES = 1 << 12  # maximum number of weight files in an index
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack", "*.ckpt.index")
WANTED = ("config.json", "*.safetensors", INDEX, "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "spm.model", "tokenizer.model", "added_tokens.json")
ROLES = ("mask_token", "cls_token", "sep_token", "bos_token", "eos_token", "pad_token", "unk_token")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[\w.-]{1,96})?(@[\w./-]{1,96})?")


def open_source(name: str) -> Source:
    """Open a local folder, a .gguf file, or a name on the hub (NAME or NAME@REVISION); the prefix `hf:` is optional.

    >>> open_source("no/such/folder/anywhere")
    Traceback (most recent call last):
    unmask.errors.ModelFolderError: no/such/folder/anywhere is missing
    """
    name = name.removeprefix(PREFIX)
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        opened: Source = importlib.import_module("unmask.pretrained.gguf").open_gguf(path)
        return opened
    if path.is_dir():
        return Folder(path)
    if path.exists():
        raise UsageError(f"{name} is no folder: name the folder that holds config.json, or a .gguf file")
    if not _HUB_NAME.fullmatch(name) or name.startswith((".", "/", "~")):
        raise ModelFolderError(f"{printable(name)} is missing")
    return Folder(_from_hub(name), where=name, linked=True)


class Folder(Source):
    """A folder in transformers' layout. linked: its files are links into the cache of the hub's client."""

    def __init__(self, path: Path, where: str | None = None, *, linked: bool = False) -> None:
        self.path, self.where, self.linked = path, where or str(path), linked
        self.config = read_json(path / "config.json", MAX_CONFIG)
        self._files: dict[str, Path] | None = None

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return _Tensors(self._placed())

    def shapes(self) -> dict[str, Tensor]:
        placed = self._placed()
        return {name: t for path in sorted(set(placed.values())) for name, t in read_shapes(path).items()}

    def _placed(self) -> dict[str, Path]:
        """Tensor name → file."""
        if self._files is None:
            self._files = {}
            for path in _weight_files(self.path):
                for name in read_shapes(path):
                    if name in self._files:
                        raise ModelFolderError(f"{path} holds {printable(name)}, which another file holds, too")
                    self._files[name] = path
        return self._files

    @property
    def special(self) -> dict[str, str]:
        said: dict[str, str] = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            if (self.path / file).exists():
                table = read_json(self.path / file)
                said |= {role: text for role in ROLES if (text := _spelling(table.get(role))) is not None}
        return said

    def tokenizer(self) -> tokenizers.Tokenizer:
        from unmask.pretrained.vocabulary import read_vocabulary

        return read_vocabulary(self.path, self.model_type, self.special)


class _Tensors(Mapping[str, Tensor]):
    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        return read_one(self._files[name], name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _weight_files(folder: Path) -> list[Path]:
    """The single file if there is one, as in transformers, otherwise those of the index."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    index = folder / INDEX
    if index.exists():
        placed = read_json(index).get("weight_map")
        if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
            raise ModelFolderError(f"{index} is damaged: it has no weight_map")
        names = sorted(set(placed.values()))
        for name in names:
            if Path(name).name != name or not name.endswith(".safetensors") or len(names) > MAX_FILES:
                raise ModelFolderError(f"{index} names {printable(name)!r}, which is no safetensors file of its folder")
        return [folder / name for name in names]
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled:
        raise ModelFolderError(
            f"{folder} holds its weights as {printable(pickled[0])} alone, which can run code and is not read: in the "
            "environment it came from, save it as safetensors (save_pretrained does)"
        )
    raise ModelFolderError(f"{folder} holds no model.safetensors")


def _spelling(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _from_hub(name: str) -> Path:
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        what = f"{name} is no folder here, and to get it from the hub"
        raise MissingExtraError("huggingface-hub", "hf", what) from None
    repo, _, revision = name.partition("@")
    try:
        # Only safetensors and plain text: files that can run code are not even downloaded.
        return Path(hub.snapshot_download(repo, revision=revision or None, allow_patterns=[*WANTED, *VOCABULARIES]))
    except Exception as e:  # the hub's client raises what its many layers do; none of it is ours to tell apart
        reason = printable((str(e).strip() or type(e).__name__).splitlines()[0], 200)
        raise DataError(
            f"{name} is no folder here, and the hub gives nothing by that name ({reason}): without a network, name "
            "a folder"
        ) from None
