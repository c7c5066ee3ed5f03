"""A cache is opaque: a recurrent network, and one without any, are driven as the DiT is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unmask.denoisers.flat_rows import gather_positions
from unmask.denoisers.network import Network
from unmask.objectives.terms import subs_log_probs
from unmask.samplers.left_to_right import LeftToRight
from unmask.sampling.canvas import Canvas
from unmask.sampling.loop import sample
from unmask.sampling.predictor import NextToken
from unmask.server.next_tokens import NextQuery, RowCache, answer_next, next_groups

IDS, MASK, L = 7, 6, 9


class Recurrent(Network):
    """A GRU. Its cache holds the state before the span that was read last, and the one after it."""

    causal = True
    embed: nn.Embedding

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.num_ids, self.mask_id, self.keeps = IDS, MASK, keeps
        self.embed = nn.Embedding(IDS, 12)
        self.cell = nn.GRUCell(12, 12)
        self.output = nn.Linear(12, IDS)

    def new_cache(self, batch: int, length: int) -> dict[int, Tensor] | None:
        return {0: self.embed.weight.new_zeros(batch, 12)} if self.keeps else None

    def trunk(self, z: Tensor, level: Tensor | None = None, **options: Any) -> Tensor:
        cache = options.get("cache") or {0: self.embed.weight.new_zeros(len(z), 12)}
        start, stop = options.get("span") or (0, z.shape[1])
        e_BLE = self.embed(nn.functional.pad(z[:, :-1], (1, 0), value=MASK))
        first = h_BD = cache[start]
        each = []
        for position in range(start, stop):
            h_BD = self.cell(e_BLE[:, position], h_BD)
            each.append(h_BD)
        cache.clear()
        cache.update({start: first, stop: h_BD})
        at_BK = options.get("at_BK")
        h_BLD = torch.stack(each, dim=1)
        return h_BLD if at_BK is None else gather_positions(h_BLD, at_BK)

    def can_step_rows(self) -> bool:
        return self.keeps

    def step_rows(self, ids_M: Tensor, caches: Sequence[Any], at: Sequence[int]) -> Tensor:
        before = torch.cat([cache[position] for cache, position in zip(caches, at, strict=True)])
        after_MD = self.cell(self.embed(ids_M), nn.functional.pad(before, (0, 0, 0, len(ids_M) - len(before))))
        for b, (cache, position) in enumerate(zip(caches, at, strict=True)):
            cache[position + 1] = after_MD[b : b + 1]
        return after_MD

    def head(self, h_ND: Tensor) -> Tensor:
        logits: Tensor = self.output(h_ND)
        return logits


def network(*, keeps: bool) -> Recurrent:
    torch.manual_seed(0)
    return Recurrent(keeps=keeps).double().eval()


@pytest.mark.parametrize("keeps", [True, False])
@torch.no_grad()
def test_text_by_text_and_row_by_row_it_is_the_networks_own_law(keeps: bool) -> None:
    net = network(keeps=keeps)
    z_BL = torch.randint(0, MASK, (3, L))
    want = subs_log_probs(net.head(net.trunk(z_BL).flatten(0, 1)), MASK).view(3, L, IDS)

    def query(z: Tensor, reach: int, cache: RowCache) -> NextQuery:
        at = torch.full((len(z), 1), reach - 1)
        return NextQuery(z, torch.ones(len(z)), at, torch.ones_like(at, dtype=torch.bool), reach, cache=cache)

    predictor = NextToken(net)
    for reach in (2, 3, 6, 7):
        torch.testing.assert_close(predictor(query(z_BL, reach, RowCache())), want[:, reach - 1])
    caches, reach_B = [RowCache() for _ in z_BL], [1, 4, 2]
    for _ in range(4):
        asked = [query(z_BL[b : b + 1], reach_B[b], caches[b]) for b in range(3)]
        together = list(next_groups(asked, net))
        for part in together:
            for answer, b in zip(answer_next(net, [asked[i] for i in part], z_BL.device), part, strict=True):
                torch.testing.assert_close(answer[0], want[b, reach_B[b] - 1])
        reach_B = [reach + 1 for reach in reach_B]
    assert together == ([[0, 1, 2]] if keeps else [[0], [1], [2]])


def test_with_and_without_a_cache_it_writes_the_same() -> None:
    canvas = Canvas.blank(num=4, length=L, mask_id=MASK, seed=1)
    texts = [sample(network(keeps=keeps), canvas, LeftToRight()).tokens for keeps in (True, False)]
    assert texts[0].equal(texts[1])
