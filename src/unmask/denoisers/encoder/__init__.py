"""Pretrained masked language models: BERT, RoBERTa, DistilBERT, ModernBERT, ELECTRA's generator, DeBERTa-v2, ESM-2."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from unmask.denoisers import Denoiser
from unmask.denoisers.encoder.heads import FAMILIES, config_of, hide_masks, make_model, parts_of
from unmask.denoisers.encoder.lora import adapt, is_low_rank, merged
from unmask.denoisers.encoder.settings import FamilyName, first_position, num_positions, read_settings
from unmask.denoisers.flat_rows import gather_positions, take_rows
from unmask.denoisers.network import Attend, LinearHead, Network, attending, check_labels, refuse_options
from unmask.errors import UsageError
from unmask.registry import check_fields


@dataclass(frozen=True, kw_only=True)
class Encoder(Denoiser):
    """An encoder of transformers with its own vocabulary head; `unmask train --init hf:PATH_OR_ID` fills this in.

    settings: what its config says, by the names it has there (see the reference); what is left out has a default.
    fixed: ids that are never predicted, such as [CLS] and [PAD]: their probability is 0 before the softmax.
    dropout: of all its dropouts. lora_rank: 0 trains all weights, a rank only low-rank changes of the blocks' linear
    maps, which count lora_alpha / lora_rank.
    """

    family: FamilyName = "bert"
    settings: dict[str, Any] | None = None
    fixed: tuple[int, ...] = ()
    dropout: float = 0.0
    lora_rank: int = 0
    lora_alpha: float = 16.0

    causal = False
    uses_level = False
    chosen_by_recipe = ("dropout", "lora_rank", "lora_alpha")

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(cast(object, self.settings), dict | None):
            raise UsageError("settings must be a table of the encoder's sizes")
        object.__setattr__(self, "settings", read_settings(self.family, self.settings or {}))
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout must lie in [0, 1), got {self.dropout}")
        if self.lora_rank < 0 or self.lora_rank > 1 << 12 or not self.lora_alpha > 0:
            raise UsageError(
                f"lora_rank must lie in 0..4096 and lora_alpha above 0, got {self.lora_rank} and {self.lora_alpha}"
            )
        if any(type(id) is not int for id in self.fixed) or list(self.fixed) != sorted({*self.fixed}):
            raise UsageError("fixed must be ids in rising order, each once")

    @property
    def framed(self) -> bool:
        return bool(self.fixed)

    @property
    def all_settings(self) -> dict[str, Any]:
        """Those given and the defaults of the others."""
        assert self.settings is not None
        return self.settings

    @property
    def positions(self) -> int:
        """The longest row that it can read."""
        return num_positions(self.family, self.all_settings)

    def check_start(self, *, num_ids: int, mask_id: int) -> None:
        """Its defaults are those of published encoders, which are large; who wants one so says a setting at least."""
        if self.settings != read_settings(self.family, {}):
            return
        with torch.device("meta"):
            size = sum(p.numel() for p in self.build(num_ids=num_ids, mask_id=mask_id).parameters())
        width, depth = ("dim", "n_layers") if self.family == "distilbert" else ("hidden_size", "num_hidden_layers")
        raise UsageError(
            f"denoiser = encoder without settings is a {self.family} of {size / 1e6:.0f} million parameters, begun "
            f"from nothing: give --init hf:PATH_OR_ID, or say its sizes, such as denoiser.settings.{width} and {depth}"
        )

    def build(self, *, num_ids: int, mask_id: int) -> EncoderNetwork:
        return EncoderNetwork(self, num_ids=num_ids, mask_id=mask_id)


class EncoderNetwork(Network):
    closed_I: Tensor

    def __init__(self, config: Encoder, *, num_ids: int, mask_id: int) -> None:
        super().__init__()
        self.config = config
        self.num_ids, self.mask_id = num_ids, mask_id
        pad = config.all_settings["pad_token_id"]
        if odd := [id for id in (*config.fixed, *([] if pad is None else [pad])) if not 0 <= id < num_ids]:
            raise UsageError(f"the encoder names the id {odd[0]}, the vocabulary has {num_ids}: they do not fit")
        if mask_id in config.fixed:
            raise UsageError(f"the mask's id {mask_id} is among the encoder's fixed ids: it could not be told apart")
        self.fixed_ids = config.fixed
        made = config_of(config.family, config.all_settings, num_ids=num_ids, mask_id=mask_id, dropout=config.dropout)
        self.encoder = make_model(config.family, made)
        if not config.all_settings.get("mask_embedding", True):
            hide_masks(self.encoder, mask_id)
        self.layers = parts_of(config.family, self.encoder).layers
        if config.lora_rank:
            adapt(self, self.layers, config.lora_rank, config.lora_alpha / config.lora_rank)
        self.width = int(parts_of(config.family, self.encoder).weight.shape[1])
        closed_I = torch.zeros(num_ids)
        closed_I[list(config.fixed)] = -torch.inf
        self.register_buffer("closed_I", closed_I, persistent=False)
        self._first = first_position(config.family, config.all_settings)
        self.tells_pairs = FAMILIES[config.family].pairs and config.all_settings["type_vocab_size"] > 1
        self._checkpoints = False

    def trunk(
        self,
        z: Tensor,
        level: Tensor | None = None,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        positions_BL: Tensor | None = None,
        cond: Tensor | None = None,
        cache: Any = None,
        span: tuple[int, int] | None = None,
        at_BK: Tensor | None = None,
    ) -> Tensor:
        refuse_options("encoder", positions_BL=positions_BL, cache=cache, span=span)
        h_BLD = self._encoded(z, attending(attend, valid_BL), cond)
        return self._transformed(h_BLD if at_BK is None else gather_positions(h_BLD, at_BK))

    def trunk_at(
        self,
        z: Tensor,
        level: Tensor | None,
        flat_N: Tensor,
        *,
        valid_BL: Tensor | None = None,
        attend: Attend | None = None,
        cond: Tensor | None = None,
        second_BL: Tensor | None = None,
    ) -> Tensor:
        """The head's transform is asked for the chosen positions alone."""
        h_BLD = self._encoded(z, attending(attend, valid_BL), cond, second_BL)
        return self._transformed(take_rows(h_BLD.flatten(0, 1), flat_N))

    def _encoded(self, z: Tensor, attend: Attend, cond: Tensor | None, second_BL: Tensor | None = None) -> Tensor:
        refuse_options("encoder", mask=attend.mask, blocks=attend.blocks)
        refuse_options("encoder", causal=attend.causal or None, back=attend.back or None)
        check_labels(cond, self.num_classes)
        if z.is_floating_point():
            raise UsageError("the denoiser encoder reads tokens, not vectors: use an objective whose states are tokens")
        if z.shape[1] > self.config.positions:
            raise UsageError(f"the encoder reads at most {self.config.positions} tokens, got {z.shape[1]}")
        if self.checkpoint_activations != self._checkpoints:
            self._checkpoint(self.checkpoint_activations)
        options: dict[str, Any] = {"attention_mask": None if attend.valid_BL is None else attend.valid_BL.long()}
        # Its own numbers would count what is not padding by ids; here that is said by valid_BL.
        options["position_ids"] = torch.arange(self._first, self._first + z.shape[1], device=z.device).expand(z.shape)
        if FAMILIES[self.config.family].types:
            options["token_type_ids"] = torch.zeros_like(z) if second_BL is None else second_BL.to(z.dtype)
        h_BLD: Tensor = self._parts.trunk(input_ids=z, **options).last_hidden_state
        return h_BLD

    @property
    def _parts(self) -> Any:
        return parts_of(self.config.family, self.encoder)  # of the weights as they are now

    def _transformed(self, h: Tensor) -> Tensor:
        made: Tensor = self._parts.transform(h)
        return made

    def _checkpoint(self, wanted: bool) -> None:
        if wanted:
            self.encoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        else:
            self.encoder.gradient_checkpointing_disable()
        self._checkpoints = wanted

    def head(self, h_ND: Tensor) -> Tensor:
        linear = self.head_linear()
        return nn.functional.linear(h_ND, linear.weight, linear.bias)

    def head_parameters(self) -> list[nn.Parameter]:
        return [p for p in self._parts[2:4] if p is not None]

    def head_linear(self) -> LinearHead:
        """What is never predicted has a bias of -inf: all softmaxes are over the other ids."""
        _, _, weight, bias, _ = self._parts
        return LinearHead(
            weight, self.closed_I.to(weight.dtype) if bias is None else bias + self.closed_I.to(bias.dtype)
        )

    def parts(self) -> list[nn.Module]:
        return self.layers

    def matrices(self) -> dict[str, int]:
        """The layers' linear maps; embeddings, those of positions among them, and the head are none."""
        if self.config.lora_rank:
            return {}
        maps = {
            id(module.weight) for layer in self.layers for module in layer.modules() if isinstance(module, nn.Linear)
        }
        stacked = FAMILIES[self.config.family].stacked
        return {
            name: next((num for ending, num in stacked.items() if name.endswith(ending)), 1)
            for name, p in self.named_parameters()
            if id(p) in maps
        }

    def begins_anew(self) -> dict[str, Tensor]:
        """Low-rank changes, and tables that are made from the settings where nobody has kept others."""
        own, parameters = self.state_dict(), dict(self.named_parameters())
        tables = [name for name, _ in self.named_buffers() if name in own and not name.startswith("objective.")]
        return {name: own[name] for name in (*filter(is_low_rank, parameters), *tables)}

    def saved(self, weights: dict[str, Tensor]) -> tuple[Denoiser, dict[str, Tensor]]:
        """Low-rank changes are merged: a model's folder holds a plain encoder."""
        if not self.config.lora_rank:
            return self.config, weights
        plain = replace(self.config, lora_rank=0)
        return plain, merged(weights, self.config.lora_alpha / self.config.lora_rank)
