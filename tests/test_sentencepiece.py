"""SentencePiece files, written here byte by byte: our ids are those of the definitions, and transformers'."""

from __future__ import annotations

import functools
import importlib
import itertools
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import unmask
from pretrained_llamas import of_transformers
from tiny_encoders import save_encoder
from unmask.cli import run
from unmask.data.subwords import Subwords
from unmask.errors import DataError, ModelFolderError, UsageError
from unmask.pretrained import read_pretrained, sentencepiece
from unmask.pretrained.sentencepiece import sentence_pieces
from unmask.pretrained.vocabulary import read_vocabulary
from unmask.storage.untrusted import parse_json

UNKNOWN, CONTROL, USER, UNUSED, BYTE = 2, 3, 4, 5, 6
Piece = tuple[str, float, int]


def varint(value: int) -> bytes:
    low = value & 0x7F
    return bytes([low]) if value < 0x80 else bytes([low | 0x80]) + varint(value >> 7)


def whole(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def inside(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def piece(text: str, score: float, kind: int = 1) -> bytes:
    said = inside(1, text.encode()) + varint(2 << 3 | 5) + struct.pack("<f", score)
    return inside(1, said + (whole(3, kind) if kind != 1 else b""))


def spm(pieces: Sequence[Piece], *, bpe: bool = False, trained: bytes = b"", normal: bytes = b"") -> bytes:
    said = b"".join(piece(*one) for one in pieces)
    return said + inside(2, whole(3, 2 if bpe else 1) + trained) + inside(3, inside(1, b"rule") + normal)


SPECIAL: list[Piece] = [("[PAD]", 0, CONTROL), ("[CLS]", 0, CONTROL), ("[SEP]", 0, CONTROL), ("[UNK]", 0, UNKNOWN)]
WORDS = {"▁the": -2.0, "▁cat": -4.5, "▁c": -4.0, "at": -3.0, "▁": -3.5, "t": -5.0, "h": -6.0, "e": -5.5, "a": -5.25}
WORDS |= {"c": -6.5, "▁th": -5.75, "he": -4.25, "ca": -6.25, "▁sat": -7.0, "s": -5.125, "A": -8.0}
UNIGRAM = [*SPECIAL, *((text, score, 1) for text, score in WORDS.items())]

LETTERS = ["▁", *"thecas"]
MERGES = ["th", "he", "▁t", "at", "▁th", "the", "▁the", "▁c", "ca", "▁cat", "cat", "▁▁"]
BYTES: list[Piece] = [(f"<0x{b:02X}>", 0, BYTE) for b in range(256)]
LLAMA = [("<unk>", 0, UNKNOWN), ("<s>", 0, CONTROL), ("</s>", 0, CONTROL), *BYTES]
LLAMA += [(text, -float(k), 1) for k, text in enumerate(MERGES)]
LLAMA += [(letter, -float(len(MERGES) + k), 1) for k, letter in enumerate(LETTERS)]
LLAMA_BYTES = spm(LLAMA, bpe=True, trained=whole(35, 1), normal=whole(4, 0))

TEXTS = ["the cat sat", "cat", "thethe cat  at", " a  c ", "", "   ", "the xyz cat", "sat\n the", "hehehe that"]
TEXTS += ["".join(word) for word in itertools.product("tca ", repeat=3)]


def path_of(data: bytes, folder: Path, name: str = "spm.model") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def best(text: str) -> list[int]:
    """The likeliest way to cut a text, of all that there are; what no piece is costs 10 more than the worst."""
    ids = {text: id for id, (text, _, kind) in enumerate(UNIGRAM) if kind == 1}
    unknown = min(WORDS.values()) - 10

    @functools.cache
    def ways(rest: str) -> tuple[float, tuple[int, ...]]:
        if not rest:
            return 0.0, ()
        heads = [(WORDS[rest[:k]], ids[rest[:k]], k) for k in range(1, len(rest) + 1) if rest[:k] in WORDS]
        if not any(k == 1 for *_, k in heads):
            heads.append((unknown, 3, 1))
        return max((score + ways(rest[k:])[0], (id, *ways(rest[k:])[1])) for score, id, k in heads)

    plain = " ".join(part for part in text.split(" ") if part)
    chosen = ways("▁" + plain.replace(" ", "▁"))[1] if plain else ()
    return [id for k, id in enumerate(chosen) if id != 3 or not k or chosen[k - 1] != 3]  # one for all in a row


def merged(text: str) -> list[int]:
    """Of all neighbours that make a piece, again and again, those of the highest score, from the left."""
    ids = {text: id for id, (text, *_) in enumerate(LLAMA)}
    scores = {text: score for text, score, kind in LLAMA if kind == 1}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while pairs := [(-scores[a + b], k) for k, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]:
        _, k = min(pairs)
        parts[k : k + 2] = [parts[k] + parts[k + 1]]
    known = [[ids[part]] if part in ids else [3 + byte for byte in part.encode()] for part in parts]
    return [id for group in known for id in group]


def test_a_unigram_model_takes_the_likeliest_pieces(tmp_path: Path) -> None:
    inner = sentence_pieces(path_of(spm(UNIGRAM), tmp_path))
    for text in TEXTS:
        assert inner.encode(text).ids == best(text), text
    assert {3 in best(text) for text in TEXTS} == {True, False}
    assert inner.decode(inner.encode("the cat  sat").ids) == "the cat sat"


def test_bpe_merges_the_best_neighbours_first(tmp_path: Path) -> None:
    inner = sentence_pieces(path_of(LLAMA_BYTES, tmp_path))
    inner.encode_special_tokens = True  # as in ours: no text spells one
    for text in [*TEXTS, "日本 the", "<s> cat", "<0x41>"]:
        assert inner.encode(text).ids == merged(text), text
        assert inner.decode(inner.encode(text).ids) == text
    assert inner.get_added_tokens_decoder()[1].special


def test_without_bytes_what_is_not_known_is_one_piece(tmp_path: Path) -> None:
    plain = [LLAMA[0], *LLAMA[259:]]
    inner = sentence_pieces(path_of(spm(plain, bpe=True, normal=whole(4, 0)), tmp_path))
    space = [text for text, *_ in plain].index("▁")
    assert inner.encode("日本").ids == [space, 0]


def test_transformers_has_the_same_ids(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    ours = sentence_pieces(path_of(spm(UNIGRAM), tmp_path))
    theirs = transformers.DebertaV2Tokenizer(vocab=[(text, score) for text, score, _ in UNIGRAM], unk_id=3)
    plain = [text for text in TEXTS if text.strip() == text and "  " not in text and "\n" not in text]
    for text in plain:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"], text
    ids = {text: id for id, (text, *_) in enumerate(LLAMA)}
    scores = [(text, score) for text, score, kind in LLAMA if kind == 1]
    merges = importlib.import_module("transformers.convert_slow_tokenizer").generate_merges(ids, scores)
    theirs = transformers.LlamaTokenizer(vocab=ids, merges=merges)
    ours = sentence_pieces(path_of(LLAMA_BYTES, tmp_path))
    for text in [*plain, "日本 the"]:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False)["input_ids"], text


def charsmap(spelled: bytes, becomes: bytes) -> bytes:
    """A double array that knows one spelling: unit 0 is the root, the children of each lie at their own place."""
    units, at = [0] * (256 * (len(spelled) + 2)), 0
    for k, byte in enumerate(spelled):
        offset = 256 * (k + 1)
        units[at] |= (offset ^ at) << 10
        at = offset | byte
        units[at] = byte
    units[at] |= 1 << 8 | (256 * (len(spelled) + 1) ^ at) << 10
    units[256 * (len(spelled) + 1)] = 1 << 31
    tree = b"".join(unit.to_bytes(4, "little") for unit in units)
    return len(tree).to_bytes(4, "little") + tree + becomes + b"\0"


def test_a_text_is_normalized_by_the_files_table(tmp_path: Path) -> None:
    table = charsmap("Ａ".encode(), b"at")
    inner = sentence_pieces(path_of(spm(UNIGRAM, normal=inside(2, table)), tmp_path))
    assert inner.encode("c\uff21").ids == inner.encode("cat").ids
    assert sentence_pieces(path_of(spm(UNIGRAM), tmp_path)).encode("c\uff21").ids != inner.encode("cat").ids
    lower = sentence_pieces(tmp_path / "spm.model", lower=True)
    assert lower.encode("CAT").ids == inner.encode("cat").ids


HOSTILE: dict[str, tuple[bytes | Callable[[], bytes], str]] = {
    "text": (b"IQ== 0\nIg== 1\n", "no SentencePiece model, or a damaged one"),
    "nothing": (b"", "no SentencePiece model"),
    "cut": (spm(UNIGRAM)[:-3], "no SentencePiece model"),
    "a length beyond the file": (b"\x0a\xff\xff\xff\xff\x0f", "no SentencePiece model"),
    "an endless number": (b"\xff" * 20, "no SentencePiece model"),
    "a number where a message belongs": (whole(1, 7), "no SentencePiece model"),
    "no UTF-8": (inside(1, inside(1, b"\xff")), "no SentencePiece model"),
    "twice": (spm([*UNIGRAM, ("at", -1, 1)]), "the piece 'at' is there twice"),
    "long": (spm([*UNIGRAM, ("a" * 300, -1, 1)]), "more than 256 characters"),
    "empty": (spm([*UNIGRAM, ("", -1, 1)]), "a piece is empty"),
    "not a number": (spm([*UNIGRAM, ("x", float("nan"), 1)]), "score is no number"),
    "no unknown": (spm(UNIGRAM[:3] + UNIGRAM[4:]), "no piece for what it does not know"),
    "user-defined": (spm([*UNIGRAM, ("[X]", 0, USER)]), "USER_DEFINED"),
    "unused": (spm([*UNIGRAM, ("[X]", 0, UNUSED)]), "UNUSED"),
    "another kind": (spm([*UNIGRAM, ("[X]", 0, 9)]), "pieces of an unknown type"),
    "characters": (b"".join(piece(*p) for p in UNIGRAM) + inside(2, whole(3, 4)), "model_type"),
    "spaces after": (spm(UNIGRAM, trained=whole(24, 1)), "treat_whitespace_as_suffix"),
    "spaces as they are": (spm(UNIGRAM, normal=whole(5, 0)), "escape_whitespaces"),
    "rewritten": (spm(UNIGRAM) + inside(5, inside(2, b"x")), "denormalizer_spec"),
    "bytes that nobody uses": (spm(LLAMA, bpe=True), "byte_fallback"),
    "a table's size": (spm(UNIGRAM, normal=inside(2, b"\xff\xff\xff\xffxx")), "the table that normalizes"),
    "a table's tree": (spm(UNIGRAM, normal=inside(2, b"\x03\x00\x00\x00abcd")), "the table that normalizes"),
    "a table that grows": (lambda: spm(UNIGRAM, normal=inside(2, charsmap(b"a", b"b" * 999))), "more than 256 bytes"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_nothing_of_a_file_is_believed(case: str, tmp_path: Path) -> None:
    data, said = HOSTILE[case]
    path = path_of(data() if callable(data) else data, tmp_path)
    with pytest.raises(ModelFolderError, match=said) as caught:
        sentence_pieces(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_what_is_there_twice_is_found_in_one_pass(tmp_path: Path) -> None:
    """Of a list as long as its file: name by name against all others it would take hours."""
    many = [f"▁{number}" for number in range(200_000)]
    path = path_of(spm([*UNIGRAM, *((text, 0.0, 1) for text in [*many, many[-1]])]), tmp_path)
    with pytest.raises(ModelFolderError, match="the piece '▁199999' is there twice"):
        sentence_pieces(path)
    keys = ",".join(f'"{text}": 1' for text in [*many, many[-1]])
    with pytest.raises(ValueError, match="the key '▁199999' is there twice"):
        parse_json(f"{{{keys}}}")


def test_the_ways_to_cut_pieces_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = path_of(spm(LLAMA, bpe=True, trained=whole(35, 1)), tmp_path)
    sentence_pieces(path)
    monkeypatch.setattr(sentencepiece, "MAX_MERGES", 3)
    with pytest.raises(ModelFolderError, match="in more than 3 ways"):
        sentence_pieces(path)


@pytest.mark.parametrize("table", [{"9" * 5000: {"content": "x"}}, {"40": "x"}, {"40": None}, {"-1": {"content": "x"}}])
def test_added_tokens_that_are_none_are_a_sentence(tmp_path: Path, table: dict[str, Any]) -> None:
    path_of(spm(UNIGRAM), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table}))
    with pytest.raises(ModelFolderError, match=r"the added token .* has no id"):
        read_vocabulary(tmp_path, "deberta-v2", {})


def test_any_damage_is_a_sentence(tmp_path: Path) -> None:
    whole = spm(UNIGRAM, normal=inside(2, charsmap(b"ab", b"c")))
    table = len(spm(UNIGRAM))
    said = []
    for k in [*range(0, table, 5), *range(table, len(whole), 61), *(table + 8 + 4 * ord(c) for c in "abc")]:
        for byte in (0, whole[k] ^ 0x80, 0xFF):
            path = path_of(whole[:k] + bytes([byte]) + whole[k + 1 :], tmp_path)
            try:
                Subwords(sentence_pieces(path)).encode("the cab")
            except (DataError, ModelFolderError) as e:
                said.append(str(e))
    assert len(said) > 100
    assert not [line for line in said if "\n" in line]


def test_a_debertas_folder_with_its_pieces_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "deberta"
    save_encoder("deberta-v2", folder, vocab_size=40, pad_token_id=0, mask_token_id=len(UNIGRAM))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "spm"}))
    path_of(spm(UNIGRAM), folder)
    read = read_pretrained(str(folder))
    tokenizer = read.tokenizer
    assert (tokenizer.mask_id, tokenizer.bos_id, tokenizer.eot_id, tokenizer.num_ids) == (len(UNIGRAM), 1, 2, 40)
    assert {0, 1, 2, 3, *range(len(UNIGRAM) + 1, 40)} == set(tokenizer.fixed_ids)
    assert tokenizer.encode("the cat") == best("the cat")
    assert run(["import", f"hf:{folder}", str(tmp_path / "ours")]) == 0
    assert unmask.load(tmp_path / "ours", device="cpu").tokenizer.encode("the cat") == best("the cat")
    (folder / "tokenizer_config.json").write_text(json.dumps({"split_by_punct": True}))
    with pytest.raises(ModelFolderError, match="split_by_punct"):
        read_pretrained(str(folder))


def test_a_llamas_folder_with_its_pieces_alone(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "llama"
    network = of_transformers("SmolLM2", vocab_size=len(LLAMA) + 1)
    network.save_pretrained(folder)
    path_of(LLAMA_BYTES, folder, "tokenizer.model")
    (folder / "added_tokens.json").write_text(json.dumps({"<pad>": len(LLAMA)}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    read = read_pretrained(str(folder))
    tokenizer = read.tokenizer
    assert (tokenizer.num_ids, tokenizer.mask_id, tokenizer.eot_id) == (len(LLAMA) + 2, len(LLAMA) + 1, 2)
    assert read.denoiser.begin == 1  # type: ignore[attr-defined]
    assert {0, 1, len(LLAMA)} <= set(tokenizer.never_ids())
    assert tokenizer.encode("日 the cat") == merged("日 the cat")
    assert tokenizer.decode(tokenizer.encode("日 the cat")) == "日 the cat"
    ids = torch.tensor([[1, *merged("the cat")]])
    described: Any = read.denoiser
    net = described.build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    net.load_state_dict(dict(read.state), strict=False)
    with torch.no_grad():
        want = network(ids).logits[0, :-1]
        torch.testing.assert_close(net(ids[:, 1:])[0, :, : len(LLAMA) + 1], want, rtol=1e-5, atol=1e-5)
    for wrong, said in (({"<pad>": 3}, "does not follow"), ({"<pad>": "x"}, "has no id"), ({"at": 999}, "follow")):
        (folder / "added_tokens.json").write_text(json.dumps(wrong))
        with pytest.raises(ModelFolderError, match=said):
            read_pretrained(str(folder))


def test_a_gguf_file_with_such_a_vocabulary(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from unmask.pretrained.gguf import open_gguf

    def written(pieces: Sequence[Piece], *, scores: bool = True) -> Path:
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tokenizer_model("llama")
        writer.add_token_list([text for text, *_ in pieces])
        writer.add_token_types([kind for *_, kind in pieces])
        if scores:
            writer.add_token_scores([float(score) for _, score, _ in pieces])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / "a.gguf"

    inner = open_gguf(written(LLAMA)).tokenizer()
    for text in [*TEXTS, "日本 the"]:
        assert inner.encode(text).ids == merged(text), text
    for pieces, scores, said in (
        (LLAMA, False, "kind 'llama' without scores"),
        ([*LLAMA, ("x", 0, USER)], True, "USER_DEFINED"),
    ):
        with pytest.raises((UsageError, ModelFolderError), match=said):
            open_gguf(written(pieces, scores=scores)).tokenizer()


def test_pieces_of_another_family_are_not_guessed(tmp_path: Path) -> None:
    path_of(spm(UNIGRAM), tmp_path, "tokenizer.model")
    with pytest.raises(ModelFolderError, match=r"of tokenizer\.model make one with transformers"):
        read_vocabulary(tmp_path, "xlm-roberta", {})
