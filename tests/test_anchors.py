"""Anchors: fixed tokens that frame a row's text. They give an all-masked canvas positions, and are nobody's text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import unmask
from tiny import MakeConfig
from unmask import constraints
from unmask.config import RECIPE_FILE, DataConfig, load_config
from unmask.corpora import Document
from unmask.data.batch import batch_of
from unmask.data.packing import Anchor, Policy, pack_texts
from unmask.data.tokenizers import Tokenizer, load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.distributed.world import World
from unmask.errors import ConfigError, DataError, UsageError
from unmask.evaluation.evaluate import evaluate_rows
from unmask.model import Model, load
from unmask.objectives import Objective
from unmask.objectives.ar import AR
from unmask.objectives.d3pm import D3PM
from unmask.objectives.mdlm import MDLM
from unmask.processes.absorbing import Absorbing
from unmask.samplers.confidence import Confidence
from unmask.samplers.remdm import ReMDM
from unmask.training.checkpoint.resume import check_same_run, find_checkpoint

BYTES = load_tokenizer("bytes")
A = BYTES.eot_id  # bytes have no begin token, so end-of-text stands there


@pytest.fixture
def wordpiece(tmp_path: Path) -> Tokenizer:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    return load_tokenizer(str(tmp_path))


def random_model(anchor: Anchor = "both", *, packing: Policy = "pad", seed: int = 0, **net: Any) -> Model:
    torch.manual_seed(seed)
    network = DiT(hidden=32, blocks=1, heads=2, dropout=0, **net).build(num_ids=258, mask_id=257)
    with torch.no_grad():
        for p in network.parameters():
            p.normal_(std=0.3)
        network.output.bias[:32] = network.output.bias[127:] = -9.0
    objective: Objective = AR() if net.get("causal") else MDLM(form="count")
    how: dict[str, Any] = {"packing": packing, "anchor": anchor, "typical_length": 20}
    return Model(denoiser=network, tokenizer=BYTES, objective=objective, length=32, **how)


def rows_seen(model: Model, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Every row that the network is shown, without its padding."""
    found: list[list[int]] = []
    for name in ("trunk", "trunk_at", "trunk_ragged"):
        plain: Callable[..., Tensor] = getattr(model.denoiser, name)

        def spy(z: Tensor, *args: Any, plain: Callable[..., Tensor] = plain, name: str = name, **given: Any) -> Tensor:
            if name == "trunk":
                valid = given.get("valid_BL")
                ends = [z.shape[1]] * len(z) if valid is None else valid.sum(dim=1).tolist()
                found.extend(row[:end] for row, end in zip(z.tolist(), ends, strict=True))
            return plain(z, *args, **given)

        monkeypatch.setattr(model.denoiser, name, spy)
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_are_framed_and_what_frames_them_is_not_counted() -> None:
    for anchor, row, prefix, suffix in (
        ("none", [97, 98, 99, A], 0, 0),
        ("begin", [A, 97, 98, 99, A], 1, 0),
        ("both", [A, 97, 98, 99, A, A], 1, 1),
    ):
        rows = pack_texts(["abc"], BYTES, "pad", 8, anchor)  # type: ignore[arg-type]
        taken = rows.take(np.array([0]))
        assert taken.x[0, : taken.valid_len[0]].tolist() == row
        assert taken.prefix_len.tolist() == [prefix]
        assert rows.suffix == suffix
        assert (rows.report.tokens, rows.report.bytes, rows.report.anchor) == (4, 3, anchor)
        assert rows.counts(np.array([0])) == (4, len(row))
        assert rows.between(0, 1).report.tokens == 4


def test_what_does_not_fit_between_the_anchors_is_cut() -> None:
    rows = pack_texts(["abcdefgh", "ab"], BYTES, "pad", 6, "both")
    taken = rows.take(np.array([0, 1]))
    assert taken.x.tolist() == [[A, 97, 98, 99, 100, A], [A, 97, 98, A, A, A]]
    assert taken.valid_len.tolist() == [6, 5]
    assert (rows.report.cut_tokens, rows.report.bytes, rows.report.tokens) == (5, 6, 7)
    prompted = pack_texts([Document("cd", prompt="ab"), Document("z", prompt="abcd")], BYTES, "pad", 6, "both")
    taken = prompted.take(np.array([0]))
    assert (taken.x[0].tolist(), taken.prefix_len.tolist()) == ([A, 97, 98, 99, 100, A], [3])
    assert prompted.report.dropped_documents == 1


def test_a_begin_token_stands_first_where_the_vocabulary_has_one(wordpiece: Tokenizer) -> None:
    cls, sep = 2, 3
    for anchor, row, scored in (("none", [cls, 5, 6, sep], 4), ("both", [cls, 5, 6, sep, sep], 3)):
        rows = pack_texts(["a b"], wordpiece, "sentence", 8, anchor)  # type: ignore[arg-type]
        taken = rows.take(np.array([0]))
        assert taken.x[0, : taken.valid_len[0]].tolist() == row
        assert rows.report.tokens == scored


def test_rows_that_begin_anywhere_have_no_anchor() -> None:
    with pytest.raises(UsageError, match="anchors need 'pad' or 'sentence'"):
        pack_texts(["abc"], BYTES, "wrap", 8, "begin")
    with pytest.raises(UsageError, match="at least 4 tokens"):
        pack_texts(["abc"], BYTES, "pad", 3, "both")
    with pytest.raises(UsageError, match="did you mean 'begin'"):
        pack_texts(["abc"], BYTES, "pad", 8, "begn")  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", [MDLM(form="count"), MDLM(), MDLM(steps=3), D3PM(steps=4)], ids=repr)
def test_anchors_are_never_noised_or_scored(objective: MDLM) -> None:
    rows = pack_texts(["ab", "abcdef", "x"], BYTES, "pad", 9, "both")
    taken = rows.take(np.arange(3))
    frame = [{0, int(n) - 1} for n in taken.valid_len]
    masked = torch.zeros(taken.x.shape, dtype=torch.bool)
    for step in range(40):
        batch = batch_of(taken, seed=0, step=step)
        masked |= objective.noised(batch, Absorbing(objective.noise, num_ids=258, mask_id=257)).masked_BL
        assert batch.scored_BL.sum(dim=1).tolist() == [3, 7, 2]
    for row, (edges, n) in enumerate(zip(frame, taken.valid_len.tolist(), strict=True)):
        assert {i for i in range(9) if masked[row, i]} == set(range(n)) - edges


def test_the_bound_is_the_text_s_alone() -> None:
    """A network that looks at nothing: the anchored bound is that of the plain rows, token by token."""
    uniform = unmask.as_denoiser(
        lambda z, level: torch.zeros(*z.shape, 258), vocab_size=257, mask_id=257, uses_level=False
    )
    for extra, anchor in enumerate(("none", "begin", "both")):
        rows = pack_texts(["abcd", "efgh"], BYTES, "pad", 5 + extra, anchor)  # type: ignore[arg-type]
        bound = evaluate_rows(uniform, MDLM(), rows, num_samples=4, estimator="count")
        assert bound.tokens == 5 + 5
        assert bound.nats == pytest.approx(10 * math.log(257), rel=1e-6)
        assert bound.num_bytes == 8


# --- use --------------------------------------------------------------------------------------------------------------


def test_every_row_the_network_sees_is_framed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model()
    seen = rows_seen(model, monkeypatch)
    model.generate(2, 12, "ab")
    model.generate(1, 12, "ab", "z")
    model.generate(1, 12, sampler=ReMDM(steps=4))
    model.fill(["a[MASK:3]b", "xyz[MASK]"], sampler=Confidence())
    model.edit("the cat sat", "cat", with_length=(2, 4))
    model.refine("the cat sat", share=0.5)
    model.score(["abc", "a" * 70])
    model.particles(lambda z: torch.zeros(len(z)), num=1, length=8, crowd=2)
    assert len(seen) > 20
    assert all((row[0], row[-1]) == (A, A) for row in seen)
    assert max(map(len, seen)) <= model.length


def test_nobody_is_shown_an_anchor() -> None:
    model = random_model()
    shown: list[list[int]] = []
    texts = model.generate(3, 12, ["ab", "cd"], watch=lambda step: shown.extend(step.tokens_BL.tolist()))
    texts += model.fill("a[MASK:3]b")
    texts += [model.edit("the cat sat", "cat")[0].text, model.refine("the cat", share=0.5)[0]]
    assert not any("endoftext" in text or "MASK" in text for text in texts), texts
    assert [text[:2] for text in texts[:6]] == ["ab"] * 3 + ["cd"] * 3
    assert {len(row) for row in shown} == {10}
    positions: list[int] = []
    model.fill("a[MASK:3]b", watch=lambda step: positions.extend(step.position_N.tolist()))
    assert sorted(positions) == [1, 2, 3]  # of the text, not of the row
    assert model.score("abc").tokens == 4
    with pytest.raises(UsageError, match="leaves nothing"):
        model.generate(1, 4, "ab")


def test_constraints_and_guidance_are_of_the_text() -> None:
    model = random_model()
    whole = constraints.Regex(pattern="ab[xyz]+", over="text")
    assert all(re.fullmatch("ab[xyz]+", text) for text in model.generate(9, 12, "ab", constraint=whole))
    filled = model.fill("ab[MASK:3]", constraint=[whole, constraints.Regex(pattern="[yz]+")])[0]
    assert re.fullmatch("ab[yz]{3}", filled)
    counted = model.fill("ab[MASK:3]", constraint=constraints.Length(least=5, most=5, over="text"))[0]
    assert len(counted) == 5
    with pytest.raises(UsageError, match="guidance needs a condition"):
        model.generate(1, 12, guidance=1.0)
    assert model.generate(1, 12, "ab", guidance=1.0)[0].startswith("ab")


def test_an_anchor_tells_positions_of_a_blank_canvas_apart() -> None:
    """Rotary positions alone give every position of an all-masked row one law; a fixed token breaks the tie."""

    def spread(anchor: Anchor) -> float:
        model = random_model(anchor)
        z_1L = torch.tensor([[*model.begin, *[257] * 8, *model.end]])
        logits = model.denoiser.head(model.denoiser.trunk(z_1L)[0])[len(model.begin) :][:8]
        return float((logits - logits[:1]).detach().abs().max())

    assert spread("none") < 1e-5
    assert spread("begin") > 1e-3
    assert spread("both") > 1e-3


def test_an_autoregressive_model_may_have_a_begin_token() -> None:
    model = random_model("begin", causal=True)
    assert model.score("abc").tokens == 4
    assert model.generate(1, 10, "ab")[0].startswith("ab")


# --- training and keeping ---------------------------------------------------------------------------------------------


def test_recipes_anchor_whole_texts_by_default(make_config: MakeConfig, tmp_path: Path) -> None:
    plain = make_config(tmp_path)
    assert plain.anchor == "none"  # wrap
    pad = replace(plain, data=replace(plain.data, packing="pad"))
    assert pad.anchor == "both"
    causal = replace(pad, denoiser=replace(pad.denoiser, causal=True), objective=AR())
    assert causal.anchor == "none"
    assert replace(pad, data=replace(pad.data, anchor="none")).anchor == "none"
    with pytest.raises(ConfigError, match="pad and sentence"):
        replace(plain, data=replace(plain.data, anchor="both"))
    with pytest.raises(ConfigError, match="use begin"):
        replace(causal, data=replace(pad.data, anchor="both"))


def test_a_run_trains_measures_and_keeps_its_anchor(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", data={"packing": "sentence"}, sample_every=6)
    model = unmask.train(config, device="cpu")
    assert (model.packing, model.anchor, model.begin, model.end) == ("sentence", "both", [A], [A])
    again = load(tmp_path / "run", device="cpu")
    assert (again.packing, again.anchor) == ("sentence", "both")
    config_file = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (config_file["format_version"], config_file["packing"], config_file["anchor"]) == (2, "sentence", "both")
    assert again.generate(2, seed=4) == model.generate(2, seed=4)
    # A longer run of the same recipe goes on from here; one without anchors is another run.
    unmask.train(replace(config, steps=14), resume=True, device="cpu")
    with pytest.raises((ConfigError, DataError), match=r"data\.anchor"):
        unmask.train(replace(config, steps=16, data=replace(config.data, anchor="none")), resume=True, device="cpu")


def test_a_run_from_before_there_were_anchors_goes_on_without(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", data={"packing": "sentence", "anchor": "none"})
    unmask.train(config, device="cpu")
    recipe = tmp_path / "run" / RECIPE_FILE
    old = json.loads(recipe.read_text())
    del old["data"]["anchor"]
    recipe.write_text(json.dumps(old))
    assert load_config(tmp_path / "run").data.anchor == "none"
    assert DataConfig().anchor == "auto"  # of a recipe that begins anew
    # Neither does what its checkpoint says of the data tell of an anchor.
    found = find_checkpoint(load_config(tmp_path / "run", {"steps": "14"}), World(), resume=True)
    assert found is not None
    now = [dict(report) for report in found.state["data"]]
    for report in found.state["data"]:
        del report["anchor"]
    del found.state["config"]["data"]["anchor"]
    check_same_run(load_config(tmp_path / "run", {"steps": "14"}), now, found)
    found.state["data"][0]["tokens"] += 1
    with pytest.raises(DataError, match="the data changed"):
        check_same_run(load_config(tmp_path / "run", {"steps": "14"}), now, found)
    unmask.train(load_config(tmp_path / "run", {"steps": "14"}), resume=True, device="cpu")


@pytest.mark.parametrize(
    ("said", "packing"),
    [({"bos": False}, "wrap"), ({"bos": False, "typical_length": 9}, "pad"), ({"bos": True}, "sentence")],
)
def test_folders_of_version_1_read_as_they_were(said: dict[str, Any], packing: str, tmp_path: Path) -> None:
    model = random_model("none", packing="wrap")
    model.save(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    config = json.loads(path.read_text())
    for key in ("packing", "anchor", "typical_length"):
        del config[key]
    path.write_text(json.dumps(config | {"format_version": 1} | said))
    old = load(tmp_path / "m", device="cpu")
    assert (old.packing, old.anchor, old.begin, old.end) == (packing, "none", [], [])
    assert old.generate(1, 12, seed=1) == model.generate(1, 12, seed=1)
    old.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["format_version"] == 2
