"""Tensors that are moved to a device which lacks their precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unmask.devices import put


class Moved(torch.Tensor):
    """Stands for a tensor that an Apple GPU takes: torch refuses to move float64 there."""

    def to(self, device: Any) -> Moved:  # type: ignore[override]
        assert device.type == "mps"
        if self.dtype == torch.float64:
            raise TypeError("the MPS framework doesn't support float64")
        return self


@pytest.mark.parametrize(
    ("dtype", "there"),
    [(torch.float64, torch.float32), (torch.float32, torch.float32), (torch.long, torch.long)],
    ids=str,
)
def test_an_apple_gpu_gets_float32_for_float64(dtype: torch.dtype, there: torch.dtype) -> None:
    assert put(torch.ones(2, dtype=dtype).as_subclass(Moved), torch.device("mps")).dtype == there


def test_other_devices_keep_the_precision() -> None:
    assert put(torch.ones(2, dtype=torch.float64), torch.device("cpu")).dtype == torch.float64
