"""The model: an encoder, a transition that is applied until it stops changing the sentence, and its heads.

The way of a sentence: `encode` once; `inject` puts tokens, positions and the copied source on a canvas; `bind` makes
the transition a function f(z) of the state alone; `refine` finds z = f(z); the head reads tokens from the result.
"""

import math
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

from .alignment import ctc_loss, full_precision
from .configuration_deqnar import DeqNarConfig
from .conversion_deqnar import backbone_weights, config_from_teacher, weights_from_teacher
from .generation_deqnar import DeqNarGenerationConfig, DeqNarGenerationMixin
from .landscape import held_weights, rescale_weights, rescaling_of
from .layers_deqnar import DecoderLayer, Encoder, Positions, Record, RecurrentStack, additive_mask
from .ngrams_deqnar import Ngrams
from .refinement_deqnar import RefinementMixin, Source
from .shortlist_deqnar import UNKNOWN, Shortlist, Words
from .transition_deqnar import TRANSITIONS, BoundTransition, Context, Feedback, RecurrentTransition

if TYPE_CHECKING:  # a saved model carries the files that are mentioned here, and its config names this one
    from .pipeline_deqnar import DeqNarTranslationPipeline  # noqa: F401

logger = logging.get_logger(__name__)


@dataclass
class DeqNarModelOutput(ModelOutput):
    """Features in the equilibrium, and how it was reached; every figure is per row.

    `residual` and `converged` are None for `stacked` models, which seek no equilibrium. `decoder_hidden_states` are the
    input z + u and the output of every layer in one evaluation at the equilibrium.
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


class LengthHead(nn.Module):
    """Classifies target length − source length on the mean of the encoder states."""

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__()
        self.offsets = config.length_offsets
        self.classifier = nn.Linear(config.d_model, 2 * config.length_offsets)

    def forward(self, memory: Tensor, source_mask: Tensor) -> Tensor:
        """rows × classes."""
        weights = source_mask.to(memory.dtype)[:, :, None]
        return self.classifier((memory * weights).sum(dim=1) / weights.sum(dim=1))

    def loss(self, logits: Tensor, source_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        offset = (target_lengths - source_lengths).clamp(-self.offsets, self.offsets - 1)
        return functional.cross_entropy(full_precision(logits), offset + self.offsets)


class Gaussian(nn.Linear):
    """Mean and logarithm of the deviation of a diagonal Gaussian, N(0, I) at first.

    Anything wilder makes the first KL hundreds of nats.
    """

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(hidden).chunk(2, dim=-1)


class LatentHead(nn.Module):
    """Latent variables at source positions, added to what the decoder sees of the source (Gu and Kong 2021).

    p(z|x) is read from the encoder states; q(z|x, y) from a layer that also attends to the target. Training samples
    from q, evaluation with a target uses its mean, and without a target the prior's mean is all there is.
    """

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__()
        self.free_bits = config.latent_free_bits
        self.prior = Gaussian(config.d_model, 2 * config.latent_dim)
        self.posterior_layer = DecoderLayer(config)
        self.posterior = Gaussian(config.d_model, 2 * config.latent_dim)
        self.lift = nn.Linear(config.latent_dim, config.d_model)

    def forward(
        self, memory: Tensor, source_mask: Tensor, target: Tensor | None, target_mask: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The memory with latents added, and KL(q‖p) of every row (None without a target)."""
        prior_mean, prior_log_deviation = self.prior(memory)
        if target is None:
            return memory + self.lift(prior_mean), None
        key, value = self.posterior_layer.cross_attention.project(target)
        masks = (additive_mask(source_mask, memory.dtype), additive_mask(target_mask, memory.dtype))
        hidden = self.posterior_layer(memory, key, value, *masks, None, None, None)
        mean, log_deviation = self.posterior(hidden)
        sample = mean + torch.randn_like(mean) * log_deviation.exp() if self.training else mean
        # KL of two diagonal Gaussians: log(σp/σq) + (σq² + (μq − μp)²) / 2σp² − 1/2
        divergence = prior_log_deviation - log_deviation - 0.5
        spread = (2 * log_deviation).exp() + (mean - prior_mean).pow(2)
        divergence = (divergence + 0.5 * spread * (-2 * prior_log_deviation).exp()).sum(dim=-1)
        divergence = divergence.clamp_min(self.free_bits) if self.free_bits else divergence
        return memory + self.lift(sample), (divergence * source_mask).sum(dim=1)


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


def copy_uniformly(memory: Tensor, source_lengths: Tensor, canvas_lengths: Tensor, canvas: int) -> Tensor:
    """Position t of a canvas of length N receives source position ⌊t·S/N⌋: rows × canvas × width."""
    position = torch.arange(canvas, device=memory.device)[None]
    index = position * source_lengths[:, None] // canvas_lengths[:, None]
    index = torch.minimum(index, source_lengths[:, None] - 1)  # behind the canvas: anything, it is masked
    return memory.gather(1, index[:, :, None].expand(-1, -1, memory.shape[2]))


class DeqNarPreTrainedModel(PreTrainedModel):
    config_class = DeqNarConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]

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
                "as it was saved, and change it with landscape.remove_rescaling and landscape.rescale_weights."
            )
        return (model, info) if wants_info else model

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """As in transformers; a shortlist and n-grams get to know new tokens, but cannot forget old ones."""
        core, known = self.base_model, self.config.vocab_size
        tables = [table for table in (core.shortlist, core.ngrams) if table is not None]
        wanted, multiple = known if new_num_tokens is None else new_num_tokens, pad_to_multiple_of or 1
        if tables and math.ceil(wanted / multiple) * multiple < known:
            raise ValueError(
                f"A shortlist or n-grams speak of all {known:,} tokens, so that {wanted:,} are too few. Load the model "
                "without them (shortlist_size=0, shortlist_common=0, ngram_order=0, ngram_entries=0) to take some away."
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
        recurrent = config.architecture == "bilstm"
        self.encoder = RecurrentStack(config, config.encoder_layers) if recurrent else Encoder(config)
        transition = RecurrentTransition if recurrent else TRANSITIONS[config.refinement]
        self.transition = transition(config, config.decoder_depth)
        rescale_weights(self.transition, config.weight_norm, config.weight_norm_clip)
        self.length_head = LengthHead(config) if config.length == "predict" else None
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

    def get_encoder(self) -> Callable[..., BaseModelOutput]:
        """The encoder as a function of `input_ids` and `attention_mask`; its result can be `encoder_outputs`."""
        return self.encode_source

    def encode_source(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> BaseModelOutput:
        mask = self.check_source(input_ids, attention_mask, None)
        return BaseModelOutput(last_hidden_state=self.encode(input_ids, mask))

    def embed(self, tokens: Tensor, positions: Positions | None = None) -> Tensor:
        """Scaled token embeddings plus positions, those of the canvas if not given: rows × length × width."""
        return (self.canvas_positions if positions is None else positions)(self.shared(tokens) * self.embedding_scale)

    def encode(self, input_ids: Tensor, source_mask: Tensor, record: Record | None = None) -> Tensor:
        """rows × source × width."""
        hidden = self.embed(input_ids, self.source_positions)
        return self.encoder(hidden, additive_mask(source_mask, hidden.dtype), record)

    def inject(self, canvas: Tensor, canvas_mask: Tensor, memory: Tensor, source_mask: Tensor) -> Tensor:
        """u: what every evaluation sees of the canvas. Tokens, positions and, if configured, the copied source."""
        injection = self.embed(canvas)
        if self.config.copies_source:
            lengths = (source_mask.sum(dim=1), canvas_mask.sum(dim=1))
            injection = injection + copy_uniformly(memory, *lengths, canvas.shape[1])
        return functional.dropout(injection, self.config.dropout, self.training)

    def project(self, memory: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Cross-attention keys and values of every decoder layer: once per sentence, whatever is done with it."""
        return [layer.cross_attention.project(memory) for layer in self.transition.layers]

    def read_source(self, input_ids: Tensor, source_mask: Tensor) -> Source:
        """All that translating needs of the source, without a target to look at."""
        memory = self.encode(input_ids, source_mask)
        length_logits = None if self.length_head is None else self.length_head(memory, source_mask)
        seen = memory if self.latent_head is None else self.latent_head(memory, source_mask, None, None)[0]
        return Source(seen, self.project(seen), length_logits)

    def bind(
        self,
        canvas: Tensor,
        canvas_mask: Tensor,
        memory: Tensor,
        source_mask: Tensor,
        projected: list[tuple[Tensor, Tensor]] | None = None,
        words: Words | None = None,
    ) -> BoundTransition:
        """The transition as a function of the state alone: the canvas injected, dropout drawn."""
        injection = self.inject(canvas, canvas_mask, memory, source_mask)
        embedding = self.shared.weight
        if words is not None and self.config.refinement in ("explicit", "mixed"):  # others do not predict on the way
            embedding = embedding[words.tokens]
        context = Context(
            injection=injection,
            canvas_mask=additive_mask(canvas_mask, injection.dtype),
            memory=self.project(memory) if projected is None else projected,
            memory_mask=additive_mask(source_mask, injection.dtype),
            source_lengths=source_mask.sum(dim=1),
            kept=self.transition.hold_dropout(injection),
            embedding=embedding,
            scale=self.embedding_scale,
            words=words,
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
        labels: Tensor | None = None,
        initial_state: Tensor | None = None,
        max_nfe: int | None = None,
        tol: float | None = None,
        solver: str | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> DeqNarModelOutput:
        """Encode, lay out a canvas, and refine it to its equilibrium.

        Args:
            decoder_input_ids: the canvas: `<mask>` where a token is to be found, tokens where it is known, padding
                behind the end. Without it the canvas is all `<mask>`, as long as CTC, `labels` or the length head say.
            encoder_outputs: the result of an earlier `encode`, to save its cost.
            labels: targets, −100 at padding. Only their lengths are used, and their tokens for a latent posterior.
            initial_state: where the solver starts; zero if not given, which makes the first evaluation see the canvas.
            max_nfe, tol, solver: override the configuration for this call.
        """
        config = self.config
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        recording = output_attentions or output_hidden_states
        encoder_record = Record.empty() if recording else None

        source_mask = self.check_source(input_ids, attention_mask, encoder_outputs)
        label_mask = None if labels is None else self.check_labels(labels)
        if encoder_outputs is None:
            memory = self.encode(input_ids, source_mask, encoder_record)
        else:
            memory = encoder_outputs[0]
        length_logits = None if self.length_head is None else self.length_head(memory, source_mask)
        seen, latent_kl = memory, None
        if self.latent_head is not None:
            target = None if labels is None else self.embed(labels.clamp_min(0))
            seen, latent_kl = self.latent_head(memory, source_mask, target, label_mask)

        if decoder_input_ids is None:
            lengths = self.canvas_lengths(source_mask, labels, length_logits)
            width = labels.shape[1] if labels is not None and config.length == "predict" else None
            decoder_input_ids = self.masked_canvas(lengths, width)
        canvas_mask = self.check_canvas(decoder_input_ids, decoder_attention_mask)
        bound = self.bind(decoder_input_ids, canvas_mask, seen, source_mask)
        found = self.refine(bound, canvas_mask, initial_state=initial_state, max_nfe=max_nfe, tol=tol, solver=solver)
        if not found.value.isfinite().all() or not (length_logits is None or length_logits.isfinite().all()):
            raise FloatingPointError("The model's features are not finite; check the weights for NaN or infinity.")
        decoder_record = None
        if recording:
            decoder_record = Record.empty()
            with held_weights(self.transition):
                bound.transition.features(found.state, bound.context, decoder_record)
        return DeqNarModelOutput(
            last_hidden_state=found.value,
            state=found.state,
            nfe=found.nfe,
            residual=found.residual,
            converged=found.converged,
            canvas_mask=canvas_mask,
            length_logits=length_logits,
            latent_kl=latent_kl,
            decoder_hidden_states=tuple(decoder_record.hidden_states) if output_hidden_states else None,
            decoder_attentions=tuple(decoder_record.self_attentions) if output_attentions else None,
            cross_attentions=tuple(decoder_record.cross_attentions) if output_attentions else None,
            encoder_last_hidden_state=memory,
            encoder_hidden_states=tuple(encoder_record.hidden_states) or None if output_hidden_states else None,
            encoder_attentions=tuple(encoder_record.self_attentions) or None if output_attentions else None,
        )


class DeqNarForConditionalGeneration(DeqNarPreTrainedModel, DeqNarGenerationMixin):
    """The translation model: `DeqNarModel` and the head that reads tokens from the equilibrium."""

    generation_config_class = DeqNarGenerationConfig
    _tied_weights_keys = {"lm_head.weight": "model.shared.weight"}

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__(config)
        self.model = DeqNarModel(config)
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_teacher(
        cls, teacher: PreTrainedModel, tokenizer: Any, **overrides: Any
    ) -> "DeqNarForConditionalGeneration":
        """A student that starts from a teacher's encoder, embeddings and decoder layers; Marian or Bart.

        Its encoder computes what the teacher's does. The decoder's layers are the teacher's first ones (all of them if
        the student has as many), without the causal mask. A feed-forward network may be wider than the teacher's and
        computes the same at first.

        Args:
            tokenizer: the teacher's; it must have <mask> and <blank>.
            overrides: fields of the student's configuration, such as `length="ctc"` or `refinement="stacked"`.
        """
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
        if backbone.config.refinement != "stacked":
            raise ValueError(f"A backbone has refinement='stacked', but this model '{backbone.config.refinement}'.")
        if overrides.get("weight_norm", backbone.config.weight_norm) != backbone.config.weight_norm:
            raise ValueError(
                f"weight_norm={overrides['weight_norm']!r}, but the backbone has {backbone.config.weight_norm!r}: its "
                "weights are stored in that form; leave it out."
            )
        settings = {"refinement": "implicit", "transition_layers": backbone.config.decoder_layers, **overrides}
        model = cls(type(backbone.config).from_dict({**backbone.config.to_dict(), **settings}))
        return model._take(backbone_weights(backbone, model), backbone.dtype)

    def _take(self, weights: dict[str, Tensor], dtype: torch.dtype) -> "DeqNarForConditionalGeneration":
        """Take up weights by name; only what the old model did not have may keep its random start."""
        mine = self.to(dtype).state_dict()
        for name, value in weights.items():
            if name in mine and mine[name].shape != value.shape:
                raise ValueError(
                    f"{name} is {tuple(value.shape)} in the old model but {tuple(mine[name].shape)} in the new one; "
                    "it must have the old one's width."
                )
        missing, unknown = self.load_state_dict(weights, strict=False)
        new = ("length_head.", "latent_head.", "input_head.", ".fusion.", ".feedback.", "lm_head.")
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

    def get_encoder(self) -> Callable[..., BaseModelOutput]:
        return self.model.get_encoder()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | None = None,
        labels: Tensor | None = None,
        initial_state: Tensor | None = None,
        max_nfe: int | None = None,
        tol: float | None = None,
        solver: str | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> DeqNarSeq2SeqLMOutput:
        """Logits in the equilibrium; with `labels` also the loss. The arguments are those of `DeqNarModel.forward`.

        The loss is cross-entropy (CTC for CTC models) per target token, plus the length loss and the latent KL where
        the model has them. Other objectives build on the same outputs.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            encoder_outputs=encoder_outputs,
            labels=labels,
            initial_state=initial_state,
            max_nfe=max_nfe,
            tol=tol,
            solver=solver,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits = self.lm_head(outputs.last_hidden_state)
        if not self.training and not logits.sum(dtype=torch.float32).isfinite():
            raise FloatingPointError("The logits are not finite; check the weights for NaN or infinity.")
        loss = None
        if labels is not None:
            source_mask = self.model.check_source(input_ids, attention_mask, encoder_outputs)
            loss = self.loss(logits, labels, outputs, source_mask.sum(dim=1))
            if not loss.isfinite():
                raise FloatingPointError(f"The loss is {loss.item()}; check the weights for NaN or infinity.")
        return DeqNarSeq2SeqLMOutput(loss=loss, logits=logits, **outputs)

    def loss(self, logits: Tensor, labels: Tensor, outputs: DeqNarModelOutput, source_lengths: Tensor) -> Tensor:
        target_lengths = (labels >= 0).sum(dim=1)
        if self.config.length == "ctc":
            canvas_lengths = outputs.canvas_mask.sum(dim=1)
            negative, fits = ctc_loss(logits, labels, canvas_lengths, target_lengths, self.config.blank_token_id)
            if not fits.all():
                logger.warning_once("Some targets are longer than their CTC canvas; they have no part in the loss.")
            loss = negative.sum() / (target_lengths * fits).sum().clamp_min(1)
        else:
            if logits.shape[:2] != labels.shape:
                raise ValueError(
                    f"The canvas is {tuple(logits.shape[:2])} but the labels are {tuple(labels.shape)}; "
                    "a model with length='predict' needs one canvas position per label."
                )
            loss = functional.cross_entropy(full_precision(logits).flatten(0, 1), labels.flatten())
            length_loss = self.model.length_head.loss(outputs.length_logits, source_lengths, target_lengths)
            loss = loss + self.config.length_loss_factor * length_loss
        if outputs.latent_kl is not None:
            loss = loss + self.config.latent_kl_factor * outputs.latent_kl.sum() / target_lengths.sum()
        return loss


__all__ = [
    "DeqNarForConditionalGeneration",
    "DeqNarModel",
    "DeqNarModelOutput",
    "DeqNarPreTrainedModel",
    "DeqNarSeq2SeqLMOutput",
]
