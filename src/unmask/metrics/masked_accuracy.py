"""Masked accuracy: how often the likeliest token is correct when a given share of the tokens is masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from unmask.errors import UsageError
from unmask.metrics import Metric
from unmask.registry import check_fields

if TYPE_CHECKING:
    from torch import Tensor

    from unmask.data.batch import Batch
    from unmask.data.packing import Rows
    from unmask.evaluation.measurement import Measurement
    from unmask.model import Model


@dataclass(frozen=True, kw_only=True)
class MaskedAccuracy(Metric):
    """Every scored token is masked with probability `rate`; all masked tokens of a row are predicted in one call."""

    best_is: ClassVar[Literal["least", "most"]] = "most"

    rate: float = 0.15
    max_rows: int | None = None
    batch: int = 16

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.rate <= 1:
            raise UsageError(f"rate must lie in (0, 1], got {self.rate}")
        for name in ("max_rows", "batch"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")

    def measure(self, model: Model, data: Rows, *, seed: int) -> Measurement:
        import torch

        from unmask.denoisers.network import evaluating
        from unmask.evaluation.by_text import said, text_numbers
        from unmask.evaluation.evaluate import batches_of, chosen_rows
        from unmask.evaluation.measurement import Measurement, ratio_ci95

        right, masked = [], []
        with evaluating(model.denoiser):
            for batch in batches_of(model.denoiser, data, seed=seed, max_rows=self.max_rows, batch=self.batch):
                right_B, masked_B = self._count(model, batch)
                right.append(right_B.cpu())
                masked.append(masked_B.cpu())
        right_B, masked_B = torch.cat(right), torch.cat(masked)
        if not int(masked_B.sum()):
            raise UsageError(f"no token was masked at the rate {self.rate}: give more rows or a larger rate")
        of_B = text_numbers(data, model.tokenizer, chosen_rows(data, self.max_rows))
        interval = ratio_ci95(right_B, masked_B, of_B)
        return Measurement(
            name="masked accuracy",
            value=float(right_B.sum() / masked_B.sum()),
            ci95=None if interval is None else (max(0.0, interval[0]), min(1.0, interval[1])),
            n=int(masked_B.sum()),
            protocol={
                "rows": len(right_B),
                "masked_tokens": int(masked_B.sum()),
                "rate": self.rate,
                "interval": said(of_B, len(right_B)),
            },
        )

    def _count(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """For each row: the number of tokens whose argmax is correct, and the number of masked tokens."""
        import torch

        from unmask.data.batch import DRAW_MASK
        from unmask.evaluation.inspection import ask_masks
        from unmask.rng import uniform

        position_L = torch.arange(batch.x_BL.shape[1], device=batch.x_BL.device)
        u_BL = uniform(batch.key_B[:, None], DRAW_MASK, position_L)
        masked_BL = batch.scored_BL & (u_BL < self.rate)
        z_BL = batch.x_BL.masked_fill(masked_BL, model.denoiser.mask_id)
        level_B = torch.full_like(batch.time_B, self.rate)
        right_BL = torch.zeros_like(masked_BL)
        if bool(masked_BL.any()):
            log_p_NI = ask_masks(model, z_BL, level_B, masked_BL, valid_BL=batch.valid_BL, label_B=batch.label_B)
            right_BL[masked_BL] = log_p_NI.argmax(dim=1) == batch.x_BL[masked_BL]
        return right_BL.sum(dim=1), masked_BL.sum(dim=1)
