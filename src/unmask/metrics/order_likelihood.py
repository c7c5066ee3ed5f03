"""Likelihood of texts in the order in which a sampler opens them: what the sampler in use is worth.

Of an order that follows from what is visible (confidence, margin, entropy, left_to_right) it is exact, a network call
for each round of the sampler. Of a drawn order (ancestral) it is a mixture over `orders` of them, an upper bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from unmask.errors import UsageError
from unmask.metrics import Metric
from unmask.metrics.perplexity import measured_of
from unmask.registry import check_fields
from unmask.samplers import Sampler
from unmask.samplers.confidence import Confidence

if TYPE_CHECKING:
    from unmask.data.packing import Rows
    from unmask.evaluation.measurement import Measurement
    from unmask.model import Model


@dataclass(frozen=True, kw_only=True)
class OrderLikelihood(Metric):
    """sampler: whose order, of the model's own law. orders: how many are drawn and mixed, where its order is drawn.

    num_samples: so many independent mixtures, for an interval given the texts. max_rows: rows spread evenly over the
    data; None: all.
    """

    best_is: ClassVar[Literal["least", "most"]] = "least"

    sampler: Sampler = Confidence()
    orders: int = 1
    num_samples: int = 1
    max_rows: int | None = None
    batch: int = 16

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("orders", "num_samples", "max_rows", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.sampler.fixed_order and max(self.orders, self.num_samples) > 1:
            raise UsageError(
                f"{type(self.sampler).__name__} has one order for each text: leave out orders and num_samples, or give "
                "it random = 1"
            )

    def measure(self, model: Model, data: Rows, *, seed: int) -> Measurement:
        import torch

        from unmask.denoisers.network import evaluating
        from unmask.evaluation.bound import Bound
        from unmask.evaluation.by_text import text_numbers
        from unmask.evaluation.evaluate import batches_of, chosen_rows
        from unmask.evaluation.orders import check_order, mixture_nats

        predictor = model.objective.predictor(model.denoiser)
        check_order(self.sampler, predictor)
        how = {"mask_id": model.denoiser.mask_id, "orders": self.orders}
        parts, tokens = [], []
        with evaluating(model.denoiser):
            for batch in batches_of(model.denoiser, data, seed=seed, max_rows=self.max_rows, batch=self.batch):
                draws = [mixture_nats(predictor, batch, self.sampler, **how, draw=i) for i in range(self.num_samples)]
                parts.append(torch.stack(draws, dim=1))
                tokens.append(batch.scored_BL.sum(dim=1).cpu())
        indices = chosen_rows(data, self.max_rows)
        bound = Bound(
            draws_BS=torch.cat(parts),
            tokens_B=torch.cat(tokens),
            num_bytes=int(data.bytes_of(indices).sum()),
            of_B=text_numbers(data, model.tokenizer, indices),
            kind="exact" if self.sampler.fixed_order else "upper bound",
        )
        calls = self.sampler.max_calls(data.length) * self.orders * self.num_samples
        orders = "fixed" if self.sampler.fixed_order else self.orders
        about = {"sampler": repr(self.sampler), "orders": orders, "calls_per_row": f"at most {calls}"}
        return measured_of(bound, {"estimator": "order", **about})
