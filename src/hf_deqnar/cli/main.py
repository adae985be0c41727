"""Entry point of `hf-deqnar`."""

import argparse
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator

import hf_deqnar

from ..utils.suggestions import did_you_mean
from . import (
    bench,
    calibrate,
    demo,
    distill,
    energy,
    ensemble,
    evaluate,
    export,
    ngrams,
    push,
    report,
    serve,
    shortlist,
    teacher,
    train,
    translate,
)
from .command import Command
from .completion import complete_if_asked

# The verbs in groups, each with an example.
GROUPS = {
    "translate": ({"translate": translate, "serve": serve, "demo": demo}, 'translate --watch "I like tea."'),
    "train": (
        {
            "train": train,
            "teacher": teacher,
            "ensemble": ensemble,
            "distill": distill,
            "energy": energy,
            "ngrams": ngrams,
            "shortlist": shortlist,
            "calibrate": calibrate,
        },
        "train --train_data train.jsonl --source en --target de --output_dir runs/first",
    ),
    "measure": (
        {"evaluate": evaluate, "report": report, "bench": bench},
        "evaluate runs/first --data test.jsonl --source en --target de",
    ),
    "publish": ({"export": export, "push": push}, "push --model runs/first --repo_id user/my-model"),
}
VERBS = {name: module for verbs, _ in GROUPS.values() for name, module in verbs.items()}


MEMORY_REMEDY = (
    "use smaller batches (--batch_size, in training --max_tokens with more --gradient_accumulation_steps, in distill "
    "--batch_tokens with another output), fewer --processes, or a smaller model."
)

COMMANDS: dict[str, Command | dict[str, Command]] = {
    name: bench.BENCHMARKS if module is bench else Command(module.__doc__, module.ARGUMENTS, module.run)
    for name, module in VERBS.items()
}


class VerbParser(argparse.ArgumentParser):
    """Parses the verb; errors are raised."""

    def __init__(self, program: str, description: str, summaries: dict[str, str]) -> None:
        super().__init__(prog=program, description=description)
        verbs = self.add_subparsers(dest="verb", required=True, metavar="verb", parser_class=argparse.ArgumentParser)
        for name, summary in summaries.items():
            verbs.add_parser(name, help=summary, add_help=False)
        self.names = list(summaries)

    def error(self, message: str) -> None:
        wrong = re.search(r"invalid choice: '([^']*)'", message)
        advice = did_you_mean(wrong[1], self.names) if wrong else ""
        if advice:
            raise ValueError(f"{message.partition(' (choose')[0]}; {advice}")
        raise ValueError(f"{message}; see {self.prog} --help.")


class GroupedParser(VerbParser):
    """Parses the verb of `hf-deqnar`; its help has the verbs in groups."""

    def format_help(self) -> str:
        parts = ["usage: hf-deqnar VERB …", self.description or ""]
        width = max(map(len, VERBS)) + 2
        for title, (verbs, example) in GROUPS.items():
            lines = [f"    {name:<{width}}{first_line(module.__doc__)}" for name, module in verbs.items()]
            parts.append("\n".join([f"{title}:", *lines, "", f"    $ hf-deqnar {example}"]))
        parts.append("hf-deqnar VERB --help lists the options of a verb; hf-deqnar --version prints the version.")
        return "\n\n".join(parts) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run one verb and return its exit status: 0, 1 if some lines could not be translated, 2 after an error."""
    complete_if_asked("hf-deqnar", COMMANDS)
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    program = f"hf-deqnar {arguments[0]}" if arguments and arguments[0] in VERBS else "hf-deqnar"
    with unwinding_on_termination():
        status = exit_status(program, lambda: run_verb(program, arguments))
    if status == 0:
        leave_process_group()
    return status


def leave_process_group() -> None:
    """End the communication with other processes of a training run; its threads could abort an exiting process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def unwinding_on_termination() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that locks are released, temporary files removed and other processes ended."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_verb(program: str, arguments: list[str]) -> int | None:
    """Find the verb, and in `bench` the benchmark, and run it with the arguments that follow."""
    summaries = {name: first_line(module.__doc__) for name, module in VERBS.items()}
    parser = GroupedParser("hf-deqnar", "Deep-equilibrium non-autoregressive translation.", summaries)
    parser.add_argument("--version", action="version", version=hf_deqnar.__version__)
    if not arguments:
        parser.print_help()
        return 0
    command = COMMANDS[parser.parse_args(arguments[:1]).verb]
    if isinstance(command, Command):
        return command(program, arguments[1:])
    summaries = {name: first_line(benchmark.description) for name, benchmark in command.items()}
    name = VerbParser(program, bench.__doc__, summaries).parse_args(arguments[1:2]).verb
    return command[name](f"{program} {name}", arguments[2:])


def first_line(text: str) -> str:
    return text.strip().splitlines()[0]


def exit_status(program: str, run: Callable[[], int | None]) -> int:
    """The exit status of a program; an error that the user can correct is one line on stderr and status 2."""
    try:
        return run() or 0
    except BrokenPipeError:  # the reader closed the pipe; exit quietly
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not is_correctable(error):
            raise
        message = " ".join(str(error).split())
        if is_memory_error(error):
            message = f"Memory is exhausted ({message or 'MemoryError'}); {MEMORY_REMEDY}"
        print(f"{program}: {message}", file=sys.stderr)
        return 2
    return 0


def is_correctable(error: Exception) -> bool:
    """Whether the user can correct the cause of an error, as opposed to a bug."""
    from huggingface_hub.errors import StrictDataclassError

    correctable = (ValueError, OSError, ImportError, FloatingPointError, StrictDataclassError)
    return isinstance(error, correctable) or is_memory_error(error)


def is_memory_error(error: Exception) -> bool:
    if not isinstance(error, (MemoryError, RuntimeError)):
        return False
    from ..utils.memory import is_out_of_memory  # imports torch

    return is_out_of_memory(error)


if __name__ == "__main__":
    sys.exit(main())
