"""The model: encoder, transition and heads, and the path of a batch through them.

`prepare` encodes the source, `lay_out` makes a canvas, `solve` finds the fixed point of the transition on it and `read`
projects the result to the vocabulary. `forward` is these four calls and the loss.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput, can_return_tuple, logging

from .configuration_deqnar import DeqNarConfig
from .conversion_deqnar import backbone_weights, config_from_teacher, load_teacher_and_tokenizer, weights_from_teacher
from .fixed_point import FixedPoint
from .generation_deqnar import DeqNarGenerationConfig, DeqNarGenerationMixin
from .layers_deqnar import DecoderLayer, Encoder, Positions, Record, RecurrentStack, additive_mask
from .losses_deqnar import Targets
from .ngrams import Ngrams
from .refinement_deqnar import Canvas, RefinementMixin, Source
from .shortlist import UNKNOWN, Shortlist
from .stability import rescale_weights, rescaling_of
from .transition_deqnar import BoundTransition, Context, Feedback, transition_class

if TYPE_CHECKING:  # a saved model carries the files that are mentioned here, and its config names this one
    from .pipeline_deqnar import DeqNarTranslationPipeline  # noqa: F401

logger = logging.get_logger(__name__)


@dataclass
class DeqNarModelOutput(ModelOutput):
    """Features at the equilibrium and statistics of the solve, one per row.

    `residual` and `converged` are None for `stacked` models, which are evaluated once. `decoder_hidden_states` are the
    input W·z + u of the decoder layers and the output of each in the evaluation at the equilibrium; the last of them is
    `last_hidden_state`.
    """

    last_hidden_state: Tensor | None = None
    state: Tensor | None = None
    nfe: Tensor | None = None
    residual: Tensor | None = None
    converged: Tensor | None = None
    canvas_mask: Tensor | None = None
    length_logits: Tensor | None = None
    latent_kl: Tensor | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None


@dataclass
class DeqNarSeq2SeqLMOutput(ModelOutput):
    """`DeqNarModelOutput` with the loss and the logits (rows × canvas × vocabulary)."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    last_hidden_state: Tensor | None = None
    state: Tensor | None = None
    nfe: Tensor | None = None
    residual: Tensor | None = None
    converged: Tensor | None = None
    canvas_mask: Tensor | None = None
    length_logits: Tensor | None = None
    latent_kl: Tensor | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_attentions: tuple[Tensor, ...] | None = None
    cross_attentions: tuple[Tensor, ...] | None = None
    encoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    encoder_attentions: tuple[Tensor, ...] | None = None


class Gaussian(nn.Linear):
    """Mean and logarithm of the deviation of a diagonal Gaussian, N(0, I) at first.

    Larger initial weights give an initial KL of hundreds of nats.
    """

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden).chunk(2, dim=-1)


class LatentHead(nn.Module):
    """Latent variables at source positions, added to what the decoder sees of the source (Gu and Kong 2021).

    p(z|x) is read from the encoder states; q(z|x, y) from a layer that also attends to the target. Training samples
    from q, evaluation with a target uses its mean, and without a target the prior mean is used.
    """

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__()
        self.free_bits = config.latent_free_bits
        self.prior = Gaussian(config.d_model, 2 * config.latent_dim)
        self.posterior_layer = DecoderLayer(config)
        self.posterior = Gaussian(config.d_model, 2 * config.latent_dim)
        self.lift = nn.Linear(config.latent_dim, config.d_model)

    def forward(
        self, encoder_states: Tensor, source_mask: Tensor, target: Tensor | None, target_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The encoder states with latents added, and KL(q‖p) of every row (None without a target)."""
        prior_mean, prior_log_deviation = self.prior(encoder_states)
        if target is None:
            return encoder_states + self.lift(prior_mean), None
        key, value = self.posterior_layer.cross_attention.project(target)
        masks = (additive_mask(source_mask, encoder_states.dtype), additive_mask(target_mask, encoder_states.dtype))
        hidden = self.posterior_layer(encoder_states, key, value, *masks, None, None, None)
        mean, log_deviation = self.posterior(hidden)
        sample = mean + torch.randn_like(mean) * log_deviation.exp() if self.training else mean
        # KL of two diagonal Gaussians: log(σp/σq) + (σq² + (μq − μp)²) / 2σp² − 1/2
        divergence = prior_log_deviation - log_deviation - 0.5
        spread = (2 * log_deviation).exp() + (mean - prior_mean).pow(2)
        divergence = (divergence + 0.5 * spread * (-2 * prior_log_deviation).exp()).sum(dim=-1)
        divergence = divergence.clamp_min(self.free_bits) if self.free_bits else divergence
        return encoder_states + self.lift(sample), (divergence * source_mask).sum(dim=1)


class InputHead(nn.Linear):
    """The log-odds that a position of the proxy input is masked; even at first (MPLE paper, appendix E.6).

    It reads the decoder's features of a canvas that is all `<mask>`. No training loss reaches it; it is fitted on
    frozen features.
    """

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__(config.d_model, 1)
        self.requires_grad_(False)

    def forward(self, features: Tensor) -> Tensor:
        """rows × canvas."""
        return super().forward(features)[..., 0]


def copy_uniformly(encoder_states: Tensor, source_lengths: Tensor, canvas_lengths: Tensor, canvas: int) -> Tensor:
    """Position t of a canvas of length N receives source position ⌊t·S/N⌋: (batch, canvas, d_model)."""
    position = torch.arange(canvas, device=encoder_states.device)[None]
    index = position * source_lengths[:, None] // canvas_lengths[:, None]
    index = torch.minimum(index, source_lengths[:, None] - 1)  # the value at padding does not matter
    return encoder_states.gather(1, index[:, :, None].expand(-1, -1, encoder_states.shape[2]))


def refuse_decoder_embeddings(embeddings: Tensor | None) -> None:
    """Raise an error unless `decoder_inputs_embeds` is `None`: a canvas consists of tokens."""
    if embeddings is not None:
        raise ValueError("The canvas consists of tokens; pass decoder_input_ids instead of decoder_inputs_embeds.")


class SourceEncoder(nn.Module):
    """The encoder with its embedding, as `get_encoder` returns it; it shares the model's modules."""

    def __init__(self, core: "DeqNarModel") -> None:
        super().__init__()
        self.embedding, self.positions, self.encoder = core.shared, core.source_positions, core.encoder
        self.scale, self.check = core.embedding_scale, core.check_source

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutput:
        """Encoder states; they can be passed to the model as `encoder_outputs`."""
        mask = self.check(input_ids, attention_mask, None if inputs_embeds is None else (inputs_embeds,))
        hidden = self.embedding(input_ids) * self.scale if inputs_embeds is None else inputs_embeds
        return BaseModelOutput(self.encoder(self.positions(hidden), additive_mask(mask, hidden.dtype), None))


class DeqNarPreTrainedModel(PreTrainedModel):
    config_class = DeqNarConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True
    # DecoderLayer is left out: its keys and values are projected once per sentence, outside its forward.
    _no_split_modules = ["EncoderLayer"]

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__(config)
        self.supports_gradient_checkpointing = not config.is_recurrent  # an LSTM has no layer to recompute

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *arguments: Any, **options: Any) -> Any:
        """As in transformers; but the weight norm must be the checkpoint's, whose matrices are stored in its form."""
        wants_info = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *arguments, output_loading_info=True, **options
        )
        if any(".parametrizations." in key for key in (*info["missing_keys"], *info["unexpected_keys"])):
            raise ValueError(
                f"{pretrained_model_name_or_path} was not saved with weight_norm='{model.config.weight_norm}'; load it "
                "as it was saved, and change it with stability.remove_rescaling and stability.rescale_weights."
            )
        return (model, info) if wants_info else model

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers; a shortlist and n-grams are extended to new tokens, but cannot shrink."""
        core, known = self.base_model, self.config.vocab_size
        tables = [table for table in (core.shortlist, core.ngrams) if table is not None]
        wanted, multiple = known if new_num_tokens is None else new_num_tokens, pad_to_multiple_of or 1
        if tables and math.ceil(wanted / multiple) * multiple < known:
            raise ValueError(
                f"A shortlist or n-grams cover all {known:,} tokens, so that {wanted:,} are too few. Load the model "
                "without them (shortlist_size=0, shortlist_common=0, ngram_order=0, ngram_entries=0) to remove tokens."
            )
        embedding = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        for table in tables:
            table.extend(self.config.vocab_size)
        if core.shortlist is not None:
            self.config.shortlist_common = len(core.shortlist.common)
        return embedding

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (Gaussian, InputHead, Feedback)):
            init.zeros_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            rescaling = rescaling_of(module)
            weight = module.weight if rescaling is None else rescaling[1]
            init.xavier_uniform_(weight, gain=getattr(module, "initial_gain", 1.0))
            if module.bias is not None:
                init.zeros_(module.bias)
            if rescaling is not None:
                for name, value in rescaling[0].starting_values(weight).items():
                    init.copy_(getattr(rescaling[0], name), value)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.d_model**-0.5)
        elif isinstance(module, nn.LSTM):
            bound = module.hidden_size**-0.5
            for weight in module.parameters():
                init.uniform_(weight, -bound, bound)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, Shortlist):
            init.constant_(module.companions, UNKNOWN)
            init.constant_(module.common, UNKNOWN)
        elif isinstance(module, Ngrams):
            for table in module.buffers():
                init.zeros_(table)


class DeqNarModel(RefinementMixin, DeqNarPreTrainedModel):
    """Encoder, transition and length, latent and input heads, without the head that reads tokens."""

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__(config)
        config.check()  # fields may have been overridden since the configuration was made
        self.shared = nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)
        self.embedding_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.source_positions, self.canvas_positions = Positions(config), Positions(config)
        self.encoder = RecurrentStack(config, config.encoder_layers) if config.is_recurrent else Encoder(config)
        self.transition = transition_class(config)(config, config.decoder_depth)
        rescale_weights(self.transition, config.weight_norm, config.weight_norm_clip)
        self.length_head = self.length_model.make_head()
        self.link_head = self.length_model.make_links()
        self.latent_head = LatentHead(config) if config.latent == "vae" else None
        self.input_head = InputHead(config) if config.input_predictor else None
        self.shortlist = Shortlist(config) if config.shortlist_size else None
        self.ngrams = (
            Ngrams(config.vocab_size, config.ngram_order, config.ngram_entries) if config.ngram_order else None
        )
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.shared

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.shared = value

    def get_encoder(self, modality: str | None = None) -> SourceEncoder:
        """The encoder as a module that takes `input_ids` and `attention_mask`."""
        return SourceEncoder(self)

    def embed(self, tokens: Tensor) -> Tensor:
        """Scaled embeddings of canvas tokens plus positions: (batch, length, d_model)."""
        return self.canvas_positions(self.shared(tokens) * self.embedding_scale)

    def prepare(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        labels: Tensor | None = None,
        shortlist: bool = False,
        record: Record | None = None,
    ) -> Source:
        """Encode the source and project it to the keys and values of the decoder.

        Args:
            inputs_embeds: embeddings of the source, (batch, source, d_model), instead of `input_ids`.
            encoder_outputs: the result of an earlier call of the encoder, which is then not run again.
            labels: targets for the posterior of latent variables; without them the mean of the prior is used.
            shortlist: whether the model's shortlist limits what is predicted.
            record: collects hidden states and attentions of the encoder.
        """
        given = (inputs_embeds,) if encoder_outputs is None and inputs_embeds is not None else encoder_outputs
        source_mask = self.check_source(input_ids, attention_mask, given)
        label_mask = None if labels is None else self.check_labels(labels)
        source = self.encode_source(input_ids, source_mask, inputs_embeds, encoder_outputs, labels, label_mask, record)
        if shortlist and self.shortlist is not None:
            source.words = self.shortlist(input_ids, source_mask)
        return source

    def encode_source(
        self,
        input_ids: Tensor | None,
        source_mask: Tensor | None,
        inputs_embeds: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        labels: Tensor | None = None,
        label_mask: Tensor | None = None,
        record: Record | None = None,
    ) -> Source:
        """`prepare` without its checks, which cannot be part of an exported graph."""
        if encoder_outputs is None:
            hidden = self.shared(input_ids) * self.embedding_scale if inputs_embeds is None else inputs_embeds
            hidden = self.source_positions(hidden)
            encoded = self.encoder(hidden, additive_mask(source_mask, hidden.dtype), record)
        else:
            encoded = encoder_outputs[0]
        length_logits = None if self.length_head is None else self.length_head(encoded, source_mask)
        states, latent_kl = encoded, None
        if self.latent_head is not None:
            target = None if labels is None else self.embed(labels.clamp_min(0))
            states, latent_kl = self.latent_head(encoded, source_mask, target, label_mask)
        keys_values = [layer.cross_attention.project(states) for layer in self.transition.layers]
        return Source(source_mask, states, keys_values, length_logits, latent_kl, encoded)

    def with_latents(self, source: Source, labels: Tensor) -> Source:
        """A prepared source with latents of the posterior of these labels; unchanged if the model has no latents."""
        if self.latent_head is None:
            return source
        encoded = (source.encoder_last_hidden_state,)
        return self.encode_source(None, source.mask, None, encoded, labels, self.check_labels(labels))

    def inject(
        self, tokens: Tensor, canvas_mask: Tensor | None, encoder_states: Tensor | None, source_mask: Tensor | None
    ) -> Tensor:
        """u, the input of every evaluation: tokens, positions and, if configured, the copied source."""
        injection = self.embed(tokens)
        if self.config.copies_source:
            lengths = (source_mask.sum(dim=1), canvas_mask.sum(dim=1))
            injection = injection + copy_uniformly(encoder_states, *lengths, tokens.shape[1])
        return functional.dropout(injection, self.config.dropout, self.training)

    def bind(self, source: Source, canvas: Canvas) -> BoundTransition:
        """The transition as a function of the state alone; dropout masks are drawn here."""
        injection = self.inject(canvas.tokens, canvas.mask, source.encoder_states, source.mask)
        embedding = self.shared.weight
        if source.words is not None and self.transition.predicts_tokens:
            embedding = embedding[source.words.tokens]
        context = Context(
            injection=injection,
            canvas_mask=additive_mask(canvas.mask, injection.dtype),
            keys_values=source.keys_values,
            source_mask=additive_mask(source.mask, injection.dtype),
            source_lengths=source.lengths,
            dropout_masks=self.transition.draw_dropout_masks(injection),
            embedding=embedding,
            scale=self.embedding_scale,
            words=source.words,
            links=self.link_head,
        )
        return BoundTransition(self.transition, context)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        initial_state: Tensor | None = None,
        max_nfe: int | None = None,
        tol: float | None = None,
        solver: str | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        decoder_inputs_embeds: Tensor | None = None,
    ) -> DeqNarModelOutput:
        """Encode, lay out a canvas and solve for its equilibrium.

        Args:
            decoder_input_ids: the canvas: `<mask>` where a token is to be found, tokens where it is known, padding
                behind the end. Without it the canvas is all `<mask>`, with the length that the length model chooses.
            encoder_outputs: the result of an earlier call of the encoder, which is then not run again.
            inputs_embeds: embeddings of the source instead of `input_ids`.
            labels: targets, −100 at padding. Only their lengths are used, and their tokens for a latent posterior.
            initial_state: where the solver starts; zeros if not given, so that the first evaluation sees the canvas.
            max_nfe, tol, solver: override the configuration for this call.
            use_cache: accepted for compatibility; a parallel decoder has no cache.
            decoder_inputs_embeds: accepted for compatibility with PEFT and must be `None`; see `decoder_input_ids`.
        """
        refuse_decoder_embeddings(decoder_inputs_embeds)
        source, canvas, found, records = self._solve_batch(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            labels=labels,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            initial_state=initial_state,
            max_nfe=max_nfe,
            tol=tol,
            solver=solver,
        )
        return DeqNarModelOutput(**self._output_fields(source, canvas, found, *records))

    def _solve_batch(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input_ids: Tensor | None,
        decoder_attention_mask: Tensor | None,
        *,
        encoder_outputs: BaseModelOutput | None,
        inputs_embeds: Tensor | None,
        labels: Tensor | None,
        output_attentions: bool | None,
        output_hidden_states: bool | None,
        **options: Any,
    ) -> tuple[Source, Canvas, FixedPoint, tuple[Record | None, Record | None]]:
        """`prepare`, `lay_out` and `solve` for the arguments of `forward`."""
        attentions = self.config.output_attentions if output_attentions is None else output_attentions
        hidden_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        records = tuple(
            Record.empty(hidden_states=hidden_states, attentions=attentions) if hidden_states or attentions else None
            for _ in range(2)
        )
        source = self.prepare(
            input_ids,
            attention_mask,
            inputs_embeds=inputs_embeds,
            encoder_outputs=encoder_outputs,
            labels=labels,
            record=records[0],
        )
        canvas = self.lay_out(source, labels, tokens=decoder_input_ids)
        if decoder_attention_mask is not None:
            canvas = Canvas(canvas.tokens, self.check_canvas(canvas.tokens, decoder_attention_mask))
        found = self.solve(source, canvas, record=records[1], **options)
        logits = source.length_logits
        if not found.value.isfinite().all() or not (logits is None or logits.isfinite().all()):
            raise FloatingPointError("The model's features are not finite; check the weights for NaN or infinity.")
        return source, canvas, found, records

    @staticmethod
    def _output_fields(
        source: Source, canvas: Canvas, found: FixedPoint, encoder: Record | None, decoder: Record | None
    ) -> dict[str, Any]:
        """The fields of `DeqNarModelOutput`."""
        fields = {
            "last_hidden_state": found.value,
            "state": found.state,
            "nfe": found.nfe,
            "residual": found.residual,
            "converged": found.converged,
            "canvas_mask": canvas.mask,
            "length_logits": source.length_logits,
            "latent_kl": source.latent_kl,
            "encoder_last_hidden_state": source.encoder_last_hidden_state,
        }
        if encoder is not None and encoder.wants_hidden_states:
            fields["encoder_hidden_states"] = tuple(encoder.hidden_states) or None
            fields["decoder_hidden_states"] = (*decoder.hidden_states, found.value)
        if encoder is not None and encoder.wants_attentions:
            fields["encoder_attentions"] = tuple(encoder.self_attentions) or None
            fields["decoder_attentions"] = tuple(decoder.self_attentions)
            fields["cross_attentions"] = tuple(decoder.cross_attentions)
        return fields


class DeqNarForConditionalGeneration(DeqNarPreTrainedModel, DeqNarGenerationMixin):
    """The translation model: `DeqNarModel` with a projection of the equilibrium to the vocabulary."""

    generation_config_class = DeqNarGenerationConfig
    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__(config)
        self.model = DeqNarModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_teacher(
        cls, teacher: PreTrainedModel | str | os.PathLike, tokenizer: Any = None, **overrides: Any
    ) -> "DeqNarForConditionalGeneration":
        """A student initialised with the encoder, embeddings and decoder layers of a Marian or Bart model.

        Its encoder computes what the teacher's does. The decoder's layers are the teacher's first ones (all of them if
        the student has as many), without the causal mask. A feed-forward network may be wider than the teacher's and
        computes the same at first.

        Args:
            teacher: a model, or the directory or hub id of one.
            tokenizer: the teacher's; it must have <mask> and <blank>. Loaded with the teacher if that is given by name.
            overrides: fields of the student's configuration, such as `length="ctc"` or `refinement="stacked"`.
        """
        teacher, tokenizer = load_teacher_and_tokenizer(teacher, tokenizer)
        model = cls(config_from_teacher(teacher.config, tokenizer, overrides))
        return model._take(weights_from_teacher(teacher, model.config), teacher.dtype)

    @classmethod
    def from_backbone(
        cls, backbone: "DeqNarForConditionalGeneration", **overrides: Any
    ) -> "DeqNarForConditionalGeneration":
        """An equilibrium model whose transition is the decoder of a trained `stacked` one.

        One evaluation from the initial state gives exactly what the backbone gives.

        Args:
            overrides: fields of the new configuration; `refinement` is `implicit` if not given.
        """
        if backbone.config.seeks_equilibrium:
            raise ValueError(f"A backbone has refinement='stacked', but this model '{backbone.config.refinement}'.")
        if overrides.get("weight_norm", backbone.config.weight_norm) != backbone.config.weight_norm:
            raise ValueError(
                f"weight_norm={overrides['weight_norm']!r}, but the backbone has {backbone.config.weight_norm!r}: its "
                "weights are stored in that form; leave it out."
            )
        settings = {"refinement": "implicit", "transition_layers": backbone.config.decoder_layers, "feedback": None}
        settings |= overrides
        model = cls(type(backbone.config).from_dict({**backbone.config.to_dict(), **settings}))
        return model._take(backbone_weights(backbone, model), backbone.dtype)

    def _take(self, weights: dict[str, Tensor], dtype: torch.dtype) -> "DeqNarForConditionalGeneration":
        """Load weights by name; only parameters that the source model lacks keep their initial values."""
        mine = self.to(dtype).state_dict()
        for name, value in weights.items():
            if name in mine and mine[name].shape != value.shape:
                raise ValueError(
                    f"{name} is {tuple(value.shape)} in the old model but {tuple(mine[name].shape)} in the new one; "
                    "it must have the old one's width."
                )
        missing, unknown = self.load_state_dict(weights, strict=False)
        new = ("length_head.", "link_head.", "latent_head.", "input_head.", ".fusion.", ".feedback.", "lm_head.")
        missing = [name for name in missing if not any(part in name for part in new)]
        unknown = [name for name in unknown if not any(part in name for part in new)]
        if unknown or missing:
            where = f"The new model has no {unknown[0]}" if unknown else f"The old model has no {missing[0]}"
            raise ValueError(f"{where}; the new one must have the width and depth of the old one.")
        return self.eval()

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.lm_head = value

    def get_encoder(self, modality: str | None = None) -> SourceEncoder:
        """The encoder as a module that takes `input_ids` and `attention_mask`."""
        return self.model.get_encoder(modality)

    def read(self, found: FixedPoint) -> Tensor:
        """Logits of the vocabulary, (batch, canvas, vocabulary)."""
        return self.lm_head(found.value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        initial_state: Tensor | None = None,
        max_nfe: int | None = None,
        tol: float | None = None,
        solver: str | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        objective: Callable[..., Any] | None = None,
    ) -> DeqNarSeq2SeqLMOutput:
        """Logits at the equilibrium, and with `labels` the loss. The arguments are those of `DeqNarModel.forward`.

        The loss is cross-entropy (CTC for CTC models, −log of the sum over paths for graphs) per target token, plus the
        length loss and the latent KL where the model has them.

        Args:
            objective: called with this model; its result is returned instead. Trainers compute their objectives this
                way, because wrappers such as DistributedDataParallel synchronise gradients of `forward` only.
        """
        if objective is not None:
            return objective(self)
        refuse_decoder_embeddings(decoder_inputs_embeds)
        source, canvas, found, records = self.model._solve_batch(
            input_ids,
            attention_mask,
            decoder_input_ids,
            decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            inputs_embeds=inputs_embeds,
            labels=labels,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            initial_state=initial_state,
            max_nfe=max_nfe,
            tol=tol,
            solver=solver,
        )
        logits = self.read(found)
        if not self.training and not logits.sum(dtype=torch.float32).isfinite():
            raise FloatingPointError("The logits are not finite; check the weights for NaN or infinity.")
        loss = None if labels is None else self.loss(source, canvas, found, labels)
        fields = self.model._output_fields(source, canvas, found, *records)
        return DeqNarSeq2SeqLMOutput(loss=loss, logits=logits, **fields)

    def loss(self, source: Source, canvas: Canvas, found: FixedPoint, labels: Tensor) -> Tensor:
        """The likelihood per target token, plus the length loss and the latent KL where the model has them."""
        lengths, target_lengths = self.length_model, (labels >= 0).sum(dim=1)
        if not lengths.fits(labels, canvas.lengths).all():
            logger.warning_once("Some targets are longer than their canvas; they are excluded from the loss.")
        total, tokens = lengths.loss(self, found.value, Targets(labels, canvas.mask))
        loss = total / tokens.clamp_min(1)
        length_loss = lengths.length_loss(self, source, target_lengths)
        if length_loss is not None:
            loss = loss + self.config.length_loss_factor * length_loss
        if source.latent_kl is not None:
            loss = loss + self.config.latent_kl_factor * source.latent_kl.sum() / target_lengths.sum()
        if not loss.isfinite():
            raise FloatingPointError(f"The loss is {loss.item()}; check the weights for NaN or infinity.")
        return loss

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any
    ) -> dict[str, Tensor | None]:
        """The inputs of `forward`; parallel decoding has no step to prepare for, but PEFT asks for this method."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}


__all__ = [
    "DeqNarForConditionalGeneration",
    "DeqNarModel",
    "DeqNarModelOutput",
    "DeqNarPreTrainedModel",
    "DeqNarSeq2SeqLMOutput",
]
