"""Scores given a prompt, by full enumeration: the bound of a continuation, and the chain rule where it is exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import Tensor

from unmask.data.tokenizers import Span, Tokenizer
from unmask.denoisers.network import as_denoiser
from unmask.model import Model
from unmask.objectives.mdlm import MDLM

L, IDS, EOT, MASK = 5, 4, 2, 3
PROMPT = [1, 0]


class Two(Tokenizer):
    """a and b, end of text, mask."""

    num_ids, eot_id, mask_id = IDS, EOT, MASK

    def encode(self, text: str) -> list[int]:
        return ["ab".index(letter) for letter in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join("ab|?"[id] for id in ids)

    def token_text(self, id: int) -> str:
        return self.decode([id])

    def to_json(self) -> str:
        return "{}"

    def encode_spans(self, texts: Sequence[str]) -> list[Span]:
        raise NotImplementedError


@pytest.fixture(scope="module")
def table() -> Tensor:
    """Logits for every row of five ids, masks among them: nothing that is visible may be ignored."""
    return torch.randn(IDS**L, L, IDS, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.fixture(scope="module")
def model(table: Tensor) -> Model:
    powers = IDS ** torch.arange(L)
    denoiser = as_denoiser(
        lambda z, level: table[(z * powers).sum(dim=1)], vocab_size=IDS - 1, mask_id=MASK, uses_level=False
    )
    return Model(denoiser=denoiser, tokenizer=Two(), objective=MDLM(), length=L)


def log_x_theta(table: Tensor, x: list[int], masked: Iterable[int], at: int) -> float:
    z = torch.tensor([MASK if i in set(masked) else id for i, id in enumerate(x)])
    logits_I = table[int((z * IDS ** torch.arange(L)).sum()), at].clone()
    logits_I[MASK] = -torch.inf
    return float(torch.log_softmax(logits_I, dim=0)[x[at]])


def exact_nats(table: Tensor, x: list[int]) -> float:
    """-log p(continuation | prompt): one token a call in a random order, over the places after the prompt alone."""
    gap = range(len(PROMPT), L)
    orders = list(itertools.permutations(gap))
    log_ps = [sum(log_x_theta(table, x, order[k:], order[k]) for k in range(len(gap))) for order in orders]
    return -math.log(sum(map(math.exp, log_ps)) / len(orders))


def bound_nats(table: Tensor, x: list[int]) -> float:
    """The count form written out: n uniform in 1..3, then a uniform set of n places after the prompt."""
    gap, total = range(len(PROMPT), L), 0.0
    for n in range(1, len(gap) + 1):
        sets = list(itertools.combinations(gap, n))
        nats = sum(-log_x_theta(table, x, masked, at) for masked in sets for at in masked)
        total += len(gap) / n * nats / len(sets) / len(gap)
    return total


def test_the_score_given_a_prompt_is_the_enumerated_bound(table: Tensor, model: Model) -> None:
    everything = [[*PROMPT, *rest] for rest in itertools.product(range(3), repeat=3)]
    assert sum(math.exp(-exact_nats(table, x)) for x in everything) == pytest.approx(1)
    texts = ["".join(two) for two in itertools.product("ab", repeat=2)]
    found = model.score(texts, prompts="ba", num_samples=1600, seed=1)
    assert found.tokens_B.tolist() == [3] * 4  # the prompt is no token of the text
    for text, draws_S in zip(texts, found.draws_BS, strict=True):
        x = [*PROMPT, *Two().encode(text), EOT]
        truth, error = bound_nats(table, x), float(draws_S.std()) / math.sqrt(len(draws_S))
        assert abs(float(draws_S.mean()) - truth) < 4.5 * error
        assert error < 0.03 * truth
        assert truth >= exact_nats(table, x)
    # Another prompt is another law, and none is another measure altogether.
    assert float((model.score(texts, prompts="ab", num_samples=400).nats_B - found.nats_B).abs().min()) > 0.05


def test_an_exact_score_follows_the_chain_rule(ar_model: Model) -> None:
    """-log p(prompt + text) = -log p(prompt) - log p(text | prompt), to the last token."""
    for prompt, text in (("the cat", " sat on the mat"), ("a", ""), ("no rat ate", " the oat cake")):
        whole = ar_model.score(prompt + text)
        given = ar_model.score(text, prompts=prompt)
        head = torch.tensor([list(prompt.encode())])
        with torch.no_grad():
            logits = ar_model.denoiser(head)
        logits[..., ar_model.tokenizer.mask_id] = -torch.inf
        first = -float(torch.log_softmax(logits.double(), dim=-1).gather(2, head[..., None]).sum())
        assert given.exact
        assert given.nats + first == pytest.approx(whole.nats, rel=1e-5)
        assert given.tokens == len(text.encode()) + 1
