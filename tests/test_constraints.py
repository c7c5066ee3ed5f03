"""Constraints on texts: what is generated under one always obeys, whatever the model, the vocabulary and the order."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from constraint_pool import POOL, Entry
from tiny import TINY, MakeConfig
from unmask import constraints, samplers
from unmask.cli import run
from unmask.config import from_dict
from unmask.constraints import Constraint
from unmask.corpora.text import Text
from unmask.data.subwords import Subwords, from_bert_vocab, train_bpe
from unmask.data.tokenizers import Tokenizer, load_tokenizer
from unmask.errors import MissingExtraError, UsageError
from unmask.model import Model
from unmask.objectives.mdlm import MDLM
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample
from unmask.training.loop import train

LENGTH = 40
NUM = int(os.environ.get("UNMASK_DRAWS", "48"))  # of each of the pool's entries and each of three models: 10,000 in all
SAMPLERS: list[Sampler] = [
    samplers.Ancestral(steps=2),
    samplers.Ancestral(steps=4, temperature=0.7),
    samplers.Ancestral(steps=3, temperature=1.5, top_p=0.9),
    samplers.Ancestral(steps=1, top_k=3),
    samplers.Block(size=9, inner=samplers.Confidence(steps=2)),
]


def random_model(tokenizer: Tokenizer, seed: int = 0, length: int = LENGTH, **how: Any) -> Model:
    torch.manual_seed(seed)
    net = dataclasses.replace(TINY, dropout=0.0).build(num_ids=tokenizer.num_ids, mask_id=tokenizer.mask_id)
    torch.nn.init.normal_(net.output.weight, std=0.3)  # far from even, in a way that suits no pattern
    return Model(denoiser=net, tokenizer=tokenizer, objective=MDLM(), length=length, **how)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits, JSON and words in one."""
    path = tmp_path_factory.mktemp("bpe") / "text.txt"
    lines = [
        f'{{"a": {i * 37 % 1000}, "name": "the cat {i} ran", "on": true}} 20{i % 90 + 10}-0{i % 9 + 1}'
        for i in range(400)
    ]
    path.write_text("\n".join(lines) + "\n[1, 2, 3] [true, false] null moon rose été größer", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def bpe(text_file: Path) -> Subwords:
    """Byte-level pieces that cut across patterns."""
    return train_bpe(600, Text(path=str(text_file)))


@pytest.fixture(scope="module")
def random_models(bpe: Subwords) -> dict[str, Model]:
    return {"bytes": random_model(load_tokenizer("bytes")), "bpe": random_model(bpe, seed=1)}


@pytest.fixture(scope="module")
def taught(text_file: Path, tmp_path_factory: pytest.TempPathFactory, make_config: MakeConfig) -> Model:
    """A model that has strong opinions: trained on the text that the vocabulary was made of."""
    corpus = Text(path=str(text_file))
    config = make_config(
        tmp_path_factory.mktemp("taught"),
        tokenizer="bpe:600",
        steps=120,
        batch=16,
        data={"train": corpus, "valid": corpus, "length": LENGTH},
    )
    model = train(config)
    assert model.score(text_file.read_text("utf-8")[:400], num_samples=8).nats_per_token < 4  # of log 600 = 6.4
    return model


def test_the_pool_is_large_enough() -> None:
    assert len(POOL) >= 50
    assert len(POOL) * 3 * 48 >= 10_000


@pytest.mark.parametrize("which", ["bytes", "bpe", "taught"])
@pytest.mark.parametrize("entry", POOL, ids=lambda entry: entry.name)
def test_every_draw_obeys(entry: Entry, which: str, random_models: dict[str, Model], taught: Model) -> None:
    """By two models of random weights and a trained one."""
    model = taught if which == "taught" else random_models[which]
    sampler = SAMPLERS[POOL.index(entry) % len(SAMPLERS)]
    texts = model.generate(NUM, entry.length, sampler=sampler, constraint=entry.constraint, seed=3)
    assert len(texts) == NUM
    assert [text for text in texts if not entry.judge(text)] == []


# --- where it holds ---------------------------------------------------------------------------------------------------

NUMBER = constraints.Regex(pattern="[0-9]+")
ORDERS: list[Sampler] = [samplers.Ancestral(steps=None), samplers.LeftToRight(), samplers.Ancestral(temperature=0)]


@pytest.mark.parametrize("sampler", ORDERS, ids=repr)
@pytest.mark.parametrize("vocabulary", ["bytes", "bpe"])
def test_prompts_gaps_and_suffixes(sampler: Sampler, vocabulary: str, random_models: dict[str, Model]) -> None:
    model = random_models[vocabulary]
    for text in model.generate(3, 12, ["x = ", "the cat"], constraint=NUMBER, sampler=sampler):
        assert re.fullmatch(r"(x = |the cat)[0-9]+", text), text
    for text in model.generate(3, 14, "f(", ")", constraint=NUMBER, sampler=sampler):
        assert re.fullmatch(r"f\([0-9]+\)", text), text
    filled = model.fill(["a[MASK:3]b", "x = [MASK:4], y = [MASK]!", "[MASK:2]"], constraint=NUMBER, sampler=sampler)
    for text, pattern in zip(filled, [r"a[0-9]+b", r"x = [0-9]+, y = [0-9]+!", r"[0-9]+"], strict=True):
        assert re.fullmatch(pattern, text), text
    whole = constraints.Regex(pattern=r"[a-z]+: [0-9]{2,8}(, [0-9]{2,8})*;", over="text")
    for text in model.fill(["id[MASK:9];", "[MASK:3]: 12[MASK:3]"], constraint=whole, sampler=sampler):
        assert re.fullmatch(whole.pattern, text), text
    for text in model.generate(4, 20, "total: 17", constraint=whole, sampler=sampler):
        assert re.fullmatch(whole.pattern, text), text
        assert text.startswith("total: 17")


def test_a_gap_fills_its_masks_exactly_and_a_generated_text_may_end_early(random_models: dict[str, Model]) -> None:
    model = random_models["bytes"]
    assert {len(text) for text in model.fill(["[MASK:7]"] * 5, constraint=NUMBER)} == {7}
    texts = model.generate(50, 6, constraint=constraints.Choices(options=("yes", "no", "perhaps")))
    assert set(texts) == {"yes", "no"}  # the third has seven letters
    assert model.generate(1, 3, constraint=constraints.Choices(options=("yes",))) == ["yes"]


def test_several_constraints_hold_together(random_models: dict[str, Model]) -> None:
    for model in random_models.values():
        texts = model.generate(
            20, 24,
            constraint=[
                constraints.Regex(pattern="[a-z ]+"),
                constraints.Contains(phrases=("cat", "moon")),
                constraints.Words(forbid=("cat", "a")),
                constraints.Length(least=10, most=14),
            ],
        )  # fmt: skip
        for text in texts:
            assert re.fullmatch("[a-z ]+", text)
            assert "cat" in text
            assert "moon" in text
            assert not {"cat", "a"} & set(text.split())


def test_options_may_be_lists_and_an_automaton_is_made_once(random_models: dict[str, Model]) -> None:
    model, made = random_models["bytes"], []

    class Counted(constraints.Choices):  # type: ignore[misc]
        def automaton(self, tokenizer: Tokenizer, *, may_end: bool = True) -> Any:
            made.append(may_end)
            return super().automaton(tokenizer, may_end=may_end)

    for _ in range(3):
        assert model.generate(1, 4, constraint=Counted(options=("ab",))) == ["ab"]
    assert model.fill("[MASK:2]", constraint=Counted(options=("ab",))) == ["ab"]
    assert made == [True, False]
    assert model.generate(1, 4, constraint=constraints.Choices(options=["ab"])) == ["ab"]


def test_a_number_of_tokens(random_models: dict[str, Model]) -> None:
    model = random_models["bytes"]
    ascii_only = constraints.Regex(pattern=r"[\x20-\x7e]*")
    for least, most in ((5, 5), (0, 3), (12, None)):
        length = constraints.Length(least=least, most=most)
        lengths = {len(text) for text in model.generate(30, 16, constraint=[ascii_only, length])}
        assert min(lengths) >= least
        assert max(lengths) <= (16 if most is None else most)
    prompt = model.generate(5, 16, "abc", constraint=[
        dataclasses.replace(ascii_only, over="text"), constraints.Length(least=7, most=7, over="text")
    ])  # fmt: skip
    assert {len(text) for text in prompt} == {7}


def test_a_row_does_not_depend_on_its_neighbours(random_models: dict[str, Model]) -> None:
    model = random_models["bpe"]
    sampler = samplers.Ancestral(steps=5)
    together = model.generate(6, 20, ["", "a", "the cat"], constraint=NUMBER, sampler=sampler, seed=8)
    assert together[:2] == model.generate(2, 20, constraint=NUMBER, sampler=sampler, seed=8)
    assert len(set(together)) > 12


def test_what_follows_the_end_is_free_and_the_same_text_is_shown(random_models: dict[str, Model]) -> None:
    model = random_models["bytes"]
    eot = model.tokenizer.eot_id
    rows: list[list[int]] = []
    texts = model.generate(
        40, 12, constraint=constraints.Choices(options=("ab",)), sampler=samplers.Ancestral(steps=1),
        watch=lambda step: rows.extend(step.tokens_BL.tolist()),
    )  # fmt: skip
    assert set(texts) == {"ab"}
    assert {tuple(row[:3]) for row in rows} == {(97, 98, eot)}
    assert len({tuple(row[3:]) for row in rows}) > 30


# --- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> Subwords:
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,!?'"]
    words = ["the", "cat", "dog", "moon", "##s", "##ing", "don", "'t", *(f"##{c}" for c in letters)]
    path = tmp_path_factory.mktemp("wordpiece") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *words]), encoding="utf-8")
    return from_bert_vocab(path)


@pytest.fixture(scope="module")
def sentencepiece() -> Subwords:
    """Unigram with ▁ for a leading space, as SentencePiece models have it."""
    pieces = ["<unk>", "▁", "▁the", "▁cat", "the", "s", "é", *"abcdefghijklmnopqrtuvwxyz0123456789.,"]
    inner = tokenizers.Tokenizer(models.Unigram([(piece, -1.0 - i / 9) for i, piece in enumerate(pieces)], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return Subwords(inner)


@pytest.mark.parametrize("name", ["bytes", "chars", "bpe", "wordpiece", "sentencepiece"])
def test_spellings_join_to_what_decode_gives(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(name) if name in ("bytes", "chars") else request.getfixturevalue(name)
    first, inside = tokenizer.spellings()
    assert len(first) == len(inside) == tokenizer.num_ids
    never = {*tokenizer.never_ids(), tokenizer.mask_id, tokenizer.eot_id}
    usable = [id for id in range(tokenizer.num_ids) if id not in never and inside[id] is not None]
    starts = [id for id in usable if first[id] is not None]
    g = torch.Generator().manual_seed(0)
    for _ in range(300):
        ids = [starts[int(torch.randint(len(starts), (1,), generator=g))]]
        ids += [usable[i] for i in torch.randint(len(usable), (6,), generator=g).tolist()]
        spelled = b"".join([first[ids[0]] or b"", *(inside[id] or b"" for id in ids[1:])])
        assert spelled.decode("utf-8", errors="replace") == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["chars", "wordpiece", "sentencepiece"])
def test_other_vocabularies_obey(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = load_tokenizer(name) if name == "chars" else request.getfixturevalue(name)
    for how in ({}, {"packing": "sentence"}, {"packing": "pad", "anchor": "both"}):
        model = random_model(tokenizer, **how)
        for pattern in (r"the [a-z]+ (cat|moon)s?", r"[a-f]{2,9}", r"(the cat )*the cat"):
            texts = model.generate(20, 20, constraint=constraints.Regex(pattern=pattern))
            assert all(re.fullmatch(pattern, text) for text in texts), texts
        whole = constraints.Regex(pattern="the [a-z ]*cat [a-z ]*", over="text")
        assert all(re.fullmatch(whole.pattern, t) for t in model.generate(9, 20, "the", constraint=whole))
        filled = model.fill("the cat[MASK:3]", constraint=constraints.Regex(pattern="[a-z]*"))[0]
        assert re.fullmatch("the cat ?[a-z]+", filled)  # the vocabulary may join what follows with a space


def test_a_vocabulary_that_tells_no_spellings_is_refused(random_models: dict[str, Model]) -> None:
    class Secret(type(load_tokenizer("bytes"))):  # type: ignore[misc]
        def spellings(self) -> Any:
            return Tokenizer.spellings(self)

    with pytest.raises(UsageError, match="the tokenizer Secret does not tell how its ids are spelled"):
        NUMBER.automaton(Secret())


# --- refused ----------------------------------------------------------------------------------------------------------

DATE = constraints.Regex(pattern=r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (constraints.Regex(pattern="("), {}, r"'\(' is no regular expression: missing \)"),
    (constraints.Regex(pattern="a(?=b)b"), {}, "has look-around"),
    (constraints.Regex(pattern=r"(a)\1"), {}, "back references"),
    (constraints.Regex(pattern="[a&&b]{99999999}"), {}, "asks for more than 20000 characters"),
    (constraints.Regex(pattern="a[^\x00-\U0010ffff]"), {}, "matches no text at all"),
    (constraints.Regex(pattern="(a(.b){300}c){300}"), {}, "asks for more than 20000 characters"),
    (constraints.Regex(pattern="(.a){200}.{300}"), {}, "states, more than 4000"),
    (constraints.Regex(pattern=".{5000}"), {}, "has too many states"),
    (DATE, {"length": 9}, "a gap of 9 tokens: it needs at least 10"),
    (DATE, {"length": 9, "num": 2}, r"a gap of 9 tokens \(row 0\): it needs at least 10"),
    (DATE, {"length": 20, "suffix": "!"}, "a gap of 19 tokens: nothing of just that length obeys it"),
    (dataclasses.replace(DATE, over="text"), {"prompt": "19x"}, "a text of 40 tokens with what is fixed in it"),
    ([], {}, "no constraint in the list"),
    ([DATE, NUMBER], {}, "exclude each other"),
    (
        [NUMBER, constraints.Regex(pattern="x[0-9]*", over="text")],
        {"length": 3},
        "a text of 3 tokens with what is fixed",
    ),
    (NUMBER, {"sampler": samplers.Block(inner=samplers.Refine())}, "the sampler Block cannot hold a constraint"),
    (NUMBER, {"sampler": samplers.Refine()}, "the sampler Refine cannot hold a constraint"),
    (NUMBER, {"sampler": samplers.SemiAR(window=8)}, "held within one window"),
    (NUMBER, {"length": 99}, "held within one window"),
    (constraints.Contains(phrases=tuple(f"phrase {i}" for i in range(14))), {}, "more than 4000 states"),
    (constraints.JsonSchema(schema="{"), {}, "the schema is not valid JSON"),
    (constraints.JsonSchema(schema="[]"), {}, "expected a JSON object"),
]


@pytest.mark.parametrize(("constraint", "options", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_cannot_be_is_refused_in_one_line_before_the_first_call(
    constraint: Any, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(load_tokenizer("bytes"))
    monkeypatch.setattr(model.denoiser, "trunk", None)  # a call would be an error of another kind
    with pytest.raises(UsageError, match=message) as caught:
        model.generate(constraint=constraint, **options)
    assert "\n" not in str(caught.value)


SCHEMAS_REFUSED = [
    ({"type": "integer", "minimum": 3, "maximum": 2}, "no integer meets minimum and maximum"),
    ({"type": "number", "multipleOf": 2}, "multipleOf of number cannot be held"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "uniqueItems of array is held for an enum"),
    ({"type": "array", "items": True}, r"schema\.items: expected a JSON object"),
    ({"allOf": [{"type": "integer"}]}, "needs a type"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use anyOf"),
    ({"type": "strin"}, "did you mean 'string'"),
    ({"type": [{}]}, "needs a type"),
    ({"type": "object", "required": ["a"]}, "'a' is required and has no schema"),
    ({"type": "object", "properties": []}, "expected an object of schemas"),
    ({"type": "object", "properties": {"a": {"type": "string", "format": "email"}}}, r"schema\.a: the format 'email'"),
    ({"type": "string", "pattern": ".*"}, "may match quotes"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "cannot be held together"),
    ({"$ref": "https://example.org/x.json"}, "leads out of the schema"),
    ({"$ref": "#/$defs/nowhere"}, "the schema cannot be held"),
    ({"const": 1, "minimum": 2}, "const beside minimum"),
    ({"enum": ["a"], "type": "integer"}, "is not of its type"),
    ({"enum": []}, "at least one value"),
    ({"anyOf": []}, "at least one schema"),
]


@pytest.mark.parametrize(("schema", "message"), SCHEMAS_REFUSED, ids=[message for _, message in SCHEMAS_REFUSED])
def test_what_a_schema_asks_and_we_cannot_hold_is_refused_by_name(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        constraints.JsonSchema.of(schema).automaton(load_tokenizer("bytes"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: constraints.Choices(options=()), "at least one option"),
        (lambda: constraints.Choices(options=("a", "")), "no empty one"),
        (lambda: constraints.Contains(phrases=("",)), "no empty one"),
        (lambda: constraints.Words(), "words to allow or words to forbid"),
        (lambda: constraints.Words(forbid=("two words",)), "'two words' is not one word"),
        (lambda: constraints.Length(least=3, most=2), "0 <= least <= most"),
        (lambda: constraints.Length(least=-1), "0 <= least <= most"),
        (lambda: constraints.Regex(pattern="a", over="line"), "over is 'line'"),
    ],
)
def test_options_that_mean_nothing(make: Callable[[], Constraint], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()


def test_a_text_where_a_list_of_texts_is_asked_for_is_a_list_of_one() -> None:
    for name, field in (("choices", "options"), ("contains", "phrases"), ("words", "allow"), ("words", "forbid")):
        kind = constraints.room.get(name)
        one = kind(**{field: ("the",)})
        assert kind(**{field: "the"}) == kind(**{field: ["the"]}) == one
        assert hash(kind(**{field: ["the"]})) == hash(one)
        assert from_dict(Constraint, {"name": name, field: "the"}) == one
        for wrong in (3, ["the", 3], [["the"]]):
            with pytest.raises(UsageError, match=f"{field} must be a text or a list of texts, got"):
                kind(**{field: wrong})


def test_autoregression_is_refused(ar_model: Model) -> None:
    with pytest.raises(UsageError, match="constraints need a diffusion model"):
        ar_model.generate(1, 8, constraint=NUMBER)


def test_another_vocabulary_is_refused(random_models: dict[str, Model]) -> None:
    model = random_models["bytes"]
    canvas = Canvas.blank(num=1, length=4, mask_id=model.tokenizer.mask_id)
    wrong = dataclasses.replace(canvas, constraint=constraints.Length(most=3).automaton(load_tokenizer("chars")))
    with pytest.raises(UsageError, match="made for another vocabulary"):
        sample(model.denoiser, wrong, samplers.Ancestral())


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'unmask\[constrain\]'"):
        constraints.JsonSchema.of({"const": "none has asked for this"}).automaton(load_tokenizer("bytes"))
    for needs_none in (constraints.Choices(options=("no", "need")), constraints.Regex(pattern="no|need|either")):
        assert needs_none.automaton(load_tokenizer("bytes")).accepts(b"no")


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def texts(*words: str) -> list[str]:
        assert run([*words, "--json", "--device", "cpu"]) == 0
        found: list[str] = json.loads(capsys.readouterr().out)["texts"]
        return found

    folder = str(trained.folder)
    generate = ("generate", folder, "--length", "20", "--num", "3", "--steps", "4")
    assert all(re.fullmatch("x = [0-9]+", t) for t in texts(*generate, "--prompt", "x = ", "--regex", "[0-9]+"))
    (tmp_path / "schema.json").write_text('{"type": "array", "items": {"type": "integer"}}', encoding="utf-8")
    assert all(
        isinstance(json.loads(t), list) for t in texts(*generate, "--json-schema", str(tmp_path / "schema.json"))
    )
    assert set(texts("fill", folder, "the [MASK:3]", "--choices", "cat,dog,horse")) <= {"the cat", "the dog"}
    both = texts(
        *generate, "--must-contain", "cat", "--must-contain", "mat", "--forbid-words", "the", "--regex", "[a-z ]*"
    )
    assert all("cat" in t and "mat" in t and "the" not in t.split() for t in both)
    words = texts(*generate, "--allow-words", "cat,mat", "--min-tokens", "7", "--max-tokens", "7")
    assert all(len(t.encode()) == 7 and set(re.findall(r"\w+", t)) <= {"cat", "mat"} for t in words)
    whole = texts(*generate, "--prompt", "the", "--regex", "the [a-z]+", "--constrain", "text")
    assert all(re.fullmatch("the [a-z]+", t) for t in whole)
    plugin = texts(*generate, "--constraint", '{"name": "words", "allow": ["Mat"], "ignore_case": true}')
    assert all(set(re.findall(r"\w+", t.lower())) <= {"mat"} for t in plugin)
    assert texts(*generate, "--constraint", '{"name": "choices", "options": "mat"}') == ["mat"] * 3
    for flags, message in (
        (("--constraint", "choises"), "did you mean 'choices'?"),
        (("--constraint", "{"), "--constraint is not valid JSON"),
        (("--constraint", '{"name": "choices", "option": ["a"]}'), "did you mean 'options'?"),
        (("--regex", "("), "no regular expression"),
        (("--json-schema", "nowhere.json"), "cannot read the schema nowhere.json"),
        (("--regex", "[0-9]{99}"), "it needs at least 99"),
        (("--min-tokens", "5", "--max-tokens", "4"), "0 <= least <= most"),
        (("--constrain", "line"), "'line' is not a choice"),
    ):
        assert run([*generate, *flags, "--device", "cpu"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
