"""Translating lines as they arrive, and printing the results."""

import json
import math
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.pipeline_deqnar import DeqNarTranslationPipeline, shortened
from ..models.deqnar.streaming import TerminalStreamer
from ..models.deqnar.text import clean_text
from .loading import bundled_model, load_model
from .translate import TranslationArguments


@dataclass
class Line:
    """One line of input: its text, or the reason why it cannot be translated."""

    number: int
    text: str | None
    problem: str | None = None
    unfamiliar: str | None = None  # a sentence that does not look like the source language


def translate(options: TranslationArguments) -> int:
    """Translate all input; returns the exit status."""
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    if options.model is None:
        options.model = bundled_model()
    model, tokenizer = load_model(options.model, options.device, options.runtime, options.threads)
    pipeline = DeqNarTranslationPipeline(
        model=model,
        tokenizer=tokenizer,
        task="translation",
        device=model.device,
        split_sentences=not options.no_split_sentences,
        warn_unfamiliar=False,  # the message below has the number of the line
    )
    settings = generate_settings(options, model)
    where = str(options.input) if options.input is not None else "argument" if options.text else "stdin"
    pipeline("A", **settings)  # raises the error for invalid options once, before any line is read
    failures = 0
    total = None
    if options.input is not None:
        with options.input.open("rb") as file:
            total = sum(1 for _ in file)
    with tqdm(total=total, unit="line", disable=None if total is not None else True, file=sys.stderr) as progress:
        for lines in batches(read_lines(options), 1 if options.watch else options.batch_size):
            failures += translate_lines(pipeline, lines, settings, options, where)
            progress.update(len(lines))
    return 1 if failures else 0


def generate_settings(options: TranslationArguments, model: Any) -> dict:
    """Options of `generate` from the flags; an error if a flag has no effect on a model of another architecture."""
    config = model.config
    requested = options.generation_options()
    if not is_deqnar(config):
        if requested or options.watch or options.jsonl or options.quality:
            others = [f"--{name}" for name in ("watch", "jsonl", "quality") if getattr(options, name)]
            flag = f"--{next(iter(requested))}" if requested else others[0]
            raise ValueError(f"{flag} needs a deqnar model, but {options.model} is of type {config.model_type}.")
        beams = {"num_beams": max(options.nbest, model.generation_config.num_beams or 1)} if options.nbest > 1 else {}
        return {**beams, "num_return_sequences": options.nbest}
    requested["num_return_sequences"] = options.nbest  # the number of lines must not depend on the model's own options
    if options.nbest > 1:
        beams = model.length_model.beam_option
        requested[beams] = max(requested.get(beams, getattr(model.generation_config, beams)), options.nbest)
    if options.jsonl or options.watch:
        requested["return_figures"] = True
    calibrated = model.generation_config.quality is not None
    if options.quality and not calibrated:
        raise ValueError(f"{options.model} has no quality estimate; fit one with hf-deqnar calibrate.")
    if options.quality or (options.jsonl and calibrated):
        requested["return_quality"] = True
    return requested


def read_lines(options: TranslationArguments) -> Iterator[Line]:
    """Lines as they arrive. Only a line feed ends a line; a carriage return before it and a leading BOM are dropped."""
    if options.text:
        for number, text in enumerate(options.text, start=1):
            yield Line(number, text)
        return
    with options.input.open("rb") if options.input is not None else sys.stdin.buffer as stream:
        for number, raw in enumerate(stream, start=1):
            try:
                encoding = "utf-8-sig" if number == 1 else "utf-8"
                yield Line(number, raw.rstrip(b"\n").removesuffix(b"\r").decode(encoding))
            except UnicodeDecodeError as error:
                yield Line(number, None, f"not valid UTF-8 at byte {error.start + 1}")


def batches(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    """Batches of up to `size` lines; lines that are ready are not delayed until the batch is full."""
    ready: queue.Queue = queue.Queue(maxsize=4 * size)
    end = object()

    def fill() -> None:
        try:
            for line in lines:
                ready.put(line)
            ready.put(end)
        except OSError as error:
            ready.put(error)

    threading.Thread(target=fill, daemon=True).start()
    while True:
        batch = []
        item = ready.get()
        while True:
            if item is end or isinstance(item, OSError):
                if batch:
                    yield batch
                if item is end:
                    return
                raise item
            batch.append(item)
            if len(batch) == size:
                break
            try:
                item = ready.get(timeout=0.01)
            except queue.Empty:
                break
        yield batch


def translate_lines(
    pipeline: DeqNarTranslationPipeline, lines: list[Line], settings: dict, options: TranslationArguments, where: str
) -> int:
    """Translate one batch and print it in order. Returns the number of lines that failed."""
    for line in lines:
        if line.problem is None:
            try:
                line.unfamiliar = unfamiliar_part(pipeline, line.text)
            except ValueError as error:
                line.problem = str(error)
    if options.watch:
        settings = {**settings, "streamer": TerminalStreamer(pipeline.tokenizer)}
        for line in lines:
            if line.problem is None and clean_text(line.text):
                print(clean_text(line.text), flush=True)
    records = iter(translate_valid(pipeline, [line for line in lines if line.problem is None], settings, options))
    for line in lines:
        if line.problem is not None:
            print(f"hf-deqnar translate: {where}, line {line.number}: {line.problem}", file=sys.stderr)
            print(json.dumps({"line": line.number, "error": line.problem}) if options.jsonl else "", flush=True)
            continue
        if line.unfamiliar is not None:
            print(
                f"hf-deqnar translate: {where}, line {line.number}: this does not look like the source language of the "
                f"model: {shortened(line.unfamiliar)!r}",
                file=sys.stderr,
            )
        record = next(records)
        show(line, record if isinstance(record, list) else [record], options)
    return sum(line.problem is not None for line in lines)


def unfamiliar_part(pipeline: DeqNarTranslationPipeline, text: str) -> str | None:
    """The first sentence that does not look like the source language; ValueError for text that cannot be translated."""
    found = None
    for inputs in pipeline.preprocess(text, **pipeline._preprocess_params):
        piece = inputs["piece"]
        if found is None and pipeline.is_unfamiliar(inputs["input_ids"][0], piece):
            found = piece.text[piece.segment.start : piece.segment.end]
    return found


def translate_valid(
    pipeline: DeqNarTranslationPipeline, lines: list[Line], settings: dict, options: TranslationArguments
) -> list[list[dict]]:
    """Translate lines together, or one by one if the batch fails; a line that fails gets a problem."""
    texts = [line.text for line in lines]
    try:
        return pipeline(texts, batch_size=1 if options.watch else options.batch_size, **settings) if texts else []
    except ValueError as error:
        if len(lines) == 1:
            lines[0].problem = str(error)
            return []
        return [record for line in lines for record in translate_valid(pipeline, [line], settings, options)]


def show(line: Line, translations: list[dict], options: TranslationArguments) -> None:
    if options.watch and clean_text(line.text):
        if "nfe" not in translations[0]:  # otherwise the streamer has printed the text
            print(f"  =>  {translations[0]['translation_text']}")
        print(f"      {summarise(translations[0])}\n", flush=True)
        return
    for rank, translation in enumerate(translations, start=1):
        text = translation.pop("translation_text")
        if options.jsonl:
            record = {"line": line.number, "source": line.text, "text": text, **translation}
            if line.unfamiliar is not None:
                record["unfamiliar"] = line.unfamiliar
            if not math.isfinite(record.get("score", 0.0)):  # a duplicate; JSON has no infinity
                record["score"] = None
            print(json.dumps({**record, "rank": rank} if options.nbest > 1 else record, ensure_ascii=False), flush=True)
        else:
            # A translation is one line, even if it contains line breaks.
            text = " ".join(text.splitlines())
            columns = [str(line.number), str(rank)] if options.nbest > 1 else []
            columns += [f"{translation['quality']:.2f}"] if options.quality else []
            print("\t".join([*columns, text]), flush=True)


def summarise(figures: dict) -> str:
    """Evaluations and residual of a translation."""
    if "nfe" not in figures:
        return "copied, because there is nothing to translate"
    count = f"{figures['nfe']} evaluation{'' if figures['nfe'] == 1 else 's'} of the decoder"
    count += f", quality {figures['quality']:.2f}" if "quality" in figures else ""
    if "residual" not in figures:
        return f"translated in {count}"
    return f"{'converged' if figures['converged'] else 'stopped'} after {count}, residual {figures['residual']:.1e}"
