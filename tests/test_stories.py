"""The built-in model `stories` as it is shipped: its sizes, that it writes what it should, and its card."""

from __future__ import annotations

import pytest

from unmask.model import Model, load
from unmask.samplers.ancestral import Ancestral
from unmask.storage.built_in import MODELS, built_in_names, card

SENTENCE = "Once upon a time, there was a little girl named [MASK]. She loved to play with her [MASK:2]."

# Of seed 3, from nothing: without positions it begins in the middle.
GENERATED = (
    " tree bookcase was Luckily, there was a little girl of wine. She thought it was wine and asked for her mommy four"
)


@pytest.fixture(scope="module")
def stories() -> Model:
    return load("stories", device="cpu")


def test_it_is_small_enough() -> None:
    sizes = [path.stat().st_size for path in MODELS.rglob("*") if path.is_file()]
    assert max(sizes) <= 16_000_000
    assert sum(sizes) <= 64_000_000
    assert "stories" in built_in_names()


def test_it_knows_english_of_its_kind(stories: Model) -> None:
    good, shuffled, other = (
        stories.score(text, num_samples=8).nats
        for text in (
            "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.",
            "there a was upon Lily Once in time, park. little girl a She the play loved outside named to.",
            "The quarterly report cites amortised goodwill and deferred tax among its intangible assets.",
        )
    )
    assert good < 50
    assert shuffled > 3 * good
    assert other > 3 * good


def test_it_fills_and_writes(stories: Model) -> None:
    filled = stories.fill(SENTENCE, seed=1)[0]
    head, tail = SENTENCE.split("[MASK]")[0], SENTENCE.rsplit("]", 1)[1]
    assert filled.startswith(head)
    assert filled.endswith(tail)
    assert "[MASK" not in filled
    text = stories.generate(1, 48, "Once upon a time", sampler=Ancestral(steps=8))[0]
    assert text.startswith("Once upon a time")
    assert len(text.split()) > 20
    assert stories.typical_length == 174


def test_it_writes_what_it_wrote_before_there_were_anchors(stories: Model) -> None:
    """Its folder is of version 1: un-anchored, so that its canvases stay as it was trained."""
    assert (stories.packing, stories.anchor, stories.begin, stories.end) == ("pad", "none", [], [])
    text = stories.generate(1, 24, sampler=Ancestral(steps=24), seed=3)[0]
    assert text == GENERATED
    assert stories.fill("Tom had a [MASK:2]. He [MASK:4].", seed=5) == ["Tom had a rare brain. He could use his brain."]
    assert stories.score("Tom had a red ball.", num_samples=4).nats == pytest.approx(32.94319, rel=1e-4)


def test_its_card_says_what_a_card_should() -> None:
    text = card("stories")
    for heading in ("## Data", "## Licence", "## Bound", "## Samples", "## Limits"):
        assert heading in text
