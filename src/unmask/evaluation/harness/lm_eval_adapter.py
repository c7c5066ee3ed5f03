"""unmask as a model of lm-evaluation-harness: the class that the harness sees, a wrapper of `HarnessModel`.

The package lm_eval is imported only when `register` is called.
"""

from __future__ import annotations

import functools
from typing import Any

from unmask.errors import UsageError
from unmask.evaluation import SCORE_DRAWS
from unmask.evaluation.harness.model import HarnessModel

NAME = "unmask"
BATCH = 32  # for batch_size=auto


@functools.cache
def register() -> Any:
    """Register `unmask` among the harness's models; returns its class, whose `latest` is the last instance created.

    >>> from unmask.evaluation.harness.lm_eval_adapter import register  # doctest: +SKIP
    >>> register()  # doctest: +SKIP
    >>> lm_eval.simple_evaluate(model="unmask", model_args="pretrained=stories", tasks=["lambada"])  # doctest: +SKIP
    """
    import lm_eval.models  # noqa: F401  # else the harness would take the registry for filled and know no other model
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model

    class Unmask(LM):  # type: ignore[misc]
        """A model of unmask; its arguments are those of --model_args."""

        latest: Unmask | None = None

        def __init__(self, pretrained: str | None = None, **arguments: Any) -> None:
            super().__init__()
            self.asked = harness_model(pretrained, **arguments)
            self._device = self.asked.model.device
            type(self).latest = self

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            return self.asked.loglikelihood([request.args for request in requests])

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            return self.asked.loglikelihood_rolling([request.args[0] for request in requests])

        def generate_until(self, requests: list[Any]) -> list[str]:
            return self.asked.generate_until([request.args for request in requests])

        def chat_template(self, chat_template: bool | str = False) -> str:
            if chat_template:
                raise UsageError("unmask's models have no chat template: leave out --apply_chat_template")
            return ""

        def get_model_info(self) -> dict[str, Any]:
            """The entries of the results' config: what the numbers are, and what was truncated."""
            return {"model_num_parameters": self.asked.model.num_parameters, "unmask": self.asked.protocol()}

    return register_model(NAME)(Unmask)


def harness_model(
    pretrained: str | None = None,
    *,
    batch_size: int | str = 1,
    max_batch_size: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    num_samples: int = SCORE_DRAWS,
    estimator: str | None = None,
    order: str | None = None,
    seed: int = 0,
    separator: str | None = None,
    sampler: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> HarnessModel:
    """The model that --model_args names; options that are not listed here are passed to the sampler.

    >>> harness_model("stories", order="confidence", sampler="block", size=16)  # doctest: +SKIP
    """
    from unmask.model import load

    if pretrained is None:
        raise UsageError("which model? give --model_args pretrained=MODEL, a folder or the name of a built-in model")
    words = str(batch_size)
    if not words.isdigit() and not words.startswith("auto"):
        raise UsageError(f"batch_size is a whole number or auto, got {words!r}")
    batch = int(words) if words.isdigit() else min(BATCH, max_batch_size or BATCH)
    return HarnessModel(
        load(str(pretrained), device=device, dtype=dtype),
        batch=batch,
        num_samples=num_samples,
        estimator=estimator,
        order=order,
        seed=seed,
        separator=separator,
        sampler=sampler,
        options=options,
    )
