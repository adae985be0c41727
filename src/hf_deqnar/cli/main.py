"""Entry point of `hf-deqnar`."""

import argparse
import os
import sys

from huggingface_hub.errors import StrictDataclassError

from . import (
    bench,
    distill,
    energy,
    evaluate,
    export,
    ladder,
    ngrams,
    release,
    report,
    shortlist,
    teacher,
    train,
    translate,
)

VERBS = {
    "translate": translate,
    "train": train,
    "teacher": teacher,
    "distill": distill,
    "energy": energy,
    "evaluate": evaluate,
    "report": report,
    "ladder": ladder,
    "release": release,
    "bench": bench,
    "export": export,
    "shortlist": shortlist,
    "ngrams": ngrams,
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-deqnar", description="Deep-equilibrium non-autoregressive translation.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="verb")
    for name, module in VERBS.items():
        summary = module.__doc__.strip().splitlines()[0]
        takes_all = getattr(module, "TAKES_ALL", False)  # its flags are those of dataclasses, read when it runs
        verb = verbs.add_parser(
            name,
            help=summary,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            add_help=not takes_all,
            prefix_chars="\0" if takes_all else "-",
        )
        if takes_all:
            verb.add_argument("arguments", nargs=argparse.REMAINDER, help="[settings.yaml] [--flag value …]")
        else:
            module.add_arguments(verb)
        verb.set_defaults(run=module.run)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Errors that a user can mend are one line on stderr and exit status 1."""
    options = make_parser().parse_args(arguments)
    try:
        return options.run(options) or 0
    except BrokenPipeError:  # the reader of our output has left; that is its good right
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError, ImportError, FloatingPointError, StrictDataclassError) as error:
        text = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else error
        print(f"hf-deqnar {options.verb}: {text}", file=sys.stderr)
        return 1
    return 0  # only after a closed pipe


if __name__ == "__main__":
    sys.exit(main())
