"""The configuration of a deep-equilibrium non-autoregressive translation model."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

CHOICES = {
    "architecture": ("transformer", "bilstm"),
    "refinement": ("stacked", "implicit", "explicit", "mixed"),
    "feedback": (None, "sum", "learned"),
    "self_conditioning": ("none", "expected", "argmax"),
    "self_conditioning_layers": ("first", "all"),
    "layer_norm": ("post", "pre"),
    "positions": ("sinusoidal", "learned"),
    "solver": ("picard", "anderson", "broyden"),
    "gradient": ("one_step", "phantom", "ift", "unrolled"),
    "gradient_solver": ("picard", "anderson", "broyden"),
    "weight_norm": ("none", "weight", "spectral"),
    "length": ("predict", "ctc", "dag"),
    "source_copy": (None, "none", "uniform"),
    "latent": ("none", "vae"),
}

# The field with the canvas positions per source token, for every length model that determines them so.
UPSAMPLING = {"ctc": "ctc_upsampling", "dag": "dag_upsampling"}

# Decoder depth is that of the stacked backbone. `tiny` and `small` fit two CPU cores; `base` and `big` are the
# Transformer sizes of Vaswani et al. (2017).
PRESETS = {
    "tiny": {"width": 128, "feed_forward": 512, "heads": 4, "encoder_layers": 4, "decoder_layers": 3},
    "small": {"width": 256, "feed_forward": 1024, "heads": 4, "encoder_layers": 4, "decoder_layers": 3},
    "base": {"width": 512, "feed_forward": 2048, "heads": 8, "encoder_layers": 6, "decoder_layers": 6},
    "big": {"width": 1024, "feed_forward": 4096, "heads": 16, "encoder_layers": 6, "decoder_layers": 6},
}

CUSTOM_PIPELINES = {
    "translation": {"impl": "pipeline_deqnar.DeqNarTranslationPipeline", "pt": ["AutoModelForSeq2SeqLM"]}
}


@strict
class DeqNarConfig(PreTrainedConfig):
    """Configuration of a model: architecture, transition, solver, gradient and length model.

    Fields that also exist in `MarianConfig` are spelled as there.

    Args:
        refinement: what is iterated. `stacked` is N ordinary decoder layers, no equilibrium; `implicit` iterates
            features, `explicit` expected embeddings, `mixed` features fused with the predicted tokens.
        architecture: `transformer`, or `bilstm`: a recurrent encoder and a recurrent tagger of the canvas, for
            `stacked` models only (the inference network of ENGINE's first table).
        decoder_layers: depth of a `stacked` decoder, and of the transition of `explicit`.
        transition_layers: decoder layers inside one evaluation of `implicit` and `mixed`.
        feedback: how state and injection are combined: `sum`, F(z + u), or `learned`, F(W·z + u) with W = 0 at first,
            so that a model made from a backbone computes what the backbone computes. None chooses `learned`, or `sum`
            for `stacked` models and with a weight norm.
        self_conditioning: what every evaluation of `implicit` and `mixed` is told of the predictions of the one before:
            nothing (`none`), the expected embedding of the predicted token (`expected`), or the embedding of the
            likeliest token (`argmax`); F(W·z + V·E[emb | p] + u) with V = 0 at first.
        self_conditioning_layers: whether that enters the `first` decoder layer or `all`, each with its own V.
        layer_norm: `post` (as in the paper) or `pre`.
        positions: `sinusoidal`, or `learned`, one table for the source and one for the canvas (as in Bart).
        layernorm_embedding: normalise the sum of token and position embeddings (as in Bart).
        solver, max_nfe, tol, memory, damping, check_interval: see `fixed_point.solve`.
        gradient: how a loss reaches the parameters: `one_step`, `phantom`, `ift` or `unrolled`.
        gradient_steps: k of `phantom` and `unrolled`.
        gradient_damping: τ of `phantom`.
        gradient_solver, gradient_max_nfe, gradient_tol: how `ift` solves its adjoint equation.
        weight_norm: reparametrise the transition's matrices by their `weight` (row) or `spectral` norm.
        weight_norm_clip: largest rescaling factor allowed, or None.
        length: `predict` (classify the offset between target and source), `ctc` (a canvas of
            `ctc_upsampling` × source length, read through CTC) or `dag` (a graph of `dag_upsampling` × source length
            vertices with learned links, of which a path is read).
        length_offsets: the classifier covers offsets from −length_offsets to length_offsets − 1.
        length_loss_factor: weight of the length loss beside the likelihood.
        dag_link_heads: heads of the attention that predicts the links of a `dag` model.
        source_copy: what is added to the canvas embeddings: `none`, or the encoder states spread
            uniformly over it. None chooses `uniform` for CTC and `bilstm`, else `none`.
        latent: `vae` adds latent variables of `latent_dim` dimensions at source positions.
        latent_kl_factor, latent_free_bits: weight of their KL term, and free nats per position.
        input_predictor: whether there is a head that says which positions of a proxy input are masked, for
            `generate(input_sampling=True)` and the MPLE report.
        shortlist_size, shortlist_common: tokens a source token brings to its sentence's shortlist, and tokens that are
            on all of them; 0 if the model has none. Set by `hf-deqnar shortlist`, which learns the lists.
        ngram_order, ngram_entries: tokens of the longest n-gram that the model knows of its target language, and how
            many it knows of two tokens and more; 0 if it has none. Set by `hf-deqnar ngrams`, which learns them.
        objective: what the model was trained with, such as `ctc+glat`; set by the trainer, read by the report.

    >>> DeqNarConfig.preset("tiny", vocab_size=4000, length="ctc").d_model
    128
    """

    model_type = "deqnar"
    attribute_map = {
        "num_attention_heads": "encoder_attention_heads",
        "hidden_size": "d_model",
        "num_hidden_layers": "encoder_layers",
    }

    vocab_size: int = 32000
    d_model: int = 512
    encoder_layers: int = 6
    encoder_attention_heads: int = 8
    encoder_ffn_dim: int = 2048
    decoder_layers: int = 6
    decoder_attention_heads: int = 8
    decoder_ffn_dim: int = 2048
    activation_function: str = "relu"
    dropout: float | int = 0.1
    max_position_embeddings: int = 1024
    scale_embedding: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True

    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    unk_token_id: int | None = 3
    mask_token_id: int = 4
    blank_token_id: int = 5

    architecture: str = "transformer"
    refinement: str = "implicit"
    transition_layers: int = 1
    feedback: str | None = None
    self_conditioning: str = "none"
    self_conditioning_layers: str = "first"
    layer_norm: str = "post"
    positions: str = "sinusoidal"
    layernorm_embedding: bool = False

    solver: str = "anderson"
    max_nfe: int = 20
    tol: float | int = 1e-3
    memory: int = 5
    damping: float | int = 1.0
    check_interval: int | None = None

    gradient: str = "one_step"
    gradient_steps: int = 5
    gradient_damping: float | int = 0.5
    gradient_solver: str = "anderson"
    gradient_max_nfe: int = 20
    gradient_tol: float | int = 1e-3

    weight_norm: str = "none"
    weight_norm_clip: float | int | None = None

    length: str = "predict"
    length_offsets: int = 128
    length_loss_factor: float | int = 0.1
    ctc_upsampling: int = 2
    dag_upsampling: int = 8
    dag_link_heads: int = 4
    source_copy: str | None = None

    latent: str = "none"
    latent_dim: int = 8
    latent_kl_factor: float | int = 1.0
    latent_free_bits: float | int = 0.0

    input_predictor: bool = False
    shortlist_size: int = 0
    shortlist_common: int = 0
    ngram_order: int = 0
    ngram_entries: int = 0
    objective: str | None = None

    def __post_init__(self, **kwargs) -> None:
        if self.feedback is None:
            self.feedback = "learned" if self.seeks_equilibrium and self.weight_norm == "none" else "sum"
        pipelines = kwargs.pop("custom_pipelines", None)
        if pipelines is not None and __name__.startswith("transformers_modules."):
            self.custom_pipelines = pipelines
        super().__post_init__(**kwargs)
        self.check()

    def to_dict(self) -> dict[str, Any]:
        """Saved configurations name the pipeline for remote code.

        The installed package must not see that entry on its own objects: transformers would treat the pipeline as
        foreign code and ask for `trust_remote_code`.
        """
        return {**super().to_dict(), "custom_pipelines": CUSTOM_PIPELINES}

    def to_diff_dict(self) -> dict[str, Any]:
        """`feedback` is always saved: checkpoints of version 0.1 have none and use `sum`, the default of that time."""
        return {**super().to_diff_dict(), "feedback": self.feedback}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; see `to_diff_dict` for configurations without `feedback`."""
        return super().from_dict({"feedback": "sum", **config_dict}, **kwargs)

    @property
    def seeks_equilibrium(self) -> bool:
        """Whether the decoder is applied until it converges; a `stacked` one is applied once."""
        return self.refinement != "stacked"

    @property
    def is_self_conditioned(self) -> bool:
        """Whether evaluations are told the predictions of the one before."""
        return self.self_conditioning != "none"

    @property
    def is_recurrent(self) -> bool:
        """Whether encoder and decoder are LSTMs."""
        return self.architecture == "bilstm"

    @property
    def max_source_length(self) -> int:
        """Most tokens of a source whose canvas has a position for everything."""
        return self.max_position_embeddings // self.upsampling

    @property
    def upsampling(self) -> int:
        """Canvas positions per source token; 1 if the length is predicted."""
        field = UPSAMPLING.get(self.length)
        return 1 if field is None else getattr(self, field)

    @property
    def predicts_blanks(self) -> bool:
        """Whether the blank is predicted: by CTC, and where AXE has no token, but not on a path of a graph."""
        return self.length != "dag"

    @property
    def decoder_depth(self) -> int:
        """Number of decoder layers of one evaluation."""
        return self.decoder_layers if self.refinement in ("stacked", "explicit") else self.transition_layers

    @classmethod
    def preset(cls, name: str, **overrides) -> "DeqNarConfig":
        """A configuration of a named size (`tiny`, `small`, `base`, `big`), with any field overridden."""
        if name not in PRESETS:
            raise ValueError(f"Unknown preset '{name}'; choose one of {', '.join(PRESETS)}.")
        size = PRESETS[name]
        fields = {
            "d_model": size["width"],
            "encoder_layers": size["encoder_layers"],
            "encoder_ffn_dim": size["feed_forward"],
            "encoder_attention_heads": size["heads"],
            "decoder_layers": size["decoder_layers"],
            "decoder_ffn_dim": size["feed_forward"],
            "decoder_attention_heads": size["heads"],
        }
        return cls(**{**fields, **overrides})

    @property
    def copies_source(self) -> bool:
        """Whether the encoder states are spread over the canvas."""
        if self.source_copy is None:
            return self.length == "ctc" or self.architecture == "bilstm"
        return self.source_copy == "uniform"

    def validate_deqnar(self) -> None:
        """Run again by transformers before a configuration is saved."""
        self.check()

    def check(self) -> None:
        """Refuse, in one line that says what to do, an invalid configuration."""
        for field, allowed in CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"{field}='{value}' is unknown; choose one of {', '.join(filter(None, allowed))}.")
        self._check_ranges()
        self._check_tokens()
        self._check_combinations()

    def _check_ranges(self) -> None:
        positive = (
            "vocab_size d_model encoder_layers encoder_attention_heads encoder_ffn_dim decoder_layers "
            "decoder_attention_heads decoder_ffn_dim max_position_embeddings transition_layers max_nfe memory "
            "gradient_steps gradient_max_nfe length_offsets ctc_upsampling dag_link_heads latent_dim tol "
            "gradient_tol"
        )
        for field in positive.split():
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be above 0, not {getattr(self, field)}.")
        if self.check_interval is not None and self.check_interval < 1:
            raise ValueError(
                f"check_interval must be at least 1, not {self.check_interval}; null checks every evaluation."
            )
        for field in ("damping", "gradient_damping"):
            if not 0 < getattr(self, field) <= 1:
                raise ValueError(f"{field} must be in (0, 1], not {getattr(self, field)}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout}.")
        for field in ("length_loss_factor", "latent_kl_factor", "latent_free_bits"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, but is {getattr(self, field)}.")
        if self.dag_upsampling < 2:
            raise ValueError(
                f"dag_upsampling={self.dag_upsampling} must be at least 2: a graph needs more vertices than the "
                "translation has tokens."
            )
        for heads in ("encoder_attention_heads", "decoder_attention_heads"):
            if self.d_model % getattr(self, heads):
                raise ValueError(
                    f"d_model={self.d_model} is not a multiple of {heads}={getattr(self, heads)}; change one of them."
                )
        if self.d_model % 2:
            raise ValueError(f"d_model={self.d_model} must be even: positions are pairs of sine and cosine.")

        sizes = (self.shortlist_size, self.shortlist_common)
        if not all(0 <= size <= self.vocab_size for size in sizes) or (sizes[0] > 0) != (sizes[1] > 0):
            raise ValueError(
                f"shortlist_size={self.shortlist_size} and shortlist_common={self.shortlist_common} must both be 0 (no "
                f"shortlist) or between 1 and vocab_size={self.vocab_size}; hf-deqnar shortlist sets them."
            )

        if self.ngram_order < 0 or self.ngram_entries < 0 or (self.ngram_order > 0) != (self.ngram_entries > 0):
            raise ValueError(
                f"ngram_order={self.ngram_order} and ngram_entries={self.ngram_entries} must both be 0 (no n-grams) or "
                "above; hf-deqnar ngrams sets them."
            )

    def _check_tokens(self) -> None:
        tokens = {field: getattr(self, field) for field in ("pad_token_id", "mask_token_id", "blank_token_id")}
        for field, token in tokens.items():
            if token is None or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"{field}={token} is not below vocab_size={self.vocab_size}; "
                    "add the token to the tokenizer and pass its id."
                )
        if len(set(tokens.values())) < len(tokens):
            listed = ", ".join(f"{field}={token}" for field, token in tokens.items())
            raise ValueError(f"{listed}: these three must differ; give each its own token.")

    def _check_combinations(self) -> None:
        if self.architecture == "bilstm":
            fixed = {"refinement": "stacked", "latent": "none", "weight_norm": "none", "layer_norm": "post"}
            for field, value in fixed.items():
                if getattr(self, field) != value:
                    raise ValueError(
                        f"architecture='bilstm' has no attention to iterate or rescale: it needs {field}='{value}', "
                        f"not '{getattr(self, field)}'."
                    )
            if not self.copies_source:
                raise ValueError("architecture='bilstm' sees the source only as a copy; use source_copy='uniform'.")
        if self.length == "ctc" and self.source_copy == "none":
            raise ValueError(
                "length='ctc' with source_copy='none' makes all canvas positions equal; use source_copy='uniform'."
            )
        if self.is_self_conditioned and self.refinement not in ("implicit", "mixed"):
            raise ValueError(
                f"self_conditioning='{self.self_conditioning}' needs refinement='implicit' or 'mixed', but it is "
                f"'{self.refinement}'; leave one of them out."
            )
        if self.self_conditioning_layers != "first" and not self.is_self_conditioned:
            raise ValueError(
                f"self_conditioning_layers='{self.self_conditioning_layers}' has no effect with self_conditioning="
                "'none'; choose expected or argmax."
            )
        if self.is_self_conditioned and (self.feedback != "learned" or not self.tie_word_embeddings):
            raise ValueError(
                f"self_conditioning='{self.self_conditioning}' needs feedback='learned' and tied embeddings, but "
                f"feedback='{self.feedback}' and tie_word_embeddings={self.tie_word_embeddings}."
            )
        if self.refinement in ("explicit", "mixed") and not self.tie_word_embeddings:
            raise ValueError(
                f"refinement='{self.refinement}' predicts and embeds tokens in every evaluation and needs one matrix "
                "for both, but tie_word_embeddings=False; tie them or use refinement='implicit'."
            )
        if self.weight_norm_clip is not None:
            if self.weight_norm == "none":
                raise ValueError(
                    f"weight_norm_clip={self.weight_norm_clip} has no effect with weight_norm='none'; "
                    "choose weight_norm='weight' or 'spectral', or drop the clip."
                )
            if not self.weight_norm_clip > 0:
                raise ValueError(f"weight_norm_clip must be above 0, not {self.weight_norm_clip}.")
        if self.feedback == "learned":
            if self.refinement == "stacked":
                raise ValueError(
                    "refinement='stacked' feeds nothing back, so feedback='learned' has nothing to learn; leave it out."
                )
            if self.weight_norm != "none":
                raise ValueError(
                    f"feedback='learned' starts with a matrix of zeros, which weight_norm='{self.weight_norm}' cannot "
                    "rescale; use weight_norm='none' or feedback='sum'."
                )
        if self.refinement == "stacked" and self.gradient != "one_step":
            raise ValueError(
                f"refinement='stacked' has no equilibrium for gradient='{self.gradient}' to go through; "
                "leave gradient='one_step', which for a stack is ordinary back-propagation."
            )
        if self.length == "dag" and self.d_model % self.dag_link_heads:
            raise ValueError(
                f"d_model={self.d_model} is not a multiple of dag_link_heads={self.dag_link_heads}; change one of them."
            )
        if self.length in UPSAMPLING and 2 * self.upsampling > self.max_position_embeddings:
            raise ValueError(
                f"{UPSAMPLING[self.length]}={self.upsampling} makes even short canvases longer than "
                f"max_position_embeddings={self.max_position_embeddings}; raise the latter."
            )


def is_deqnar(config: Any) -> bool:
    """Whether a model's configuration is one of these models, not of another seq2seq model."""
    return getattr(config, "model_type", None) == DeqNarConfig.model_type


__all__ = ["DeqNarConfig"]
