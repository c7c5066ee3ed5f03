"""DNA: FASTA and BED read strictly, splits that never overlap, both strands, and constraints on sequences."""

from __future__ import annotations

import dataclasses
import gzip
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unmask
from unmask import cli
from unmask.config import DataConfig, load_config
from unmask.constraints.excludes import Excludes
from unmask.constraints.gc import Gc
from unmask.corpora.fasta import Fasta
from unmask.corpora.intervals import Interval, overlap, spans_of, without
from unmask.corpora.memory import Memory
from unmask.corpora.reading import read_like
from unmask.corpora.sources import from_path
from unmask.data.augment import augmentation
from unmask.data.loader import Loader
from unmask.data.packing import pack_texts, rows_of
from unmask.data.tokenizers import load_tokenizer, tokenizer_from_json
from unmask.denoisers.dit import DiT
from unmask.errors import DataError, UsageError
from unmask.model import Model
from unmask.objectives.mdlm import MDLM

DNA = load_tokenizer("dna")
GENOME = ">chr1 the first\nACGTacgtNN\nNNNNGGGG\n\n>chr2\nTTTTRYAAAA\n"


@pytest.fixture
def genome(tmp_path: Path) -> str:
    (tmp_path / "genome.fa").write_text(GENOME)
    return str(tmp_path / "genome.fa")


def bed(tmp_path: Path, text: str, name: str = "some.bed") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def texts(corpus: Fasta) -> list[str]:
    return [document.text for document in corpus.documents()]


# --- letters ----------------------------------------------------------------------------------------------------------


def test_the_tokenizer_has_a_token_a_base() -> None:
    assert DNA.encode("acgtNACGT") == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert DNA.decode([0, 3, 5, 6]) == "AT<|endoftext|>[MASK]"
    assert tokenizer_from_json(DNA.to_json()).fingerprint() == DNA.fingerprint()
    with pytest.raises(DataError, match="dna knows only A C G T N, the text has 'X' at position 2"):
        DNA.encode("ACXG")


def test_unknown_bases_are_not_scored() -> None:
    rows = pack_texts(["ACNNGT"], DNA, "wrap", 8)
    assert rows.report.tokens == 5  # A C G T and the end
    assert rows.report.bytes == 4
    assert rows.bytes_of(np.array([0])).tolist() == [4]
    assert rows.take(np.array([0])).fixed_ids == (4,)


# --- files ------------------------------------------------------------------------------------------------------------


def test_records_are_cut_at_gaps_and_into_pieces(genome: str, tmp_path: Path) -> None:
    assert texts(Fasta(path=genome)) == ["ACGTACGTNNNNNNGGGG", "TTTTNNAAAA"]
    assert texts(Fasta(path=genome, gap=6)) == ["ACGTACGT", "GGGG", "TTTTNNAAAA"]
    assert texts(Fasta(path=genome, gap=6, piece=3)) == ["ACG", "TAC", "GT", "GGG", "G", "TTT", "TNN", "AAA", "A"]
    assert texts(Fasta(path=genome, repeats="unknown", gap=99)) == ["ACGTNNNNNNNNNNGGGG", "TTTTNNAAAA"]
    assert texts(Fasta(path=genome, records=("chr2",))) == ["TTTTNNAAAA"]
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "g.fa.gz").write_bytes(gzip.compress(GENOME.encode()))
    assert texts(Fasta(path=str(tmp_path / "packed"))) == texts(Fasta(path=genome))
    assert isinstance(from_path(genome), Fasta)


def test_intervals_are_documents_of_their_strand(genome: str, tmp_path: Path) -> None:
    lines = "# a comment\nchr1\t0\t4\tplus\t0\t+\nchr1\t0\t5\tminus\t0\t-\nchr2 4 8\n"
    corpus = Fasta(path=genome, bed=bed(tmp_path, lines), labelled=True)
    assert [(document.text, document.label) for document in corpus.documents()] == [
        ("ACGT", "plus"),
        ("TACGT", "minus"),  # of ACGTa
        ("NNAA", ""),
    ]
    holes = Fasta(path=genome, exclude=bed(tmp_path, "chr1\t6\t7\n", "out.bed"), margin=1, gap=99)
    assert texts(holes) == ["ACGTA", "NNNNNNGGGG", "TTTTNNAAAA"]
    assert Fasta(path="a.fa", bed="b.bed").absolute().bed == str(Path("b.bed").absolute())


@pytest.mark.parametrize(
    ("fasta", "intervals", "sentence"),
    [
        (">a\nACGT\nACX\n", "", r"genome.fa, line 3: 'X' is no letter of DNA"),
        ("ACGT\n", "", r"genome.fa, line 1 is no FASTA: a record begins with a line such as >chr1"),
        (">\nACGT\n", "", r"line 1: a record without a name"),
        ("", "", "is empty"),
        (">a\nACGT\n", "a\t2\n", r"some.bed, line 1 is no interval of a BED file"),
        (">a\nACGT\n", "a\t2\tx\n", r"line 1 is no interval"),
        (">a\nACGT\n", "a\t3\t3\n", r"line 1: the interval 3..3 is empty"),
        (">a\nACGT\n", "a\t0\t2\tn\t0\tx\n", r"the strand is 'x', not"),
        (">a\nACGT\n", "a\t0\t9\n", r"some.bed, line 1: a ends at 4, before 9; another assembly"),
        (">chr1\nACGT\n", "\nchr2\t0\t2\n", r"some.bed, line 2: .*genome.fa has no record 'chr2'; did you mean 'chr1'"),
        (">a\nACGT\n", "# nothing\n", "holds no interval"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, fasta: str, intervals: str, sentence: str) -> None:
    (tmp_path / "genome.fa").write_text(fasta)
    options = {"bed": bed(tmp_path, intervals)} if intervals else {}
    with pytest.raises(DataError, match=sentence):
        texts(Fasta(path=str(tmp_path / "genome.fa"), **options))


bases = st.text("ACGTNacgtn", min_size=1, max_size=60)


@settings(deadline=None, max_examples=40)
@given(records=st.lists(bases, min_size=1, max_size=4), width=st.integers(1, 20), piece=st.integers(1, 30))
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, records: list[str], width: int, piece: int
) -> None:
    path = tmp_path_factory.mktemp("fasta") / "g.fa"
    lines = [
        f">r{i}\n" + "\n".join(r[lo : lo + width] for lo in range(0, len(r), width)) for i, r in enumerate(records)
    ]
    path.write_text("\n".join(lines) + "\n")
    assert "".join(texts(Fasta(path=str(path), gap=999, piece=piece))) == "".join(records).upper()


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])), max_size=6)


@settings(max_examples=80)
@given(ours=spans, theirs=spans)
def test_spans_are_sets_of_bases(ours: Any, theirs: Any) -> None:
    def bases_of(parts: Any) -> set[int]:
        return {base for start, end in parts for base in range(start, end)}

    joined, holes = (spans_of(Interval("a", *span) for span in parts).get("a", []) for parts in (ours, theirs))
    assert bases_of(joined) == bases_of(ours)
    assert all(a[1] < b[0] for a, b in pairwise(joined))
    left = without(joined, holes)
    assert bases_of(left) == bases_of(ours) - bases_of(theirs)
    assert (overlap({"a": joined}, {"a": holes}) is not None) == bool(bases_of(ours) & bases_of(theirs))
    assert overlap({"a": left}, {"a": holes}) is None


# --- splits -----------------------------------------------------------------------------------------------------------


def test_what_is_held_out_is_never_learned(genome: str, tmp_path: Path) -> None:
    test_bed = bed(tmp_path, "chr1\t0\t4\n")
    valid = Fasta(path=genome, bed=test_bed)

    def rows(train: Fasta) -> Any:
        data = DataConfig(train=train, valid=valid, length=4, cache=str(tmp_path / "cache"))
        return rows_of(data, DNA, "train")

    assert rows(Fasta(path=genome, records=("chr1", "chr2"), exclude=test_bed)).report.documents == 2
    assert rows(Fasta(path=genome, records=("chr2",))).report.documents == 1
    with pytest.raises(UsageError, match=r"chr1 from 0 to 4 is in data\.train and in data.valid"):
        rows(Fasta(path=genome, records=("chr1",)))
    with pytest.raises(UsageError, match=r"chr1 from 3 to 4 is in data\.train"):
        rows(Fasta(path=genome, bed=bed(tmp_path, "chr1\t3\t8\n", "b.bed")))
    with pytest.raises(UsageError, match="both read all of"):
        rows(Fasta(path=genome))
    with pytest.raises(UsageError, match="name the records, so that what is left"):
        rows(Fasta(path=genome, exclude=test_bed))


def test_another_file_is_read_whole(genome: str, tmp_path: Path) -> None:
    other = tmp_path / "other.fa"
    other.write_text(">chrX\nACGT\n")
    like = Fasta(path=genome, records=("chr1",), exclude="test.bed", margin=3, gap=9, repeats="unknown")
    assert read_like(str(other), like) == Fasta(path=str(other), gap=9, repeats="unknown")


def test_labels_need_intervals(genome: str) -> None:
    with pytest.raises(UsageError, match="labels are the names of intervals"):
        Fasta(path=genome, labelled=True)
    with pytest.raises(UsageError, match="piece must be at least 1"):
        Fasta(path=genome, piece=0)


# --- strands ----------------------------------------------------------------------------------------------------------


def reverse_complement(text: str) -> str:
    return text.translate(str.maketrans("ACGT", "TGCA"))[::-1]


def test_every_second_time_a_row_is_the_other_strand() -> None:
    rng = random.Random(0)
    texts = ["".join(rng.choice("ACGT") for _ in range(9)) for _ in range(40)]
    rows = pack_texts(texts, DNA, "pad", 12, "both")
    data = DataConfig(augment="reverse_complement")
    plain = Loader(rows, 40, 3)
    loader = Loader(rows, 40, 3, augment=augmentation(data, DNA, 3))
    flipped = []
    for epoch in range(4):
        ours, theirs = loader.fetch(epoch), plain.fetch(epoch)
        assert np.array_equal(ours.indices, theirs.indices)
        turned = {}
        for index, mine, other in zip(ours.indices.tolist(), ours.x, theirs.x, strict=True):
            text = DNA.decode(other[1:11])
            assert mine[0] == other[0] == mine[11] == DNA.eot_id  # begin and end stay
            now = DNA.decode(mine[1:11])
            there = "".join(reverse_complement(part) if part else "" for part in text.split("<|endoftext|>"))
            assert now in (text, "<|endoftext|>" + there)
            turned[index] = now != text
        flipped.append([turned[i] for i in range(40)])
    assert flipped[0] == flipped[2] == [not one for one in flipped[1]] == [not one for one in flipped[3]]
    assert 8 < sum(flipped[0]) < 32
    again = Loader(rows, 40, 3, augment=augmentation(data, DNA, 3)).fetch(2, 10, 20)
    assert np.array_equal(again.x, loader.fetch(2).x[10:20])  # of the row alone, whoever reads it


def test_a_run_reads_both_strands(tmp_path: Path) -> None:
    from unmask.training.callbacks import Callback
    from unmask.training.loop import train

    class Losses(Callback):
        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_step(self, report: Any) -> None:
            self.losses.append(report.loss)

    def losses(augment: str) -> list[float]:
        small = {"denoiser.hidden": "16", "denoiser.blocks": "1", "denoiser.heads": "2", "batch": "4", "steps": "2"}
        options = {"out": str(tmp_path / augment), "tokenizer": "dna", "data.length": "12", "valid_rows": "2"}
        config = load_config("fast", small | options | {"data.augment": augment, "sample_every": "0"})
        corpus = Memory(texts=("AAAAAAAAAAA",) * 40)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=corpus, valid=corpus))
        train(config, callbacks=[told := Losses()], device="cpu")
        return told.losses

    assert losses("none") != losses("reverse_complement")


def test_other_vocabularies_have_no_other_strand() -> None:
    pairs = load_tokenizer("bpe:300", Memory(texts=("ACGT" * 50,)))
    with pytest.raises(UsageError, match="need a token a letter, the tokenizer has"):
        augmentation(DataConfig(augment="reverse_complement"), pairs, 0)


# --- constraints ------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    text=st.text("ACGT", max_size=12), sites=st.lists(st.text("ACGT", min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_excluded_sites_are_nowhere(text: str, sites: list[str]) -> None:
    try:
        automaton = Excludes(phrases=tuple(sites)).automaton(DNA, may_end=False)
    except UsageError:  # all four letters are forbidden
        return
    assert automaton.accepts(DNA.encode(text)) == (not any(site in text for site in sites))


@settings(max_examples=60)
@given(text=st.text("ACGT", max_size=14), low=st.integers(0, 2), more=st.integers(0, 2))
def test_the_share_of_g_and_c_is_of_each_window(text: str, low: int, more: int) -> None:
    automaton = Gc(low=low / 4, high=(low + more) / 4, window=4).automaton(DNA, may_end=False)
    whole = [text[i : i + 4] for i in range(0, len(text) - 3, 4)]
    good = all(low <= sum(base in "GC" for base in part) <= low + more for part in whole)
    rest = text[4 * len(whole) :]
    strong = sum(base in "GC" for base in rest)
    good &= np.floor(low / 4 * len(rest)) <= strong <= np.ceil((low + more) / 4 * len(rest))
    assert automaton.accepts(DNA.encode(text)) == good


def test_constraints_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="must-not-contain needs at least one phrase"):
        Excludes(phrases=())
    with pytest.raises(UsageError, match="would forbid nothing: the vocabulary spells it 'GAATTC'"):
        Excludes(phrases=("AA", "gaattc")).automaton(DNA)
    with pytest.raises(UsageError, match="'GAUUC' would forbid nothing: the vocabulary cannot"):
        Excludes(phrases=("GAUUC",)).automaton(DNA)
    with pytest.raises(UsageError, match=r"no whole number of 5 bases is a share from 0\.45 to 0\.55"):
        Gc(low=0.45, high=0.55, window=5)
    with pytest.raises(UsageError, match="0 <= low <= high <= 1"):
        Gc(low=0.7, high=0.6)


# --- use --------------------------------------------------------------------------------------------------------------


def test_a_model_of_dna_learns_writes_and_obeys(tmp_path: Path) -> None:
    from unmask.training.loop import train

    rng = random.Random(1)
    unit = "".join(rng.choice("ACGT") for _ in range(40))
    small = {"denoiser.hidden": "32", "denoiser.blocks": "1", "denoiser.heads": "2", "batch": "8", "valid_rows": "8"}
    options = {
        "out": str(tmp_path / "run"),
        "steps": "60",
        "valid_every": "60",
        "sample_every": "0",
        "tokenizer": "dna",
    }
    config = load_config("fast", small | options | {"data.length": "32", "data.augment": "reverse_complement"})
    corpus = Memory(texts=tuple(unit[i:] + unit[:i] + "NN" + unit for i in range(40)))
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, train=corpus, held_out=0.2))
    model = train(config, device="cpu")
    measured = unmask.evaluate(model, [unit], num_samples=4)
    assert measured.bound is not None
    assert measured.bound.summary()["bits_per_byte"] < 2.2
    wanted = Gc(low=0.5, high=0.5, window=8)
    written = model.generate(8, 17, seed=0, constraint=wanted)
    windows = [text[i : i + 8] for text in written for i in range(0, len(text) - 7, 8)]
    assert len(windows) >= 4
    assert {sum(base in "GC" for base in window) for window in windows} == {4}
    texts = model.generate(8, 24, seed=1, constraint=Excludes(phrases=("GAATTC", "AA")))
    assert not any("AA" in text or "N" in text for text in texts)
    assert model.fill("ACNN[MASK:4]", seed=0)[0].startswith("ACNN")


def test_a_score_of_nothing_but_unknown_bases_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dna = load_tokenizer("dna")
    network = DiT(hidden=8, blocks=1, heads=2).build(num_ids=dna.num_ids, mask_id=dna.mask_id)
    Model(denoiser=network, tokenizer=dna, objective=MDLM(), length=16).save(tmp_path / "model")
    assert cli.run(["score", str(tmp_path / "model"), "NNN", "ACGT", "--device", "cpu"]) == 0
    nothing, bases = capsys.readouterr().out.splitlines()
    assert nothing.startswith("nothing scored")
    assert "bits/byte" in bases


# --- the recipes and tools of benchmarks/dna --------------------------------------------------------------------------

BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "dna"
ELSEWHERE = ("common", "queue", "cells", "classify")  # no recipe by itself, or another test trains it
RECIPES = sorted(path.stem for path in BENCHMARKS.glob("*.toml") if path.stem not in ELSEWHERE)


def random_genome(tmp_path: Path) -> str:
    rng = random.Random(3)
    path = tmp_path / "genome.fa"
    path.write_text(">chr20\n" + "\n".join("".join(rng.choice("ACGT") for _ in range(60)) for _ in range(40)) + "\n")
    return str(path)


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_trains_on_a_split(name: str, tmp_path: Path) -> None:
    from unmask.training.loop import train

    genome = random_genome(tmp_path)
    beds = {part: bed(tmp_path, f"chr20\t{span}\n", f"{part}.bed") for part, span in SPLITS.items()}
    options = {"out": str(tmp_path / "run"), "steps": "2", "valid_every": "2", "valid_rows": "4", "batch": "2"}
    options |= {"data.train.path": genome, "data.train.bed": beds["train"], "data.train.exclude": beds["tasks"]}
    options |= {"data.valid.path": genome, "data.valid.bed": beds["test"], "data.length": "32"}
    options |= {"denoiser.hidden": "16", "denoiser.blocks": "1", "data.cache": str(tmp_path / "cache")}
    model = train(load_config(BENCHMARKS / f"{name}.toml", options), device="cpu")
    text = model.generate(1, 12, seed=1)[0]
    assert set(text) <= set("ACGT")
    assert 1.0 < unmask.evaluate(model, ["ACGTTGCAACGT"], num_samples=2).value < 60


SPLITS = {"train": "0\t1200", "test": "1300\t2400", "tasks": "100\t140"}


def test_counting_says_what_there_is_to_know(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    markov, locate = importlib.import_module("markov"), importlib.import_module("locate")
    rng = np.random.default_rng(0)
    cycle_N = np.tile([0, 1, 2, 3], 500)
    assert markov.perplexity(cycle_N, cycle_N, 1)[0] < 1.01
    four_N = np.array([0, 1, 0, 1])  # counts of 2 and 2, and those of four bases that are added
    for add, share in ((0.5, 2.5 / 6), (1.0, 3 / 8)):
        assert markov.perplexity(four_N, four_N, 0, add) == (pytest.approx(1 / share), 4)
    random_N = rng.integers(0, 4, 20_000)
    assert markov.perplexity(random_N[:10_000], random_N[10_000:], 2)[0] == pytest.approx(4.0, abs=0.02)
    before_N, base_N = markov.contexts(np.array([0, 1, 4, 2, 3, 1]), 2)
    assert (before_N.tolist(), base_N.tolist()) == ([4 * 2 + 3], [1])  # none that an unknown base touches
    genome = random_genome(tmp_path)
    text = "".join(document.text for document in Fasta(path=genome).documents())
    assert list(locate.places(text, text[77:130])) == [77]
    assert list(locate.places(text, reverse_complement(text[200:260]))) == [200]
