"""Training steps of hf_deqnar and of a reference implementation, and every gradient compared with a stacked decoder.

One step is forward, backward and Adam on a batch of random sentences with the lengths of image captions. The reference
implementation computes logits of the full vocabulary for every position, padding included, stores them for the backward
pass, and selects glanced tokens with a log-softmax over the vocabulary; both must agree in the loss. Every system
trains in its own process on the same batches, with interleaved steps. CPU time is that of all threads; it is less
affected by other processes than wall-clock time. Peak memory is what torch allocates in one further step, parameters
included.

A second table compares the likelihoods alone, loss and backward pass from random features: CTC, and graphs of several
sizes with their links.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..models.deqnar.configuration_deqnar import CHOICES, DeqNarConfig
from ..models.deqnar.ctc import ctc_loss, viterbi_path
from ..models.deqnar.lengths import LENGTH_MODELS
from ..models.deqnar.losses_deqnar import Targets
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.stability import RandomState
from ..objectives.inputs import Prediction, masked, needs_prediction
from ..objectives.objective import Objective, parse_objective
from ..objectives.states import SupervisedStates
from ..objectives.targets import reference
from ..training.samplers import TokenBudgetSampler
from .common import machine, markdown_table, untrained_model
from .memory import peak_bytes
from .options import TrainingOptions

WARM_UP = 2  # untimed steps of every system before the timed ones
COMPARED = 3  # batches on which the losses of both implementations are compared, with initial weights
FIRST_WORD = 6  # below are special tokens
SHORTEST, LONGEST = 5, 30
SAMPLED_WORDS = 512
ROWS, WORDS = 32, 20  # sentences, and tokens of each, with which likelihoods are compared
LIKELIHOODS: dict[str, dict[str, Any]] = {
    "CTC, 2 × source": {"length": "ctc"},
    "graph, 4 × source": {"length": "dag", "dag_upsampling": 4},
    "graph, 8 × source": {"length": "dag", "dag_upsampling": 8},
}


IMPLEMENTATIONS = ("reference", "hf_deqnar")


@dataclass
class System:
    """A model and the implementation of its training step."""

    model: str  # name in the table
    fields: dict[str, Any]  # of its configuration
    implementation: str = "hf_deqnar"  # one of `IMPLEMENTATIONS`
    settings: dict[str, float] = field(default_factory=dict)  # of the objective
    states: int = 0  # supervised states of a path, equally weighted, instead of a solve

    @property
    def name(self) -> str:
        settings = "".join(f", {key} {value:g}" for key, value in self.settings.items())
        return f"{self.model}{settings}; {self.implementation}"


def systems(layers: int, correction: float, sampled: bool) -> list[System]:
    """Stacked and implicit models with both implementations, every gradient, and supervised states of self-conditioned
    models, the latter also with a sampled vocabulary if `sampled`.
    """
    stacked = {"refinement": "stacked", "decoder_layers": layers}
    implicit = {"refinement": "implicit", "gradient": "one_step"}
    chosen = []
    for model, fields in ((f"stacked, {layers} layers", stacked), ("implicit one_step", implicit)):
        chosen += [System(model, fields, implementation) for implementation in IMPLEMENTATIONS]
    for implementation in IMPLEMENTATIONS:
        chosen.append(System("implicit one_step", implicit, implementation, {"correction": correction}))
    settings = {"correction": correction, "correction_share": 0.25}
    chosen.append(System("implicit one_step", implicit, settings=settings))
    for refinement in ("implicit", "mixed"):
        for gradient in CHOICES["gradient"]:
            if (refinement, gradient) != ("implicit", "one_step"):
                chosen.append(System(f"{refinement} {gradient}", {"refinement": refinement, "gradient": gradient}))
    conditioned = {"refinement": "implicit", "feedback": "learned", "self_conditioning": "expected"}
    for settings in ({}, {"sampled_words": SAMPLED_WORDS})[: 2 if sampled else 1]:
        chosen += [
            System(
                f"{states} supervised states of {layers} layers",
                {**conditioned, "transition_layers": layers},
                settings=settings,
                states=states,
            )
            for states in (2, 3)
        ]
    return chosen


def caption_batches(vocabulary: int, max_tokens: int, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Random sentences with the lengths of image captions (about 14 ± 5 tokens), in batches within a token budget."""
    generator = torch.Generator().manual_seed(seed)
    pairs = count * max_tokens // SHORTEST
    source = torch.normal(14.0, 4.5, (pairs,), generator=generator).round().long().clamp(SHORTEST, LONGEST)
    change = torch.normal(0.0, 2.0, (pairs,), generator=generator).round().long()
    target = (source + change).clamp(SHORTEST, LONGEST)
    sampler = TokenBudgetSampler(torch.maximum(source, target).tolist(), max_tokens, seed=seed)
    batches = []
    for rows in sampler.batches()[:count]:
        tokens = [torch.randint(FIRST_WORD, vocabulary, (len(rows), LONGEST), generator=generator) for _ in range(2)]
        inside = [torch.arange(LONGEST)[None] < lengths[rows][:, None] for lengths in (source, target)]
        longest = [int(mask.sum(dim=1).max()) for mask in inside]
        padding = DeqNarConfig.pad_token_id
        batches.append(
            {
                "input_ids": tokens[0].masked_fill(~inside[0], padding)[:, : longest[0]],
                "labels": tokens[1].masked_fill(~inside[1], -100)[:, : longest[1]],
            }
        )
    return batches


def reference_loss(
    objective: Objective,
    model: DeqNarForConditionalGeneration,
    batch: dict[str, Tensor],
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """The loss of `Objective` in a reference implementation that stores all logits.

    Supports the reference as target, masked, CMLM (without CTC) and glancing inputs, and no latents.
    """
    config, labels = model.config, batch["labels"]
    ctc = model.length_model.has_own_alignment
    lengths = (labels >= 0).sum(dim=1)
    source = model.prepare(batch["input_ids"])
    masked_canvas = model.lay_out(source, labels)

    tokens, prediction = model.length_model.unaligned(labels, masked_canvas.tokens), None
    if needs_prediction(objective.input):
        with torch.no_grad():
            log_probabilities = model.read(model.solve(source, masked_canvas)).log_softmax(dim=-1)
            if ctc:
                path, _ = viterbi_path(log_probabilities, labels, masked_canvas.lengths, lengths, config.blank_token_id)
                tokens = path.clamp_min(0)
            chances = log_probabilities.gather(2, tokens[:, :, None])[:, :, 0].exp()
            prediction = Prediction(log_probabilities.argmax(dim=-1), chances)
    revealed = objective.input(tokens, masked_canvas.mask, prediction, 0.0, generator)
    corrected = objective.correction > 0 and config.seeks_equilibrium
    path = RandomState(generator) if corrected else None
    found = model.solve(source, masked_canvas.reveal(revealed, tokens), observe=path)

    def likelihood(features: Tensor) -> Tensor:
        logits = model.lm_head(features)  # (batch, canvas, vocabulary)
        if ctc:
            loss, fits = ctc_loss(logits, labels, masked_canvas.lengths, lengths, config.blank_token_id)
            return loss.sum() / (lengths * fits).sum()
        hidden = labels.masked_fill(revealed, -100)
        loss = functional.cross_entropy(
            logits.flatten(0, 1), hidden.flatten(), reduction="sum", label_smoothing=objective.label_smoothing
        )
        return loss / (hidden >= 0).sum()

    loss = likelihood(found.value)
    if corrected:
        loss = loss + objective.correction * likelihood(found.function.features(path.value))
    length_loss = model.length_model.length_loss(model, source, lengths)
    if length_loss is not None:
        loss = loss + config.length_loss_factor * length_loss
    return {"loss": loss, "nfe": found.nfe.double().mean()}


class Worker:
    """The model, optimizer and batches of one system."""

    def __init__(self, system: System, options: TrainingOptions) -> None:
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        settings: dict[str, Any] = dict(system.settings)
        if system.states:
            settings |= {"states": SupervisedStates((1 / system.states,) * system.states), "equilibrium": 0.0}
        self.objective = parse_objective(options.objective, **settings)
        length = next(name for name, one in LENGTH_MODELS.items() if self.objective.likelihood == one.likelihood)
        size = {"vocab_size": options.vocabulary, "length": length}
        self.model = untrained_model(DeqNarConfig.preset(options.preset, **size, **system.fields))
        self.model.train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-4, betas=(0.9, 0.98), fused=True)
        self.batches = caption_batches(options.vocabulary, options.max_tokens, options.steps, options.seed)
        self.reference = system.implementation == "reference"

    def terms(self, index: int) -> dict[str, Tensor]:
        """The loss of a batch; revealed tokens and dropout depend only on the index of the batch."""
        torch.manual_seed(index)
        generator = torch.Generator().manual_seed(index)
        batch = self.batches[index % len(self.batches)]
        if self.reference:
            return reference_loss(self.objective, self.model, batch, generator)
        return self.objective(self.model, batch, generator=generator)

    def losses(self) -> list[float]:
        """Losses of the first batches with the current weights."""
        with torch.no_grad():
            return [self.terms(index)["loss"].item() for index in range(min(COMPARED, len(self.batches)))]

    def step(self, index: int) -> dict[str, float]:
        start, start_cpu = time.perf_counter(), time.process_time()
        terms = self.terms(index)
        self.optimizer.zero_grad()
        terms["loss"].backward()
        self.optimizer.step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
        nfe = float(terms["nfe"]) if "nfe" in terms else 1.0
        tokens = int((self.batches[index % len(self.batches)]["labels"] >= 0).sum())
        loss = terms["loss"].item()
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": tokens, "loss": loss, "nfe": nfe}

    def peak(self) -> int:
        parameters = sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())
        return parameters + peak_bytes(lambda: self.step(0))


def serve(connection: Connection, system: System, options: TrainingOptions) -> None:
    """Process of a system: runs methods of `Worker` until it receives None."""
    try:
        worker = Worker(system, options)
        while (message := connection.recv()) is not None:
            name, *arguments = message
            connection.send(getattr(worker, name)(*arguments))
    except (ValueError, RuntimeError) as error:
        connection.send(error)  # raised by `call` in the main process


def call(connection: Connection, *method: object) -> Any:
    """Run a method of the worker in its process and return the result."""
    connection.send(method)
    try:
        result = connection.recv()
    except EOFError as error:
        raise RuntimeError("The process of a system ended early; its error message is above.") from error
    if isinstance(result, Exception):
        raise result
    return result


@contextmanager
def workers(chosen: list[System], options: TrainingOptions) -> Iterator[dict[str, Connection]]:
    """Context manager: a process for every system, by name."""
    spawn = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    try:
        for system in chosen:
            connections[system.name], remote = spawn.Pipe()
            processes.append(spawn.Process(target=serve, args=(remote, system, options), daemon=True))
            processes[-1].start()
            remote.close()  # so that reading fails if the process dies
        yield connections
    finally:
        for process in processes:
            process.terminate()
            process.join()


def measure(options: TrainingOptions) -> dict:
    chosen = check(options)
    with workers(chosen, options) as connections:
        losses = {name: call(connection, "losses") for name, connection in connections.items()}
        steps: dict[str, list[dict]] = {name: [] for name in connections}
        for index in range(WARM_UP + options.steps):
            for name, connection in connections.items():
                steps[name].append(call(connection, "step", index))
        peaks = {name: call(connection, "peak") for name, connection in connections.items()}
    results = {}
    for system in chosen:
        timed = steps[system.name][WARM_UP:]
        results[system.name] = {
            "seconds": statistics.median(step["seconds"] for step in timed),
            "cpu_seconds": statistics.median(step["cpu_seconds"] for step in timed),
            "tokens_per_second": statistics.median(step["tokens"] / step["seconds"] for step in timed),
            "loss": statistics.mean(step["loss"] for step in timed),
            "nfe": statistics.mean(step["nfe"] for step in timed),
            "peak_bytes": peaks[system.name],
            "first_losses": losses[system.name],
            "system": asdict(system),
        }
    likelihoods = measure_likelihoods(options)
    shown = ("objective", "preset", "vocabulary", "layers", "max_tokens", "correction", "steps", "seed")
    return {
        "machine": machine(options.threads),
        "settings": {key: getattr(options, key) for key in shown},
        "results": results,
        "likelihoods": likelihoods,
        "largest_difference": largest_difference(results),
    }


def measure_likelihoods(options: TrainingOptions) -> dict[str, dict[str, float]]:
    """Seconds of a loss and its backward pass, and the peak of the memory allocated for them, by likelihood."""
    threads = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return {name: measure_likelihood(fields, options) for name, fields in LIKELIHOODS.items()}
    finally:
        torch.set_num_threads(threads)


def measure_likelihood(fields: dict[str, Any], options: TrainingOptions) -> dict[str, float]:
    torch.manual_seed(options.seed)
    config = DeqNarConfig.preset(options.preset, vocab_size=options.vocabulary, refinement="stacked", **fields)
    model = untrained_model(config).train()
    labels = torch.randint(FIRST_WORD, options.vocabulary, (ROWS, WORDS))
    features = torch.randn(ROWS, WORDS * config.upsampling, config.d_model, requires_grad=True)
    targets = Targets(labels, torch.ones(features.shape[:2], dtype=torch.bool))

    def run() -> None:
        total, count = model.length_model.loss(model, features, targets)
        (total / count).backward()

    seconds, cpu_seconds = [], []
    for _ in range(WARM_UP + options.steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        run()
        seconds.append(time.perf_counter() - start)
        cpu_seconds.append(time.process_time() - start_cpu)
    return {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "cpu_seconds": statistics.median(cpu_seconds[WARM_UP:]),
        "peak_bytes": peak_bytes(run),
    }


def check(options: TrainingOptions) -> list[System]:
    """The selected systems, after checking the options."""
    objective = parse_objective(options.objective)
    glancing = objective.input is masked or needs_prediction(objective.input)
    supported = {"ce": True, "ctc": glancing}.get(objective.likelihood, False)
    if objective.target is not reference or not supported:
        raise ValueError(
            f"--objective {options.objective}: the reference implementation supports ce and ctc, masked and glat, and "
            "cmlm without ctc; choose one of these."
        )
    lengths = next(one for one in LENGTH_MODELS.values() if objective.likelihood == one.likelihood)
    known = systems(options.layers, options.correction, lengths.has_sampled_loss)
    chosen = [one for one in known if any(text in one.name for text in options.only)]
    if not chosen:
        raise ValueError(
            f"--only '{' '.join(options.only)}' matches no system; names are such as 'mixed ift; hf_deqnar'."
        )
    return chosen


def largest_difference(results: dict[str, dict]) -> float | None:
    """Largest difference in loss between the implementations with the same weights; None without such a pair."""
    pairs: dict[tuple, dict[str, list[float]]] = {}
    for result in results.values():
        one = result["system"]
        if one["settings"].get("correction_share", 1) == 1:
            pair = pairs.setdefault((one["model"], *one["settings"].values()), {})
            pair[one["implementation"]] = result["first_losses"]
    differences = [
        abs(loss - expected)
        for pair in pairs.values()
        if len(pair) == 2
        for loss, expected in zip(pair["hf_deqnar"], pair["reference"], strict=True)
    ]
    return max(differences, default=None)


def table(figures: dict) -> str:
    results = figures["results"]
    stacked = next(
        (
            one["seconds"]
            for name, one in results.items()
            if name.startswith("stacked") and name.endswith("; hf_deqnar")
        ),
        None,
    )
    rows = []
    for name, one in results.items():
        model, implementation = name.split("; ")
        baseline = results.get(f"{model}; reference")
        speed = "" if baseline is None else f"{baseline['seconds'] / one['seconds']:.2f}×"
        rows.append(
            [
                model,
                implementation,
                f"{1000 * one['seconds']:.0f}",
                f"{1000 * one['cpu_seconds']:.0f}",
                f"{one['tokens_per_second']:.0f}",
                speed,
                "" if stacked is None else f"{one['seconds'] / stacked:.2f}×",
                f"{one['nfe']:.1f}",
                f"{one['loss']:.3f}",
                f"{one['peak_bytes'] / 1e6:.0f}",
            ]
        )
    compared = ["speed to reference", "time to stacked"]
    headers = ["model", "step", "ms", "CPU ms", "tokens/s", *compared, "nfe", "loss", "MB"]
    difference = figures["largest_difference"]
    agreement = (
        "" if difference is None else f"\n\nLargest difference in loss between the implementations: {difference:.1e}"
    )
    head = f"{figures['machine']}\n{figures['settings']}"
    likelihoods = likelihood_table(figures["likelihoods"])
    return f"{head}\n\n{markdown_table(headers, rows)}{agreement}\n\n{likelihoods}"


def likelihood_table(likelihoods: dict[str, dict[str, float]]) -> str:
    first = next(iter(likelihoods.values()))
    rows = [
        [
            name,
            f"{1000 * one['seconds']:.0f}",
            f"{1000 * one['cpu_seconds']:.0f}",
            f"{one['cpu_seconds'] / first['cpu_seconds']:.2f}×",
            f"{one['peak_bytes'] / 1e6:.0f}",
        ]
        for name, one in likelihoods.items()
    ]
    title = f"Loss and backward pass of {ROWS} sentences of {WORDS} tokens, without encoder and decoder"
    return f"{title}\n\n{markdown_table(['likelihood', 'ms', 'CPU ms', 'CPU to first', 'MB'], rows)}"
