"""Translating lines as they arrive, and printing the results."""

import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.pipeline_deqnar import DeqNarTranslationPipeline, shortened
from ..models.deqnar.streaming import TerminalStreamer
from ..models.deqnar.text import clean_text
from ..utils.files import read_json, write_error, write_json
from ..utils.locks import try_lock
from ..utils.memory import is_out_of_memory
from .line_workers import available_cores, map_in_processes
from .loading import bundled_model, load_model
from .translate import TranslationArguments

# A file of more lines is translated by several processes.
LINES_OF_ONE_PROCESS = 1000
# Batches that are read from a file at once; sentences of similar length are put in one batch.
BATCHES_OF_A_CHUNK = 32


@dataclass
class Line:
    """One line of input: its text, or the reason why it cannot be translated."""

    number: int
    text: str | None
    problem: str | None = None
    unfamiliar: str | None = None  # a sentence that does not look like the source language


@dataclass
class Translated:
    """The output for some lines, what is said about them on stderr, and how many they are and failed."""

    output: str
    messages: str
    lines: int
    failures: int


class LineTranslator:
    """Translates lines with a model that is loaded once."""

    def __init__(self, options: TranslationArguments) -> None:
        if options.model is None:
            options.model = bundled_model()
        model, tokenizer = load_model(options.model, options.device, options.runtime, options.threads)
        self.pipeline = DeqNarTranslationPipeline(
            model=model,
            tokenizer=tokenizer,
            task="translation",
            device=model.device,
            split_sentences=not options.no_split_sentences,
            warn_unfamiliar=False,  # the message of `translate_lines` has the number of the line
        )
        self.options, self.settings = options, generate_settings(options, model)
        self.where = str(options.input) if options.input is not None else "argument" if options.text else "stdin"
        self.pipeline("A", **self.settings)  # raises the error for invalid options once, before any line is translated

    def __call__(self, lines: list[Line]) -> Translated:
        output, messages = io.StringIO(), io.StringIO()
        failures = self.print(lines, output, messages)
        return Translated(output.getvalue(), messages.getvalue(), len(lines), failures)

    def print(self, lines: list[Line], output: TextIO, messages: TextIO) -> int:
        """Translate and print in order. Returns the number of lines that failed."""
        return translate_lines(self.pipeline, lines, self.settings, self.options, self.where, output, messages)


def translate(options: TranslationArguments) -> int:
    """Translate all input; returns the exit status."""
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    total = None
    if options.input is not None:
        with options.input.open("rb") as file:
            total = sum(1 for _ in file)
    processes = number_of_processes(options, total)
    if processes > 1:  # each of them has its share of the threads
        options.threads = max(1, (options.threads or available_cores()) // processes)
    if options.output is not None:
        return write_output(options, total, processes)
    failures = 0
    with progress_bar(total) as progress:
        for translated in translate_input(options, processes, sys.stdout):
            print(translated.output, end="", flush=True)
            print(translated.messages, end="", file=sys.stderr)
            failures += translated.failures
            progress.update(translated.lines)
    return 1 if failures else 0


def progress_bar(total: int | None, done: int = 0) -> tqdm:
    return tqdm(total=total, initial=done, unit="line", disable=None if total is not None else True, file=sys.stderr)


def number_of_processes(options: TranslationArguments, total: int | None) -> int:
    """--processes, or for long files one for each core, if the model runs on the CPU."""
    if options.processes is not None:
        return options.processes
    if total is None or total <= LINES_OF_ONE_PROCESS or options.watch:
        return 1
    if options.device is None:
        import torch

        on_cpu = not torch.cuda.is_available()
    else:
        on_cpu = options.device == "cpu"
    return min(options.threads or available_cores(), available_cores()) if on_cpu else 1


def translate_input(
    options: TranslationArguments, processes: int, live: TextIO | None = None, skipped: int = 0
) -> Iterator[Translated]:
    """The translations of all input in its order.

    Args:
        processes: that translate; one is this process.
        live: where lines are printed as they arrive, if the input is not a file.
        skipped: number of lines at the beginning that are left out.
    """
    lines = itertools.islice(read_lines(options), skipped, None)
    size = 1 if options.watch else options.batch_size
    if options.input is not None and not options.watch:
        chunks = chunks_of(lines, size * BATCHES_OF_A_CHUNK)
        if processes > 1:
            yield from map_in_processes(LineTranslator, options, chunks, processes)
        else:
            yield from map(LineTranslator(options), chunks)
        return
    translator = LineTranslator(options)
    for batch in batches(lines, size):
        if live is None:
            yield translator(batch)
        else:
            yield Translated("", "", len(batch), translator.print(batch, live, sys.stderr))


def chunks_of(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    while chunk := list(itertools.islice(lines, size)):
        yield chunk


def write_output(options: TranslationArguments, total: int | None, processes: int) -> int:
    """Translate into --output. Lines are written to FILE.unfinished, from which the same command resumes."""
    assert options.output is not None
    unfinished = options.output.with_name(f"{options.output.name}.unfinished")
    start = time.perf_counter()
    with try_lock(unfinished.with_name(f"{unfinished.name}.lock")) as acquired:
        if not acquired:
            raise ValueError(f"Another run is writing {options.output}; wait for it, or choose another --output.")
        try:
            count, failures = write_lines(options, total, processes, unfinished)
        except OSError as error:
            raise (write_error(options.output, error) if error.errno is not None else error) from error
    seconds = time.perf_counter() - start
    print(
        f"{options.output}: {count:,} lines in {seconds:.1f} s ({count / seconds:.1f} a second), "
        f"{processes} process{'es' if processes > 1 else ''}",
        file=sys.stderr,
    )
    return 1 if failures else 0


def write_lines(options: TranslationArguments, total: int | None, processes: int, unfinished: Path) -> tuple[int, int]:
    """Translate the lines that are left into the unfinished file, and rename it; the numbers of lines and failures.

    The file is synchronised before its record is written, which has the digest of what is finished.
    """
    record, key = unfinished.with_name(f"{unfinished.name}.json"), resumption_key(options)
    done, size, failures, digest = finished_lines(unfinished, record, key)
    count = 0
    if done:
        print(f"{unfinished}: {done:,} lines are done; resuming after them.", file=sys.stderr)
    with unfinished.open("r+b" if done else "wb") as file, progress_bar(total, done) as progress:
        file.truncate(size)
        file.seek(size)
        for translated in translate_input(options, processes, skipped=done):
            output = translated.output.encode("utf-8", errors="replace")
            file.write(output)
            file.flush()
            os.fsync(file.fileno())
            digest.update(output)
            print(translated.messages, end="", file=sys.stderr)
            failures += translated.failures
            count += translated.lines
            progress.update(translated.lines)
            finished = {"lines": done + count, "bytes": file.tell(), "sha256": digest.hexdigest()}
            write_json(record, {"key": key, **finished, "failures": failures})
    unfinished.replace(unfinished.with_name(unfinished.name.removesuffix(".unfinished")))
    record.unlink(missing_ok=True)
    return count, failures


def resumption_key(options: TranslationArguments) -> str:
    """A hash of everything that the output depends on: the options, and size and time of the input."""
    values = {
        field.name: str(getattr(options, field.name))
        for field in dataclasses.fields(options)
        if field.name not in ("batch_size", "threads", "processes")
    }
    if options.input is not None:
        status = options.input.stat()
        values["status"] = f"{status.st_size} {status.st_mtime_ns}"
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def finished_lines(unfinished: Path, record: Path, key: str) -> tuple[int, int, int, Any]:
    """Lines of the input that an interrupted run of the same command has translated, their bytes, failures and digest.

    None of them if the file is not what was written.
    """
    digest = hashlib.sha256()
    if not (unfinished.is_file() and record.is_file()):
        return 0, 0, 0, digest
    remedy = f"delete it and {unfinished} to start again"
    found = read_json(record, "key", "lines", "bytes", "sha256", "failures", remedy=remedy)
    if found["key"] != key:
        return 0, 0, 0, digest
    with unfinished.open("rb") as file:
        left = found["bytes"]
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    if left or digest.hexdigest() != found["sha256"]:
        print(f"{unfinished} is damaged; its lines are translated again.", file=sys.stderr)
        return 0, 0, 0, hashlib.sha256()
    return found["lines"], found["bytes"], found["failures"], digest


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
    pipeline: DeqNarTranslationPipeline,
    lines: list[Line],
    settings: dict,
    options: TranslationArguments,
    where: str,
    output: TextIO,
    messages: TextIO,
) -> int:
    """Translate lines and print them in order. Returns the number of lines that failed."""
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
                print(clean_text(line.text), file=output, flush=True)
    records = iter(translate_valid(pipeline, [line for line in lines if line.problem is None], settings, options))
    for line in lines:
        if line.problem is not None:
            print(f"hf-deqnar translate: {where}, line {line.number}: {line.problem}", file=messages)
            failed = json.dumps({"line": line.number, "error": line.problem}) if options.jsonl else ""
            print(failed, file=output, flush=True)
            continue
        if line.unfamiliar is not None:
            print(
                f"hf-deqnar translate: {where}, line {line.number}: this does not look like the source language of the "
                f"model: {shortened(line.unfamiliar)!r}",
                file=messages,
            )
        record = next(records)
        show(line, record if isinstance(record, list) else [record], options, output)
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
    """Translate lines together, or one by one if the batch fails; a line that fails gets a problem.

    If memory is exhausted, both halves are translated separately: translations do not depend on the batch.
    """
    texts = [line.text for line in lines]
    try:
        return pipeline(texts, batch_size=1 if options.watch else options.batch_size, **settings) if texts else []
    except (ValueError, RuntimeError, MemoryError) as error:
        exhausted = is_out_of_memory(error)
        if not exhausted and not isinstance(error, ValueError):
            raise
        if len(lines) == 1:
            lines[0].problem = f"not enough memory ({error})" if exhausted else str(error)
            return []
    size = max(1, len(lines) // 2) if exhausted else 1  # after `except`, because its error holds the batch's tensors
    parts = [lines[first : first + size] for first in range(0, len(lines), size)]
    return [record for part in parts for record in translate_valid(pipeline, part, settings, options)]


def show(line: Line, translations: list[dict], options: TranslationArguments, output: TextIO | None = None) -> None:
    if options.watch and clean_text(line.text):
        if "nfe" not in translations[0]:  # otherwise the streamer has printed the text
            print(f"  =>  {translations[0]['translation_text']}", file=output)
        print(f"      {summarise(translations[0])}\n", file=output, flush=True)
        return
    for rank, translation in enumerate(translations, start=1):
        text = translation.pop("translation_text")
        if options.jsonl:
            record = {"line": line.number, "source": line.text, "text": text, **translation}
            if line.unfamiliar is not None:
                record["unfamiliar"] = line.unfamiliar
            if not math.isfinite(record.get("score", 0.0)):  # a duplicate; JSON has no infinity
                record["score"] = None
            ranked = {**record, "rank": rank} if options.nbest > 1 else record
            print(json.dumps(ranked, ensure_ascii=False), file=output, flush=True)
        else:
            # A translation is one line, even if it contains line breaks.
            text = " ".join(text.splitlines())
            columns = [str(line.number), str(rank)] if options.nbest > 1 else []
            columns += [f"{translation['quality']:.2f}"] if options.quality else []
            print("\t".join([*columns, text]), file=output, flush=True)


def summarise(figures: dict) -> str:
    """Evaluations and residual of a translation."""
    if "nfe" not in figures:
        return "copied, because there is nothing to translate"
    count = f"{figures['nfe']} evaluation{'' if figures['nfe'] == 1 else 's'} of the decoder"
    count += f", quality {figures['quality']:.2f}" if "quality" in figures else ""
    if "residual" not in figures:
        return f"translated in {count}"
    return f"{'converged' if figures['converged'] else 'stopped'} after {count}, residual {figures['residual']:.1e}"
