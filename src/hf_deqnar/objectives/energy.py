"""ENGINE: trains a student to minimise the energy of a frozen autoregressive teacher (Tu et al. 2020).

E(x, z) = −Σ_t O₂(z_t) · log p(· | O₁(z_<t), x), where z are the student's logits at every position, p is the teacher,
O₁ converts logits to decoder inputs of the teacher, and O₂ to the target distribution (ENGINE equations 2 to 4).

A sequence of tokens is given as distributions (rows × length × vocabulary) or, if they are one-hot, as token ids (rows
× length). Like labels, it ends with </s>, has no start token, and is padded on the right.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.ctc import full_precision
from ..models.deqnar.lengths import LENGTH_MODELS
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.reranking import check_scorer, check_width
from ..models.deqnar.shortlist import never_written
from .objective import Term

# (logits, temperature, generator) → distributions over the vocabulary
Operator = Callable[[Tensor, float, torch.Generator | None], Tensor]

# (sequence y, its mask) → log p(· | y_<t, x) at every t: rows × length × vocabulary. A teacher bound to its sources.
Reader = Callable[[Tensor, Tensor], Tensor]

TOLERANCE = 1e-3  # relative difference of logits, far above differences of floating-point summation order
TEST_TOKENS = 8


# ---- Operators: ENGINE table 1, q = softmax(z), q̃ = softmax(z + g)


def softmax(logits: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """SX: q, with its own Jacobian ∂q/∂z.

    >>> softmax(torch.tensor([0.0, 0.0]))
    tensor([0.5000, 0.5000])
    """
    return (logits / temperature).softmax(dim=-1)


def straight_through_logits(
    logits: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """STL: onehot(arg-max z), with ∂O/∂z replaced by the identity (Bengio et al. 2013); has no temperature."""
    return straight_through(logits)


def straight_through_gumbel_softmax(
    logits: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """SG: onehot(arg-max q̃), differentiated as q̃ (Jang et al. 2016)."""
    return straight_through(gumbel_softmax(logits, temperature, generator))


def straight_through_softmax(
    logits: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """ST: onehot(arg-max q), differentiated as q.

    >>> straight_through_softmax(torch.tensor([0.0, 3.0]))
    tensor([0., 1.])
    """
    return straight_through(softmax(logits, temperature))


def gumbel_softmax(logits: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """GX: q̃ = softmax(z + g) with Gumbel noise g, and its own Jacobian."""
    return softmax(logits + gumbel_noise(logits, generator), temperature)


OPERATORS: dict[str, Operator] = {
    "SX": softmax,
    "STL": straight_through_logits,
    "SG": straight_through_gumbel_softmax,
    "ST": straight_through_softmax,
    "GX": gumbel_softmax,
}


def straight_through(values: Tensor) -> Tensor:
    """onehot(arg-max of the values), differentiated as the values themselves."""
    hard = torch.zeros_like(values).scatter_(-1, values.argmax(dim=-1, keepdim=True), 1.0)
    return hard + (values - values.detach())  # the bracket is exactly zero


def gumbel_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """g = −log(−log u), u uniform in (0, 1)."""
    uniform = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return -(-uniform.clamp_min(torch.finfo(like.dtype).tiny).log()).log()


def check_operator(name: str, which: str) -> None:
    if name not in OPERATORS:
        raise ValueError(f"{which}='{name}' is unknown; choose one of {', '.join(OPERATORS)}.")


# ---- The energy


def energy(read: Reader, decoder_inputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """−Σ_t y_t · log p(· | ŷ_<t, x) of every row, over the positions of the mask.

    Args:
        read: the teacher, bound to the sources; any function with this signature.
        decoder_inputs: ŷ, decoder inputs of the teacher, which must apply its causal mask.
        targets: y, the target distributions.
    """
    log_probabilities = read(decoder_inputs, mask)
    if targets.is_floating_point():
        agreement = (targets * log_probabilities).sum(dim=-1)
    else:
        agreement = log_probabilities.gather(-1, targets[..., None])[..., 0]
    return -agreement.masked_fill(~mask, 0.0).sum(dim=1)


@dataclass
class EnergyObjective:
    """The energy of a student's output as a loss; only the length of the reference is used.

    Attributes:
        decoder_input: O₁, a name in `OPERATORS`: operator of the decoder inputs of the teacher.
        target: O₂, operator of the target distribution.
        temperature: of the softmax in all operators but STL; 1 in the paper.
        forbid_early_end: see `forbid_early_end`; if false, the equation of the paper is used unchanged.
    """

    decoder_input: str = "SX"
    target: str = "ST"
    temperature: float = 1.0
    forbid_early_end: bool = True

    def __post_init__(self) -> None:
        check_operator(self.decoder_input, "decoder_input_operator")
        check_operator(self.target, "target_operator")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, not {self.temperature}.")

    def terms(
        self,
        model: DeqNarForConditionalGeneration,
        read: Reader,
        batch: dict[str, Tensor],
        generator: torch.Generator | None = None,
        *,
        max_nfe: int | None = None,
    ) -> dict[str, Term]:
        """The terms of the loss before they are divided and added.

        The loss is the energy per token, so that the relative weight of the length loss is that with a cross-entropy.
        `energy` and `discrete_energy` (of the predicted tokens) are per sentence, as in the paper, in nats.
        """
        labels = batch["labels"]
        mask = model.model.check_labels(labels)
        lengths = mask.sum(dim=1)
        if self.forbid_early_end:
            read = forbid_early_end(read, model.config.eos_token_id)
        # Without labels: latent variables have their prior mean, as in translation.
        source = model.prepare(batch["input_ids"], batch.get("attention_mask"))
        found = model.solve(source, model.lay_out(source, labels), max_nfe=max_nfe)
        logits = full_precision(model.read(found))
        decoder_inputs = OPERATORS[self.decoder_input](logits, self.temperature, generator)
        targets = OPERATORS[self.target](logits, self.temperature, generator)
        relaxed = energy(read, decoder_inputs, targets, mask)
        with torch.no_grad():
            tokens = written_tokens(logits, model.config)
            discrete = energy(read, tokens, tokens, mask)

        rows = torch.tensor(len(labels), device=labels.device)
        length_loss = model.length_model.length_loss(model, source, lengths)
        terms = {
            "token_energy": Term(relaxed.sum(), lengths.sum(), weight=1.0),
            "energy": Term(relaxed.detach().sum(), rows),
            "discrete_energy": Term(discrete.sum(), rows),
        }
        if length_loss is not None:
            terms["length"] = Term(length_loss * rows, rows, model.config.length_loss_factor)
        if model.config.seeks_equilibrium:
            for name in ("nfe", "residual", "converged"):
                terms[name] = Term(getattr(found, name).to(found.residual.dtype).sum(), rows)
        return terms


def forbid_early_end(read: Reader, end: int) -> Reader:
    """Give </s> before the last position the probability of the least likely token.

    Teachers are not trained on text after </s>. Many predict another end token. Then a row that consists only of </s>
    has a low energy, and training converges to it.
    """

    def read_constrained(sequence: Tensor, mask: Tensor) -> Tensor:
        log_probabilities = read(sequence, mask)
        before_last = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        lowest = log_probabilities.detach().amin(dim=-1, keepdim=True)
        ends = torch.arange(log_probabilities.shape[-1], device=mask.device) == end
        return torch.where(before_last[..., None] & ends, lowest, log_probabilities)

    return read_constrained


def written_tokens(logits: Tensor, config: DeqNarConfig) -> Tensor:
    """The arg-max over the tokens that `generate` can predict."""
    return (
        logits.detach().index_fill(-1, torch.tensor(never_written(config), device=logits.device), -torch.inf).argmax(-1)
    )


def check_student(config: DeqNarConfig) -> None:
    """Check that the canvas of the student is a token sequence, which the teacher needs."""
    if LENGTH_MODELS[config.length].has_own_alignment:
        raise ValueError(
            f"Energy training needs config.length = 'predict', but this model has '{config.length}', whose canvas is "
            "not a token sequence; start from a model that predicts lengths."
        )


# ---- Hugging Face models as teachers


def reader_of(teacher: Any, input_ids: Tensor, attention_mask: Tensor) -> Reader:
    """An encoder-decoder model of Hugging Face, bound to a batch of sources, which are encoded once.

    Decoder inputs are embeddings: that of the start token, then Σ_v y_t(v)·e_v for distributions y_t. During a call the
    teacher is in evaluation mode and its weights need no gradient; both are restored afterwards.
    """
    check_width(teacher, input_ids.shape[1], "the teacher")
    attention_mask = attention_mask.long()
    with torch.no_grad(), frozen(teacher):
        memory = teacher.get_encoder()(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
    embedding, start = decoder_embedding(teacher), teacher.config.decoder_start_token_id

    def read(sequence: Tensor, mask: Tensor) -> Tensor:
        check_width(teacher, sequence.shape[1], "the teacher")
        first = torch.full((len(sequence), 1), start, device=sequence.device)
        with frozen(teacher):
            embedded = torch.cat([embedding(first), embed(embedding, sequence[:, :-1])], dim=1)
            outputs = teacher(
                encoder_outputs=memory,
                attention_mask=attention_mask,
                decoder_inputs_embeds=embedded,
                decoder_attention_mask=torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], dim=1).long(),
                use_cache=False,
            )
        return full_precision(outputs.logits).log_softmax(dim=-1)

    return read


def decoder_embedding(teacher: Any) -> nn.Module:
    """The token embedding of a decoder, including any scaling inside the module.

    Bart, M2M100 and similar models scale in this module; Marian scales after it, in the decoder; T5 does not scale.
    """
    decoder = teacher.get_decoder()
    return (decoder if hasattr(decoder, "get_input_embeddings") else teacher).get_input_embeddings()


def embed(embedding: Any, sequence: Tensor) -> Tensor:
    """Embeddings of token ids, or expected embeddings of distributions: rows × length × width."""
    if not sequence.is_floating_point():
        return embedding(sequence)
    if type(embedding) is nn.Embedding:
        table = embedding.weight
    else:  # a subclass that also scales
        table = embedding(torch.arange(embedding.num_embeddings, device=sequence.device))
    return sequence.to(table.dtype) @ table


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Context manager: evaluation mode, and no gradients of the weights."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(weight, weight.requires_grad) for weight in model.parameters()]
    model.eval()
    model.requires_grad_(False)
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for weight, flag in flags:
            weight.requires_grad_(flag)


def check_teacher(teacher: Any, vocabulary: int) -> None:
    """Raise ValueError for a teacher without support of soft tokens; compares one-hot inputs with tokens."""
    kind = type(teacher).__name__
    accepts = "decoder_inputs_embeds" in inspect.signature(teacher.forward).parameters
    if isinstance(teacher, DeqNarForConditionalGeneration):  # the parameter exists for PEFT and must be None
        accepts = False
    if getattr(teacher.config, "is_encoder_decoder", False) and not accepts:
        raise ValueError(
            f"The teacher, a {kind}, does not accept decoder_inputs_embeds, so it does not support soft tokens."
        )
    check_scorer(teacher, vocabulary, "The teacher")
    device = next(teacher.parameters()).device
    tokens = torch.linspace(0, vocabulary - 1, TEST_TOKENS + 2, device=device).long()[1:-1]
    tokens = tokens[tokens != teacher.config.pad_token_id][None]  # texts contain no padding
    start = torch.full_like(tokens[:, :1], teacher.config.decoder_start_token_id)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with torch.no_grad(), frozen(teacher):
        by_tokens = teacher(
            input_ids=tokens,
            attention_mask=mask.long(),
            decoder_input_ids=torch.cat([start, tokens[:, :-1]], dim=1),
            decoder_attention_mask=mask.long(),
            use_cache=False,
        ).logits
        expected = full_precision(by_tokens).log_softmax(dim=-1)
        one_hot = nn.functional.one_hot(tokens, vocabulary).to(expected.dtype)
        found = reader_of(teacher, tokens, mask)(one_hot, mask)
    if not expected.isfinite().all():
        raise ValueError(f"The teacher, a {kind}, assigns zero probability to some tokens, so energies are infinite.")
    difference = (found - expected).abs().max() / expected.abs().max()
    if difference > TOLERANCE:
        raise ValueError(
            f"The teacher, a {kind}, computes different log-probabilities from embeddings than from tokens "
            f"(by {float(difference):.1%}), so it does not support soft tokens; use another teacher."
        )
