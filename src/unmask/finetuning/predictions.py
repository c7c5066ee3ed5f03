"""The outputs of a fine-tuned network for rows, and their scores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unmask.denoisers.network import Network, evaluating
from unmask.errors import NonFiniteError
from unmask.finetuning.rows import TaskRows
from unmask.finetuning.scores import score_all
from unmask.finetuning.splits import Split
from unmask.heads.task import Task, task_outputs


@dataclass(frozen=True)
class Predictions:
    """out_NK: log-probabilities of the classes, or one number per row, in the unit of the labels."""

    task: Task
    out_NK: Tensor

    @property
    def answers(self) -> list[float]:
        """Class numbers, or numbers."""
        if self.task.kind == "classification":
            return [float(k) for k in self.out_NK.argmax(dim=1).tolist()]
        return [float(x) for x in self.out_NK[:, 0].tolist()]

    def scores(self, metrics: Sequence[str], targets: Sequence[float]) -> dict[str, float]:
        """Each metric for these targets."""
        return score_all(metrics, self.task.kind, self.answers, targets)

    def loss(self, targets: Sequence[float]) -> float:
        """The training loss for these targets."""
        return float(loss_of(self.task, self._standard(), torch.tensor(targets)))

    def _standard(self) -> Tensor:
        return self.out_NK if self.task.kind == "classification" else (self.out_NK - self.task.mean) / self.task.scale

    def records(self, split: Split) -> Iterator[dict[str, Any]]:
        """One JSON object per example of a labelled split."""
        for example, target, answer, out_K in zip(
            split.examples, split.targets, self.answers, self.out_NK, strict=True
        ):
            texts = {"text": example.text} | ({} if example.pair is None else {"pair": example.pair})
            if self.task.kind == "regression":
                yield {**texts, "target": target, "predicted": answer}
                continue
            labels, probs = self.task.labels, [round(p, 6) for p in out_K.exp().tolist()]
            found = {"label": example.label, "predicted": labels[int(answer)]}
            yield {**texts, **found, "probabilities": dict(zip(labels, probs, strict=True))}


def loss_of(task: Task, out_BK: Tensor, target_B: Tensor) -> Tensor:
    """The mean cross-entropy in nats, or the mean squared error in units of the scale."""
    if task.kind == "classification":
        return torch.nn.functional.cross_entropy(out_BK, target_B.long())
    standard_B = (target_B.to(torch.float32) - task.mean) / task.scale
    return torch.nn.functional.mse_loss(out_BK[:, 0], standard_B)


@torch.no_grad()
def predict_rows(
    task: Task,
    network: Network,
    rows: TaskRows,
    *,
    batch: int,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Predictions:
    """The outputs for all rows, in order; for a conjoined task the mean of both strands' outputs."""
    out_NK = torch.zeros(len(rows), task.outputs)
    strands = [False, True] if task.conjoined and not task.joins_vectors(network) else [False]
    with evaluating(network), autocast():
        for indices in rows.by_length(batch):
            for other in strands:
                part = rows.batch(indices, other=[other] * len(indices))
                out_BK = task_outputs(task, network, *part).cpu()
                out_NK[indices] += out_BK / len(strands)
    if not bool(torch.isfinite(out_NK).all()):
        raise NonFiniteError("the network's answers are not finite numbers: lower optim.lr")
    if task.kind == "classification":
        return Predictions(task, torch.log_softmax(out_NK, dim=1))
    return Predictions(task, out_NK * task.scale + task.mean)
