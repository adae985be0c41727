"""Train a student with Marian on the data of a model, to compare with in `hf-deqnar bench latency` and `throughput`.

    python experiments/marian_student.py --tokenizer my-model --train_data distilled.jsonl.gz \
        --validation_data validation.jsonl.gz --source en --target de --output_dir runs/marian

The student has a deep encoder and a decoder of simple recurrent units (SSRU) with tied embeddings, as the models of
Firefox have. Its words are token ids of the model's tokenizer. After training it is converted to int8, and a shortlist
is counted with IBM model 1 on `--train_data`. Training continues where it was interrupted if the command is repeated.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_deqnar.benchmarks.marian import (
    MODEL,
    SHORTLIST,
    VOCABULARY,
    Student,
    as_words,
    check_pymarian,
    fingerprint_of_tokenizer,
    write_vocabulary,
)
from hf_deqnar.cli.main import exit_status
from hf_deqnar.data.parallel_text import Pair, read_parallel
from hf_deqnar.data.shortlist_counts import learn_probabilities
from hf_deqnar.models.deqnar.text import clean_text

TRAINED = "model.npz"
INT8_WIDTH = 64  # bytes of a register of AVX-512
LEAST_PROBABILITY = 1e-3  # of an entry of the shortlist


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="model whose tokenizer is used")
    parser.add_argument("--train_data", required=True, help="pairs, such as the output of hf-deqnar distill")
    parser.add_argument("--validation_data", required=True)
    parser.add_argument("--source", required=True, help="column of the source language")
    parser.add_argument("--target", required=True, help="column of the target language")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--d_model", type=int, default=256)
    parser.add_argument("--ffn_dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--encoder_layers", type=int, default=6)
    parser.add_argument("--decoder_layers", type=int, default=2)
    parser.add_argument("--mini_batch_words", type=int, default=2000, help="target words of a batch")
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--warmup_steps", type=int, default=1000)
    parser.add_argument("--max_steps", type=int, default=20000)
    parser.add_argument("--eval_steps", type=int, default=1000, help="updates between validations and checkpoints")
    parser.add_argument("--workspace", type=int, default=2000, help="megabytes of working memory")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    return exit_status("experiments/marian_student.py", lambda: train(options))


def train(options: argparse.Namespace) -> None:
    check_pymarian()
    for name in ("d_model", "ffn_dim"):
        if getattr(options, name) % INT8_WIDTH:
            raise ValueError(
                f"--{name} {getattr(options, name)} must be a multiple of {INT8_WIDTH}: Marian's int8 products fail "
                "for other widths."
            )
    folder = options.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    write_vocabulary(tokenizer, folder / VOCABULARY)
    pairs = read_parallel(options.train_data, options.source, options.target)
    write_corpus(pairs, tokenizer, folder / "train")
    write_corpus(
        read_parallel(options.validation_data, options.source, options.target), tokenizer, folder / "validation"
    )
    run_pymarian(training_flags(options))
    best = folder / f"{TRAINED}.best-cross-entropy.npz"
    trained = best if best.is_file() else folder / TRAINED
    run_pymarian(["convert", "--from", str(trained), "--to", str(folder / MODEL), "--gemm-type", "intgemm8"])
    write_shortlist(pairs, tokenizer, folder / SHORTLIST)
    settings = {key: str(value) for key, value in vars(options).items() if key != "output_dir"}
    Student(fingerprint_of_tokenizer(tokenizer), settings, has_shortlist=True).write(folder)


def training_flags(options: argparse.Namespace) -> list[str]:
    """The flags of `pymarian train`; sizes are ours, the architecture is that of Bergamot's students."""
    folder = options.output_dir
    files = {
        "model": folder / TRAINED,
        "train-sets": [folder / "train.source", folder / "train.target"],
        "valid-sets": [folder / "validation.source", folder / "validation.target"],
        "vocabs": [folder / VOCABULARY] * 2,
        "tempdir": folder,
        "log": folder / "train.log",
    }
    architecture = {
        "type": "transformer",
        "transformer-decoder-autoreg": "rnn",
        "dec-cell": "ssru",
        "enc-depth": options.encoder_layers,
        "dec-depth": options.decoder_layers,
        "dim-emb": options.d_model,
        "transformer-dim-ffn": options.ffn_dim,
        "transformer-heads": options.heads,
    }
    schedule = {
        "mini-batch": 1000,
        "mini-batch-words": options.mini_batch_words,
        "maxi-batch": 200,
        "max-length": 200,
        "learn-rate": options.learning_rate,
        "lr-warmup": options.warmup_steps,
        "lr-decay-inv-sqrt": options.warmup_steps,
        "optimizer-params": [0.9, 0.98, "1e-9"],
        "clip-norm": 1,
        "exponential-smoothing": "1e-3",
        "after-batches": options.max_steps,
        "valid-freq": options.eval_steps,
        "save-freq": options.eval_steps,
        "disp-freq": 100,
        "valid-metrics": "cross-entropy",
        "early-stopping": 10,
        "cpu-threads": options.threads,
        "workspace": options.workspace,
        "seed": options.seed,
    }
    flags = ["--tied-embeddings-all", "--keep-best", "--overwrite", "--quiet"]
    for name, value in {**files, **architecture, **schedule}.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


def run_pymarian(arguments: list[str]) -> None:
    """Run pymarian; its errors end the whole process, so that it gets one of its own."""
    done = subprocess.run([sys.executable, "-m", "pymarian", *arguments], check=False)
    if done.returncode:
        raise ValueError(f"pymarian {arguments[0]} failed with status {done.returncode}; its message is above.")


def write_corpus(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Both sides of pairs as token ids, in `path.source` and `path.target`; of several references the first."""
    special = set(tokenizer.all_special_ids)
    sources = tokenizer([clean_text(pair.source) for pair in pairs])["input_ids"]
    targets = tokenizer([clean_text(pair.references[0]) for pair in pairs])["input_ids"]
    for name, sentences in (("source", sources), ("target", targets)):
        lines = (as_words(tokens, special) + "\n" for tokens in sentences)
        path.with_suffix(f".{name}").write_text("".join(lines), encoding="utf-8")


def write_shortlist(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """p(target word | source word) of IBM model 1, in the lines of Marian's lexical shortlists."""
    special = set(tokenizer.all_special_ids)
    sources, targets = (
        [[token for token in tokens if token not in special] for tokens in tokenizer(texts)["input_ids"]]
        for texts in ([clean_text(pair.source) for pair in pairs], [clean_text(pair.references[0]) for pair in pairs])
    )
    source, target, probability = learn_probabilities(sources, targets, len(tokenizer))
    lines = (
        f"{second} {first} {chance:.6f}\n"
        for first, second, chance in zip(source.tolist(), target.tolist(), probability.tolist(), strict=True)
        if chance >= LEAST_PROBABILITY
    )
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
