"""Conjoined classifiers: a sequence and its reverse complement have the same answer, whatever the network."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from made_tasks import CAUSAL, QUICK, small_model, write_tsv
from tiny import TINY
from unmask.data.complement import complement_of, spells_dna
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers import Denoiser
from unmask.denoisers.caduceus import Caduceus
from unmask.denoisers.hyena import Hyena
from unmask.denoisers.mamba import Mamba
from unmask.errors import DataError, ModelFolderError, UsageError
from unmask.finetuning.classifier import Classifier, load_classifier
from unmask.finetuning.config import FinetuneConfig, TaskData
from unmask.finetuning.examples import Example
from unmask.finetuning.rows import make_rows
from unmask.finetuning.run import conjoins, finetune
from unmask.finetuning.seed_run import SeedRun, Watch, Work
from unmask.heads import Head
from unmask.heads.pooled import Pooled
from unmask.heads.task import Task, task_outputs
from unmask.model import Model
from unmask.pretrained.letters import tokenizer_of

DNA = load_tokenizer("dna")
OTHER = complement_of(DNA)
CONJOINED = Task(labels=("no", "maybe", "yes"), length=32, complement=OTHER)
SMALL: dict[str, Any] = {"hidden": 16, "blocks": 1, "states": 4}
NETWORKS: dict[str, Denoiser] = {
    "ps": Caduceus(**SMALL, equivariance="ps", complement=OTHER),
    "ph": Caduceus(**SMALL, equivariance="ph", complement=OTHER),
    "caduceus": Caduceus(**SMALL),
    "mamba": Mamba(**SMALL),
    "hyena": Hyena(hidden=16, blocks=1, length=32, filter_width=16),
    "dit": TINY,
    "causal dit": CAUSAL,
}
TEXTS = ["ACGTTGCANNA", "AAC", "G", "TTGACCGATAGGCTAAACCGTTTACGACTTCA", "ACGTACGTTTACAGATACCAGATTACAGGGACATACA"]


def reverse_complement(text: str) -> str:
    return text.translate(str.maketrans("ACGT", "TGCA"))[::-1]


def classifier(name: str, task: Task = CONJOINED, **how: Any) -> Classifier:
    """Of random weights, the head's output among them, so that answers differ."""
    model = small_model(NETWORKS[name], tokenizer=DNA, **how)
    torch.manual_seed(1)
    task.attach(model.denoiser)
    with torch.no_grad():
        for p in model.denoiser.parameters():
            p.add_(0.3 * torch.randn_like(p))
    model.denoiser.eval()
    return Classifier(model, task)


def logits(one: Classifier, texts: list[str]) -> Tensor:
    """Centred log-probabilities: logits up to what no answer depends on."""
    found = [list(answer.probabilities.values()) for answer in one.classify(texts)]
    return torch.tensor(found, dtype=torch.float64).log()


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("pool", ["auto", "mean", "last"])
def test_both_strands_have_one_answer(name: str, pool: Any) -> None:
    """Also where a sequence is longer than the window, and beside others of other lengths."""
    one = classifier(name, dataclasses.replace(CONJOINED, head=Pooled(pool=pool)))
    here, there = (logits(one, texts) for texts in (TEXTS, [reverse_complement(text) for text in TEXTS]))
    torch.testing.assert_close(here, there, atol=1e-6, rtol=0)
    assert float((here[0] - here[3]).abs().max()) > 1e-3  # the answers are not all the same


@pytest.mark.parametrize("name", NETWORKS)
def test_without_it_they_have_not(name: str) -> None:
    one = classifier(name, dataclasses.replace(CONJOINED, complement=()))
    here, there = (logits(one, texts) for texts in (TEXTS, [reverse_complement(text) for text in TEXTS]))
    assert float((here - there).abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["caduceus", "mamba", "dit"])
def test_the_answer_is_the_mean_of_two_rows(name: str) -> None:
    one = classifier(name)
    apart = []
    for text in (TEXTS[0], reverse_complement(TEXTS[0])):
        rows = make_rows([Example(text, None, None, "")], one.task, one.model).batch([0])
        with torch.no_grad():
            apart.append(task_outputs(one.task, one.model.denoiser, *rows))
    want = torch.log_softmax(sum(apart)[0] / 2, dim=-1)
    torch.testing.assert_close(logits(one, TEXTS[:1])[0].float(), want, atol=1e-5, rtol=0)


def test_the_ph_networks_halves_are_the_plain_networks_two_rows() -> None:
    """Both strands' vectors beside each other say what the same weights say of two sequences."""
    ph, plain = classifier("ph"), classifier("caduceus")
    plain.model.denoiser.load_state_dict(ph.model.denoiser.state_dict())

    def answers(one: Classifier, text: str) -> Tensor:
        ids_BL = torch.tensor([DNA.encode(text)])
        all_BL = torch.ones_like(ids_BL, dtype=torch.bool)
        with torch.no_grad():
            return task_outputs(one.task, one.model.denoiser, ids_BL, all_BL, all_BL, ~all_BL)

    text = TEXTS[3][:20]
    both = (answers(plain, text) + answers(plain, reverse_complement(text))) / 2
    torch.testing.assert_close(answers(ph, text), both, atol=1e-5, rtol=1e-4)
    ph.model.denoiser.train()
    ph.model.denoiser.task.eval()  # type: ignore[union-attr]
    torch.testing.assert_close(answers(ph, text), answers(plain, text), atol=1e-5, rtol=1e-4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Third(Head):
    """Reads the third token alone: an order of reading shows."""

    def wanted(self, valid_BL: Tensor, text_BL: Tensor, *, causal: bool) -> Tensor:
        return text_BL & (text_BL.cumsum(dim=1) == 3)

    def build(self, *, width: int, outputs: int, causal: bool) -> torch.nn.Module:
        class Module(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.output = torch.nn.Linear(width, outputs)

            def forward(self, h_BLD: Tensor, wanted_BL: Tensor) -> Tensor:
                assert not bool(h_BLD[~wanted_BL].any())
                out_BK: Tensor = self.output(h_BLD.sum(dim=1))
                return out_BK

        return Module()


@pytest.mark.parametrize("name", ["ps", "ph", "dit"])
def test_a_head_that_knows_an_order_reads_each_strand_in_its_own(name: str) -> None:
    one = classifier(name, dataclasses.replace(CONJOINED, head=Third()))
    texts = [text for text in TEXTS if len(text) > 4]
    here, there = (logits(one, some) for some in (texts, [reverse_complement(text) for text in texts]))
    torch.testing.assert_close(here, there, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["ps", "ph", "dit", "mamba"])
@pytest.mark.parametrize("broken", ["the places", "the complement"])
def test_what_is_broken_is_seen(name: str, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The equality is no accident of these weights: a wrong reversal or a wrong complement ends it."""
    one = classifier(name, dataclasses.replace(CONJOINED, head=Third()) if broken == "the places" else CONJOINED)
    if broken == "the places":
        monkeypatch.setattr("unmask.heads.task.reversed_places", lambda z, valid: torch.arange(z.shape[1]).expand_as(z))
        monkeypatch.setattr("unmask.finetuning.rows.reversed", list, raising=False)
    else:
        same = tuple(range(DNA.num_ids))
        one.task = dataclasses.replace(one.task, complement=same)
        one.model.denoiser.complement_I = torch.tensor(same)  # type: ignore[assignment]
    texts = [text for text in TEXTS if len(text) > 4]
    here, there = (logits(one, some) for some in (texts, [reverse_complement(text) for text in texts]))
    assert float((here - there).abs().max()) > 1e-4


# --- rows and training ------------------------------------------------------------------------------------------------


def test_rows_of_both_strands() -> None:
    one = classifier("dit", anchor="both", packing="pad")
    rows = make_rows([Example("AACGN", None, None, "")], one.task, one.model)
    eot = DNA.eot_id
    assert rows.rows == [[eot, 0, 0, 1, 2, 4, eot, eot]]
    assert rows.other_strand(0) == [eot, 4, 1, 2, 3, 3, eot, eot]
    both = rows.batch([0, 0], other=[True, False]).ids_BL.tolist()
    assert both == [rows.other_strand(0), rows.rows[0]]
    ps = classifier("ps", anchor="both", packing="pad")
    alone = make_rows([Example("AACGN", None, None, "")], ps.task, ps.model)
    assert alone.rows == [[0, 0, 1, 2, 4]]  # a token at one end would stand at another end of the other strand
    assert alone.other_strand(0) == [4, 1, 2, 3, 3]
    long = make_rows([Example("A" * 10 + "C" * 32 + "T" * 11, None, None, "")], ps.task, ps.model)
    assert long.rows[0] == [1] * 31
    assert long.cut == [22]
    with pytest.raises(DataError, match=r"a.tsv, line 2 has no bases"):
        make_rows([Example("", None, None, "a.tsv, line 2")], ps.task, ps.model)
    with pytest.raises(DataError, match=r"a.tsv, line 3: the tokenizer dna knows only A C G T N, the text has 'x'"):
        make_rows([Example("AC", None, None, ""), Example("ACx", None, None, "a.tsv, line 3")], ps.task, ps.model)


def motifs(count: int) -> list[tuple[str, str]]:
    """Random sequences; the class says whether GATTACA stands in it, on one of its strands."""
    draw = np.random.default_rng(0)
    rows = []
    for i in range(count):
        text = "".join(draw.choice(list("AC"), size=int(draw.integers(12, 20))))
        if i % 2:
            at = int(draw.integers(len(text) - 7))
            text = text[:at] + ("GATTACA" if i % 4 == 1 else "TGTAATC") + text[at + 7 :]
        rows.append((text, "yes" if i % 2 else "no"))
    return rows


def config(folder: Path, **options: Any) -> FinetuneConfig:
    path = write_tsv(folder / "motifs.tsv", [("text", "label"), *motifs(96)])
    how: dict[str, Any] = {"out": str(folder / "out"), "optim": QUICK, "batch": 16, "epochs": 1, "seeds": 1}
    return FinetuneConfig(data=TaskData(train=path, valid=path), **how | options)


@pytest.mark.parametrize("name", ["ps", "ph", "dit"])
def test_it_is_the_default_of_dna_and_kept_with_the_classifier(name: str, tmp_path: Path) -> None:
    model: Model = small_model(NETWORKS[name], tokenizer=DNA)
    done = finetune(model, config(tmp_path, epochs=4), device="cpu")
    loaded = load_classifier(done.folder, device="cpu")
    assert loaded.task.complement == OTHER
    texts = [text for text, _ in motifs(8)]
    here, there = (logits(loaded, some) for some in (texts, [reverse_complement(text) for text in texts]))
    torch.testing.assert_close(here, there, atol=1e-6, rtol=0)
    assert done.report["results"]["model"]["valid"]["accuracy"]["mean"] > 0.6
    off = finetune(model, config(tmp_path, conjoin=False, out=str(tmp_path / "off")), device="cpu")
    assert load_classifier(off.folder, device="cpu").task.complement == ()


def test_who_is_conjoined(tmp_path: Path) -> None:
    assert [spells_dna(load_tokenizer(name)) for name in ("dna", "bytes", "chars")] == [True, False, False]
    assert spells_dna(tokenizer_of(16))  # the published models' letters, with seven special tokens
    dna, texts = small_model(TINY, tokenizer=DNA), small_model()
    plain, pairs = config(tmp_path), config(tmp_path)
    pairs = dataclasses.replace(pairs, data=dataclasses.replace(pairs.data, pair="second"))
    assert [conjoins(dna, plain), conjoins(texts, plain), conjoins(dna, pairs)] == [True, False, False]
    assert conjoins(texts, dataclasses.replace(plain, conjoin=True))
    with pytest.raises(UsageError, match="answers to pairs cannot be conjoined"):
        Task(labels=("a", "b"), length=8, pairs=True, complement=OTHER)


@contextmanager
def changed(folder: Path, complement: list[int]) -> Iterator[None]:
    import json

    path = folder / "config.json"
    before = path.read_text()
    config = json.loads(before)
    config["task"]["complement"] = complement
    path.write_text(json.dumps(config))
    yield
    path.write_text(before)


def test_a_complement_that_lies_is_refused(tmp_path: Path) -> None:
    classifier("dit").save(tmp_path / "model")
    assert load_classifier(tmp_path / "model", device="cpu").task.conjoined
    for complement, said in (
        ([1, 0], "complement has 2 ids, the vocabulary 7"),
        ([1, 2, 0, 3, 4, 5, 6], "in pairs"),
        ([6, 1, 2, 3, 4, 5, 0], "the mask, id 6"),
    ):
        with changed(tmp_path / "model", complement), pytest.raises(ModelFolderError, match=said):
            load_classifier(tmp_path / "model", device="cpu")


@pytest.mark.parametrize(("name", "augmented"), [("ps", False), ("ph", True), ("dit", True), ("mamba", True)])
def test_training_reads_either_strand(name: str, augmented: bool, tmp_path: Path) -> None:
    """Each example on one strand in one epoch and on the other in the next; a ps network needs none of it."""
    model = small_model(NETWORKS[name], tokenizer=DNA)
    from unmask.finetuning.run import task_of
    from unmask.finetuning.splits import make_splits

    options = config(tmp_path)
    splits = make_splits(options)
    task = task_of(model, options, splits)
    rows = {part: make_rows(split.examples, task, model) for part, split in {"train": splits.train}.items()}
    run = SeedRun(Work(model, task, options, splits, rows, Watch(), lambda: False), "model", 3)
    steps = run.work.steps_an_epoch
    indices = np.arange(len(splits.train))
    first, second = (run._other_strand(step, indices) for step in (0, steps))
    if not augmented:
        assert first is None
        return
    assert first is not None
    assert second is not None
    assert [not one for one in first] == second
    assert 0.3 < sum(first) / len(first) < 0.7
