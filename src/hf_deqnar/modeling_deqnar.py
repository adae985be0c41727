"""The model: an encoder, a transition that is applied until it stops changing the sentence, and its heads.

The way of a sentence: `encode` once; `inject` puts tokens, positions and the copied source on a canvas; `bind` makes
the transition a function f(z) of the state alone; `refine` finds z = f(z); the head reads tokens from the result.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from .fixed_point import FixedPoint, Step, check_options, measure_residual
from .generation_deqnar import DeqNarGenerationConfig, DeqNarGenerationMixin
from .implicit_gradient import GradientOptions, equilibrium
from .landscape import held_weights, rescale_weights, rescaling_of
from .layers_deqnar import DecoderLayer, Encoder, Positions, Record, RecurrentStack, additive_mask
from .transition_deqnar import TRANSITIONS, BoundTransition, Context, RecurrentTransition

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

    def lengths(self, logits: Tensor, source_lengths: Tensor, count: int = 1) -> Tensor:
        """The `count` likeliest lengths of every row, at least 1 each: rows × count."""
        offset = logits.topk(count, dim=-1).indices - self.offsets
        return (source_lengths[:, None] + offset).clamp_min(1)


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

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (Gaussian, InputHead)):
            init.zeros_(module.weight)
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


def _one_evaluation(
    initial: Tensor, value: Tensor, residual: Tensor | None, converged: Tensor | None, options: dict
) -> FixedPoint:
    """What a decoder that is evaluated once found, told in the words of a solve."""
    rows = torch.arange(initial.shape[0], device=initial.device)
    trajectory = [Step(rows, value.detach(), residual)] if options["keep_trajectory"] else None
    if options["observe"] is not None:
        options["observe"](rows, value.detach(), residual)
    return FixedPoint(initial, value, residual, torch.ones_like(rows), converged, trajectory)


class DeqNarModel(DeqNarPreTrainedModel):
    """Encoder, transition and length, latent and input heads, without the head that reads tokens."""

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__(config)
        config.check()  # fields may have been overridden since the configuration was made
        whole = config.refinement in ("stacked", "explicit")
        self.shared = nn.Embedding(config.vocab_size, config.d_model, padding_idx=config.pad_token_id)
        self.embedding_scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.source_positions, self.canvas_positions = Positions(config), Positions(config)
        recurrent = config.architecture == "bilstm"
        self.encoder = RecurrentStack(config, config.encoder_layers) if recurrent else Encoder(config)
        transition = RecurrentTransition if recurrent else TRANSITIONS[config.refinement]
        self.transition = transition(config, config.decoder_layers if whole else config.transition_layers)
        rescale_weights(self.transition, config.weight_norm, config.weight_norm_clip)
        self.length_head = LengthHead(config) if config.length == "predict" else None
        self.latent_head = LatentHead(config) if config.latent == "vae" else None
        self.input_head = InputHead(config) if config.input_predictor else None
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

    def bind(
        self,
        canvas: Tensor,
        canvas_mask: Tensor,
        memory: Tensor,
        source_mask: Tensor,
        projected: list[tuple[Tensor, Tensor]] | None = None,
    ) -> BoundTransition:
        """The transition as a function of the state alone: the canvas injected, dropout drawn."""
        injection = self.inject(canvas, canvas_mask, memory, source_mask)
        context = Context(
            injection=injection,
            canvas_mask=additive_mask(canvas_mask, injection.dtype),
            memory=self.project(memory) if projected is None else projected,
            memory_mask=additive_mask(source_mask, injection.dtype),
            source_lengths=source_mask.sum(dim=1),
            kept=self.transition.hold_dropout(injection),
            embedding=self.shared.weight,
            scale=self.embedding_scale,
        )
        return BoundTransition(self.transition, context)

    def refine(
        self,
        bound: BoundTransition,
        canvas_mask: Tensor,
        *,
        initial_state: Tensor | None = None,
        max_nfe: int | None = None,
        tol: float | None = None,
        solver: str | None = None,
        keep_trajectory: bool = False,
        observe: Callable | None = None,
    ) -> FixedPoint:
        """Solve z = f(z). The result's `value` holds the features that tokens are read from, with graph if enabled."""
        config = self.config
        initial = torch.zeros_like(bound.context.injection) if initial_state is None else initial_state
        max_nfe = config.max_nfe if max_nfe is None else max_nfe
        options = {
            "solver": config.solver if solver is None else solver,
            "tol": config.tol if tol is None else tol,
            "memory": config.memory,
            "damping": config.damping,
        }
        check_options(max_nfe=max_nfe, **options)
        options |= {"keep_trajectory": keep_trajectory, "observe": observe}
        checkpointing = self.training and self.is_gradient_checkpointing
        gradient = GradientOptions(
            kind=config.gradient,
            steps=config.gradient_steps,
            damping=config.gradient_damping,
            solver=config.gradient_solver,
            max_nfe=config.gradient_max_nfe,
            tol=config.gradient_tol,
            checkpoint=checkpointing,
        )
        with held_weights(self.transition, cache=not checkpointing):
            if config.refinement == "stacked":
                return _one_evaluation(initial, bound(initial), None, None, options)
            if config.refinement == "explicit":
                return self._refine_explicit(bound, initial, canvas_mask, max_nfe, gradient, options)
            return equilibrium(bound, initial, gradient=gradient, mask=canvas_mask, max_nfe=max_nfe, **options)

    def _refine_explicit(
        self,
        bound: BoundTransition,
        initial: Tensor,
        canvas_mask: Tensor,
        max_nfe: int,
        gradient: GradientOptions,
        options: dict,
    ) -> FixedPoint:
        """An expected embedding is not what tokens are read from: the last evaluation of the budget gives features."""
        transition, context = bound.transition, bound.context
        if max_nfe > 1:
            found = equilibrium(bound, initial, gradient=gradient, mask=canvas_mask, max_nfe=max_nfe - 1, **options)
            return replace(found, value=transition.features(found.value, context), nfe=found.nfe + 1)
        features = transition.features(initial, context)
        with torch.no_grad():
            value = transition.next_state(features, context)
            residual = measure_residual(initial, value, canvas_mask)
        return replace(_one_evaluation(initial, value, residual, residual < options["tol"], options), value=features)

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

    def canvas_lengths(self, source_mask: Tensor, labels: Tensor | None, length_logits: Tensor | None) -> Tensor:
        """How long the canvas of every row is: fixed by CTC, known from labels, or predicted."""
        source_lengths = source_mask.sum(dim=1)
        if self.config.length == "ctc":
            return source_lengths * self.config.ctc_upsampling
        if labels is not None:
            return (labels >= 0).sum(dim=1)
        return self.length_head.lengths(length_logits, source_lengths)[:, 0].clamp_max(
            self.config.max_position_embeddings
        )

    def masked_canvas(self, lengths: Tensor, width: int | None = None) -> Tensor:
        """`<mask>` up to each row's length, padding behind it: rows × width, the longest row's if not given."""
        width = int(lengths.max()) if width is None else width
        position = torch.arange(width, device=lengths.device)[None]
        return torch.where(position < lengths[:, None], self.config.mask_token_id, self.config.pad_token_id)

    def check_source(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, encoder_outputs: BaseModelOutput | None
    ) -> Tensor:
        """The source's mask, after making sure that there is a source in every row."""
        if input_ids is None and (encoder_outputs is None or attention_mask is None):
            raise ValueError("Give input_ids, or encoder_outputs together with the attention_mask they belong to.")
        if attention_mask is None:
            attention_mask = input_ids != self.config.pad_token_id
        shape = input_ids.shape if input_ids is not None else encoder_outputs[0].shape[:2]
        if attention_mask.shape != shape:
            raise ValueError(f"The source is {tuple(shape)} but its mask is {tuple(attention_mask.shape)}.")
        return self._check_mask(attention_mask.bool(), "source")

    def check_labels(self, labels: Tensor) -> Tensor:
        """Where labels stand, after making sure that every row has some and that padding (−100) is behind them."""
        return self._check_mask(labels >= 0, "labels")

    def check_canvas(self, canvas: Tensor, canvas_mask: Tensor | None) -> Tensor:
        """The canvas's mask, after making sure that every row has something to fill in."""
        mask = (canvas != self.config.pad_token_id) if canvas_mask is None else canvas_mask.bool()
        if mask.shape != canvas.shape:
            raise ValueError(f"The canvas is {tuple(canvas.shape)} but its mask is {tuple(mask.shape)}.")
        return self._check_mask(mask, "canvas")

    def _check_mask(self, mask: Tensor, what: str) -> Tensor:
        if mask.numel() == 0:
            raise ValueError(f"The {what} is empty: its shape is {tuple(mask.shape)}, rows × length.")
        if mask.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"The {what} is {mask.shape[1]} positions long, but max_position_embeddings is "
                f"{self.config.max_position_embeddings}; shorten the text or split it into sentences."
            )
        if not mask[:, 0].all():
            empty = (~mask.any(dim=1)).nonzero()[:, 0].tolist()
            if empty:
                raise ValueError(f"Row(s) {empty} of the {what} are all padding; remove them from the batch.")
            raise ValueError(f"The {what} is padded on the left; set tokenizer.padding_side = 'right'.")
        if (mask[:, 1:] & ~mask[:, :-1]).any():
            holes = (mask[:, 1:] & ~mask[:, :-1]).any(dim=1).nonzero()[:, 0].tolist()
            raise ValueError(f"Row(s) {holes} of the {what} have padding between tokens; it must all be at the end.")
        return mask


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
        new = ("length_head.", "latent_head.", "input_head.", ".fusion.", "lm_head.")
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
