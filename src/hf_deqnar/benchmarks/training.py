"""Training steps: a straightforward one against ours, and every gradient against a stacked decoder.

One step is forward, backward and Adam on a batch of random sentences as long as image captions. The straightforward
step projects every position, padding included, to the whole vocabulary, keeps the logits for the backward pass, glances
by a log-softmax over the vocabulary, and leaves the allocator as it is; the two must agree in the loss. Every contender
trains in a process of its own on the same batches, and they take turns step by step. CPU time is that of all threads:
on a machine that others use as well it says more than the clock. Peak memory is what torch allocates in one further
step, parameters included.
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
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.stability import RandomState
from ..objectives.inputs import Prediction, masked, needs_prediction
from ..objectives.objective import Objective, parse_objective
from ..objectives.targets import reference
from ..training.allocator import keep_freed_memory
from ..training.samplers import TokenBudgetSampler
from .common import machine, markdown_table, untrained_model
from .memory import peak_bytes
from .options import TrainingOptions

WARM_UP = 2  # steps of every contender before the clock starts
COMPARED = 3  # batches on which the losses of a pair are compared, at the first weights
FIRST_WORD = 6  # below are special tokens
SHORTEST, LONGEST = 5, 30


@dataclass
class Contender:
    """One way to train one model."""

    model: str  # what the table calls the model
    fields: dict[str, Any]  # of its configuration
    way: str = "ours"  # or `straightforward`
    keeps_memory: bool = True  # whether glibc is told to keep what is freed
    settings: dict[str, float] = field(default_factory=dict)  # of the objective

    @property
    def name(self) -> str:
        usual = self.keeps_memory == (self.way == "ours")
        allocator = "" if usual else f", {'memory kept' if self.keeps_memory else 'default allocator'}"
        settings = "".join(f", {key} {value:g}" for key, value in self.settings.items())
        return f"{self.model}{settings}; {self.way}{allocator}"


def contenders(layers: int, correction: float) -> list[Contender]:
    """Stacked and implicit in both ways, with what the allocator brings to each, and the gradients."""
    stacked = {"refinement": "stacked", "decoder_layers": layers}
    implicit = {"refinement": "implicit", "gradient": "one_step"}
    chosen = []
    for model, fields in ((f"stacked, {layers} layers", stacked), ("implicit one_step", implicit)):
        for way in ("straightforward", "ours"):
            chosen += [Contender(model, fields, way, keeps_memory) for keeps_memory in (way == "ours", way != "ours")]
    for way in ("straightforward", "ours"):
        chosen.append(Contender("implicit one_step", implicit, way, way == "ours", {"correction": correction}))
    settings = {"correction": correction, "correction_share": 0.25}
    chosen.append(Contender("implicit one_step", implicit, settings=settings))
    for refinement in ("implicit", "mixed"):
        for gradient in CHOICES["gradient"]:
            if (refinement, gradient) != ("implicit", "one_step"):
                chosen.append(Contender(f"{refinement} {gradient}", {"refinement": refinement, "gradient": gradient}))
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


def straightforward_loss(
    objective: Objective,
    model: DeqNarForConditionalGeneration,
    batch: dict[str, Tensor],
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """What `Objective` computes, written down plainly: whole logits, kept for the backward pass.

    For the reference as target, the inputs masked, CMLM (without CTC) and glancing, and no latents.
    """
    config, labels = model.config, batch["labels"]
    ctc = model.length_model.likelihood == "ctc"
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
    """One contender at work: a model, its optimizer and the batches."""

    def __init__(self, contender: Contender, options: TrainingOptions) -> None:
        if contender.keeps_memory:
            keep_freed_memory()
        torch.set_num_threads(options.threads)
        torch.manual_seed(options.seed)
        self.objective = parse_objective(options.objective, **contender.settings)
        length = "ctc" if "ctc" in options.objective.split("+") else "predict"
        size = {"vocab_size": options.vocabulary, "length": length}
        self.model = untrained_model(DeqNarConfig.preset(options.preset, **size, **contender.fields))
        self.model.train()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=5e-4, betas=(0.9, 0.98), fused=True)
        self.batches = caption_batches(options.vocabulary, options.max_tokens, options.steps, options.seed)
        self.plain = contender.way == "straightforward"

    def terms(self, index: int) -> dict[str, Tensor]:
        """The loss of a batch; revealed tokens and dropout depend on the batch's number alone."""
        torch.manual_seed(index)
        generator = torch.Generator().manual_seed(index)
        batch = self.batches[index % len(self.batches)]
        if self.plain:
            return straightforward_loss(self.objective, self.model, batch, generator)
        return self.objective(self.model, batch, generator=generator)

    def losses(self) -> list[float]:
        """Of the first batches, at the weights as they are."""
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


def serve(connection: Connection, contender: Contender, options: TrainingOptions) -> None:
    """A contender's process: answers calls of `Worker`'s methods until there are no more."""
    try:
        worker = Worker(contender, options)
        while (call := connection.recv()) is not None:
            name, *arguments = call
            connection.send(getattr(worker, name)(*arguments))
    except (ValueError, RuntimeError) as error:
        connection.send(error)  # raised where the answer is awaited


def ask(connection: Connection, *call: object) -> Any:
    """The answer of a contender's process."""
    connection.send(call)
    try:
        answer = connection.recv()
    except EOFError as error:
        raise RuntimeError("A contender's process ended early; its own message is above.") from error
    if isinstance(answer, Exception):
        raise answer
    return answer


@contextmanager
def workers(chosen: list[Contender], options: TrainingOptions) -> Iterator[dict[str, Connection]]:
    """A process for every contender, while this lasts."""
    spawn = multiprocessing.get_context("spawn")
    connections, processes = {}, []
    try:
        for contender in chosen:
            connections[contender.name], theirs = spawn.Pipe()
            processes.append(spawn.Process(target=serve, args=(theirs, contender, options), daemon=True))
            processes[-1].start()
            theirs.close()  # only the process holds it now: if it dies, reading here ends as well
        yield connections
    finally:
        for process in processes:
            process.terminate()
            process.join()


def measure(options: TrainingOptions) -> dict:
    chosen = check(options)
    with workers(chosen, options) as connections:
        losses = {name: ask(connection, "losses") for name, connection in connections.items()}
        steps: dict[str, list[dict]] = {name: [] for name in connections}
        for index in range(WARM_UP + options.steps):
            for name, connection in connections.items():
                steps[name].append(ask(connection, "step", index))
        peaks = {name: ask(connection, "peak") for name, connection in connections.items()}
    results = {}
    for contender in chosen:
        timed = steps[contender.name][WARM_UP:]
        results[contender.name] = {
            "seconds": statistics.median(step["seconds"] for step in timed),
            "cpu_seconds": statistics.median(step["cpu_seconds"] for step in timed),
            "tokens_per_second": statistics.median(step["tokens"] / step["seconds"] for step in timed),
            "loss": statistics.mean(step["loss"] for step in timed),
            "nfe": statistics.mean(step["nfe"] for step in timed),
            "peak_bytes": peaks[contender.name],
            "first_losses": losses[contender.name],
            "contender": asdict(contender),
        }
    shown = ("objective", "preset", "vocabulary", "layers", "max_tokens", "correction", "steps", "seed")
    return {
        "machine": machine(options.threads),
        "settings": {key: getattr(options, key) for key in shown},
        "results": results,
        "largest_difference": largest_difference(results),
    }


def check(options: TrainingOptions) -> list[Contender]:
    """The contenders that were asked for, if the question makes sense."""
    objective = parse_objective(options.objective)
    glancing = objective.input is masked or needs_prediction(objective.input)
    if objective.target is not reference or (objective.likelihood == "ctc" and not glancing):
        raise ValueError(
            f"--objective {options.objective}: the straightforward step knows ce and ctc, masked and glat, and cmlm "
            "without ctc; choose among these."
        )
    chosen = [
        one for one in contenders(options.layers, options.correction) if any(text in one.name for text in options.only)
    ]
    if not chosen:
        raise ValueError(
            f"--only '{' '.join(options.only)}' is part of no contender's name, such as 'mixed ift; ours'."
        )
    return chosen


def largest_difference(results: dict[str, dict]) -> float | None:
    """Between the losses of straightforward and our steps at the same weights; None where there is no such pair."""
    pairs: dict[tuple, dict[str, list[float]]] = {}
    for result in results.values():
        one = result["contender"]
        if one["settings"].get("correction_share", 1) == 1:
            pair = pairs.setdefault((one["model"], *one["settings"].values()), {})
            pair[one["way"]] = result["first_losses"]
    differences = [
        abs(ours - theirs)
        for pair in pairs.values()
        if len(pair) == 2
        for ours, theirs in zip(pair["ours"], pair["straightforward"], strict=True)
    ]
    return max(differences, default=None)


def table(figures: dict) -> str:
    results = figures["results"]
    stacked = next(
        (one["seconds"] for name, one in results.items() if name.startswith("stacked") and name.endswith("; ours")),
        None,
    )
    rows = []
    for name, one in results.items():
        model, way = name.split("; ")
        rival = results.get(f"{model}; straightforward")
        speed = "" if rival is None else f"{rival['seconds'] / one['seconds']:.2f}×"
        rows.append(
            [
                model,
                way,
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
    compared = ["speed to straightforward", "time to stacked"]
    headers = ["model", "step", "ms", "CPU ms", "tokens/s", *compared, "nfe", "loss", "MB"]
    difference = figures["largest_difference"]
    agreement = "" if difference is None else f"\n\nLargest difference between the two ways in loss: {difference:.1e}"
    return f"{figures['machine']}\n{figures['settings']}\n\n{markdown_table(headers, rows)}{agreement}"
