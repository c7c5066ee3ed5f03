"""Model = denoiser + tokenizer + objective (with its noise): load, save, generate, fill, edit, score."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from unmask.constraints import Constraint
from unmask.constraints.automaton import compile_constraints
from unmask.corpora.labels import is_number
from unmask.data.packing import Anchor, Policy, anchor_ids
from unmask.data.tokenizers import Tokenizer
from unmask.denoisers.network import Network
from unmask.devices import make_current, pick_device, pick_dtype
from unmask.errors import ModelFolderError, Public, UsageError, did_you_mean
from unmask.evaluation.bound import Bound
from unmask.evaluation.inspection import hidden, logits, predict
from unmask.evaluation.score import score
from unmask.heads.task import Task
from unmask.objectives import Objective
from unmask.processes.base import Process
from unmask.samplers import Sampler
from unmask.samplers.drawing import Drawing
from unmask.sampling.canvas import Canvas
from unmask.sampling.constrained import constrained
from unmask.sampling.factory import make_sampler
from unmask.sampling.guidance import Guidance
from unmask.sampling.loop import check_accepts, sample, steps
from unmask.sampling.observe import without_frame
from unmask.storage.atomic import atomic_folder, find_folder
from unmask.storage.built_in import built_in_folder
from unmask.storage.model_folder import FILES, Folder, read_folder, write_folder
from unmask.text.arguments import check_constraint, check_sampler, check_whole
from unmask.text.editing import edit, fill
from unmask.text.generation import Watch, generate, particles, prompted, refine


class Model:
    """A trained network with everything needed to use it.

    >>> model = unmask.load("runs/demo")                          # doctest: +SKIP
    >>> model.generate(num=2, length=128, prompt="def ", seed=0)   # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        denoiser: Network,
        tokenizer: Tokenizer,
        objective: Objective,
        length: int,
        packing: Policy = "wrap",
        anchor: Anchor = "none",
        typical_length: int | None = None,
        drawing: Drawing = Drawing(),
        separator: str = "",
        labels: Sequence[str] = (),
    ) -> None:
        if denoiser.num_ids != tokenizer.num_ids or denoiser.mask_id != tokenizer.mask_id:
            raise UsageError(
                f"the denoiser has {denoiser.num_ids} ids with mask {denoiser.mask_id}, "
                f"the tokenizer {tokenizer.num_ids} with mask {tokenizer.mask_id}: they must agree"
            )
        if len(labels) > denoiser.num_classes:
            raise UsageError(f"{len(labels)} labels for {denoiser.num_classes} classes: give the denoiser more classes")
        objective.check(denoiser)
        objective.attach(denoiser)
        objective.check_fixed(denoiser)
        self.denoiser = denoiser.eval()
        self.tokenizer = tokenizer
        self.objective = objective
        self.length = length
        self.packing = packing  # how texts were packed in training: one line per row, one text per row, one stream
        self.anchor = anchor  # the anchors of these rows, used for every canvas, too
        self.typical_length = typical_length  # mean length of the texts trained on; None: full windows
        self.drawing = drawing  # default options for drawing tokens
        self.separator = separator  # ends every prompt, as in training
        self.labels = tuple(labels)  # the words of the classes 0, 1, ...; empty if classes are numbers

    def __repr__(self) -> str:
        network = type(getattr(self.denoiser, "config", self.denoiser)).__name__
        vocabulary = f"{type(self.tokenizer).__name__} of {self.tokenizer.num_ids} ids"
        size = f"{self.num_parameters:,} parameters on {self.device}"
        return f"Model({self.objective!r}, {network} of {size}, {vocabulary}, length {self.length})"

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.denoiser.parameters()), torch.device("cpu"))

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.denoiser.parameters())

    @property
    def begin(self) -> list[int]:
        """The ids at the beginning of every row."""
        bos = self.tokenizer.bos_id
        if self.anchor == "none":  # a sentence's begin token is then noised and scored like any other
            return [bos] if self.packing == "sentence" and bos is not None else []
        return anchor_ids(self.tokenizer, self.anchor)[0]

    def anchor_of(self, packing: Policy) -> Anchor:
        """What frames rows of this packing: those of `wrap` are cut out of a stream, so only a model that knows no
        others, as an encoder, has them framed."""
        return self.anchor if packing != "wrap" or not self.tokenizer.ends_texts else "none"

    @property
    def end(self) -> list[int]:
        """The ids at the end of every row, after the text's own end."""
        return anchor_ids(self.tokenizer, self.anchor)[1]

    def unframed(self, row: list[int]) -> list[int]:
        """A row without the anchors at its beginning and end.

        >>> model.unframed([*model.begin, 104, 105, *model.end])  # doctest: +SKIP
        [104, 105]
        """
        return row[len(self.begin) : len(row) - len(self.end)]

    @property
    def sampler(self) -> Sampler:
        """The default sampler: the objective's, with this model's drawing options."""
        return self.make_sampler()

    def make_sampler(self, name: str | None = None, /, **options: Any) -> Sampler:
        """The sampler of that name (see `unmask samplers`), or the model's own, bound to this model.

        What the options leave out is the model's: its noise, its way of drawing (`Model.drawing`), its window. Of a
        sampler around another, options that it does not know are the inner one's. The command line and the server make
        samplers in this way, too: same options and seed, same text.

        >>> model.make_sampler("block", size=16, steps=4).inner.steps  # doctest: +SKIP
        4
        """
        own = self.objective.sampler()
        made = make_sampler(name, options, own=own, drawing=self.drawing, window=self.length)
        check_accepts(made, self.objective.predictor(self.denoiser))
        return made.bind(self.process)

    def sampler_names(self) -> list[str]:
        """The names of the samplers that work with this model.

        >>> model.sampler_names()  # of an autoregressive model  # doctest: +SKIP
        ['left_to_right']
        """
        names = []
        for name in Sampler.room.names():
            with contextlib.suppress(UsageError):
                self.make_sampler(name)
                names.append(name)
        return names

    @property
    def process(self) -> Process | None:
        """The forward process that the model reverses, with its noise; None for an autoregressive model."""
        return self.objective.process(self.denoiser)

    def class_of(self, label: int | str | None) -> int | None:
        """The number of a class, which may be given by its word; unknown classes are refused.

        >>> model.class_of("positive")  # of a model trained with the labels negative and positive  # doctest: +SKIP
        1
        """
        if isinstance(label, str):
            if label in self.labels:
                return self.labels.index(label)
            if not is_number(label):
                hint = did_you_mean(label, self.labels) if self.labels else self._known_classes()
                raise UsageError(
                    "the label {label!r} is not among this model's classes: {hint}", label=label[:40], hint=Public(hint)
                )
            label = int(label)
        check_whole(label=label)
        if label is not None and not 0 <= label < self.denoiser.num_classes:
            raise UsageError(
                "the label {label} is not among this model's classes: {hint}",
                label=label,
                hint=Public(self._known_classes()),
            )
        return label

    def _known_classes(self) -> str:
        if not self.denoiser.num_classes:
            return "it knows none"
        words = f" ({', '.join(self.labels[:8])}{', ...' if len(self.labels) > 8 else ''})" if self.labels else ""
        return f"it knows 0 to {self.denoiser.num_classes - 1}{words}"

    # --- use (longer functions are in files of their own) ---

    generate = generate
    particles = particles

    def fill(
        self,
        text: str | Sequence[str],
        *,
        sampler: Sampler | None = None,
        seed: int = 0,
        constraint: Constraint | Sequence[Constraint] | None = None,
        label: int | str | None = None,
        guidance: float | None = None,
        watch: Watch | None = None,
        runners_up: int = 0,
    ) -> list[str]:
        """Texts with every gap filled: `[MASK]` is one token, `[MASK:5]` five. All else stays as it is.

        `[MASK:3..8]` is a gap of unknown length: every length is tried, the text of the smallest bound comes back.
        A constraint always holds, of each gap or, with over="text", of the whole text.

        >>> model.fill("for [MASK:4] in range([MASK:1..3]):")  # doctest: +SKIP
        """
        filled = fill(
            self,
            text,
            sampler=sampler,
            seed=seed,
            constraint=constraint,
            label=label,
            guidance=guidance,
            watch=watch,
            runners_up=runners_up,
        )
        return [one.text for one in filled]

    edit = edit
    refine = refine
    prompted = prompted

    def canvas(
        self,
        rows: list[list[int]],
        constraint: Constraint | Sequence[Constraint] | None = None,
        *,
        may_end: bool,
        seed: int = 0,
        key_B: Tensor | None = None,
        label: int | str | Sequence[int | str | None] | None = None,
        framed: bool = True,
    ) -> Canvas:
        """Rows of ids, masks where something is to be written. may_end: end-of-text is allowed. key_B: not by seed.
        label: the class of all rows, or of each. framed: the rows begin and end with `begin` and `end`, as parts of
        longer rows do not.

        >>> model.canvas([[100, 101, model.tokenizer.mask_id]], may_end=False)  # doctest: +SKIP
        """
        check_whole(seed=seed)
        check_constraint(constraint)
        tok = self.tokenizer
        may_end = may_end and tok.ends_texts
        canvas = Canvas.of_rows(rows, mask_id=tok.mask_id, pad_id=tok.eot_id, seed=seed)
        canvas = canvas if key_B is None else dataclasses.replace(canvas, key_B=key_B)
        forbidden = {*tok.never_ids()} if may_end else {*tok.never_ids(), tok.eot_id}
        each = isinstance(label, Sequence) and not isinstance(label, str)
        labels: list[Any] = list(cast(Any, label)) if each else [label] * len(rows)
        class_B = torch.tensor([-1 if one is None else one for one in map(self.class_of, labels)], device=self.device)
        automaton = None if constraint is None else compile_constraints(constraint, tok, may_end=may_end)
        return dataclasses.replace(
            canvas.to(self.device),
            label_B=None if all(one is None for one in labels) else class_B,
            forbidden=tuple(sorted(forbidden)),
            frame=(len(self.begin), len(self.end)) if framed else (0, 0),
            end_id=tok.eot_id if may_end else None,
            constraint=automaton,
        )

    def run(
        self,
        canvas: Canvas,
        sampler: Sampler | None = None,
        *,
        guidance: float | None = None,
        watch: Watch | None = None,
        runners_up: int = 0,
    ) -> list[list[int]]:
        """Write every mask of a canvas; returns its rows, each up to its own end.

        >>> model.run(model.canvas([[100, 101, model.tokenizer.mask_id]], may_end=False))  # doctest: +SKIP
        """
        tokens = canvas.tokens
        fitted = self.fit_sampler(sampler, tokens.shape[1])
        how: dict[str, Any] = {"objective": self.objective}
        how["guidance"] = None if guidance is None else Guidance(guidance)
        if watch is None:
            tokens = sample(self.denoiser, canvas, fitted, **how).tokens
        else:
            for step in steps(self.denoiser, canvas, fitted, **how, runners_up=runners_up):
                tokens = step.tokens_BL
                watch(without_frame(step, canvas.frame))
        return canvas.rows_of(tokens)

    def check_possible(self, canvas: Canvas, sampler: Sampler | None = None) -> None:
        """Raise an error if no assignment of the canvas's masks meets its constraint. The network is not called.

        >>> model.check_possible(model.canvas(rows, unmask.constraints.Length(most=3), may_end=False))  # doctest: +SKIP
        """
        constrained(self.fit_sampler(sampler, canvas.tokens.shape[1])).start(canvas)

    def fit_sampler(self, sampler: Sampler | None, length: int) -> Sampler:
        """The model's own sampler for None, wrapped in windows if the text is too long for one."""
        check_sampler(sampler)
        sampler = self.sampler if sampler is None else sampler.bind(self.process)
        if sampler.context is not None and sampler.context > self.length:
            raise UsageError(
                "a window of {context} is beyond the {length} tokens the model was trained on",
                context=sampler.context,
                length=Public(self.length),
            )
        if length <= self.length or sampler.context is not None:
            return sampler
        if sampler.left_to_right:
            raise UsageError(
                "length {length} is beyond the model's window of {window} tokens; ask for less",
                length=Public(length),
                window=Public(self.length),
            )
        return self.make_sampler("semi_ar", inner=sampler)

    # --- measure ---

    score = score
    logits = logits
    hidden = hidden
    predict = predict

    def canvas_bound(self, canvas: Canvas, scored_BL: Tensor, **how: Any) -> Bound:
        """The objective's bound of a canvas's rows, over the positions in scored_BL; used by `score`.

        >>> model.canvas_bound(canvas, canvas.valid_BL, num_samples=16).nats_B  # doctest: +SKIP
        """
        rows = (self.denoiser, canvas.tokens, canvas.valid_BL)
        return self.objective.bound(*rows, scored_BL=scored_BL, label_B=canvas.label_B, **how)

    # --- keep ---

    def save(self, folder: str | Path, *, weights: dict[str, Tensor] | None = None) -> None:
        """model.safetensors + config.json + tokenizer.json, written whole or not at all.

        A model that is there already is replaced; a folder with anything else in it is left alone.
        weights: in the place of the network's own, where this process does not hold them whole.

        >>> model.save("models/mine")  # doctest: +SKIP
        """
        folder = Path(folder)
        others = {p.name for p in folder.iterdir()} - {*FILES, ".DS_Store"} if folder.is_dir() else set()
        if others:
            raise UsageError(f"{folder} holds {min(others)}, which is no part of a model; give a folder of its own")
        with atomic_folder(folder) as tmp:
            write_folder(tmp, self, weights)


def load(
    name: str | Path, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> Model:
    """Load a model from a model folder, a run's folder or a built-in model's name. Nothing in a folder is executed.

    A folder of that name in the current directory takes precedence over a built-in model. `hf:NAME` is a model on the
    Hugging Face hub uploaded by `unmask push`; `hf:DIR` a folder written by `unmask export --format hf`.

    >>> load("stories", device="cpu")  # doctest: +SKIP
    """
    model, task = load_any(name, device=device, dtype=dtype)
    if task is not None:
        raise UsageError(
            f"{name} is fine-tuned for a {task.kind} and writes no text: use unmask classify, or unmask.load_classifier"
        )
    return model


def load_any(
    name: str | Path, *, device: str | torch.device | None = None, dtype: str | torch.dtype | None = None
) -> tuple[Model, Task | None]:
    """What `load` and `load_classifier` share: the model, and the task that it is fine-tuned for, if any."""
    make_current(on := pick_device(device))
    stored = _stored(str(name)) if str(name).startswith("hf:") else read_folder(_folder_of(name))
    stored.network.to(device=on, dtype=pick_dtype(dtype, on))
    told = {f.name: getattr(stored, f.name) for f in dataclasses.fields(stored) if f.name not in ("network", "task")}
    return Model(denoiser=stored.network, **told), stored.task


def _stored(name: str) -> Folder:
    from unmask.pretrained.registered import read_ours

    return read_ours(name)


def _folder_of(name: str | Path) -> Path:
    folder = find_folder(Path(name))
    if not (folder / "config.json").exists() and find_folder(folder / "model").is_dir():
        folder = find_folder(folder / "model")  # a run stores its model there
    if not folder.is_dir():
        folder = built_in_folder(str(name))
    if (folder / "recipe.json").exists() and not (folder / "config.json").exists():
        raise ModelFolderError(f"the run in {folder} has no model yet: go on with unmask train {folder} --resume")
    return folder
