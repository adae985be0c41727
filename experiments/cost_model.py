"""What a model costs: operations, memory and communication of an update and of a sentence, and times on given hardware.

    python experiments/cost_model.py --preset base --length ctc --layers 6 --vocabulary 32000 --source_tokens 28 \
        --updates 300000 --batch_tokens 65536 --flops 120e12 --bandwidth 50e9 --processes 8

Counted are the multiplications and additions of matrix products, which take most of the time of all but the smallest
models; a product of (n × k) and (k × m) has 2·n·k·m. `--flops` are operations per second that the hardware reaches in
such products, `--bandwidth` bytes per second between processes. `tests/experiments/test_cost_model.py` compares the
counts with those of torch, and the memory with the tensors that torch keeps for the backward pass.
"""

import argparse
import sys
from dataclasses import dataclass, field

from hf_deqnar.benchmarks.common import markdown_table
from hf_deqnar.cli.main import exit_status
from hf_deqnar.models.deqnar.configuration_deqnar import PRESETS, DeqNarConfig

BYTES = {"fp32": 4, "bf16": 2}
ADAM_STATES, MUON_STATES = 2, 1  # numbers per weight


@dataclass
class Sentence:
    """Numbers of tokens and positions of one sentence pair."""

    source: int
    canvas: int


@dataclass
class Training:
    """What an update computes besides one evaluation with its gradient.

    Attributes:
        evaluations: of the solve without gradient, before the evaluation that has one; 0 for stacked models and
            supervised states.
        states: supervised states; each is an evaluation with its gradient and a loss. 1 without them.
        first_prediction: whether a prediction on a masked canvas chooses tokens to reveal, as glancing does.
        words: tokens over which the loss is normalised, if it is fewer than the vocabulary.
    """

    evaluations: int = 0
    states: int = 1
    first_prediction: bool = False
    words: int | None = None


@dataclass
class Cost:
    """Operations of an update or a sentence, by part."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def encoder_flops(config: DeqNarConfig, source: int) -> float:
    """Four projections and a feed-forward network for every token, and attention between all pairs of tokens."""
    width, inner = config.d_model, config.encoder_ffn_dim
    return config.encoder_layers * (2 * source * (4 * width**2 + 2 * width * inner) + 4 * source**2 * width)


def keys_values_flops(config: DeqNarConfig, source: int) -> float:
    """Keys and values of the cross-attention, once for every sentence and layer."""
    return config.decoder_depth * 4 * source * config.d_model**2


def evaluation_flops(config: DeqNarConfig, sentence: Sentence) -> float:
    """One evaluation of the decoder, with W·z if its feedback is learned."""
    width, inner, canvas = config.d_model, config.decoder_ffn_dim, sentence.canvas
    of_layer = 2 * canvas * (6 * width**2 + 2 * width * inner) + 4 * canvas * (canvas + sentence.source) * width
    learned = config.seeks_equilibrium and config.feedback == "learned"
    return config.decoder_depth * of_layer + learned * 2 * canvas * width**2


def feedback_flops(config: DeqNarConfig, sentence: Sentence) -> float:
    """V·E[emb | p] of a self-conditioned model, without the prediction p itself."""
    layers = config.decoder_depth if config.self_conditioning_layers == "all" else 1
    return layers * 2 * sentence.canvas * config.d_model**2


def reading_flops(config: DeqNarConfig, sentence: Sentence, words: int | None = None) -> float:
    """Logits of all canvas positions, or a product of the same size."""
    return 2 * sentence.canvas * config.d_model * (config.vocab_size if words is None else words)


def translation_cost(config: DeqNarConfig, sentence: Sentence, evaluations: int = 1) -> Cost:
    """Operations of one sentence, without a beam search."""
    parts = {
        "encoder": encoder_flops(config, sentence.source),
        "keys and values": keys_values_flops(config, sentence.source),
        "evaluations": evaluations * evaluation_flops(config, sentence),
        "vocabulary": reading_flops(config, sentence),
    }
    if config.is_self_conditioned:  # the first evaluation is told nothing
        parts["evaluations"] += (evaluations - 1) * feedback_flops(config, sentence)
        parts["vocabulary"] += (evaluations - 1) * 2 * reading_flops(config, sentence)
    return Cost(parts)


def update_cost(config: DeqNarConfig, sentence: Sentence, training: Training) -> Cost:
    """Operations of training on one sentence pair: a backward pass takes twice those of its forward pass.

    The loss computes logits, and both gradients of their product; the prediction that a state feeds back is among them.
    """
    forward = encoder_flops(config, sentence.source) + keys_values_flops(config, sentence.source)
    evaluation = evaluation_flops(config, sentence)
    loss = 3 * reading_flops(config, sentence, training.words)
    parts = {
        "encoder": 3 * forward,
        "evaluations": (training.evaluations + 3 * training.states) * evaluation,
        "vocabulary": training.states * loss,
    }
    if training.states > 1:
        parts["evaluations"] += (training.states - 1) * 3 * feedback_flops(config, sentence)
    if training.first_prediction:
        parts["evaluations"] += evaluation * max(1, training.evaluations)
        parts["vocabulary"] += reading_flops(config, sentence)
    return Cost(parts)


def parameters(config: DeqNarConfig) -> int:
    """Matrices of the layers and the embedding, which is also the output matrix."""
    width = config.d_model
    encoder = config.encoder_layers * (4 * width**2 + 2 * width * config.encoder_ffn_dim)
    decoder = config.decoder_depth * (8 * width**2 + 2 * width * config.decoder_ffn_dim)
    learned = config.seeks_equilibrium and config.feedback == "learned"
    conditioned = config.decoder_depth if config.self_conditioning_layers == "all" else 1
    feedback = (learned + conditioned * config.is_self_conditioned) * width**2
    return encoder + decoder + feedback + config.vocab_size * width


def activation_bytes(config: DeqNarConfig, sentence: Sentence, states: int, precision: str = "fp32") -> float:
    """Tensors that are kept for the backward pass of one sentence pair, with dropout and eager attention.

    An encoder layer keeps 10 tensors of the width (inputs of the projections, queries, keys and values, sums before and
    after norms, dropout masks), 1 of the inner width, and 1 weight for every head and pair of positions. A decoder
    layer keeps 16 of the width, 1 of the inner width and the weights of both attentions. Embedding and loss
    keep 3 of the width.
    """
    source, canvas, width = sentence.source, sentence.canvas, config.d_model
    encoder = source * (10 * width + config.encoder_ffn_dim) + config.encoder_attention_heads * source**2
    decoder = canvas * (16 * width + config.decoder_ffn_dim)
    decoder += config.decoder_attention_heads * canvas * (canvas + source)
    embedding_and_loss = 3 * canvas * width
    total = config.encoder_layers * encoder + states * (config.decoder_depth * decoder + embedding_and_loss)
    return BYTES[precision] * total


def vocabulary_bytes(config: DeqNarConfig, training: Training, precision: str = "fp32") -> float:
    """Rows of the output matrix, which the loss of every state gathers once for the whole batch."""
    return BYTES[precision] * training.states * (training.words or config.vocab_size) * config.d_model


def state_bytes(config: DeqNarConfig, optimizer: str = "adam") -> int:
    """Weights, gradients and states of the optimizer, all in fp32."""
    states = MUON_STATES if optimizer == "muon" else ADAM_STATES
    return 4 * parameters(config) * (2 + states)


def all_reduce_bytes(config: DeqNarConfig, processes: int, precision: str = "fp32") -> float:
    """Bytes that a process sends in an update: a ring all-reduce of the gradients."""
    return 2 * (processes - 1) / processes * BYTES[precision] * parameters(config)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), default="base")
    parser.add_argument("--length", choices=["predict", "ctc"], default="ctc")
    parser.add_argument("--layers", type=int, default=None, help="layers of the decoder; default: those of the preset")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--source_tokens", type=int, default=28, help="of a sentence, on average")
    parser.add_argument("--target_tokens", type=int, default=28)
    parser.add_argument("--evaluations", type=int, default=4, help="of the equilibrium models, when they translate")
    parser.add_argument("--states", type=int, default=3, help="supervised states of the self-conditioned model")
    parser.add_argument("--updates", type=int, default=300_000)
    parser.add_argument("--batch_tokens", type=int, default=65_536, help="target tokens of an update")
    parser.add_argument("--flops", type=float, default=120e12, help="operations per second of a device")
    parser.add_argument("--bandwidth", type=float, default=50e9, help="bytes per second between devices")
    parser.add_argument("--processes", type=int, default=8, help="devices")
    parser.add_argument("--precision", choices=list(BYTES), default="bf16")
    parser.add_argument("--optimizer", choices=["adam", "muon"], default="adam")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    return exit_status("experiments/cost_model.py", lambda: print(table(options)))


def models(options: argparse.Namespace) -> dict[str, tuple[DeqNarConfig, Training, int]]:
    """Name → configuration, training and evaluations of a translation."""
    sizes = {"vocab_size": options.vocabulary, "length": options.length}
    layers = {} if options.layers is None else {"decoder_layers": options.layers}
    evaluated = {} if options.layers is None else {"transition_layers": options.layers}
    implicit = {"refinement": "implicit", "feedback": "learned", **evaluated}
    return {
        "stacked": (
            DeqNarConfig.preset(options.preset, refinement="stacked", **layers, **sizes),
            Training(),
            1,
        ),
        f"implicit, {options.evaluations} evaluations": (
            DeqNarConfig.preset(options.preset, **implicit, **sizes),
            Training(evaluations=options.evaluations),
            options.evaluations,
        ),
        f"self-conditioned, {options.states} states": (
            DeqNarConfig.preset(options.preset, self_conditioning="expected", **implicit, **sizes),
            Training(states=options.states),
            options.evaluations,
        ),
    }


def table(options: argparse.Namespace) -> str:
    """Costs of a stacked, an implicit and a self-conditioned model."""
    rows = []
    for name, (config, training, evaluations) in models(options).items():
        sentence = Sentence(options.source_tokens, options.source_tokens * config.upsampling)
        if config.upsampling == 1:
            sentence = Sentence(options.source_tokens, options.target_tokens)
        sentences = options.batch_tokens / options.target_tokens
        update = sentences * update_cost(config, sentence, training).total
        sent = all_reduce_bytes(config, options.processes, options.precision)
        seconds = update / options.flops / options.processes + sent / options.bandwidth
        memory = state_bytes(config, options.optimizer) + vocabulary_bytes(config, training, options.precision)
        memory += sentences / options.processes * activation_bytes(config, sentence, training.states, options.precision)
        rows.append(
            [
                name,
                f"{parameters(config) / 1e6:.1f}",
                f"{update / 1e12:.1f}",
                f"{memory / 1e9:.1f}",
                f"{sent / 1e6:.0f}",
                f"{seconds:.3f}",
                f"{seconds * options.updates / 3600:.1f}",
                f"{translation_cost(config, sentence, evaluations).total / 1e9:.2f}",
            ]
        )
    headers = ["model", "M parameters", "TFLOP an update", "GB a device", "MB sent an update", "s an update"]
    return markdown_table([*headers, f"hours for {options.updates:,}", "GFLOP a sentence"], rows)


if __name__ == "__main__":
    sys.exit(main())
