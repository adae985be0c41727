"""LSTM sequence-to-sequence model with attention: the autoregressive energy of the BiLSTM experiments in ENGINE.

Tu et al. 2020, section 4.2: a bidirectional LSTM encoder and an LSTM decoder with the bilinear attention of Luong et
al. (2015).
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput


@strict
class RecurrentConfig(PreTrainedConfig):
    """Configuration of the LSTM model. The defaults are those of ENGINE, section 4.2.

    Args:
        d_model: width of the token embeddings.
        encoder_units: hidden units of the encoder in each direction.
        decoder_units: hidden units of the decoder.
    """

    model_type = "deqnar_recurrent"

    vocab_size: int = 32000
    d_model: int = 512
    encoder_units: int = 512
    decoder_units: int = 768
    encoder_layers: int = 2
    decoder_layers: int = 2
    dropout: float | int = 0.1
    max_position_embeddings: int = 1024  # checked by callers; an LSTM has no positions
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1


class RecurrentEncoder(nn.Module):
    """Token embedding and bidirectional LSTM."""

    def __init__(self, config: RecurrentConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.config, self.embedding = config, embedding
        self.recurrence = nn.LSTM(
            config.d_model,
            config.encoder_units,
            config.encoder_layers,
            batch_first=True,
            bidirectional=True,
            dropout=layer_dropout(config.dropout, config.encoder_layers),
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> BaseModelOutput:
        """Encoder states, (batch, source, 2 · encoder_units). Padding is not read, and its states are zero."""
        mask = input_ids != self.config.pad_token_id if attention_mask is None else attention_mask.bool()
        hidden = functional.dropout(self.embedding(input_ids), self.config.dropout, self.training)
        packed = pack_padded_sequence(hidden, mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False)
        output, _ = self.recurrence(packed)
        hidden, _ = pad_packed_sequence(output, batch_first=True, total_length=input_ids.shape[1])
        return BaseModelOutput(last_hidden_state=hidden)


class RecurrentPreTrainedModel(PreTrainedModel):
    config_class = RecurrentConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    accepts_loss_kwargs = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.LSTM):
            bound = module.hidden_size**-0.5
            for weight in module.parameters():
                init.uniform_(weight, -bound, bound)
        elif isinstance(module, nn.Linear):
            init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)


class RecurrentModel(RecurrentPreTrainedModel):
    """Encoder, decoder and attention, without the projection to the vocabulary."""

    _tied_weights_keys = {"encoder.embedding.weight": "shared.weight"}

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)
        self.encoder = RecurrentEncoder(config, self.shared)
        self.decoder = nn.LSTM(
            config.d_model,
            config.decoder_units,
            config.decoder_layers,
            batch_first=True,
            dropout=layer_dropout(config.dropout, config.decoder_layers),
        )
        encoder_width = 2 * config.encoder_units
        self.bridge = nn.Linear(encoder_width, config.decoder_layers * config.decoder_units)
        self.attention = nn.Linear(encoder_width, config.decoder_units, bias=False)
        self.combine = nn.Linear(encoder_width + config.decoder_units, config.d_model, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.shared = self.encoder.embedding = value

    def get_encoder(self) -> RecurrentEncoder:
        return self.encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        **kwargs: Any,
    ) -> Seq2SeqModelOutput:
        """Decoder states of every target position, (batch, target, d_model).

        With encoder states m_s:

            h_0 = tanh(W_b·mean(m)),  h_t = LSTM(h_{t−1}, y_{t−1}),  a_ts ∝ exp(h_tᵀ W m_s),
            o_t = tanh(W_c [Σ_s a_ts m_s; h_t])
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        encoder_states = encoder_outputs[0]
        if attention_mask is None:
            attention_mask = torch.ones(encoder_states.shape[:2], device=encoder_states.device)
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.shared(decoder_input_ids)
        mask = attention_mask.bool()
        mean = encoder_states.sum(dim=1) / mask.sum(dim=1, keepdim=True)  # states of padding are zero
        initial = torch.tanh(self.bridge(mean)).unflatten(1, (self.config.decoder_layers, -1))
        initial = initial.transpose(0, 1).contiguous()  # (layers, batch, decoder_units)
        inputs = functional.dropout(decoder_inputs_embeds, self.config.dropout, self.training)
        hidden, _ = self.decoder(inputs, (initial, torch.zeros_like(initial)))
        scores = hidden @ self.attention(encoder_states).mT  # (batch, target, source)
        scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
        attended = scores.softmax(dim=-1) @ encoder_states
        hidden = torch.tanh(self.combine(torch.cat([attended, hidden], dim=-1)))
        hidden = functional.dropout(hidden, self.config.dropout, self.training)
        return Seq2SeqModelOutput(last_hidden_state=hidden, encoder_last_hidden_state=encoder_states)


class RecurrentForConditionalGeneration(RecurrentPreTrainedModel, GenerationMixin):
    """The LSTM translation model. Generation has no cache: each step runs the decoder over the full prefix."""

    _tied_weights_keys = {
        "lm_head.weight": "model.shared.weight",
        "model.encoder.embedding.weight": "model.shared.weight",
    }

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.model = RecurrentModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()
        self.generation_config.use_cache = False

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def get_encoder(self, *args: Any) -> RecurrentEncoder:
        return self.model.encoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of the next token at every position, and with `labels` (−100 at padding) the mean cross-entropy.

        `decoder_attention_mask` is ignored: the decoder is causal, so padding on the right does not change the logits
        before it.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
            start = torch.full_like(labels[:, :1], self.config.decoder_start_token_id)
            decoder_input_ids = torch.cat([start, labels[:, :-1]], dim=1).clamp_min(0)
        outputs = self.model(input_ids, attention_mask, decoder_input_ids, decoder_inputs_embeds, encoder_outputs)
        logits = self.lm_head(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=outputs.encoder_last_hidden_state)

    def prepare_inputs_for_generation(
        self,
        decoder_input_ids: Tensor,
        attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        return {
            "decoder_input_ids": decoder_input_ids,
            "attention_mask": attention_mask,
            "encoder_outputs": encoder_outputs,
        }


def layer_dropout(dropout: float, layers: int) -> float:
    """Dropout between LSTM layers; torch warns if it is set for a single layer."""
    return dropout if layers > 1 else 0.0


__all__ = ["RecurrentConfig", "RecurrentForConditionalGeneration", "RecurrentModel"]
