"""Models in llama2.c's first format: the network with its weights, and the tokenizer."""

from __future__ import annotations

import math
import struct
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BEGIN = 1  # of a text, and of the next one: what ends it


class Llama:
    """The network of a llama2.c file: a token of many rows at a time, or a whole row."""

    def __init__(self, path: Path, device: str) -> None:
        data = path.read_bytes()
        self.dim, hidden, self.layers, self.heads, kv, vocab, self.length = struct.unpack("7i", data[:28])
        if kv != self.heads or vocab < 0:
            sys.exit(f"{path}: only files with one head of keys for each of queries, and a shared vocabulary, are read")
        self.numbers, self.at, self.device = np.frombuffer(data, np.float32, offset=28), 0, device
        n, d = self.layers, self.dim
        self.embedding = self._next(vocab, d)
        self.norm1, self.wq, self.wk, self.wv, self.wo = self._next(n, d), *(self._next(n, d, d) for _ in range(4))
        self.norm2, self.w1 = self._next(n, d), self._next(n, hidden, d)
        self.w2, self.w3, self.norm = self._next(n, d, hidden), self._next(n, hidden, d), self._next(d)
        pairs = d // self.heads // 2
        angle = torch.arange(self.length)[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
        self.turn_LP = torch.polar(torch.ones_like(angle), angle).to(device)

    def _next(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        part = self.numbers[self.at : self.at + count].reshape(shape)
        self.at += count
        return torch.from_numpy(part.copy()).to(self.device)

    def cache(self, rows: int) -> Tensor:
        shape = (self.layers, 2, rows, self.heads, self.length, self.dim // self.heads)
        # Half of the bytes to read at every token; its code length on the texts is the same to four digits.
        return torch.zeros(shape, device=self.device, dtype=torch.float16 if self.device == "cuda" else torch.float32)

    def step(self, token_BT: Tensor, at: int, cache: Tensor) -> Tensor:
        """Logits after these tokens, which stand at `at` and behind it; what was read before is in the cache."""
        b, t = token_BT.shape
        x = self.embedding[token_BT]
        turn = self.turn_LP[at : at + t, None]
        for i in range(self.layers):
            y = _norm(x, self.norm1[i])
            q, k, v = (F.linear(y, w[i]).view(b, t, self.heads, -1) for w in (self.wq, self.wk, self.wv))
            q, k = (_turned(a, turn) for a in (q, k))
            cache[i, 0, :, :, at : at + t] = k.transpose(1, 2)
            cache[i, 1, :, :, at : at + t] = v.transpose(1, 2)
            keys, values = cache[i, 0, :, :, : at + t], cache[i, 1, :, :, : at + t]
            y = F.scaled_dot_product_attention(q.transpose(1, 2).to(keys.dtype), keys, values, is_causal=t > 1)
            x = x + F.linear(y.transpose(1, 2).reshape(b, t, -1).float(), self.wo[i])
            y = _norm(x, self.norm2[i])
            x = x + F.linear(F.silu(F.linear(y, self.w1[i])) * F.linear(y, self.w3[i]), self.w2[i])
        return F.linear(_norm(x, self.norm), self.embedding)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2)


class Pieces:
    """llama2.c's tokenizer: pieces with scores; the pair that makes the best piece is joined first."""

    def __init__(self, path: Path, size: int) -> None:
        data, at = path.read_bytes(), 4
        self.piece: list[bytes] = []
        self.score: list[float] = []
        for _ in range(size):
            score, count = struct.unpack_from("<fi", data, at)
            self.piece.append(data[at + 8 : at + 8 + count])
            self.score.append(score)
            at += 8 + count
        # A letter as such, not as a byte, which comes before it.
        self.id = {piece: i for i, piece in enumerate(self.piece)}

    def encode(self, text: str) -> list[int]:
        ids = [i for c in " " + text for i in ([self.id[c.encode()]] if c.encode() in self.id else self._bytes(c))]
        while True:
            found = [
                (self.score[joined], -i, joined)
                for i, pair in enumerate(pairwise(ids))
                if (joined := self.id.get(self.piece[pair[0]] + self.piece[pair[1]])) is not None
            ]
            if not found:
                return ids
            _, i, joined = max(found)
            ids[-i : -i + 2] = [joined]

    def decode(self, ids: list[int]) -> str:
        data = b"".join(bytes([i - 3]) if 3 <= i < 259 else self.piece[i] for i in ids)
        return data.removeprefix(b" ").decode(errors="replace")

    def _bytes(self, c: str) -> list[int]:
        return [b + 3 for b in c.encode()]
