"""Class labels: from the corpus through packing into the network, out of it by sampling, and guidance over them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chains import World, fits
from test_guidance import chain_from
from torch import Tensor

from tiny import MakeConfig
from unmask import kernels, samplers
from unmask.corpora import Document
from unmask.corpora.jsonl import Jsonl
from unmask.data.batch import make_batch
from unmask.data.packing import build_rows, pack_texts
from unmask.data.tokenizers import load_tokenizer
from unmask.denoisers.dit import DiT
from unmask.denoisers.network import Network, as_denoiser
from unmask.errors import DataError, UsageError
from unmask.model import Model, load
from unmask.samplers import Sampler
from unmask.sampling.canvas import Canvas
from unmask.sampling.guidance import Guidance
from unmask.sampling.loop import sample
from unmask.storage.published import write_published
from unmask.training.loop import train

P_MIN = 1e-4
WORLDS = [World.random(V=2, L=3, seed=seed) for seed in (11, 12, 13)]  # class 0, class 1, no class


def labelled() -> Network:
    """A table for each class, and one for rows without."""
    nets = [world.denoiser() for world in WORLDS]

    def logits(z_BL: Tensor, level_B: Tensor | None, label_B: Tensor) -> Tensor:
        every = torch.stack([net(z_BL, level_B) for net in nets])
        return every[label_B, torch.arange(len(z_BL))]

    return as_denoiser(logits, vocab_size=2, mask_id=WORLDS[0].mask_id, uses_level=False, classes=2)


def canvas_of(labels: list[int], num: int) -> Canvas:
    blank = Canvas.blank(num=num * len(labels), length=3, mask_id=WORLDS[0].mask_id, seed=4)
    return dataclasses.replace(blank, label_B=torch.tensor(labels).repeat_interleave(num))


@pytest.mark.parametrize(
    "sampler", [samplers.Ancestral(steps=2), samplers.Posterior(steps=2), samplers.SemiAR(window=3)], ids=repr
)
def test_each_row_follows_the_law_of_its_own_label(sampler: Sampler) -> None:
    if isinstance(sampler, samplers.SemiAR):
        sampler = dataclasses.replace(sampler, inner=samplers.Ancestral(steps=2))
    tokens = sample(labelled(), canvas_of([0, -1, 1], 10_000), sampler).tokens
    start = torch.full((3,), WORLDS[0].mask_id)
    for i, world in enumerate((WORLDS[0], WORLDS[2], WORLDS[1])):
        part = tokens[i * 10_000 : (i + 1) * 10_000]
        assert fits(world, part, chain_from(world, start, 2)) > P_MIN
        other = next(w for w in WORLDS if w is not world)
        assert fits(other, part, chain_from(other, start, 2)) < 1e-6


@pytest.mark.parametrize("weight", [0.0, 1.5, -1.0])
def test_guidance_over_a_label_has_the_mixed_predictions_law(weight: float) -> None:
    given, free = (WORLDS[i].x_theta(WORLDS[i].states, 0.0, carry_over=False).log() for i in (1, 2))
    mixed = (1 + weight) * given - weight * free
    mixed[..., WORLDS[0].mask_id] = 0  # zero masking removes it again
    world = dataclasses.replace(WORLDS[1], logits=mixed)
    tokens = sample(labelled(), canvas_of([1], 30_000), samplers.Ancestral(steps=2), guidance=Guidance(weight)).tokens
    start = torch.full((3,), world.mask_id)
    assert fits(world, tokens, chain_from(world, start, 2)) > P_MIN
    if weight:
        assert fits(world, tokens, chain_from(WORLDS[1], start, 2)) < 1e-8


def test_a_label_guides_beyond_one_window() -> None:
    net = as_denoiser(lambda z, level, y: torch.zeros(*z.shape, 3), vocab_size=2, mask_id=2, classes=2)
    canvas = dataclasses.replace(Canvas.blank(num=1, length=7, mask_id=2), label_B=torch.tensor([1]))
    out = sample(net, canvas, samplers.SemiAR(window=4), guidance=Guidance(1.0))
    assert bool((out.tokens < 2).all())


def test_each_canvas_of_guidance_is_shown_its_own_level() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def look(z_BL: Tensor, level_B: Tensor | None) -> Tensor:
        assert level_B is not None
        seen.append((z_BL.clone(), level_B.clone()))
        return torch.zeros(*z_BL.shape, 3)

    tokens = torch.tensor([[0, 1, 2, 2], [2, 2, 2, 2]])
    canvas = Canvas.of(tokens, mask_id=2, seed=0)
    sample(as_denoiser(look, vocab_size=2, mask_id=2), canvas, samplers.Confidence(), guidance=Guidance(1.0))
    for z_BL, level_B in seen:
        assert torch.allclose((z_BL == 2).sum(dim=1) / 4, level_B.float())
    assert len({tuple(level_B.tolist()) for _, level_B in seen[:2]}) == 2  # the row with a prompt has two levels


def test_labels_stay_with_their_rows_through_packing() -> None:
    tok = load_tokenizer("bytes")
    documents = [Document("ab", label=1), Document("c"), Document("de\nfg", label=0)]
    rows = pack_texts(documents, tok, "pad", 6)
    assert rows.labels_of(np.array([2, 0, 1])).tolist() == [0, 1, -1]  # type: ignore[union-attr]
    lines = pack_texts(documents, tok, "sentence", 6)
    assert lines.labels_of(np.arange(4)).tolist() == [1, -1, 0, 0]  # type: ignore[union-attr]
    assert pack_texts(["ab"], tok, "pad", 6).labels_of(np.array([0])) is None
    with pytest.raises(UsageError, match="a row has one label"):
        pack_texts(documents, tok, "wrap", 6)
    rows.check_labels(2)
    with pytest.raises(DataError, match=r"denoiser\.classes = 2"):
        rows.check_labels(1)
    with pytest.raises(DataError, match="label_field"):
        pack_texts(["ab"], tok, "pad", 6).check_labels(2)


def test_labels_of_json_lines_are_cached_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab", "y": 1}\n{"text": "cd", "y": null}\n')
    corpus = Jsonl(path=str(path), label_field="y")
    for _ in range(2):  # built, then read
        rows = build_rows(corpus, load_tokenizer("bytes"), policy="pad", length=4, cache_dir=tmp_path / "cache")
        assert rows.labels_of(np.arange(2)).tolist() == [1, -1]  # type: ignore[union-attr]
    assert Jsonl(path=str(path)).fingerprint() != corpus.fingerprint()
    path.write_text('{"text": "ab", "y": 1.5}\n')
    with pytest.raises(DataError, match=r"line 1: the label '1\.5' is neither a whole number"):
        list(corpus.documents())
    path.write_text('{"text": "ab"}\n')
    with pytest.raises(DataError, match="has no field 'y'"):
        list(corpus.documents())


def test_a_share_of_the_rows_forgets_its_label_whatever_the_batch() -> None:
    batch = make_batch(torch.zeros(4000, 2, dtype=torch.long), seed=0, step=0, label_B=torch.ones(4000).long())
    lost = batch.drop_labels(0.25).label_B
    assert lost is not None
    assert abs(float((lost == -1).float().mean()) - 0.25) < 0.03
    part = batch.rows(1000, 1500).drop_labels(0.25).label_B
    assert part is not None
    assert part.equal(lost[1000:1500])


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory: pytest.TempPathFactory, make_config: MakeConfig) -> Model:
    """Trained on texts of two classes: of letters, and of digits."""
    folder = tmp_path_factory.mktemp("labels")
    lines = [{"text": ("abba" if i % 2 else "1221") * 3, "kind": i % 2} for i in range(40)]
    (folder / "kinds.jsonl").write_text("\n".join(map(json.dumps, lines)))
    corpus = Jsonl(path=str(folder / "kinds.jsonl"), label_field="kind")
    config = make_config(
        folder / "run",
        steps=80,
        batch=16,
        denoiser=DiT(size="nano", hidden=32, blocks=1, heads=2, dropout=0.0, classes=2, label_dropout=0.2),
        data={"train": corpus, "valid": corpus, "packing": "pad", "length": 13},
    )
    return train(config)


def test_a_trained_model_writes_what_its_label_says(two_kinds: Model, tmp_path: Path) -> None:
    two_kinds.save(tmp_path / "model")
    model = load(tmp_path / "model")
    assert model.denoiser.num_classes == 2
    for label, letters in ((0, set("12")), (1, set("ab"))):
        texts = model.generate(20, 12, label=label, guidance=1.0)
        right = sum(letter in letters for text in texts for letter in text)
        assert right > 0.9 * sum(map(len, texts))
        assert model.score("abba" * 3, label=1).nats < model.score("abba" * 3, label=0).nats
    plain = "".join(model.generate(40, 12))
    assert set("12ab") <= set(plain)  # without a label: both
    filled = model.fill("[MASK:12]", label=1, guidance=1.0)[0]
    assert sum(letter in "ab" for letter in filled) > 6


def test_labels_that_a_model_does_not_know_are_refused(two_kinds: Model) -> None:
    with pytest.raises(UsageError, match="label 2 is not among this model's classes: it knows 0 to 1"):
        two_kinds.generate(label=2)
    net = DiT(hidden=8, blocks=1, heads=2).build(num_ids=3, mask_id=2)
    with pytest.raises(UsageError, match="trained without classes"):
        net(torch.tensor([[2, 2]]), cond=torch.tensor([0]))
    with pytest.raises(UsageError, match="classes or causal"):
        DiT(classes=2, causal=True)
    with pytest.raises(UsageError, match=r"label_dropout in \[0, 1\)"):
        DiT(classes=2, label_dropout=1.0)


@pytest.mark.parametrize("options", [{"classes": 2}, {"value_residual": True}], ids=str)
def test_a_network_is_not_exported_without_what_it_has(tmp_path: Path, options: dict[str, Any]) -> None:
    dit = DiT(hidden=8, blocks=1, heads=2, conditioning="constant", qk_norm=False, **options)
    with pytest.raises(UsageError, match=f"with {next(iter(options))} has no published form"):
        write_published(dit.build(num_ids=5, mask_id=4), tmp_path / "out", length=16)


@pytest.mark.parametrize("conditioning", ["none", "level"])
def test_no_label_and_a_dropped_label_are_one_thing(conditioning: str) -> None:
    torch.manual_seed(0)
    net = DiT(hidden=8, blocks=2, heads=2, classes=3, conditioning=conditioning).build(num_ids=4, mask_id=3)  # type: ignore[arg-type]
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.5)
    net.eval()
    z, level = torch.tensor([[0, 3, 1], [3, 3, 2]]), torch.tensor([0.3, 0.6])
    dropped = net(z, level, cond=torch.tensor([-1, -1]))
    assert torch.allclose(net(z, level), dropped, atol=1e-6)
    assert not torch.allclose(net(z, level, cond=torch.tensor([0, 2])), dropped, atol=1e-2)
    flat = torch.tensor([1, 3])
    at = net.head(net.trunk_at(z, level, flat, cond=torch.tensor([0, 2])))
    assert torch.allclose(at, net(z, level, cond=torch.tensor([0, 2])).flatten(0, 1)[flat], atol=1e-6)


@pytest.mark.skipif(not kernels.HAS_TRITON, reason="needs triton")
def test_the_fused_pass_carries_the_class() -> None:
    """Here in Triton's interpreter, on a GPU by its kernels."""
    from unmask.denoisers.dit.fused import fused_trunk

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    net = DiT(hidden=8, blocks=1, heads=2, classes=3, conditioning="level").build(num_ids=5, mask_id=4)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.2)
    net = net.to(device).eval()
    z, level = torch.randint(0, 5, (3, 4), device=device), torch.rand(3, device=device)
    at, label = torch.tensor([[1, 2], [0, 3], [3, 1]], device=device), torch.tensor([0, -1, 2], device=device)
    with torch.no_grad():
        plain = net._blocks(z, level, None, at_BK=at, causal=False, cond=label)
        fused = fused_trunk(net, z, level, at_BK=at, cond=label)
        other = fused_trunk(net, z, level, at_BK=at)
    assert torch.allclose(fused, plain, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(other, plain, rtol=1e-1, atol=1e-1)
