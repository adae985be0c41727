"""ENGINE: a student learns to write what a frozen autoregressive teacher finds likely (Tu et al. 2020).

E(x, z) = −Σ_t O₂(z_t) · log p(· | O₁(z_<t), x), where z are the student's logits at every position, p is the teacher,
O₁ makes what the teacher's decoder is fed of them, and O₂ what its answer is compared with (ENGINE equations 2 to 4).

A sequence of tokens is given as distributions (rows × length × vocabulary) or, if they are one-hot, as token ids (rows
× length). Like labels, it ends with </s> and does not have the teacher's start token; padding stands behind it.
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

# (sequence y, its mask) → log p(· | y_<t, x) at every t: rows × length × vocabulary. A teacher that reads a source.
Reader = Callable[[Tensor, Tensor], Tensor]

TOLERANCE = 1e-3  # relative difference of logits, far above what another order of the same sums makes
TRIED_TOKENS = 8


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
    """STL: onehot(arg-max z), as if ∂O/∂z were the identity (Bengio et al. 2013); there is no temperature in it."""
    return straight_through(logits)


def straight_through_gumbel_softmax(
    logits: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """SG: onehot(arg-max q̃), as if it were q̃ when differentiated (Jang et al. 2016)."""
    return straight_through(gumbel_softmax(logits, temperature, generator))


def straight_through_softmax(
    logits: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """ST: onehot(arg-max q), as if it were q when differentiated.

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
    """onehot(arg-max of the values) when evaluated, the values themselves when differentiated."""
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
        read: the teacher, bound to the sources; any function of this signature will do.
        decoder_inputs: ŷ, what the teacher is fed; that it sees only what comes before t is its own affair.
        targets: y, what its answers are compared with.
    """
    log_probabilities = read(decoder_inputs, mask)
    if targets.is_floating_point():
        agreement = (targets * log_probabilities).sum(dim=-1)
    else:
        agreement = log_probabilities.gather(-1, targets[..., None])[..., 0]
    return -agreement.masked_fill(~mask, 0.0).sum(dim=1)


@dataclass
class EnergyObjective:
    """The energy of a student's output as a loss; nothing of the reference but its length is used.

    Attributes:
        decoder_input: O₁, a name in `OPERATORS`: how the student's logits are fed to the teacher.
        target: O₂: how they are compared with what it says.
        temperature: of the softmax in all operators but STL; 1 in the paper.
        forbid_early_end: see `whole_sentences`; off, it is the paper's equation to the letter.
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

        What is minimised is the energy per token, so that the length loss has the weight beside it that it has beside
        a cross-entropy. `energy` and `discrete_energy` (that of the tokens the student would write) are per sentence,
        as in the paper, and in nats.
        """
        labels = batch["labels"]
        mask = model.model.check_labels(labels)
        lengths = mask.sum(dim=1)
        if self.forbid_early_end:
            read = whole_sentences(read, model.config.eos_token_id)
        # Without labels: a latent variable has its prior mean, as when the student translates.
        source = model.prepare(batch["input_ids"], batch.get("attention_mask"))
        found = model.solve(source, model.lay_out(source, labels), max_nfe=max_nfe)
        logits = full_precision(model.read(found))
        fed = OPERATORS[self.decoder_input](logits, self.temperature, generator)
        compared = OPERATORS[self.target](logits, self.temperature, generator)
        relaxed = energy(read, fed, compared, mask)
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


def whole_sentences(read: Reader, end: int) -> Reader:
    """A teacher for whom </s> before the last position is as unlikely as the unlikeliest token.

    A sentence ends where it ends, so no teacher has learned what follows an end. Many say: another end. Then a row of
    nothing but </s> has a low energy, and students find it.
    """

    def read_whole(sequence: Tensor, mask: Tensor) -> Tensor:
        log_probabilities = read(sequence, mask)
        followed = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        unlikeliest = log_probabilities.detach().amin(dim=-1, keepdim=True)
        ends = torch.arange(log_probabilities.shape[-1], device=mask.device) == end
        return torch.where(followed[..., None] & ends, unlikeliest, log_probabilities)

    return read_whole


def written_tokens(logits: Tensor, config: DeqNarConfig) -> Tensor:
    """The arg-max among the tokens that can be part of a text: what `generate` would write."""
    return (
        logits.detach().index_fill(-1, torch.tensor(never_written(config), device=logits.device), -torch.inf).argmax(-1)
    )


def check_student(config: DeqNarConfig) -> None:
    """The teacher reads token sequences, which is what a canvas must hold."""
    if LENGTH_MODELS[config.length].has_own_alignment:
        raise ValueError(
            "Learning from an energy needs config.length = 'predict', but this is a CTC model: the teacher reads "
            "tokens, and a CTC canvas is a path with blanks and repetitions; start from a model that predicts lengths."
        )


# ---- Hugging Face models as teachers


def reader_of(teacher: Any, input_ids: Tensor, attention_mask: Tensor) -> Reader:
    """An encoder-decoder model of Hugging Face, bound to a batch of sources, which are encoded once.

    It is fed embeddings: Σ_v y_t(v)·e_v for a distribution y_t, behind that of its own start token. While it reads it
    is in evaluation mode and its weights want no gradient; then everything is as it was.
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
    """The module that embeds the tokens of a decoder, with whatever scaling is inside it.

    Bart, M2M100 and their kin scale in this module; Marian scales after it, whoever made the embeddings; T5 does not.
    """
    decoder = teacher.get_decoder()
    return (decoder if hasattr(decoder, "get_input_embeddings") else teacher).get_input_embeddings()


def embed(embedding: Any, sequence: Tensor) -> Tensor:
    """Embeddings of token ids, or expected embeddings of distributions: rows × length × width."""
    if not sequence.is_floating_point():
        return embedding(sequence)
    if type(embedding) is nn.Embedding:
        table = embedding.weight
    else:  # it does more than look up
        table = embedding(torch.arange(embedding.num_embeddings, device=sequence.device))
    return sequence.to(table.dtype) @ table


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """In evaluation mode and without gradients to the weights, for a while."""
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
    """Refuse a teacher that cannot be fed soft tokens; whether it is fed rightly is tried on real ones."""
    kind = type(teacher).__name__
    takes = inspect.signature(teacher.forward).parameters
    if getattr(teacher.config, "is_encoder_decoder", False) and "decoder_inputs_embeds" not in takes:
        raise ValueError(f"The teacher, a {kind}, takes no decoder_inputs_embeds, so it cannot read soft tokens.")
    check_scorer(teacher, vocabulary, "The teacher")
    device = next(teacher.parameters()).device
    tokens = torch.linspace(0, vocabulary - 1, TRIED_TOKENS + 2, device=device).long()[1:-1]
    tokens = tokens[tokens != teacher.config.pad_token_id][None]  # padding in a text is nobody's case
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
        raise ValueError(f"The teacher, a {kind}, gives some tokens no probability at all, so energies are infinite.")
    difference = (found - expected).abs().max() / expected.abs().max()
    if difference > TOLERANCE:
        raise ValueError(
            f"The teacher, a {kind}, does not say the same when it is fed embeddings instead of the tokens themselves "
            f"(log-probabilities differ by {float(difference):.1%}), so soft tokens would mislead it; use another."
        )
