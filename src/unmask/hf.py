"""Our models in transformers: `import unmask.hf` registers them with its Auto classes, without trust_remote_code.

>>> import unmask.hf, transformers  # doctest: +SKIP
>>> transformers.pipeline("fill-mask", model="stories-hf")("Once upon a [MASK]")  # doctest: +SKIP

Weights are read by our own reader, never by transformers': safetensors alone, every claim checked before it costs
memory, nothing executed.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from unmask.denoisers import Denoiser
from unmask.denoisers.network import Network
from unmask.errors import MissingExtraError, ModelFolderError, UsageError
from unmask.objectives import Objective
from unmask.pretrained.registered import CAUSAL, MASKED, MODEL_TYPES, PREFIX, read_source
from unmask.pretrained.source import Folder, open_source
from unmask.reader import from_dict
from unmask.storage.atomic import atomic_file, atomic_text
from unmask.storage.model_folder import checked, unshared
from unmask.storage.tensor_file import write_tensors

try:
    transformers: Any = importlib.import_module("transformers")
    outputs: Any = importlib.import_module("transformers.modeling_outputs")
except ImportError:
    raise MissingExtraError("transformers", "hf", "unmask.hf") from None

if TYPE_CHECKING:  # mypy does not follow what transformers imports lazily

    class PretrainedConfig:
        def __init__(self, **settings: Any) -> None: ...
        def to_json_string(self, use_diff: bool = True) -> str: ...

    class PreTrainedModel(torch.nn.Module):
        def __init__(self, config: Any) -> None: ...
        def post_init(self) -> None: ...

    class GenerationMixin: ...
else:
    PretrainedConfig, PreTrainedModel = transformers.PretrainedConfig, transformers.PreTrainedModel
    GenerationMixin = transformers.GenerationMixin

IGNORED = -100  # the label of positions that are not scored, as in transformers


class UnmaskConfig(PretrainedConfig):
    """A model of ours as plain data.

    unmask: the content of config.json in our own model folder. unmask_tokenizer: whatever its tokenizer.json cannot
    express about our tokenizer. Both are untrusted: see `pretrained.registered`.
    """

    model_type = MODEL_TYPES[0]

    def __init__(
        self,
        unmask: dict[str, Any] | None = None,
        unmask_tokenizer: dict[str, Any] | None = None,
        mask_token_id: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.unmask, self.unmask_tokenizer, self.mask_token_id = unmask, unmask_tokenizer, mask_token_id


class _Registered(PreTrainedModel):
    """A `Network` of ours with the interface of transformers."""

    config_class = UnmaskConfig
    main_input_name = "input_ids"
    base_model_prefix = ""
    architectures: ClassVar[tuple[str, ...]]  # those of the folders that it reads

    def __init__(self, config: UnmaskConfig, network: Network | None = None) -> None:
        super().__init__(config)
        self.length = int(checked(config.unmask, "the config, under unmask")["length"])
        self.network = _fresh(config) if network is None else network
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Does nothing: our networks initialise their own weights."""

    @classmethod
    def from_pretrained(cls, name: str | Path, *args: Any, config: Any = None, **options: Any) -> Any:
        """Load from a folder or a name on the hub; supports the options dtype, revision and output_loading_info."""
        if args or options.get("quantization_config") is not None or options.get("state_dict") is not None:
            raise UsageError(f"{cls.__name__}.from_pretrained reads a folder's own weights, whole: give its name alone")
        revision = options.get("revision")
        at = f"@{revision}" if revision not in (None, "main") and not Path(name).is_dir() else ""
        source = open_source(f"{name}{at}")
        if not isinstance(source, Folder) or source.model_type not in MODEL_TYPES:
            raise UsageError(f"{name} is no folder of unmask export --format hf: its model_type is not unmask")
        if source.config.get("architectures") not in [[one] for one in cls.architectures]:
            raise UsageError(f"{name} holds no {cls.__name__}: its config says {source.config.get('architectures')}")
        network = read_source(source).network
        model = cls(config if isinstance(config, UnmaskConfig) else UnmaskConfig(**source.config), network).eval()
        dtype = options.get("dtype", options.get("torch_dtype"))
        if dtype not in (None, "auto"):
            model.to(dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        loading: dict[str, Any] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
        return (model, loading) if options.get("output_loading_info") else model

    def save_pretrained(
        self, folder: str | Path, *args: Any, state_dict: Mapping[str, Tensor] | None = None, **options: Any
    ) -> None:
        """Write config.json and model.safetensors; the tokenizer has its own save_pretrained."""
        if options.get("push_to_hub"):
            raise UsageError("save_pretrained writes a folder alone: use push_to_hub of the model, or unmask push")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        names = [PREFIX + name for name in unshared(self.network)]
        state = self.state_dict() if state_dict is None else state_dict
        with atomic_file(folder / "model.safetensors") as temp:
            write_tensors(temp, {name: state[name].detach() for name in names}, {"format": "pt"})
        config: Any = self.config
        config.architectures = [CAUSAL if self.network.causal else MASKED]
        said = json.loads(config.to_json_string(use_diff=True)) | {"model_type": MODEL_TYPES[0]}
        atomic_text(folder / "config.json", json.dumps(said, indent=2, sort_keys=True) + "\n")

    def vectors(self, z_BL: Tensor, valid_BL: Tensor | None, level_B: Tensor | None) -> Tensor:
        """[B, L, D], what the head reads. level_B: of a network that sees both sides; None: the share of masks."""
        if int(z_BL.min()) < 0 or int(z_BL.max()) >= self.network.num_ids:
            raise UsageError(f"ids lie in 0..{self.network.num_ids - 1}: this text is of another tokenizer")
        if self.network.causal:
            # Our row l predicts token l from those before it: we add a position, whose own token is never seen.
            longer_BL = torch.cat([z_BL, torch.full_like(z_BL[:, :1], 0)], dim=1)
            longer = None if valid_BL is None else torch.cat([valid_BL[:, :1], valid_BL], dim=1)
            return self.network.trunk(longer_BL, None, valid_BL=longer)[:, 1:]
        if level_B is None:
            valid = torch.ones_like(z_BL, dtype=torch.bool) if valid_BL is None else valid_BL
            level_B = ((z_BL == self.network.mask_id) & valid).sum(dim=1) / valid.sum(dim=1).clamp(min=1)
        return self.network.trunk(z_BL, level_B, valid_BL=valid_BL)

    def read(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        level_B: Tensor | None,
        output_hidden_states: bool | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """`vectors`, and where asked for the hidden states: what the first block reads, what each but the last writes,
        and the vectors themselves, as the models of transformers with a norm before the head have them."""
        valid_BL = self.fitting(input_ids, attention_mask)
        assert input_ids is not None
        config: Any = self.config
        if not (config.output_hidden_states if output_hidden_states is None else output_hidden_states):
            return self.vectors(input_ids, valid_BL, level_B), None
        both: tuple[Tensor, tuple[Tensor, ...]] = self._with_states(input_ids, valid_BL, level_B)
        return both

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # code that was compiled before calls no hook
    def _with_states(
        self, z_BL: Tensor, valid_BL: Tensor | None, level_B: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        (B, L), network = z_BL.shape, self.network
        with _heard(network) as heard:
            h_BLD = self.vectors(z_BL, valid_BL, level_B)
        begin = int(network.causal)  # its first position has read nothing
        if not heard or len(heard) != len(network.parts()) + 1 or any(t.ndim != 3 or len(t) != B for t in heard):
            raise UsageError(
                f"{type(network).__name__} has no vector per block and position of a text: leave out "
                "output_hidden_states, and take last_hidden_state of UnmaskModel"
            )
        return h_BLD, (*(x_BLD[:, begin : begin + L] for x_BLD in heard[:-1]), h_BLD)

    def logits(self, h_BLD: Tensor) -> Tensor:
        """[B, L, I], with the smallest finite value for the mask, which none of our models predicts."""
        logits_BLI = self.network.head(h_BLD.flatten(0, 1)).view(*h_BLD.shape[:2], -1)
        never = torch.arange(self.network.num_ids, device=logits_BLI.device) == self.network.mask_id
        return logits_BLI.masked_fill(never, torch.finfo(logits_BLI.dtype).min)

    def fitting(self, input_ids: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """The mask of positions that are not padding; None if there is no padding."""
        if input_ids is None or input_ids.ndim != 2 or not input_ids.numel():
            raise UsageError(f"{type(self).__name__} reads input_ids, a row of ids for each text")
        if input_ids.shape[1] > self.length:
            raise UsageError(f"{input_ids.shape[1]} tokens do not fit the model's window of {self.length}")
        if attention_mask is None or bool(attention_mask.all()):
            return None
        valid_BL = attention_mask.bool()
        if valid_BL.shape != input_ids.shape or bool((valid_BL[:, 1:] & ~valid_BL[:, :-1]).any()):
            raise UsageError("padding stands at the end of a row: set tokenizer.padding_side = 'right'")
        return valid_BL


@contextmanager
def _heard(network: Network) -> Iterator[list[Tensor]]:
    """What the first block reads and what each block writes, inside the context; empty if there are no blocks."""
    heard: list[Tensor] = []
    listener = threading.get_ident()

    def note(*values: Any) -> None:
        if threading.get_ident() == listener:  # other threads may use the network meanwhile
            heard.extend(value for value in values[:1] if isinstance(value, Tensor))

    parts = network.parts()
    hooks = [part.register_forward_pre_hook(lambda _, given: note(*given)) for part in parts[:1]]
    hooks += [part.register_forward_hook(lambda _, given, made: note(made)) for part in parts]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


class UnmaskModel(_Registered):
    """The network without its head: a vector per position, as in `Model.hidden`. That of an autoregressive network at l
    has seen the tokens up to l. level: see `UnmaskForMaskedLM`.
    """

    architectures = (MASKED, CAUSAL)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        level: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> Any:
        h_BLD, states = self.read(input_ids, attention_mask, level, output_hidden_states)
        return _output(outputs.BaseModelOutput(last_hidden_state=h_BLD, hidden_states=states), return_dict)


class UnmaskForMaskedLM(_Registered):
    """The network at every position: at a mask, log x_θ of what stands there, by a softmax of the logits.

    A network that is conditioned on the noise level is told the share of masks among the row's tokens, as by
    `Model.logits` and samplers without a clock; one without time conditioning looks at none. level: another one, [B].
    """

    architectures = (MASKED,)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        level: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> Any:
        h_BLD, states = self.read(input_ids, attention_mask, level, output_hidden_states)
        logits_BLI = self.logits(h_BLD)
        loss = None if labels is None else _loss(logits_BLI, labels)
        return _output(outputs.MaskedLMOutput(loss=loss, logits=logits_BLI, hidden_states=states), return_dict)


class UnmaskForCausalLM(_Registered, GenerationMixin):
    """An autoregressive network: row l of the logits predicts token l + 1, as in transformers. There is no cache."""

    architectures = (CAUSAL,)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:  # generate() checks this before it creates a cache
        return False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> Any:
        h_BLD, states = self.read(input_ids, attention_mask, None, output_hidden_states)
        logits_BLI = self.logits(h_BLD)
        loss = None if labels is None else _loss(logits_BLI[:, :-1], labels[:, 1:])
        return _output(outputs.CausalLMOutput(loss=loss, logits=logits_BLI, hidden_states=states), return_dict)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **ignored: Any,
    ) -> dict[str, Any]:
        asked = {"output_hidden_states": output_hidden_states}
        return {"input_ids": input_ids, "attention_mask": attention_mask, **asked}


def _loss(logits_BLI: Tensor, labels_BL: Tensor) -> Tensor:
    return cross_entropy(logits_BLI.flatten(0, 1).float(), labels_BL.flatten(), ignore_index=IGNORED)


def _output(output: Any, return_dict: bool | None) -> Any:
    return output.to_tuple() if return_dict is False else output


def _fresh(config: UnmaskConfig) -> Network:
    """The network of a config, freshly initialised, for training in transformers."""
    described = checked(config.unmask, "the config, under unmask")
    if "task" in described:
        raise ModelFolderError("the config is of a model with a task head, which has no class in transformers")
    denoiser: Any = from_dict(Denoiser, described["denoiser"], "denoiser", saved=True)
    objective: Any = from_dict(Objective, described["objective"], "objective", saved=True)
    network: Network = denoiser.build(num_ids=described["num_ids"], mask_id=described["mask_id"])
    denoiser.describe(network)
    objective.attach(network)
    return network


transformers.AutoConfig.register(MODEL_TYPES[0], UnmaskConfig, exist_ok=True)
transformers.AutoModel.register(UnmaskConfig, UnmaskModel, exist_ok=True)
transformers.AutoModelForMaskedLM.register(UnmaskConfig, UnmaskForMaskedLM, exist_ok=True)
transformers.AutoModelForCausalLM.register(UnmaskConfig, UnmaskForCausalLM, exist_ok=True)
assert (UnmaskForMaskedLM.__name__, UnmaskForCausalLM.__name__) == (MASKED, CAUSAL)
