"""Text ↔ ids: no text yields the mask, what is written is read back, foreign files are checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from unmask.corpora import Corpus, Document
from unmask.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_json
from unmask.errors import DataError, MissingExtraError, ModelFolderError, UsageError

DATA = Path(__file__).parents[2] / "shared" / "data"
TEXTS = ["the cat sat on the mat", "ein Käse, bitte!", "a [MASK] here <|endoftext|> there", "数字 と 絵文字 🙂"] * 20
BERT_WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] [ ] mask the cat sat on mat ##s < > | a b c ##a ##b ##c ! , ."
HOSTILE = ["[MASK]", "<|endoftext|>", " [MASK] x", "[SEP][CLS]", "<mask>", "</s>", "[MASK]" * 3, "<|unmask:mask|>"]


class Listed(Corpus):
    def __init__(self, texts: list[str]) -> None:
        self.texts = texts

    def documents(self) -> Iterator[Document]:
        yield from map(Document, self.texts)

    def fingerprint(self) -> str:
        return repr(self.texts)


@cache
def trained() -> Tokenizer:
    return load_tokenizer("bpe:300", Listed(TEXTS))


@cache
def bert() -> Tokenizer:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.txt").write_text("\n".join(BERT_WORDS.split()), encoding="utf-8")
        return load_tokenizer(folder)


@cache
def gpt2_like() -> Tokenizer:
    import tempfile

    source = json.loads(trained().to_json())["model"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(json.dumps(source["vocab"]), encoding="utf-8")
        merges = "\n".join(" ".join(pair) for pair in source["merges"])
        (Path(folder) / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")
        return load_tokenizer(folder)


def foreign(inner: tokenizers.Tokenizer) -> Tokenizer:
    return tokenizer_from_json(inner.to_str())


def kinds() -> dict[str, Tokenizer]:
    return {"bytes": load_tokenizer("bytes"), "bpe": trained(), "bert": bert(), "gpt2": gpt2_like()}


@pytest.mark.parametrize("kind", ["bytes", "bpe", "bert", "gpt2"])
@settings(deadline=None, max_examples=60)
@given(text=st.one_of(st.text(), st.lists(st.sampled_from([*HOSTILE, " ", "a", "cat"])).map("".join)))
def test_no_text_yields_a_special(kind: str, text: str) -> None:
    tokenizer = kinds()[kind]
    ids = tokenizer.encode(text)
    assert not {tokenizer.mask_id, tokenizer.eot_id, tokenizer.bos_id} & set(ids)
    assert all(0 <= i < tokenizer.num_ids for i in ids)
    assert tokenizer.encode_batch([text, "a"]) == [ids, tokenizer.encode("a")]
    ((array, ends),) = tokenizer.encode_spans([text])
    assert array.tolist() == ids
    assert len(ends) == len(ids)
    if ids:
        assert ends[-1] == len(text.encode())
        assert (np.diff(ends) >= 0).all()


@pytest.mark.parametrize("kind", ["bytes", "bpe", "gpt2"])
@settings(deadline=None, max_examples=60)
@given(text=st.text())
def test_round_trip_of_text(kind: str, text: str) -> None:
    tokenizer = kinds()[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(deadline=None, max_examples=60)
@given(text=st.text(alphabet=" abcdefghijklmnopqrstuvwxyz"))
def test_chars_round_trip(text: str) -> None:
    tokenizer = load_tokenizer("chars")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text)
    assert max(ids, default=0) < tokenizer.eot_id


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=40), cut=st.integers(0, 40))
def test_byte_level_spans_are_exact(text: str, cut: int) -> None:
    ((ids, ends),) = trained().encode_spans([text])
    whole = text.encode()
    kept = int(ends[min(cut, len(ids)) - 1]) if min(cut, len(ids)) else 0
    # Cut within a character the decoder shows damage; the bytes before it are still the text's own.
    shown = trained().decode(ids[:cut])
    assert shown == whole[:kept].decode(errors="replace")


@pytest.mark.parametrize("kind", ["bytes", "chars", "bpe", "bert", "gpt2"])
def test_json_round_trip(kind: str) -> None:
    tokenizer = load_tokenizer("chars") if kind == "chars" else kinds()[kind]
    again = tokenizer_from_json(tokenizer.to_json())
    for name in ("num_ids", "mask_id", "eot_id", "bos_id"):
        assert getattr(again, name) == getattr(tokenizer, name)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.never_ids() == tokenizer.never_ids()
    assert again.encode("the cat a b") == tokenizer.encode("the cat a b")
    assert again.to_json() == tokenizer.to_json()


def test_fingerprints_differ() -> None:
    prints = {t.fingerprint() for t in [*kinds().values(), load_tokenizer("chars")]}
    assert len(prints) == 4  # the GPT-2 style folder holds the very vocabulary that was trained
    assert gpt2_like().fingerprint() == trained().fingerprint()


def test_ids_of_each_kind() -> None:
    assert (trained().eot_id, trained().mask_id, trained().num_ids) == (0, 300, 301)
    words = BERT_WORDS.split()
    tokenizer = bert()
    assert (tokenizer.mask_id, tokenizer.eot_id, tokenizer.bos_id, tokenizer.num_ids) == (4, 3, 2, len(words))
    assert tokenizer.never_ids() == [0, 1, 2]
    assert gpt2_like().mask_id == gpt2_like().num_ids - 1 == 300
    assert gpt2_like().eot_id == 0


def test_training_is_repeatable() -> None:
    assert load_tokenizer("bpe:300", Listed(TEXTS)).to_json() == trained().to_json()


def test_a_small_corpus_gives_a_smaller_vocabulary() -> None:
    tokenizer = load_tokenizer("bpe:5000", Listed(["ab"]))
    assert tokenizer.num_ids < 300
    assert tokenizer.mask_id == tokenizer.num_ids - 1


def test_written_file_is_a_plain_tokenizers_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(trained().to_json(), encoding="utf-8")
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert inner.token_to_id("[MASK]") == 300
    assert load_tokenizer(str(tmp_path)).fingerprint() == trained().fingerprint()
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).fingerprint() == trained().fingerprint()


@pytest.mark.parametrize("kind", ["bytes", "bpe", "bert", "gpt2"])
def test_masks_are_shown(kind: str) -> None:
    tokenizer = kinds()[kind]
    the, cat = tokenizer.encode("the"), tokenizer.encode("cat")
    shown = tokenizer.decode([*the, tokenizer.mask_id, *cat])
    assert shown.replace(" ", "") == "the[MASK]cat"
    assert tokenizer.token_text(tokenizer.mask_id) == "[MASK]"
    assert all(isinstance(tokenizer.token_text(i), str) for i in range(tokenizer.num_ids))


def test_bytes_decode_damaged_characters() -> None:
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode([0xC3, tokenizer.mask_id, 0xA9]) == "\ufffd[MASK]\ufffd"
    assert tokenizer.token_text(0xC3) == "<0xC3>"


def test_foreign_without_specials_gets_them_appended() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = foreign(inner)
    assert (tokenizer.eot_id, tokenizer.mask_id, tokenizer.num_ids) == (3, 4, 5)
    assert tokenizer.encode("a b zzz") == [0, 1, 2]


def test_foreign_with_the_mask_as_a_word_gets_another() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"[MASK]": 0, "a": 1, "?": 2, "<mask>": 3}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = foreign(inner)
    assert tokenizer.encode("a [MASK] <mask>") == [1, 0, 3]
    assert tokenizer.mask_id == tokenizer.num_ids - 1 == 5
    assert tokenizer.decode([1, tokenizer.mask_id, 1]) == "a[MASK]a"
    assert tokenizer_from_json(tokenizer.to_json()).mask_id == 5


def test_a_special_that_text_can_spell_is_refused_in_text() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"</s>": 0, "a": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["</s>"])
    tokenizer = foreign(inner)
    assert tokenizer.eot_id == 0
    with pytest.raises(DataError, match="spells </s>"):
        tokenizer.encode("a </s>")


def test_truncation_padding_and_dropout_in_a_file_are_ignored() -> None:
    data = json.loads(trained().to_json())
    data["model"]["dropout"] = 0.9
    inner = tokenizers.Tokenizer.from_str(json.dumps(data))
    inner.enable_truncation(2)
    inner.enable_padding(length=50)
    tokenizer = foreign(inner)
    assert {tuple(tokenizer.encode("the cat sat on the mat")) for _ in range(20)} == {
        tuple(trained().encode("the cat sat on the mat"))
    }


def test_ids_without_a_token_are_never_generated() -> None:
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 5}, unk_token="?"))
    tokenizer = foreign(inner)
    named = {0, 5, tokenizer.eot_id, tokenizer.mask_id}
    assert tokenizer.never_ids() == sorted(set(range(tokenizer.num_ids)) - named)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nonsense",
        "{}",
        "[" * 100_000,
        '{"unmask": "os.system"}',
        '{"unmask": ["bytes"]}',
        '{"unmask": "bytes", "x": 1}',
        '{"model": 3}',
        '{"model": {"type": "Nope"}}',
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}',
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a zz"]}}',
        '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 4294967290}, '
        '"unk_token": "a"}}',
    ],
)
def test_damaged_files_give_one_line(text: str) -> None:
    with pytest.raises(ModelFolderError) as caught:
        tokenizer_from_json(text)
    assert "\n" not in str(caught.value)


@settings(deadline=None, max_examples=80)
@given(at=st.integers(0, 10_000), junk=st.text(max_size=3))
def test_altered_files_never_crash(at: int, junk: str) -> None:
    text = trained().to_json()
    at %= len(text)
    try:
        tokenizer = tokenizer_from_json(text[:at] + junk + text[at + 1 :])
    except ModelFolderError:
        return
    assert 0 <= tokenizer.mask_id < tokenizer.num_ids


@pytest.mark.parametrize("kind", ["bytes", "bpe", "bert"])
def test_half_characters(kind: str) -> None:
    with pytest.raises(DataError, match=r"U\+D800.*position 2"):
        kinds()[kind].encode("ab\ud800")


def test_chars_name_what_they_do_not_know() -> None:
    with pytest.raises(DataError, match=r"'É' at position 3.*bytes"):
        load_tokenizer("chars").encode("abcÉ")


@pytest.mark.parametrize("spec", ["bpe", "bpe:", "bpe:x", "bpe:100", "bpe:-5", "bpe:99999999"])
def test_bad_sizes(spec: str) -> None:
    with pytest.raises(UsageError, match=r"bpe:SIZE|trained on a corpus"):
        load_tokenizer(spec, Listed(TEXTS))


def test_bpe_without_text() -> None:
    with pytest.raises(UsageError, match="trained on a corpus"):
        load_tokenizer("bpe:300")
    with pytest.raises(DataError, match="empty"):
        load_tokenizer("bpe:300", Listed([]))


def test_errors_of_the_corpus_pass_through_training() -> None:
    class Broken(Listed):
        def documents(self) -> Iterator[Document]:
            yield Document("a")
            raise DataError("line 2 is bad")

    with pytest.raises(DataError, match="line 2 is bad"):
        load_tokenizer("bpe:300", Broken([]))


def test_wrong_places(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer at"):
        load_tokenizer(str(tmp_path / "missing.json"))
    with pytest.raises(DataError, match=r"holds no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ModelFolderError, match="not UTF-8"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json: "):
        load_tokenizer(str(tmp_path))


def test_hub_names_without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"did you mean 'bytes'.*unmask\[hf\]"):
        load_tokenizer("byte")


def test_hub_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        @staticmethod
        def hf_hub_download(name: str, file: str) -> str:
            raise ConnectionError(f"cannot reach {name}\nsecond line")

    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub)
    with pytest.raises(DataError, match=r"^no tokenizer 'org/name' here .*: cannot reach org/name$"):
        load_tokenizer("org/name")


def test_importing_needs_no_torch() -> None:
    modules = ", ".join(f"unmask.data.{name}" for name in ("tokenizers", "subwords", "packing", "loader"))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == "False"


@pytest.mark.skipif(not (DATA / "vocab").exists(), reason="the published vocabularies are not here")
def test_published_vocabularies() -> None:
    gpt2 = load_tokenizer(str(DATA / "vocab" / "gpt2"))
    assert (gpt2.eot_id, gpt2.mask_id, gpt2.num_ids, gpt2.bos_id) == (50256, 50257, 50258, None)
    assert gpt2.encode("Hello world") == [15496, 995]
    uncased = load_tokenizer(str(DATA / "vocab" / "bert-base-uncased"))
    assert (uncased.mask_id, uncased.eot_id, uncased.bos_id, uncased.num_ids) == (103, 102, 101, 30522)
    assert uncased.encode("Hello World") == [7592, 2088]
    assert uncased.never_ids() == [0, 100, 101]
    wiki = load_tokenizer(str(DATA / "wiki" / "bpe16k.json"))
    assert (wiki.eot_id, wiki.mask_id, wiki.num_ids) == (0, 16384, 16385)
