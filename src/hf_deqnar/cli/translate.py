"""Translate arguments, a file or standard input, line by line.

    hf-deqnar translate "A man is riding a horse."
    hf-deqnar translate --watch "A man is riding a horse."
    hf-deqnar translate --model my-model --input corpus.en > corpus.de

A line that cannot be translated gives an empty line and a message on stderr; the others are not affected, and the exit
status is 1 in the end.
"""

import argparse
import json
import math
import queue
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ..drafts_deqnar import TerminalStreamer
from ..generation_deqnar import Options
from ..pipeline_deqnar import DeqNarTranslationPipeline, clean_text
from .loading import load_model, model_in_the_box

# Options of `generate` that are flags here; their help comes from there.
FLAGS = {
    "length_beams": ("--length-beams", int),
    "ctc_beam_size": ("--ctc-beam-size", int),
    "refinement_passes": ("--passes", int),
    "max_nfe": ("--max-nfe", int),
    "tol": ("--tol", float),
    "solver": ("--solver", str),
    "deduplicate": ("--deduplicate", None),
    "stop_on_stable_tokens": ("--stop-on-stable-tokens", int),
    "reranker": ("--reranker", str),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="*", help="sentences; without any, lines are read from --input or stdin")
    parser.add_argument("--input", type=Path, metavar="FILE", help="a text file, one sentence a line")
    parser.add_argument("--model", help="a directory or hub id; the model in the box if not given")
    parser.add_argument("--device", help="such as cpu or cuda:0; the best there is if not given")
    parser.add_argument(
        "--runtime", choices=("torch", "onnx"), help="what runs it; what the model is made for by default"
    )
    parser.add_argument("--threads", type=int, help="most threads of a computation; as many as cores if not given")
    parser.add_argument("--batch-size", type=int, default=16, help="lines translated together (default: 16)")
    for option in fields(Options):
        if option.name in FLAGS:
            flag, kind = FLAGS[option.name]
            how = {"type": kind} if kind is not None else {"action": "store_const", "const": True}
            parser.add_argument(flag, dest=option.name, help=option.metadata["help"], **how)
    parser.add_argument("--nbest", type=int, default=1, help="translations per sentence: line, rank, text (default: 1)")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--jsonl", action="store_true", help="one JSON object a line: text, nfe, residual, score")
    shown.add_argument("--watch", action="store_true", help="show each sentence settle, evaluation by evaluation")


@dataclass
class Line:
    """One line of input: its text, or why there is none."""

    number: int
    text: str | None
    problem: str | None = None


def run(options: argparse.Namespace) -> int:
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    if options.watch and options.nbest > 1:
        raise ValueError("--watch shows one translation; leave out --nbest or --watch.")
    if options.nbest < 1:
        raise ValueError(f"--nbest must be at least 1, not {options.nbest}.")
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, not {options.batch_size}.")
    if options.text and options.input is not None:
        raise ValueError("Give sentences or --input, not both.")
    if options.input is not None and not options.input.is_file():
        raise FileNotFoundError(f"There is no file {options.input}.")
    if options.model is None:
        options.model = model_in_the_box()
    model, tokenizer = load_model(options.model, options.device, options.runtime, options.threads)
    pipeline = DeqNarTranslationPipeline(model=model, tokenizer=tokenizer, task="translation", device=model.device)
    settings = generate_settings(options, model)
    where = str(options.input) if options.input is not None else "argument" if options.text else "stdin"
    pipeline(".", **settings)  # options that do not fit are told once, before any line is read
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


def generate_settings(options: argparse.Namespace, model: Any) -> dict:
    """Flags as options of `generate`; another architecture gets none of ours, and is told so if they were asked for."""
    config = model.config
    asked = {name: getattr(options, name) for name in FLAGS if getattr(options, name) is not None}
    if config.model_type != "deqnar":
        if asked or options.watch or options.jsonl:
            flag = FLAGS[next(iter(asked))][0] if asked else "--watch" if options.watch else "--jsonl"
            raise ValueError(f"{flag} needs a deqnar model, but {options.model} is of type {config.model_type}.")
        beams = {"num_beams": max(options.nbest, model.generation_config.num_beams or 1)} if options.nbest > 1 else {}
        return {**beams, "num_return_sequences": options.nbest}
    asked["num_return_sequences"] = options.nbest  # whatever the model's own options say: lines are counted on
    if options.nbest > 1:
        beams = "ctc_beam_size" if config.length == "ctc" else "length_beams"
        asked[beams] = max(asked.get(beams, getattr(model.generation_config, beams)), options.nbest)
    if options.jsonl or options.watch:
        asked["return_figures"] = True
    return asked


def read_lines(options: argparse.Namespace) -> Iterator[Line]:
    """Lines as they come. Only a line feed ends a line; a carriage return before it is dropped, and a mark at first."""
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
    """Up to `size` lines, but never waits for more while some are ready: a slow writer gets its answers at once."""
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
    pipeline: DeqNarTranslationPipeline, lines: list[Line], settings: dict, options: argparse.Namespace, where: str
) -> int:
    """Translate one batch and print it in order. Returns how many lines failed."""
    for line in lines:
        if line.problem is None:
            try:
                pipeline.preprocess(line.text)
            except ValueError as error:
                line.problem = str(error)
    if options.watch:
        settings = {**settings, "streamer": TerminalStreamer(pipeline.tokenizer)}
        for line in lines:
            if line.problem is None and clean_text(line.text):
                print(clean_text(line.text), flush=True)
    records = iter(translate_good(pipeline, [line for line in lines if line.problem is None], settings))
    for line in lines:
        if line.problem is not None:
            print(f"hf-deqnar translate: {where}, line {line.number}: {line.problem}", file=sys.stderr)
            print(json.dumps({"line": line.number, "error": line.problem}) if options.jsonl else "", flush=True)
            continue
        record = next(records)
        show(line, record if isinstance(record, list) else [record], options)
    return sum(line.problem is not None for line in lines)


def translate_good(pipeline: DeqNarTranslationPipeline, lines: list[Line], settings: dict) -> list[list[dict]]:
    """Translate lines together, or one by one if something in one of them cannot be done; those get a problem."""
    texts = [line.text for line in lines]
    try:
        return pipeline(texts, batch_size=len(texts), **settings) if texts else []
    except ValueError as error:
        if len(lines) == 1:
            lines[0].problem = str(error)
            return []
        return [record for line in lines for record in translate_good(pipeline, [line], settings)]


def show(line: Line, translations: list[dict], options: argparse.Namespace) -> None:
    if options.watch and clean_text(line.text):
        print(f"      {settling(translations[0])}\n", flush=True)  # the streamer has shown the text
        return
    for rank, translation in enumerate(translations, start=1):
        text = translation.pop("translation_text")
        if options.jsonl:
            record = {"line": line.number, "source": line.text, "text": text, **translation}
            if not math.isfinite(record.get("score", 0.0)):  # of a text that stands above already; JSON has no infinity
                record["score"] = None
            print(json.dumps({**record, "rank": rank} if options.nbest > 1 else record, ensure_ascii=False), flush=True)
        else:
            # A translation must stay one line, whatever it holds.
            text = " ".join(text.splitlines())
            print(f"{line.number}\t{rank}\t{text}" if options.nbest > 1 else text, flush=True)


def settling(figures: dict) -> str:
    """How a sentence came about."""
    count = f"{figures['nfe']} evaluation{'' if figures['nfe'] == 1 else 's'} of the decoder"
    if "residual" not in figures:
        return f"written in {count}"
    return f"{'settled' if figures['converged'] else 'stopped'} after {count}, residual {figures['residual']:.1e}"
