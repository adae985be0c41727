"""An attentional LSTM sequence-to-sequence model: the autoregressive energy of ENGINE's first table.

Tu et al. 2020, section 4.2: a bidirectional LSTM reads the source, an LSTM writes the target, and every word looks back
at the source through the bilinear attention of Luong et al. (2015).
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
    """Sizes of the model; the defaults are the paper's.

    Args:
        d_model: width of the word embeddings.
        encoder_units: of the encoder, in each direction.
        decoder_units: of the decoder.
    """

    model_type = "deqnar_recurrent"

    vocab_size: int = 32000
    d_model: int = 512
    encoder_units: int = 512
    decoder_units: int = 768
    encoder_layers: int = 2
    decoder_layers: int = 2
    dropout: float | int = 0.1
    max_position_embeddings: int = 1024  # the longest text; an LSTM has no other bound
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    decoder_start_token_id: int | None = 1


class RecurrentEncoder(nn.Module):
    def __init__(self, config: RecurrentConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        self.config, self.embedding = config, embedding
        between = config.dropout if config.encoder_layers > 1 else 0.0
        self.recurrence = nn.LSTM(
            config.d_model,
            config.encoder_units,
            config.encoder_layers,
            batch_first=True,
            bidirectional=True,
            dropout=between,
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any) -> BaseModelOutput:
        """rows × source × 2·units; zeros at padding, which is not read in either direction."""
        mask = input_ids != self.config.pad_token_id if attention_mask is None else attention_mask.bool()
        hidden = functional.dropout(self.embedding(input_ids), self.config.dropout, self.training)
        packed = pack_padded_sequence(hidden, mask.sum(dim=1).cpu(), batch_first=True, enforce_sorted=False)
        width = input_ids.shape[1]
        hidden, _ = pad_packed_sequence(self.recurrence(packed)[0], batch_first=True, total_length=width)
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
    """Encoder, decoder and attention, without the head that reads words."""

    _tied_weights_keys = {"encoder.embedding.weight": "shared.weight"}

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        self.shared = nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)
        self.encoder = RecurrentEncoder(config, self.shared)
        between = config.dropout if config.decoder_layers > 1 else 0.0
        self.decoder = nn.LSTM(
            config.d_model, config.decoder_units, config.decoder_layers, batch_first=True, dropout=between
        )
        memory = 2 * config.encoder_units
        self.bridge = nn.Linear(memory, config.decoder_layers * config.decoder_units)
        self.attention = nn.Linear(memory, config.decoder_units, bias=False)
        self.combine = nn.Linear(memory + config.decoder_units, config.d_model, bias=False)
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
        **unused: Any,
    ) -> Seq2SeqModelOutput:
        """Features of every target position: rows × target × width.

        h_0 = tanh(W_b·mean(m)), h_t = LSTM(h_{t−1}, y_{t−1}), a_ts ∝ exp(h_tᵀ W m_s), tanh(W_c [Σ_s a_ts m_s; h_t]).
        """
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask)
        memory = encoder_outputs[0]
        if attention_mask is None:
            attention_mask = torch.ones(memory.shape[:2], device=memory.device)
        if decoder_inputs_embeds is None:
            decoder_inputs_embeds = self.shared(decoder_input_ids)
        mask = attention_mask.bool()
        mean = memory.sum(dim=1) / mask.sum(dim=1, keepdim=True)  # padding is zero
        first = (
            torch.tanh(self.bridge(mean)).unflatten(1, (self.config.decoder_layers, -1)).transpose(0, 1).contiguous()
        )
        inputs = functional.dropout(decoder_inputs_embeds, self.config.dropout, self.training)
        hidden, _ = self.decoder(inputs, (first, torch.zeros_like(first)))
        scores = hidden @ self.attention(memory).mT  # rows, target, source
        scores = scores.masked_fill(~mask[:, None], torch.finfo(scores.dtype).min)
        hidden = torch.tanh(self.combine(torch.cat([scores.softmax(dim=-1) @ memory, hidden], dim=-1)))
        hidden = functional.dropout(hidden, self.config.dropout, self.training)
        return Seq2SeqModelOutput(last_hidden_state=hidden, encoder_last_hidden_state=memory)


class RecurrentForConditionalGeneration(RecurrentPreTrainedModel, GenerationMixin):
    """The recurrent translation model; it generates by reading its own words again, without a cache."""

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

    def get_encoder(self, *unused: Any) -> RecurrentEncoder:
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
        **unused: Any,
    ) -> Seq2SeqLMOutput:
        """Logits of every next word, and the mean loss if there are labels (−100 at padding).

        The decoder reads from left to right, so what stands behind the end of a row changes nothing before it.
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
        **unused: Any,
    ) -> dict[str, Any]:
        return {
            "decoder_input_ids": decoder_input_ids,
            "attention_mask": attention_mask,
            "encoder_outputs": encoder_outputs,
        }


__all__ = ["RecurrentConfig", "RecurrentForConditionalGeneration", "RecurrentModel"]
