"""Unusual and damaged inputs for every part that reads text, files, requests or configurations.

    python experiments/fuzz.py [--inputs 100000] [--configurations 10000] [--targets html server] [--seed 0]

Prints a table. An input fails if it

- raises anything but an error that the user can correct: one readable line, which for a file contains its path;
- gives NaN or infinity;
- takes more than `--seconds` of processor time;
- or makes the process grow: the growth of a target after its first tenth is in the last column, and more than
  `--megabytes` is a failure of the target.

Inputs depend only on the target, the seed and their number; a failure is printed with the command that repeats it.
The exit status is 1 if anything failed.
"""

import argparse
import asyncio
import faulthandler
import json
import logging
import math
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import fuzz_inputs as inputs
import httpx
import torch
from transformers import AutoTokenizer, pipeline
from transformers.utils import logging as transformers_logging

from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration
from hf_deqnar.cli.loading import bundled_model
from hf_deqnar.cli.main import is_correctable
from hf_deqnar.data.parallel_text import read_parallel
from hf_deqnar.documents.formats import PARSERS
from hf_deqnar.documents.glossary import read_glossary
from hf_deqnar.documents.translation import Request, translate_document
from hf_deqnar.documents.translator import Translator
from hf_deqnar.server.application import ServerOptions, create_application

Check = Callable[[Any], None]
WAIT = 120.0  # seconds after which a request of the server, or compiled code, is considered to hang
SHOWN = 10  # failures of a target


class TooSlow(BaseException):
    """An input that takes more processor time than it may; not an Exception, so that nothing handles it."""


class Wrong(AssertionError):
    """A result that must not be, such as NaN."""


@dataclass
class Target:
    """What is tested.

    Attributes:
        draw: an input from a generator of random numbers.
        open: a context with the function that is called with each input.
    """

    draw: Callable[[random.Random], Any]
    open: Callable[[], Any]


@dataclass
class Outcome:
    """A row of the table."""

    inputs: int = 0
    errors: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)
    slowest: float = 0.0
    megabytes: float = 0.0


def require_finite(name: str, value: Any) -> None:
    if not math.isfinite(value):
        raise Wrong(f"{name} is {value}")


@contextmanager
def tokenizing() -> Iterator[Check]:
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())

    def check(text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            return  # refused before it is tokenized, see the target pipeline
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
        decoded = tokenizer.decode(encoded["input_ids"], skip_special_tokens=True)
        if len(encoded["input_ids"]) > 4 * len(text.encode()) + 2 or len(decoded) > 4 * len(text) + 2:
            raise Wrong(
                f"{len(text)} characters became {len(encoded['input_ids'])} tokens and {len(decoded)} characters"
            )
        if any(not 0 <= start <= end <= len(text) for start, end in encoded["offset_mapping"]):
            raise Wrong("an offset is outside of the text")

    yield check


def small_model() -> tuple[DeqNarForConditionalGeneration, Any]:
    """An untrained model with the tokenizer of the bundled one; its translations are random and as long as any."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(bundled_model())
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_nfe": 3}
    config = DeqNarConfig.preset(
        "tiny", vocab_size=len(tokenizer), length="ctc", refinement="implicit", max_position_embeddings=128, **sizes
    )
    return DeqNarForConditionalGeneration(config).eval(), tokenizer


@contextmanager
def translating(name: str | None = None) -> Iterator[Check]:
    if name is None:
        model, tokenizer = small_model()
        translate = pipeline("translation", model=model, tokenizer=tokenizer, device="cpu")
    else:
        translate = pipeline("translation", model=name, device="cpu")

    def check(text: str) -> None:
        (found,) = translate(text, return_figures=True, return_segments=True)
        if not isinstance(found["translation_text"], str):
            raise Wrong("the translation is no text")
        for figures in (found, *found["segments"]):
            for figure in ("residual", "score"):
                require_finite(figure, figures.get(figure, 0.0))

    yield check


@contextmanager
def parsing(format: str) -> Iterator[Check]:
    """A document whose sentences are copied; the words of the requests must be in the result."""

    def copy(requests: list[Request]) -> list[str]:
        return [request.text for request in requests]

    def longer(requests: list[Request]) -> list[str]:
        return [f"{request.text} {request.text[:1000]}" for request in requests]

    def check(text: str) -> None:
        for translate in (copy, longer):
            found = translate_document(PARSERS[format](text), translate, fits=lambda part: len(part) < 500)
            if len(found) > 100 * (len(text) + 10):
                raise Wrong(f"{len(text)} characters became {len(found)}")

    yield check


@contextmanager
def reading(ending: str, read: Callable[[Path], Any]) -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{ending}"

        def check(data: bytes) -> None:
            path.write_bytes(data)
            with naming(path):
                read(path)

        yield check


@contextmanager
def reading_aligned() -> Iterator[Check]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"

        def check(sides: tuple[bytes, bytes]) -> None:
            for language, data in zip(("en", "de"), sides, strict=True):
                Path(f"{path}.{language}").write_bytes(data)
            with naming(path):
                read_corpus(path)

        yield check


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors inside must name the file."""
    try:
        yield
    except Exception as error:
        if is_correctable(error) and str(path) not in str(error):
            raise Wrong(f"the error does not name the file: {error}") from error
        raise


def read_corpus(path: Path) -> None:
    for pair in read_parallel(path, "en", "de"):
        for text in (pair.source, *pair.references):
            text.encode()  # a tokenizer refuses what this refuses


@contextmanager
def serving() -> Iterator[Check]:
    translator = Translator(*small_model(), batch_size=16)
    options = ServerOptions("en", "de", max_characters=20_000)
    application = create_application(translator, options, "small")
    loop = asyncio.new_event_loop()
    lifespan = application.router.lifespan_context(application)
    loop.run_until_complete(lifespan.__aenter__())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://server", timeout=WAIT)

    async def send(path: str, kind: str, body: bytes) -> httpx.Response:
        async with asyncio.timeout(WAIT):
            return await client.post(path, headers={"content-type": kind}, content=body)

    def check(request: tuple[str, str, bytes]) -> None:
        response = loop.run_until_complete(send(*request))
        if response.status_code in (400, 413, 415):
            raise ValueError(response.json()["error"])
        if response.status_code != 200:
            raise Wrong(f"status {response.status_code}: {response.text[:200]}")
        if request[0] == "/translate":
            if not isinstance(json.loads(response.text, parse_constant=refuse_constant)["translatedText"], (str, list)):
                raise Wrong("the translation is neither a text nor a list")
            return
        events = [event.split("\ndata: ", 1) for event in response.text.removesuffix("\n\n").split("\n\n")]
        for _, data in events:
            json.loads(data, parse_constant=refuse_constant)
        if events[-1][0] not in ("event: done", "event: error"):
            raise Wrong(f"the stream ends with {events[-1][0]}")

    try:
        yield check
    finally:
        loop.run_until_complete(client.aclose())
        loop.run_until_complete(lifespan.__aexit__(None, None, None))
        loop.close()


def refuse_constant(name: str) -> None:
    raise Wrong(f"{name} in a response, which is not JSON")


@contextmanager
def configuring() -> Iterator[Check]:
    """A training step and a translation of a small model with any valid configuration."""

    def check(fields: dict[str, Any]) -> None:
        config = DeqNarConfig(**fields)
        torch.manual_seed(0)
        model = DeqNarForConditionalGeneration(config)
        ids = torch.randint(0, config.vocab_size, (2, 4))
        mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
        loss = model.train()(input_ids=ids, attention_mask=mask, labels=ids[:, :3]).loss
        require_finite("the loss", loss.item())
        loss.backward()
        for name, weight in model.named_parameters():
            if weight.grad is not None and not weight.grad.isfinite().all():
                raise Wrong(f"the gradient of {name} is not finite")
        found = model.eval().generate(ids, attention_mask=mask, return_dict_in_generate=True)
        for score in found.sequences_scores.tolist():
            require_finite("the score", score)

    yield check


TARGETS: dict[str, Target] = {
    "tokenizer": Target(inputs.draw_document, tokenizing),
    "pipeline": Target(partial(inputs.draw_text, longest=5000), translating),
    **{name: Target(inputs.draw_document, partial(parsing, name)) for name in PARSERS if name != "srt"},
    "srt": Target(inputs.draw_subtitles, partial(parsing, "srt")),
    "jsonl": Target(inputs.draw_jsonl, partial(reading, ".jsonl", read_corpus)),
    "jsonl.gz": Target(inputs.draw_gzip, partial(reading, ".jsonl.gz", read_corpus)),
    "aligned": Target(inputs.draw_sides, reading_aligned),
    "tsv": Target(partial(inputs.draw_table, delimiter="\t"), partial(reading, ".tsv", read_corpus)),
    "csv": Target(partial(inputs.draw_table, delimiter=","), partial(reading, ".csv", read_corpus)),
    "parquet": Target(inputs.draw_parquet, partial(reading, ".parquet", read_corpus)),
    "glossary": Target(inputs.draw_glossary, partial(reading, ".tsv", read_glossary)),
    "server": Target(inputs.draw_request, serving),
    "configurations": Target(inputs.draw_configuration, configuring),
}


def generator(target: str, seed: int, number: int) -> random.Random:
    return random.Random(f"{target} {seed} {number}")


def run(name: str, numbers: range, seed: int, seconds: float, target: Target | None = None) -> Outcome:
    """Test one target."""
    target, outcome = target or TARGETS[name], Outcome()
    early = 0.0
    with target.open() as check, limited() as timer:
        for index, number in enumerate(numbers):
            if index == max(100, len(numbers) // 10):
                early = resident_megabytes()
            value = target.draw(generator(name, seed, number))
            start = time.process_time()
            try:
                timer(seconds)
                check(value)
                timer(0)
            except Exception as error:
                timer(0)
                if is_readable(error):
                    outcome.errors += 1
                else:
                    outcome.failures.append((number, described(error)))
            except TooSlow:
                outcome.failures.append((number, f"took more than {seconds:g} seconds"))
            outcome.inputs += 1
            outcome.slowest = max(outcome.slowest, time.process_time() - start)
        outcome.megabytes = max(0.0, resident_megabytes() - early) if early else 0.0
    return outcome


@contextmanager
def limited() -> Iterator[Callable[[float], None]]:
    """A function that limits the processor time from now on; 0 ends the limit. Compiled code that does not return for
    `WAIT` seconds ends the process with a traceback.
    """

    def stop(*_: Any) -> None:
        raise TooSlow

    def timer(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if seconds:
            faulthandler.dump_traceback_later(max(WAIT, 10 * seconds), exit=True, file=sys.__stderr__)
        else:
            faulthandler.cancel_dump_traceback_later()

    previous = signal.signal(signal.SIGPROF, stop)
    try:
        yield timer
    finally:
        timer(0)
        signal.signal(signal.SIGPROF, previous)


def is_readable(error: Exception) -> bool:
    """Whether an error has a message of this package or of a library that a user can act on, not of a failed operation
    inside."""
    if isinstance(error, (UnicodeError, json.JSONDecodeError)):
        return False
    return is_correctable(error) and bool(str(error).strip()) and len(str(error)) < 2000


def described(error: Exception) -> str:
    """The error and where it was raised, in one line."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]} ({Path(place.filename).name}:{place.lineno})"


def resident_megabytes() -> float:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="of every target but configurations")
    parser.add_argument("--configurations", type=int, default=10_000)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of a single input")
    parser.add_argument("--seconds", type=float, default=10.0, help="processor time that an input may take")
    parser.add_argument("--megabytes", type=float, default=500.0, help="by which the process may grow with a target")
    parser.add_argument("--model", help="translate with this model in the target pipeline, not with a small one")
    options = parser.parse_args(arguments)
    with quiet():
        return tabulate(options)


def tabulate(options: argparse.Namespace) -> int:
    """Run the targets and print the table; the exit status is 1 if anything failed."""
    failed = False
    print("| target | inputs | readable errors | failures | slowest (s) | growth (MB) |")
    print("|---|---|---|---|---|---|", flush=True)
    failures = []
    for name in options.targets:
        count = options.configurations if name == "configurations" else options.inputs
        numbers = range(count) if options.only is None else range(options.only, options.only + 1)
        target = Target(TARGETS[name].draw, partial(translating, options.model)) if name == "pipeline" else None
        found = run(name, numbers, options.seed, options.seconds, target)
        if found.megabytes > options.megabytes:
            found.failures.append((count, f"grew by {found.megabytes:.0f} MB"))
        cells = [name, f"{found.inputs:,}", f"{found.errors:,}", f"{len(found.failures):,}"]
        print(f"| {' | '.join([*cells, f'{found.slowest:.1f}', f'{found.megabytes:.0f}'])} |", flush=True)
        for number, message in found.failures[:SHOWN]:
            repeat = f"python experiments/fuzz.py --targets {name} --seed {options.seed} --only {number}"
            failures.append(f"{repeat}: {message}")
        failed = failed or bool(found.failures)
    print("\n".join(failures), file=sys.stderr)
    return int(failed)


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings about texts are expected here."""
    disabled = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        transformers_logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.disable(disabled)


if __name__ == "__main__":
    sys.exit(main())
