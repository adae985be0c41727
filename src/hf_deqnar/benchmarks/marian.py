"""A student of Marian as a contender: the engine that translates in Firefox (Junczys-Dowmunt et al. 2018, Bergamot).

`experiments/marian_student.py` trains one. It reads and writes token ids of our tokenizer as words, so that it has the
same tokens as the model it is compared with. The wheel of pymarian is compiled for AVX; its int8 products choose the
instructions of the processor when they run, all other operations do not.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..utils.files import read_json
from ..utils.fingerprints import fingerprint_of

MODEL, VOCABULARY, SHORTLIST, MANIFEST = "int8.bin", "vocabulary.yml", "shortlist.txt", "student.json"
UNKNOWN = "<unk>"
SHORTLIST_SIZES = "100 50"  # most common words, and companions of every source word
MAXI_BATCH = 100  # batches that Marian sorts by length together


@dataclass
class Student:
    """What the manifest of a student's folder says."""

    tokenizer: str  # fingerprint of its vocabulary
    settings: dict[str, Any]  # of its training
    has_shortlist: bool

    def write(self, folder: Path) -> None:
        (folder / MANIFEST).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "Student":
        if not (folder / MANIFEST).is_file():
            raise FileNotFoundError(
                f"{folder} is not a Marian student, it has no {MANIFEST}; train one with experiments/marian_student.py."
            )
        found = read_json(folder / MANIFEST, "tokenizer", "settings", "has_shortlist", remedy="train it again")
        return cls(found["tokenizer"], found["settings"], found["has_shortlist"])


def check_pymarian() -> None:
    if find_spec("pymarian") is None:
        raise ImportError("A Marian student needs pymarian: pip install 'hf_deqnar[marian]'.")


def fingerprint_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash of the vocabulary, in the order of ids."""
    return fingerprint_of(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get))


def as_words(tokens: list[int], special: set[int]) -> str:
    """Token ids as a line for Marian, without special tokens.

    >>> as_words([424, 295, 2], {2})
    '424 295'
    """
    return " ".join(str(token) for token in tokens if token not in special)


def as_tokens(line: str) -> list[int]:
    """Token ids of a line written by Marian.

    >>> as_tokens("424 <unk> 295")
    [424, 295]
    """
    return [int(word) for word in line.split() if word != UNKNOWN]


def write_vocabulary(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Marian's vocabulary file: its end and unknown token, and all token ids but special ones."""
    special = set(tokenizer.all_special_ids)
    words = ["</s>", UNKNOWN, *(str(token) for token in range(len(tokenizer)) if token not in special)]
    lines = (f'"{word}": {number}\n' for number, word in enumerate(words))
    path.write_text("".join(lines), encoding="utf-8")


def load_translator(
    folder: Path, tokenizer: PreTrainedTokenizerBase, *, threads: int, num_beams: int, shortlist: bool
) -> Callable[[list[list[int]]], list[list[int]]]:
    """A function that translates a batch of token ids; loading is refused if the tokenizer is another one.

    Args:
        threads: of Marian; each translates a batch of its own.
        num_beams: of the beam search; 1 for a greedy search.
        shortlist: whether the logits of a part of the vocabulary are computed only.
    """
    check_pymarian()
    student = Student.read(folder)
    if student.tokenizer != fingerprint_of_tokenizer(tokenizer):
        raise ValueError(f"{folder} was trained with another tokenizer than the model's; train it again.")
    if shortlist and not student.has_shortlist:
        raise ValueError(f"{folder} has no shortlist; train it again.")
    from pymarian import Translator

    vocabulary = str(folder / VOCABULARY)
    options = {"shortlist": f"{folder / SHORTLIST} {SHORTLIST_SIZES}"} if shortlist else {}
    translator = Translator(
        models=str(folder / MODEL),
        vocabs=[vocabulary, vocabulary],
        cpu_threads=threads,
        beam_size=num_beams,
        mini_batch=1024,  # the batch is what it is given
        maxi_batch=MAXI_BATCH,
        max_length_factor=3,
        skip_cost="",
        quiet="",
        quiet_translation="",
        **options,
    )
    special = set(tokenizer.all_special_ids)

    def translate(batch: list[list[int]]) -> list[list[int]]:
        lines = translator.translate("\n".join(as_words(tokens, special) for tokens in batch)).split("\n")
        return [as_tokens(line) for line in lines[: len(batch)]]

    return translate
