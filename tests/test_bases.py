"""DNA base by base: laws by enumeration, windows, strands, regions of FASTA files, the table and the picture."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from unmask import cli
from unmask.corpora.intervals import Interval, read_bed
from unmask.corpora.regions import parse_region, read_stretches
from unmask.data.dna import Dna
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.dit import DiT
from unmask.denoisers.mamba import Mamba
from unmask.denoisers.network import as_denoiser
from unmask.errors import DataError, UsageError
from unmask.evaluation.per_base import BASES, score_bases, windows
from unmask.model import Model
from unmask.objectives import Objective
from unmask.objectives.ar import AR
from unmask.objectives.mdlm import MDLM
from unmask.objectives.sedd import SEDD
from unmask.objectives.udlm import UDLM
from unmask.reporting.base_plot import Panel, draw

DNA = load_tokenizer("dna")
GENOME = ">chr1 the first\nACGTacgtNN\nNNNNGGGGTT\n>chr2\nTTTTRYAAAA\n"


def model_of(denoiser: Denoiser, objective: Objective, *, length: int = 8, **options: object) -> Model:
    torch.manual_seed(0)
    network = denoiser.for_tokenizer(DNA).build(num_ids=DNA.num_ids, mask_id=DNA.mask_id)
    for p in network.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return Model(denoiser=network, tokenizer=DNA, objective=objective, length=length, **options)  # type: ignore[arg-type]


def masked(**options: object) -> Model:
    return model_of(DiT(hidden=16, blocks=1, heads=2), MDLM(form="count"), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bases")
    masked().save(path / "model")
    (path / "genome.fa").write_text(GENOME)
    return path


# --- laws -------------------------------------------------------------------------------------------------------------

LENGTH = 3


def joint() -> Tensor:
    """A law of three bases."""
    g = torch.Generator().manual_seed(3)
    return torch.rand(4, 4, 4, generator=g, dtype=torch.float64).softmax(0).div(16)


def one_that_knows(law: Tensor) -> Model:
    """A network whose x_theta is the law's own, given what is visible."""

    def f(z_BL: Tensor, level_B: Tensor | None) -> Tensor:
        out = torch.full((*z_BL.shape, DNA.num_ids), -60.0, dtype=torch.float64)
        for b, z in enumerate(z_BL.tolist()):
            visible = law[tuple(slice(None) if id == DNA.mask_id else slice(id, id + 1) for id in z)]
            for at in range(LENGTH):
                marginal = visible.sum(dim=[axis for axis in range(LENGTH) if axis != at])
                if z[at] == DNA.mask_id:
                    out[b, at, :4] = (marginal / marginal.sum()).log()
        return out

    network = as_denoiser(f, vocab_size=DNA.mask_id, mask_id=DNA.mask_id, uses_level=False)
    return Model(denoiser=network, tokenizer=DNA, objective=MDLM(form="count"), length=LENGTH)


def test_conditionals_are_those_of_the_law() -> None:
    law = joint()
    model = one_that_knows(law)
    for text in ("ACG", "TTT", "GAC"):
        a, b, c = (BASES.index(base) for base in text)
        scores = score_bases(model, text, estimator="conditional")
        assert scores.p_L4 is not None
        want = torch.stack([law[:, b, c], law[a, :, c], law[a, b]])
        want = want / want.sum(dim=1, keepdim=True)
        torch.testing.assert_close(scores.p_L4, want, rtol=0, atol=1e-6)
        torch.testing.assert_close(scores.nats_L, -want[[0, 1, 2], [a, b, c]].log(), rtol=0, atol=1e-6)


def test_shares_of_the_bound_add_up_to_what_a_sequence_costs() -> None:
    """Of a network that knows the law the bound is -log p itself."""
    law = joint()
    model, total = one_that_knows(law), 0.0
    scores = score_bases(model, "GAC", estimator="bound", num_samples=512)
    assert scores.p_L4 is None
    assert scores.nats == pytest.approx(-math.log(float(law[2, 0, 1])), abs=0.05)
    rows = torch.tensor([[2, 0, 1]])
    total = model.objective.bound(model.denoiser, rows, num_samples=512).nats
    assert scores.nats == pytest.approx(total, rel=1e-9)  # the same draws, place by place


@pytest.mark.parametrize("network", [DiT(hidden=16, blocks=1, heads=2, causal=True), Mamba(hidden=16, blocks=1)])
def test_the_exact_sum_is_a_law_of_sequences(network: Denoiser) -> None:
    model = model_of(network, AR(), length=LENGTH)
    total = 0.0
    for bases in itertools.product(BASES, repeat=LENGTH):
        scores = score_bases(model, "".join(bases))
        assert scores.estimator == "exact"
        total += math.exp(-scores.nats)
    first = score_bases(model, "A").p_L4
    others = sum(  # sequences that begin with A, C, G or T and go on in letters alone are all but these
        float(score_bases(model, "".join(bases)).p_L4[-1].sum())
        * math.exp(-score_bases(model, "".join(bases[:-1])).nats)  # type: ignore[index]
        for bases in itertools.product(BASES, repeat=LENGTH)
        if bases[-1] == "A"
    )
    assert first is not None
    assert total == pytest.approx(others, rel=1e-6)
    rows = torch.tensor([DNA.encode("GAC")])
    assert score_bases(model, "GAC").nats == pytest.approx(model.objective.bound(model.denoiser, rows).nats, rel=1e-6)


def test_a_score_of_ratios_has_a_law_as_well() -> None:
    model = model_of(DiT(hidden=16, blocks=1, heads=2, conditioning="sigma"), SEDD())
    scores = score_bases(model, "ACGTA")
    assert scores.p_L4 is not None
    assert (scores.p_L4.sum(dim=1) <= 1 + 1e-6).all()
    torch.testing.assert_close(
        scores.nats_L.neg().exp(), scores.p_L4.gather(1, torch.tensor([[0, 1, 2, 3, 0]]).T)[:, 0]
    )


def test_what_a_model_has_not_is_refused() -> None:
    uniform = model_of(DiT(hidden=16, blocks=1, heads=2), UDLM())
    assert score_bases(uniform, "ACG", num_samples=2).estimator == "bound"
    with pytest.raises(UsageError, match="conditional is none of this model's: it has bound"):
        score_bases(uniform, "ACG", estimator="conditional")
    with pytest.raises(UsageError, match="exact is none of this model's: it has conditional and bound"):
        score_bases(masked(), "ACG", estimator="exact")
    with pytest.raises(UsageError, match="known: exact, conditional, bound"):
        score_bases(masked(), "ACG", estimator="likely")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="'R' at position 2 is no base"):
        score_bases(masked(), "ARG")


# --- windows and strands ----------------------------------------------------------------------------------------------


@given(length=st.integers(1, 60), size=st.integers(1, 20), both=st.booleans(), data=st.data())
def test_each_base_is_scored_once_with_what_it_can_see(length: int, size: int, both: bool, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, length - 1))
    last = data.draw(st.integers(first + 1, length))
    scored: list[int] = []
    for window in windows(length, size, first, last, both=both):
        assert 0 <= window.start <= window.low < window.high <= window.stop <= min(length, window.start + size)
        for at in range(window.low, window.high):
            scored.append(at)
            assert at - window.start >= min(at, size // 4 if both else size - max(1, size // 2))
            assert not both or window.stop - 1 - at >= min(length - 1 - at, size // 4 - 1)
    assert scored == list(range(first, last))


def test_a_long_sequence_is_read_in_windows() -> None:
    model, text = masked(), "ACGTTGCAACGTGGCA"
    scores = score_bases(model, text)
    torch.testing.assert_close(scores.nats_L[:6], score_bases(model, text[:8]).nats_L[:6])
    torch.testing.assert_close(scores.nats_L[6:10], score_bases(model, text[4:12]).nats_L[2:6])
    causal = model_of(DiT(hidden=16, blocks=1, heads=2, causal=True), AR())
    scores = score_bases(causal, text)
    torch.testing.assert_close(scores.nats_L[8:12], score_bases(causal, text[4:12]).nats_L[4:])


def test_parts_of_a_bound_see_what_stands_before_them_alone() -> None:
    """So they multiply to one law: the first part's shares do not depend on what follows it."""
    one, other = (score_bases(masked(), "ACGTTGCA" + rest, estimator="bound") for rest in ("ACGT", "GGAA"))
    torch.testing.assert_close(one.nats_L[:8], other.nats_L[:8], rtol=0, atol=0)
    torch.testing.assert_close(one.nats_L[:8], score_bases(masked(), "ACGTTGCA", estimator="bound").nats_L)


def test_what_stands_around_is_seen_and_not_scored() -> None:
    model = masked()
    whole = score_bases(model, "ACGTTGCA")
    part = score_bases(model, "GTT", before="AC", after="GCA")
    torch.testing.assert_close(part.nats_L, whole.nats_L[2:5])
    assert part.text == "GTT"
    assert not torch.allclose(part.nats_L, score_bases(model, "GTT").nats_L)


def test_unknown_bases_are_seen_and_not_scored() -> None:
    scores = score_bases(masked(), "acNgt")
    assert scores.nats_L.isnan().tolist() == [False, False, True, False, False]
    assert scores.p_L4 is not None
    assert scores.p_L4[2].isnan().all()
    assert scores.num == 4
    assert not torch.allclose(scores.nats_L[:2], score_bases(masked(), "acAgt").nats_L[:2])


@pytest.mark.parametrize("estimator", ["conditional", "bound"])
def test_both_strands_are_read_alike(estimator: str) -> None:
    how = {"estimator": estimator, "both_strands": True, "num_samples": 4}
    here, there = score_bases(masked(), "AACGNT", **how), score_bases(masked(), "ANCGTT", **how)  # type: ignore[arg-type]
    torch.testing.assert_close(here.nats_L, there.nats_L.flip(0), equal_nan=True)
    if here.p_L4 is not None and there.p_L4 is not None:
        torch.testing.assert_close(here.p_L4, there.p_L4.flip(0, 1), equal_nan=True)
    assert not torch.allclose(here.nats_L[:2], score_bases(masked(), "AACGNT").nats_L[:2])


@pytest.mark.parametrize("both_strands", [False, True])
@pytest.mark.parametrize("estimator", ["conditional", "bound"])
def test_progress_ends_when_all_bases_are_read(estimator: str, both_strands: bool) -> None:
    told: list[tuple[int, int]] = []
    how: dict[str, Any] = {"estimator": estimator, "both_strands": both_strands, "num_samples": 2}
    score_bases(masked(), "ACGTNACGTACGNT", before="GG", progress=lambda *now: told.append(now), **how)
    total = 12 * (1 + both_strands)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (total, total)


@pytest.mark.parametrize("estimator", ["conditional", "bound"])
def test_what_stands_around_is_read_along_either_strand(estimator: str) -> None:
    how: dict[str, Any] = {"estimator": estimator, "num_samples": 4}
    both = score_bases(masked(), "GTT", before="AC", after="GCA", both_strands=True, **how)
    here = score_bases(masked(), "GTT", before="AC", after="GCA", **how)
    there = score_bases(masked(), "AAC", before="TGC", after="GT", **how)
    torch.testing.assert_close(both.nats_L, (here.nats_L + there.nats_L.flip(0)) / 2)


@pytest.mark.parametrize("estimator", ["exact", "bound"])
def test_what_stands_after_is_not_read_by_what_multiplies_to_a_law(estimator: str) -> None:
    exact = estimator == "exact"
    model = model_of(DiT(hidden=16, blocks=1, heads=2, causal=True), AR()) if exact else masked()
    ones = [score_bases(model, "GTTC", after=after, num_samples=4, estimator=estimator) for after in ("", "ACGTTGCA")]  # type: ignore[arg-type]
    torch.testing.assert_close(ones[0].nats_L, ones[1].nats_L, rtol=0, atol=0)


@pytest.mark.parametrize("anchor", ["none", "both"])
def test_a_bases_law_does_not_know_the_base(anchor: str) -> None:
    """The mask is where the base is, whatever frames a row."""
    model = masked(anchor=anchor)
    for at in range(4):
        laws = []
        for base in BASES:
            p_L4 = score_bases(model, "ACGT"[:at] + base + "ACGT"[at + 1 :]).p_L4
            assert p_L4 is not None
            laws.append(p_L4[at])
        torch.testing.assert_close(torch.stack(laws), laws[0].expand(4, 4))


@pytest.mark.parametrize("estimator", ["conditional", "bound"])
def test_bases_are_scored_given_a_class(estimator: str) -> None:
    network = DiT(hidden=16, blocks=1, heads=2, classes=2)
    model = model_of(network, MDLM(form="count"), labels=("a", "b"))
    how: dict[str, Any] = {"estimator": estimator, "num_samples": 4}
    of_class = [score_bases(model, "GTTC", label=label, **how).nats_L for label in ("a", 0, "b", None)]
    torch.testing.assert_close(of_class[0], of_class[1], rtol=0, atol=0)
    assert not any(torch.allclose(of_class[i], of_class[j]) for i, j in ((0, 2), (0, 3), (2, 3)))


def test_an_equivariant_network_needs_no_second_strand() -> None:
    model = model_of(Caduceus(hidden=16, blocks=1, states=4, equivariance="ps"), MDLM(form="count"))
    here, there = score_bases(model, "AACGNT"), score_bases(model, "ANCGTT")
    torch.testing.assert_close(here.nats_L, there.nats_L.flip(0), equal_nan=True, rtol=1e-5, atol=1e-6)
    assert here.p_L4 is not None
    assert there.p_L4 is not None
    torch.testing.assert_close(here.p_L4, there.p_L4.flip(0, 1), equal_nan=True, rtol=1e-5, atol=1e-6)
    with pytest.raises(UsageError, match="reads both strands by itself"):
        score_bases(model, "ACG", both_strands=True)


def test_a_model_of_whole_texts_sees_that_they_end() -> None:
    """Rows of `pad` have an end after the text, those of `wrap` have none."""
    padded, wrapped = masked(packing="pad"), masked()
    padded.denoiser.load_state_dict(wrapped.denoiser.state_dict())
    assert not torch.allclose(score_bases(padded, "ACGT").nats_L, score_bases(wrapped, "ACGT").nats_L)


# --- regions ----------------------------------------------------------------------------------------------------------


def test_regions_are_read_as_browsers_write_them(folder: Path) -> None:
    path = str(folder / "genome.fa")
    asked = [parse_region(text) for text in ("chr2:9-10", "chr1:1-4", "chr1:4-6:-", "chr2", "chr1:1-20:+")]
    found = read_stretches(path, asked, flank=3)
    assert [(one.before, one.text, one.after) for one in found] == [
        ("NAA", "AA", ""),
        ("", "ACGT", "ACG"),
        ("NAC", "GTA", "CGT"),  # of ACG TAC GTN
        ("", "TTTTNNAAAA", ""),
        ("", "ACGTACGTNNNNNNGGGGTT", ""),
    ]
    assert [*found[2].positions()] == [6, 5, 4]
    assert [*found[0].positions()] == [9, 10]
    assert [one.name for one in found][2:4] == ["chr1:4-6:-", "chr2:1-10"]
    assert parse_region("HLA:01:5-6") == Interval("HLA:01", 4, 6, "HLA:01:5-6")


@pytest.mark.parametrize(
    ("region", "sentence"),
    [
        ("chr3:1-2", "genome.fa has no record 'chr3'; did you mean"),
        ("chr2:5-11", "chr2 has 10 bases, but 5 to 11 is asked for"),
        ("chr2:11-12", "chr2 has 10 bases"),
        ("chr2:0-3", "counted from 1"),
        ("chr2:4-3", "is empty"),
        ("", "is no region: write chr20"),
    ],
)
def test_a_region_that_is_none_is_told(folder: Path, region: str, sentence: str) -> None:
    with pytest.raises((UsageError, DataError), match=sentence):
        read_stretches(str(folder / "genome.fa"), [parse_region(region)])


def test_a_line_of_a_bed_file_that_does_not_fit_is_named(folder: Path) -> None:
    bed = folder / "beyond.bed"
    bed.write_text("chr2\t0\t3\nchr2\t4\t11\n")
    with pytest.raises(DataError, match=r"beyond\.bed, line 2: chr2 has 10 bases, but 5 to 11 is asked for"):
        read_stretches(str(folder / "genome.fa"), read_bed(str(bed)), bed=str(bed))
    bed.write_text("# a comment\nchrX\t0\t3\n")
    with pytest.raises(DataError, match=r"beyond\.bed, line 2: .*genome\.fa has no record 'chrX'"):
        read_stretches(str(folder / "genome.fa"), read_bed(str(bed)), bed=str(bed))
    bed.unlink()


# --- the command ------------------------------------------------------------------------------------------------------


def test_regions_become_a_table_and_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "some.bed").write_text("chr1\t2\t10\tname\t0\t-\n")
    words = ["score", str(folder / "model"), "--fasta", str(folder / "genome.fa"), "--region", "chr2:2-6"]
    words += ["--bed", str(folder / "some.bed"), "--csv", str(folder / "a.csv"), "--plot", str(folder / "a.svg")]
    assert cli.run(words) == 0
    said = capsys.readouterr()
    assert "3 bases, 2 not known  chr2:2-6" in said.out
    assert "no bound" in said.err
    lines = list(csv.DictReader((folder / "a.csv").read_text().splitlines()))
    assert [(line["record"], int(line["position"]), line["strand"], line["base"]) for line in lines] == [
        *(("chr2", 2 + i, "+", base) for i, base in enumerate("TTTNN")),
        *(("chr1", 10 - i, "-", base) for i, base in enumerate("NNACGTAC")),
    ]
    assert lines[3]["nats"] == lines[3]["p_A"] == ""
    first = score_bases(masked(), "TTTNN", before="T", after="AAAA").nats_L[0]
    assert float(lines[0]["nats"]) == pytest.approx(float(first), rel=1e-5)
    assert float(lines[0]["bits"]) == pytest.approx(float(first) / math.log(2), rel=1e-5)
    assert float(lines[0]["p_T"]) == pytest.approx(math.exp(-float(first)), rel=1e-5)
    words_of = " ".join(ElementTree.parse(folder / "a.svg").getroot().itertext())
    for word in ("chr2:2-6", "chr1:3-10:-", "bits per base", "position (base pairs)", "conditional", "other strand"):
        assert word in words_of


def test_a_region_sees_so_many_bases_around_it(folder: Path) -> None:
    words = ["score", str(folder / "model"), "--fasta", str(folder / "genome.fa"), "--region", "chr1:4-5"]
    for flank, before, after in ((None, "ACG", "CGTN"), ("0", "", ""), ("1", "G", "C")):
        more = [] if flank is None else ["--flank", flank]
        assert cli.run([*words, *more, "--csv", str(folder / "flank.csv")]) == 0
        nats = [float(line["nats"]) for line in csv.DictReader((folder / "flank.csv").read_text().splitlines())]
        want = score_bases(masked(), "TA", before=before, after=after).nats_L.tolist()
        assert nats == pytest.approx(want, rel=1e-5)


def test_sequences_of_the_command_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["score", str(folder / "model"), "ACGTAC", "ggNt", "--csv", "-", "--estimator", "bound"]) == 0
    said = capsys.readouterr()
    assert [line.split(",")[:4] for line in said.out.splitlines()[-4:]] == [
        ["2", str(i), "+", base] for i, base in enumerate("GGNT", start=1)
    ]
    assert said.out.splitlines()[-1].endswith(",,,,")
    assert cli.run(["score", str(folder / "model"), "NNN", "--estimator", "conditional", "--json"]) == 0
    [region] = json.loads(capsys.readouterr().out)["regions"]
    assert region["bits_per_base"] is None
    assert region["unknown"] == 3


def test_a_sequence_may_be_piped_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("ACGTN\n"))
    assert cli.run(["score", str(folder / "model"), "-", "A", "--csv", "-"]) == 0
    assert [line.split(",")[3] for line in capsys.readouterr().out.splitlines()[1:]] == [*"ACGTNA"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--fasta", "genome.fa"], "nothing to score: give --region"),
        (["--region", "chr1:1-2"], "--region is of a FASTA file: give --fasta"),
        (["ACG", "--fasta", "genome.fa", "--region", "chr1"], "brings its own sequences"),
        (["ACG", "--csv", "a.csv", "--prompt", "x"], "--prompt is of whole texts"),
        (["ACG", "--csv", "none/a.csv"], "there is no folder none"),
        (["ACG", "--plot", "a.svg", "--label", "x"], "it knows none"),
        (["ACG", "--json", "--csv", "-"], "both print"),
        (["--fasta", "genome.fa", "--region", "chr1", "--flank", "-1"], "--flank must be 0 or more"),
        (["--fasta", "genome.fa", *["--region", "chr1:1-2"] * 13, "--plot", "a.svg"], "a picture holds 12 regions"),
        (["", "--plot", "a.svg"], "an empty sequence"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    assert cli.run(["score", "model", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before


class Joined(Dna):
    """Reads CG as one token."""

    def encode(self, text: str) -> list[int]:
        return super().encode(text.replace("CG", "N"))


def test_a_model_of_other_tokens_is_refused() -> None:
    model = masked()
    model.tokenizer = Joined()
    assert score_bases(model, "GCTA").num == 4
    with pytest.raises(UsageError, match="need a token a base"):
        score_bases(model, "ACGT")


@pytest.mark.parametrize("step", [1, -1])
def test_positions_stand_below_their_bases(step: int) -> None:
    """Along the other strand they fall: of 60 bases from 60 down to 1, 10 stands below the 51st."""
    first = 1 if step > 0 else 60
    root = ElementTree.fromstring(draw([Panel("a", first, step, "ACGT" * 15, [1.0] * 60)], said="it"))
    texts = [
        (one.text, one.get("class"), float(one.get("x", "0"))) for one in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    letters = [x for _, kind, x in texts if kind == "letter"]
    assert len(letters) == 60
    for position in (10, 20, 50):
        [x] = [x for word, kind, x in texts if word == str(position) and kind == "note"]
        at = (position - first) * step
        assert abs(x - letters[at]) < abs(letters[1] - letters[0]) / 2


def test_a_long_region_is_drawn_in_means() -> None:
    picture = draw([Panel("a:1-1000", 1, 1, "A" * 1000, [1.0, 2.0] * 500)], said="it")
    assert picture.count('class="bar"') <= 430
    assert "means of 3 bases" in picture
    assert ">A<" not in picture
    assert draw([Panel("a:7-7", 7, 1, "N", [math.nan])], said="it").count('class="unknown"') == 1
