"""An ensemble: several encoder-decoder models with one vocabulary, whose predictions are averaged token by token.

    p(y_t | y_<t, x) = 1/N · Σ_n p_n(y_t | y_<t, x)

It is a model of transformers: it is saved and loaded like any other and translates with `generate`, so that it can be a
teacher of distillation or a reranker.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    EncoderDecoderCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

# What all members must agree on: what texts consist of and how a translation begins.
SHARED_FIELDS = ("vocab_size", "pad_token_id", "eos_token_id", "decoder_start_token_id")


@strict
class EnsembleConfig(PreTrainedConfig):
    """Configuration of an ensemble.

    Args:
        members: the configurations of its models, as dictionaries.
        num_hidden_layers: decoder layers of all members together; each has a place in the cache.
    """

    model_type = "deqnar_ensemble"

    members: list[dict[str, Any]] | None = None
    num_hidden_layers: int = 0
    vocab_size: int = 0
    max_position_embeddings: int = 512
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None

    @classmethod
    def of(cls, configs: Sequence[PreTrainedConfig]) -> "EnsembleConfig":
        """The configuration of an ensemble of models with these configurations."""
        first = configs[0]
        for name in SHARED_FIELDS:
            values = [getattr(config, name, None) for config in configs]
            if any(value != values[0] for value in values):
                raise ValueError(f"Models of an ensemble must have the same {name}, but they have {values}.")
        lengths = [getattr(config, "max_position_embeddings", None) for config in configs]
        return cls(
            members=[config.to_dict() for config in configs],
            num_hidden_layers=sum(decoder_layers(config) for config in configs),
            max_position_embeddings=min((length for length in lengths if length), default=512),
            bos_token_id=first.bos_token_id,
            **{name: getattr(first, name, None) for name in SHARED_FIELDS},
        )


def decoder_layers(config: PreTrainedConfig) -> int:
    """Layers of the decoder; Marian, Bart and T5 have different names for it."""
    return getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None) or 1


class EnsembleEncoder(nn.Module):
    """The encoders of all members; their states are concatenated along the width."""

    main_input_name = "input_ids"

    def __init__(self, members: Sequence[PreTrainedModel]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **unused: Any
    ) -> BaseModelOutput:
        encoders = [member.get_encoder() for member in self.members]
        states = [
            encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)[0] for encoder in encoders
        ]
        return BaseModelOutput(last_hidden_state=torch.cat(states, dim=-1))


class EnsembleForConditionalGeneration(PreTrainedModel, GenerationMixin):
    """Averages the predictions of its members.

    >>> ensemble = EnsembleForConditionalGeneration.of([first, second])  # doctest: +SKIP
    >>> ensemble.save_pretrained("runs/ensemble")  # doctest: +SKIP
    """

    config_class = EnsembleConfig
    main_input_name = "input_ids"

    def __init__(self, config: EnsembleConfig) -> None:
        super().__init__(config)
        configs = [AutoConfig.for_model(**settings) for settings in config.members or []]
        self.widths = [config.hidden_size for config in configs]
        for number, member_config in enumerate(configs):  # transformers finds tied weights in direct children only
            self.add_module(f"member_{number}", AutoModelForSeq2SeqLM.from_config(member_config))
        self._share_cache()
        self.post_init()

    @classmethod
    def of(cls, models: Sequence[PreTrainedModel]) -> "EnsembleForConditionalGeneration":
        """An ensemble with copies of the models' weights; it decodes with the generation config of the first one."""
        if len(models) < 2:
            raise ValueError(f"An ensemble has at least two models, not {len(models)}.")
        ensemble = cls(EnsembleConfig.of([model.config for model in models])).to(models[0].dtype)
        for member, model in zip(ensemble.members, models, strict=True):
            member.load_state_dict(model.state_dict())
        ensemble.generation_config = models[0].generation_config
        return ensemble.eval()

    @property
    def members(self) -> list[PreTrainedModel]:
        """The models whose predictions are averaged."""
        return [getattr(self, f"member_{number}") for number in range(len(self.config.members or []))]

    def _share_cache(self) -> None:
        """Give every decoder layer of all members its own place in one cache."""
        offset = 0
        for member in self.members:
            modules = member.get_decoder().modules()
            layers = [module for module in modules if getattr(module, "layer_idx", None) is not None]
            if not layers:
                raise ValueError(
                    f"{type(member).__name__} has no cache that members of an ensemble could share; use Marian, Bart, "
                    "T5 or similar models."
                )
            for layer in layers:
                layer.layer_idx += offset
            offset += decoder_layers(member.config)

    def get_encoder(self, modality: str | None = None) -> EnsembleEncoder:
        """All encoders as one module."""
        return EnsembleEncoder(self.members)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        **unused: Any,
    ) -> Seq2SeqLMOutput:
        """The logarithm of the averaged probabilities as logits, and with `labels` their cross-entropy."""
        if use_cache and past_key_values is None:
            past_key_values = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask)
        if labels is not None and decoder_input_ids is None:
            start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
            decoder_input_ids = torch.cat([start, labels[:, :-1].clamp_min(0)], dim=1)
        states = encoder_outputs[0].split(self.widths, dim=-1)
        log_probs = []
        # The first member comes last: its layers tell the others how many tokens the cache has.
        for member, state in reversed(list(zip(self.members, states, strict=True))):
            found = member(
                attention_mask=attention_mask,
                decoder_input_ids=decoder_input_ids,
                decoder_attention_mask=decoder_attention_mask,
                encoder_outputs=BaseModelOutput(last_hidden_state=state),
                past_key_values=past_key_values,
                use_cache=past_key_values is not None,
                return_dict=True,
            )
            log_probs.append(found.logits.float().log_softmax(dim=-1))
        logits = torch.stack(log_probs).logsumexp(dim=0) - math.log(len(log_probs))
        loss = None
        if labels is not None:
            loss = nn.functional.nll_loss(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return Seq2SeqLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values,
            encoder_last_hidden_state=encoder_outputs[0],
        )


__all__ = ["EnsembleConfig", "EnsembleForConditionalGeneration"]
