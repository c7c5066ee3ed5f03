"""Model folders by somebody who means harm: each is refused with one line, and nothing in them is run or followed."""

from __future__ import annotations

import importlib
import io
import json
import marshal
import os
import pickle
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from watching import watched

from damaging import edit
from matrix import sample
from unmask.cli import run as unmask_command
from unmask.errors import UnmaskError
from unmask.model import load
from unmask.registry import Room

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX files")

Attack = Callable[[Path], Any]
ATTACKS: dict[str, Attack] = {}
FILES = ("config.json", "tokenizer.json", "model.safetensors")


def add(name: str, attack: Attack) -> None:
    assert name not in ATTACKS
    ATTACKS[name] = attack


def put(name: str, data: bytes | str) -> Attack:
    content = data.encode() if isinstance(data, str) else data

    def attack(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return attack


# --- things that run when they are read ------------------------------------------------------------------------------


class Evil:
    """What a hostile pickle would do."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def torch_saved(**options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({"norm.weight": Evil()}, buffer, **options)
    return buffer.getvalue()


def numpy_saved() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([Evil()], dtype=object), allow_pickle=True)
    return buffer.getvalue()


PAYLOADS = {
    "pickle": pickle.dumps(Evil()),
    "old pickle": pickle.dumps(Evil(), protocol=0),
    "torch zip": torch_saved(),
    "torch legacy": torch_saved(_use_new_zipfile_serialization=False),
    "numpy object": numpy_saved(),
    "marshal": marshal.dumps(compile("import os; os.mkdir('executed')", "x", "exec")),
    "python": b"import os; os.mkdir('executed')\n",
    "yaml": b"!!python/object/apply:os.mkdir ['executed']\n",
}
for kind, payload in PAYLOADS.items():
    for file in FILES:
        add(f"{kind} as {file}", put(file, payload))

OTHER_NAMES = ("pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "weights.pkl", "model.npz", "model.joblib")
OTHER_NAMES += ("model.safetensors.index.json", "modeling.py", "tokenizer.model", "training_args.bin", "config.yaml")


def instead(other: str) -> Attack:
    def attack(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / other).write_bytes(PAYLOADS["torch zip"])

    return attack


for other_name in OTHER_NAMES:
    add(f"{other_name} in place of the weights", instead(other_name))


# --- files that are no files -----------------------------------------------------------------------------------------


def replace(name: str, make: Callable[[Path], Any]) -> Attack:
    def attack(folder: Path) -> None:
        outside = folder.parent / "outside"
        outside.mkdir()
        (folder / name).rename(outside / name)  # a good one, where nobody should look
        make(folder / name)

    return attack


def bind_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's name must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


NO_FILES: dict[str, Callable[[Path], Any]] = {
    "a link by an absolute path": lambda p: p.symlink_to(p.parent.parent / "outside" / p.name),
    "a link by ..": lambda p: p.symlink_to(Path("..", "outside", p.name)),
    "a link to a password file": lambda p: p.symlink_to("/etc/passwd"),
    "a link to zeros without end": lambda p: p.symlink_to("/dev/zero"),
    "a link to a terminal": lambda p: p.symlink_to("/dev/tty"),
    "a link to itself": lambda p: p.symlink_to(p.name),
    "a link to nothing": lambda p: p.symlink_to("nothing"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a socket": bind_socket,
}
for kind, make in NO_FILES.items():
    for file in FILES:
        add(f"{file} is {kind}", replace(file, make))


# --- weights ---------------------------------------------------------------------------------------------------------


def raw(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(head) if length is None else length) + head + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


HEADERS: dict[str, bytes] = {
    "nothing": b"",
    "seven bytes": b"\x01" * 7,
    "no header": struct.pack("<Q", 0),
    "a header of 2^63": raw({}, length=1 << 63),
    "a header of 2^64 - 1": raw({}, length=(1 << 64) - 1),
    "a header beyond the file": raw({}, length=1000),
    "a header of 200 MB": raw({}, length=200_000_000),
    "a header of zeros": raw(b"\0" * 64),
    "a header that is no JSON": raw(b"{'a': 1}"),
    "a header that is a list": raw(b"[]"),
    "a deep header": raw(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "a deep list as header": raw(b"[" * 100_000),
    "a header that is not UTF-8": raw(b'{"\xff\xfe": 1}'),
    "an entry that is no object": raw({"norm.weight": 1}),
    "an entry without offsets": raw({"norm.weight": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "an unknown dtype": raw({"norm.weight": entry("F31")}, bytes(8)),
    "a dtype that is code": raw({"norm.weight": entry("__import__('os')")}, bytes(8)),
    "overlapping offsets": raw({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": raw({"a": entry(), "b": entry()}, bytes(8)),
    "a hole between tensors": raw({"a": entry(), "b": entry(offsets=(16, 24))}, bytes(24)),
    "offsets beyond the file": raw({"a": entry(offsets=(0, 1 << 40), shape=(1 << 38,))}, bytes(8)),
    "offsets of 2^64": raw(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551616]}}', bytes(8)),
    "offsets the wrong way": raw({"a": entry(offsets=(8, 0))}, bytes(8)),
    "negative offsets": raw({"a": entry(offsets=(-8, 0))}, bytes(8)),
    "three offsets": raw({"a": entry(offsets=(0, 4, 8))}, bytes(8)),
    "a shape that is not its bytes": raw({"a": entry(shape=(3,))}, bytes(8)),
    "a negative shape": raw({"a": entry(shape=(-2,))}, bytes(8)),
    "a shape of fractions": raw({"a": entry(shape=(2.0,))}, bytes(8)),
    "a shape beyond 2^64": raw({"a": entry(shape=(1 << 33, 1 << 33, 0), offsets=(0, 0))}),
    "a shape whose product is small by overflow": raw({"a": entry(shape=(1 << 62, 1 << 62, 16))}, bytes(8)),
    "ten thousand dimensions": raw({"a": entry(shape=(1,) * 10_000, offsets=(0, 4))}, bytes(4)),
    "metadata that is no text": raw({"__metadata__": {"format": {"a": 1}}, "a": entry()}, bytes(8)),
    "metadata that is a list": raw({"__metadata__": [], "a": entry()}, bytes(8)),
    "bytes behind the last tensor": raw({"a": entry()}, bytes(9)),
    "one name twice": raw(
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "a name with ..": raw({"../../evil": entry()}, bytes(8)),
    "a name with lines": raw({"a\nb\rc": entry()}, bytes(8)),
    "a name of a million letters": raw({"a" * 1_000_000: entry()}, bytes(8)),
    "fifty thousand tensors": raw({f"t{i}": entry(shape=(0,), offsets=(0, 0)) for i in range(50_000)}),
}
for kind, data in HEADERS.items():
    add(f"weights: {kind}", put("model.safetensors", data))


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Attack:
    def attack(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors")

    return attack


def set_one(value: float, dtype: torch.dtype) -> Attack:
    def change(held: dict[str, torch.Tensor]) -> None:
        held["norm.weight"] = held["norm.weight"].to(dtype)
        held["norm.weight"][5] = value

    return tensors(change)


for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    for number in (float("nan"), float("inf"), float("-inf")):
        add(f"weights: {number} in {dtype}", set_one(number, dtype))
for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16):
    add(f"weights: {dtype}", tensors(lambda held, d=dtype: held.update({"norm.weight": torch.ones(32).to(d)})))  # type: ignore[misc]
for shape in ((31,), (33,), (32, 1), (1, 32), (0,), (), (16, 2)):
    add(f"weights: shape {shape}", tensors(lambda held, s=shape: held.update({"norm.weight": torch.ones(s)})))  # type: ignore[misc]
add("weights: one missing", tensors(lambda held: held.pop("norm.weight")))
add("weights: one too many, with lines", tensors(lambda held: held.update({"a\n\x1b[2Jb": torch.ones(2)})))
add("weights: one too many", tensors(lambda held: held.update(evil=torch.ones(2))))
add(
    "weights: two swapped",
    tensors(lambda held: held.update({"norm.weight": held["embed.weight"], "embed.weight": held["norm.weight"]})),
)


def sparse(folder: Path) -> None:
    """A terabyte that takes no room on the disk, and would in memory."""
    shape = [1 << 38]
    head = raw({"norm.weight": entry(shape=shape, offsets=(0, 1 << 40))})
    (folder / "model.safetensors").write_bytes(head)
    os.truncate(folder / "model.safetensors", len(head) + (1 << 40))


add("weights: a terabyte of nothing", sparse)


PART = "model-{:05d}-of-{:05d}.safetensors"


def in_parts(change: Callable[[Path], Any]) -> Attack:
    """Whole weights in two parts, then the change."""

    def attack(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(held)
        save_file({name: held[name] for name in names[::2]}, folder / PART.format(1, 2))
        save_file({name: held[name] for name in names[1::2]}, folder / PART.format(2, 2))
        load(folder, device="cpu")  # it was whole
        change(folder)

    return attack


def part_moved(number: int, make: Callable[[Path], Any]) -> Attack:
    return in_parts(lambda folder: replace(PART.format(number, 2), make)(folder))


PARTS: dict[str, Attack] = {
    "the first is missing": in_parts(lambda f: (f / PART.format(1, 2)).unlink()),
    "the last is missing": in_parts(lambda f: (f / PART.format(2, 2)).unlink()),
    "one too many": in_parts(lambda f: shutil.copy(f / PART.format(2, 2), f / PART.format(3, 2))),
    "one of 99999": in_parts(lambda f: (f / PART.format(2, 2)).rename(f / PART.format(2, 99999))),
    "one that is number 0": in_parts(lambda f: (f / PART.format(1, 2)).rename(f / PART.format(0, 2))),
    "one twice": in_parts(lambda f: shutil.copy(f / PART.format(1, 2), f / PART.format(2, 2))),
    "beside the whole": in_parts(lambda f: shutil.copy(f / PART.format(1, 2), f / "model.safetensors")),
    "one a pickle": in_parts(put(PART.format(2, 2), PAYLOADS["torch zip"])),
    "one a link": part_moved(2, lambda p: p.symlink_to(Path("..", "outside", p.name))),
    "one a pipe": part_moved(2, os.mkfifo),
    "one a folder": part_moved(1, Path.mkdir),
}
for kind, attack in PARTS.items():
    add(f"weights in parts: {kind}", attack)


# --- config ----------------------------------------------------------------------------------------------------------


def textual(old: str, new: str) -> Attack:
    def attack(folder: Path) -> None:
        text = (folder / "config.json").read_text(encoding="utf-8")
        assert old in text
        (folder / "config.json").write_text(text.replace(old, new, 1), encoding="utf-8")

    return attack


def stretched(file: str, size: int) -> Attack:
    return lambda folder: os.truncate(folder / file, size)


BIG = 1 << 40
CONFIGS: dict[str, Attack] = {
    "auto_map": edit(auto_map={"AutoModel": "modeling_evil.Evil"}),
    "trust_remote_code": edit(trust_remote_code=True),
    "architectures": edit(architectures=["os.mkdir"]),
    "_target_": edit(denoiser___target_="os.mkdir"),
    "a class in the denoiser": edit(denoiser={"name": "dit", "__class__": "os"}),
    "a name in the base": edit(_name_or_path="../../evil"),
    "a vocabulary of 2^40": edit(num_ids=BIG),
    "a mask of 2^40": edit(mask_id=BIG),
    "a negative mask": edit(mask_id=-1),
    "2^40 wide": edit(denoiser__hidden=BIG),
    "2^40 blocks": edit(denoiser__blocks=BIG),
    "2^40 heads": edit(denoiser__heads=BIG),
    "no heads": edit(denoiser__heads=0),
    "fewer than no blocks": edit(denoiser__blocks=-1),
    "all sizes beyond 2^63": edit(denoiser__hidden=1 << 70, denoiser__heads=1 << 60, denoiser__blocks=1 << 70),
    "a conditioning of 2^40": edit(denoiser__conditioning="constant", denoiser__cond_dim=BIG),
    "a window of 2^40": edit(length=BIG),
    "a window of nothing": edit(length=0),
    "a negative window": edit(length=-5),
    "a fraction of a window": edit(length=16.5),
    "a window that is true": edit(length=True),
    "a dropout of 1e308": edit(denoiser__dropout=1e308),
    "a dropout that is no number": textual('"dropout": 0.1', '"dropout": NaN'),
    "a dropout without end": textual('"dropout": 0.1', '"dropout": 1e999'),
    "a number of ten thousand digits": textual('"length": ', '"length": ' + "9" * 10_000),
    "denoiser by path": edit(denoiser__name="../evil"),
    "denoiser by absolute path": edit(denoiser__name="/tmp/evil"),
    "denoiser by module": edit(denoiser__name="os.path"),
    "denoiser with a null": edit(denoiser__name="dit\0"),
    "denoiser with lines": edit(denoiser__name="dit\nunmask: all is well"),
    "denoiser with a private name": edit(denoiser__name="_network"),
    "denoiser without a name": edit(denoiser__name=""),
    "denoiser a list": edit(denoiser=["dit"]),
    "denoiser a number": edit(denoiser=7),
    "denoiser null": edit(denoiser=None),
    "objective by module": edit(objective__name="os"),
    "objective null": edit(objective=None),
    "objective of another kind": edit(objective={"name": "ar"}),
    "noise by path": edit(objective__noise={"name": "../../evil"}),
    "noise of the wrong kind": edit(objective__noise=[1]),
    "noise with code": edit(objective__noise={"name": "log_linear", "eps": "__import__('os')"}),
    "a version from the future": edit(format_version=99),
    "a version that is true": edit(format_version=True),
    "a version as text": edit(format_version="1"),
    "no version": edit(format_version=...),
    "a packing that is none": edit(packing="__import__('os')"),
    "a packing that is a list": edit(packing=["pad"]),
    "no packing": edit(packing=...),
    "an anchor that is none": edit(anchor="\x1b[2J"),
    "an anchor that is null": edit(anchor=None),
    "an anchor where rows begin anywhere": edit(packing="wrap", anchor="both"),
    "a key of version 1": edit(bos=False),
    "version 1 with bos as text": edit(format_version=1, packing=..., anchor=..., bos="yes"),
    "version 1 without bos": edit(format_version=1, packing=..., anchor=...),
    "an usual length of 2^40": edit(typical_length=BIG),
    "an usual length that is null": edit(typical_length=None),
    "an usual length below nothing": edit(typical_length=-1),
    "a separator that is a list": edit(separator=["|"]),
    "a separator of a million letters": edit(separator="|" * 1_000_000),
    "a drawing that is null": edit(drawing=None),
    "a drawing by code": edit(drawing={"draw": "__import__('os')"}),
    "a drawing beyond certainty": edit(drawing={"top_p": BIG}),
    "a drawing of less than nothing": edit(drawing={"top_k": -BIG}),
    "a drawing with a sampler in it": edit(drawing={"inner": {"name": "refine"}}),
    "a vocabulary of four thousand digits": edit(num_ids=10**4000),
    "a width of four thousand digits": edit(denoiser__hidden=10**4000),
    "a mask of four thousand digits": edit(mask_id=10**4000),
    "an unknown key of a megabyte": edit(**{"k" * 900_000: 1}),
    "an unknown key with lines": edit(**{"a\nb": 1}),
    "a key twice": textual('"length": ', '"length": 8, "length": '),
    "a key twice inside": textual('"hidden": ', '"hidden": 64, "hidden": '),
    "no object": put("config.json", "[1, 2]"),
    "a text": put("config.json", '"config"'),
    "nothing": put("config.json", ""),
    "half": put("config.json", '{"format_version": 1, "denoiser": {'),
    "100,000 brackets": put("config.json", "[" * 100_000),
    "100,000 objects": put("config.json", '{"a":' * 100_000),
    "not UTF-8": put("config.json", b'{"format_version": "\xff"}'),
    "UTF-16": put("config.json", '{"format_version": 1}'.encode("utf-16")),
    "a mark at the start": put("config.json", b"\xef\xbb\xbf{}"),
    "nulls": put("config.json", b"\0" * 1000),
    "two megabytes of blanks": put("config.json", b" " * 2_000_000 + b"{}"),
    "a terabyte": stretched("config.json", BIG),
}
for kind, attack in CONFIGS.items():
    add(f"config: {kind}", attack)


# --- tokenizer -------------------------------------------------------------------------------------------------------


def vocabulary(**changes: Any) -> Attack:
    """A tokenizer.json in the format of `tokenizers`: a small BPE with changes."""
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "[MASK]": 3}, "merges": [["a", "b"]]}
    data = {"version": "1.0", "added_tokens": [], "model": model | changes.pop("model", {})} | changes
    return put("tokenizer.json", json.dumps(data))


def nested(levels: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(levels):
        part = {"type": "Sequence", "normalizers": [part]}
    return part


def doubling(pattern: dict[str, str], times: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": pattern, "content": "MM"}] * times}


def added(**changes: Any) -> dict[str, Any]:
    token = {"id": 4, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False}
    return token | {"normalized": False, "special": True} | changes


TOKENIZERS: dict[str, Attack] = {
    "of another model": put("tokenizer.json", '{"unmask": "chars"}'),
    "by path": put("tokenizer.json", '{"unmask": "../../evil"}'),
    "by list": put("tokenizer.json", '{"unmask": ["bytes"]}'),
    "with more beside": put("tokenizer.json", '{"unmask": "bytes", "auto_map": "evil.Evil"}'),
    "twice": put("tokenizer.json", '{"unmask": "bytes", "unmask": "bytes"}'),
    "no object": put("tokenizer.json", "[]"),
    "nothing": put("tokenizer.json", ""),
    "null": put("tokenizer.json", "null"),
    "not UTF-8": put("tokenizer.json", b'{"unmask": "\xff"}'),
    "deep": put("tokenizer.json", '{"model":' * 100_000),
    "no model": put("tokenizer.json", '{"version": "1.0"}'),
    "a model that is a text": put("tokenizer.json", '{"model": "BPE"}'),
    "a terabyte": stretched("tokenizer.json", BIG),
    "small and whole, but another": vocabulary(),
    "of an unknown kind": vocabulary(model={"type": "Evil"}),
    "ids of 2^40": vocabulary(model={"vocab": {"a": BIG}, "merges": []}),
    "ids of 2^32 - 1": vocabulary(model={"vocab": {"a": (1 << 32) - 1}, "merges": []}),
    "ids of 2^31": vocabulary(model={"vocab": {"a": 1 << 31}, "merges": []}),
    "negative ids": vocabulary(model={"vocab": {"a": -1}, "merges": []}),
    "ids with fractions": vocabulary(model={"vocab": {"a": 0.5}, "merges": []}),
    "ids of text": vocabulary(model={"vocab": {"a": "0"}, "merges": []}),
    "one id twice": vocabulary(model={"vocab": {"a": 0, "b": 0}, "merges": []}),
    "an empty vocabulary": vocabulary(model={"vocab": {}, "merges": []}),
    "merges of strangers": vocabulary(model={"merges": [["x", "y"]]}),
    "merges of one": vocabulary(model={"merges": [["a"]]}),
    "half a character": put("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"\\ud800": 0}, "merges": []}}'),
    "added ids of 2^40": vocabulary(added_tokens=[added(id=BIG)]),
    "added ids of 2^32 - 1": vocabulary(added_tokens=[added(id=(1 << 32) - 1)]),
    "added without content": vocabulary(added_tokens=[added(content="")]),
    "added that are no list": vocabulary(added_tokens={"a": 1}),
    "a hundred nested normalizers": vocabulary(normalizer=nested(100)),
    "four hundred nested normalizers": vocabulary(normalizer=nested(400)),
    "a text that doubles sixty times": vocabulary(normalizer=doubling({"String": "M"}, 60)),
    "a pattern that doubles sixty times": vocabulary(normalizer=doubling({"Regex": "M"}, 60)),
    "an expression that is none": vocabulary(normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}),
    "an expression without end": vocabulary(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "((((.+)+)+)+)+$x"},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "a map of letters that is none": vocabulary(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "an unknown normalizer": vocabulary(normalizer={"type": "Exec", "code": "import os"}),
    "an unknown decoder": vocabulary(decoder={"type": "Exec"}),
    "a unigram without its unknown": vocabulary(model={"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}),
    "a unigram of nothing": vocabulary(model={"type": "Unigram", "vocab": [], "unk_id": 0}),
    "a unigram with 1e999": put("tokenizer.json", '{"model": {"type": "Unigram", "vocab": [["a", 1e999]]}}'),
    "a word piece without words": vocabulary(model={"type": "WordPiece", "vocab": {}, "unk_token": "[UNK]"}),
    "both words of the mask taken": vocabulary(model={"vocab": {"[MASK]": 0, "<|unmask:mask|>": 1}, "merges": []}),
}
for kind, attack in TOKENIZERS.items():
    add(f"tokenizer: {kind}", attack)


# --- the tests -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, trained: Any) -> Path:
    """A whole folder, loaded once with every plug-in imported: what happens after that is the folder's doing."""
    folder = tmp_path_factory.mktemp("good") / "m"
    shutil.copytree(trained.model_folder, folder)
    for name in ("noise", "objectives", "denoisers", "samplers", "constraints"):
        room: Room = importlib.import_module(f"unmask.{name}").room
        for plugin in room.names():
            room.get(plugin)
    importlib.import_module("unmask.data.subwords")
    assert load(folder, device="cpu").generate(1, 8)
    with pytest.raises(UnmaskError):
        load(folder.parent / "nowhere")
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(good, tmp_path / "m"))


@pytest.mark.parametrize("name", sample(ATTACKS, 60))
def test_refused(folder: Path, name: str, tally: Any) -> None:
    ATTACKS[name](folder)
    left = sorted(Path.cwd().rglob("*"))
    with watched(folder), pytest.raises(UnmaskError) as caught:
        load(folder, device="cpu")
    message = str(caught.value)
    assert message.isprintable(), message  # one line, and nothing that moves a terminal's cursor
    assert len(message) < 600
    assert sorted(Path.cwd().rglob("*")) == left
    tally("hostile model folders refused")


def test_there_are_enough() -> None:
    assert len(ATTACKS) >= 100


def test_a_good_folder_passes_under_the_same_watch(folder: Path) -> None:
    with watched(folder):
        model = load(folder, device="cpu")
    assert len(model.generate(1, 8)) == 1


@pytest.mark.parametrize(
    "name", [*OTHER_NAMES, "__init__.py", "sitecustomize.py", "torch.py", "json.py", "conftest.py"]
)
def test_what_lies_beside_is_never_looked_at(folder: Path, name: str, tally: Any) -> None:
    (folder / name).write_bytes(PAYLOADS["python" if name.endswith(".py") else "torch zip"])
    (folder / name).chmod(0o000)
    with watched(folder):
        load(folder, device="cpu")
    assert not Path("executed").exists()
    tally("hostile files beside a model left alone")


@pytest.mark.parametrize(
    "name",
    [
        "pickle as model.safetensors",
        "config.json is a pipe",
        "config: auto_map",
        "config: denoiser with lines",
        "tokenizer: ids of 2^40",
        "weights: a name with lines",
        "weights: a terabyte of nothing",
    ],
)
def test_the_command_says_it_in_one_line(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ATTACKS[name](folder)
    assert unmask_command(["generate", str(folder), "--device", "cpu"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("unmask: ")
    assert err.count("\n") == 1
