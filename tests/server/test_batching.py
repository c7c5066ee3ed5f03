"""Questions side by side: a row's answer is the same bits in any company."""

from __future__ import annotations

import argparse
import os
from typing import Any

import pytest
import torch
from small_server import random_model

from unmask.cli import serve
from unmask.denoisers.llama import Llama
from unmask.errors import UsageError
from unmask.sampling.predictor import Query
from unmask.server import same_bits
from unmask.server.batching import LEAST, answer, bucket, groups


@pytest.mark.parametrize(
    ("hidden", "heads", "blocks", "llama"),
    [(32, 2, 1, None), (128, 4, 2, None), (192, 6, 2, None), (128, 4, 2, {}), (96, 6, 2, {"shifted": True})],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_answer_is_the_same_bits_in_any_company(
    hidden: int, heads: int, blocks: int, threads: int, llama: dict[str, Any] | None
) -> None:
    described = None if llama is None else Llama(hidden=hidden, heads=heads, blocks=blocks, groups=2, **llama)
    model = random_model(hidden, blocks, heads, described=described)
    predictor = model.objective.predictor(model.denoiser)
    generator = torch.Generator().manual_seed(0)

    def query(length: int, wanted: int) -> Query:
        z = torch.randint(0, 250, (1, length), generator=generator)
        at = torch.randperm(length, generator=generator)[:wanted].sort().values[None]
        return Query(
            z, torch.rand(1, generator=generator), at, torch.ones_like(at, dtype=torch.bool), int(at.max()) + 1
        )

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for length in (3, 16, 23, 31):
            mine = query(length, 1)
            [alone] = answer(predictor, [mine], torch.device("cpu"), padded=True)
            assert alone.shape == (1, 258)
            same = [n for n in range(1, 33) if bucket(n) == bucket(length)]
            for size in (1, 2, 3, 6, 11, 20):
                others = [query(n, min(n, 1 + k % 9)) for k, n in enumerate((same * 20)[:size])]
                for place in (0, size // 2, size):
                    batch = [*others[:place], mine, *others[place:]]
                    found = answer(predictor, batch, torch.device("cpu"), padded=True)
                    assert torch.equal(found[place], alone), (length, size, place)
    finally:
        torch.set_num_threads(before)


def test_serving_asks_for_the_same_bits_before_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(["model", "--max-batch", "0"])  # refused right after
    for intel, before, after in ((True, None, "AUTO,STRICT"), (True, "AVX2", "AVX2"), (False, None, None)):
        monkeypatch.setattr(same_bits, "_is_intel", lambda intel=intel: intel)
        monkeypatch.delenv("MKL_CBWR", raising=False)
        if before:
            monkeypatch.setenv("MKL_CBWR", before)
        with pytest.raises(UsageError):
            serve.run(args)
        assert os.environ.get("MKL_CBWR") == after


def test_buckets_depend_on_a_rows_own_length() -> None:
    assert [bucket(n) for n in (1, 15, 16, 17, 24, 25, 48, 49, 129, 1000)] == [
        16,
        16,
        16,
        24,
        24,
        32,
        48,
        64,
        192,
        1024,
    ]
    for n in range(1, 600):
        assert n <= bucket(n) <= max(16, n * 3 // 2)
    parts = list(groups([5, 40, 7, 40], [1, 1, 2, 1], 100, padded=True))
    assert parts == [[0, 2], [1, 3]]
    assert list(groups([5, 6, 5], [1, 1, 1], 100, padded=False)) == [[0, 2], [1]]


def test_a_call_is_cut_before_it_is_too_large() -> None:
    parts = list(groups([64] * 100, [64] * 100, 1 << 15, padded=True))
    assert sorted(i for part in parts for i in part) == list(range(100))
    assert all(len(part) * 64 * (1 << 15) <= 1 << 26 for part in parts)
    assert LEAST >= 4  # below four lines a matrix product goes another way
