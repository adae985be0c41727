"""Translate arguments, a file or standard input, line by line.

    hf-deqnar translate "A man is riding a horse."
    hf-deqnar translate --watch "A man is riding a horse."
    hf-deqnar translate --model my-model --input corpus.en --output corpus.de
    hf-deqnar translate --input page.html --glossary terms.tsv --output page.de.html

Subtitles (.srt), Markdown (.md) and HTML keep their markup. Without --format, other input is read line by line. The
sentences of a line are translated separately and printed as one line. For a line that cannot be translated, an empty
line is printed and a message on stderr; the other lines are not affected, and the exit status is 1.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..documents.formats import format_of
from ..utils.files import check_writable

# Fields that are options of `generate`.
GENERATION = (
    "length_beams",
    "ctc_beam_size",
    "dag_search",
    "dag_beta",
    "dag_length_penalty",
    "dag_beam_size",
    "refinement_passes",
    "max_nfe",
    "tol",
    "solver",
    "deduplicate",
    "stop_on_stable_tokens",
    "reranker",
)


@dataclass
class TranslationArguments:
    """Input, model, options of `generate`, and output."""

    text: list[str] = field(
        default_factory=list,
        metadata={
            "positional": True,
            "nargs": "*",
            "metavar": "TEXT",
            "help": "Texts. Without any, lines are read from --input or standard input.",
        },
    )
    input: Path | None = field(
        default=None, metadata={"metavar": "FILE", "help": "Text file, read line by line, or a document."}
    )
    output: Path | None = field(
        default=None,
        metadata={
            "metavar": "FILE",
            "help": "File of the translations. Default: standard output. The same command resumes an interrupted one.",
        },
    )
    format: Literal["lines", "text", "srt", "markdown", "html"] | None = field(
        default=None,
        metadata={
            "help": "Format: lines, text (paragraphs), srt, markdown or html. Default: by the ending of --input."
        },
    )
    glossary: Path | None = field(
        default=None, metadata={"metavar": "FILE", "help": "Lines of source term, tab and required translation."}
    )
    model: str | None = field(default=None, metadata={"help": "Directory or hub id. Default: the bundled model."})
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda:0. Default: cuda if available, else cpu."}
    )
    runtime: Literal["torch", "onnx"] | None = field(
        default=None,
        metadata={
            "help": "Runtime: torch, or onnx, for which a model is exported to int8 when it is first used. Default: "
            "onnx for exports, torch for models."
        },
    )
    threads: int | None = field(
        default=None, metadata={"help": "Maximum number of threads. Default: one per processor core."}
    )
    processes: int | None = field(
        default=None,
        metadata={"help": "Processes that translate --input. Default: one per core for files of over 1,000 lines."},
    )
    batch_size: int = field(default=16, metadata={"help": "Sentences translated together."})
    no_split_sentences: bool = field(
        default=False,
        metadata={"help": "Translate each line at once. By default its sentences are translated separately."},
    )
    length_beams: int | None = field(default=None, metadata={"help": "Number of candidate lengths per sentence."})
    ctc_beam_size: int | None = field(
        default=None, metadata={"help": "Beam size of the CTC prefix search; 1 takes the best path."}
    )
    dag_search: Literal["greedy", "lookahead", "viterbi"] | None = field(
        default=None, metadata={"help": "How a path of a graph is chosen: greedy, lookahead or viterbi."}
    )
    dag_beta: float | None = field(
        default=None, metadata={"help": "Weight of the token's log-probability in lookahead."}
    )
    dag_length_penalty: float | None = field(
        default=None, metadata={"help": "α of score / length^α in the viterbi and beam search of a graph."}
    )
    dag_beam_size: int | None = field(
        default=None, metadata={"help": "Beam size of the search of texts in a graph; 1 for none."}
    )
    refinement_passes: int | None = field(
        default=None,
        metadata={
            "aliases": ["--passes"],
            "help": "Solves per sentence; before each but the first, the least likely tokens are masked.",
        },
    )
    max_nfe: int | None = field(default=None, metadata={"help": "Maximum number of evaluations of a solve."})
    tol: float | None = field(
        default=None, metadata={"help": "Relative residual below which a sentence has converged."}
    )
    solver: str | None = field(default=None, metadata={"help": "Solver: picard, anderson or broyden."})
    deduplicate: bool | None = field(default=None, metadata={"help": "Merge equal neighbouring tokens."})
    stop_on_stable_tokens: int | None = field(
        default=None, metadata={"help": "Stop a sentence whose tokens did not change for this many evaluations."}
    )
    reranker: str | None = field(
        default=None, metadata={"help": "Seq2seq model with the same vocabulary that selects the best candidate."}
    )
    nbest: int = field(default=1, metadata={"help": "Translations per sentence, printed as line, rank and text."})
    quality: bool = field(
        default=False,
        metadata={"help": "Print an estimate of the quality, from 0 to 1, before every translation."},
    )
    jsonl: bool = field(
        default=False,
        metadata={"help": "Print one JSON object a line: text, nfe, residual, converged, score, quality, words."},
    )
    watch: bool = field(
        default=False, metadata={"help": "Print the draft after every evaluation that changes it, until it converges."}
    )

    def __post_init__(self) -> None:
        if self.watch and self.jsonl:
            raise ValueError("--watch and --jsonl are two output formats; leave out one of them.")
        if self.watch and self.nbest > 1:
            raise ValueError("--watch shows one translation; leave out --nbest or --watch.")
        for name in ("nbest", "batch_size", "processes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, not {getattr(self, name)}.")
        if self.text and self.input is not None:
            raise ValueError("Give sentences or --input, not both.")
        for file in (self.input, self.glossary):
            if file is not None and not file.is_file():
                raise FileNotFoundError(f"There is no file {file}.")
        for name in ("output", "processes"):
            if getattr(self, name) is not None and (self.input is None or self.watch):
                raise ValueError(f"--{name} is for --input without --watch; leave it out.")
        check_writable(self.output)
        if self.is_document:
            shown = {"watch": self.watch, "jsonl": self.jsonl, "nbest": self.nbest > 1, "quality": self.quality}
            shown.update(no_split_sentences=self.no_split_sentences, processes=self.processes is not None)
            for name, is_set in shown.items():
                if is_set:
                    raise ValueError(f"--{name} is for lines, not for documents or glossaries; leave it or them out.")

    @property
    def document_format(self) -> str:
        """The format of the input."""
        return self.format or (format_of(self.input) if self.input is not None else "lines")

    @property
    def is_document(self) -> bool:
        """Whether the input is translated as a document, with its markup and the glossary."""
        return self.document_format != "lines" or self.glossary is not None

    def generation_options(self) -> dict[str, Any]:
        """The options of `generate` that are set."""
        return {name: getattr(self, name) for name in GENERATION if getattr(self, name) is not None}


ARGUMENTS = (TranslationArguments,)


def run(arguments: TranslationArguments) -> int:
    if arguments.is_document:
        from .document_translation import translate_documents

        return translate_documents(arguments)
    from .line_translation import translate

    return translate(arguments)
