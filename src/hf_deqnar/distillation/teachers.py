"""Teachers of distillation: any Hugging Face seq2seq model, run by transformers or by CTranslate2."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenized_dataset import within_budget
from ..evaluation.metrics import sentence_bleu
from ..models.deqnar.text import clean_text, longest_source
from ..utils.fingerprints import digest_weights
from ..utils.locks import wait_for_lock
from .selection import chrf_of

# Token ids of a batch of sources → token ids of one translation per source; with `nearest`, of all beams of the first
# source, then of the second, and so on.
Translate = Callable[[list[list[int]]], list[list[int]]]

NEARNESS = ("bleu", "chrf")

BACKENDS = ("transformers", "ctranslate2")

# Entries of a configuration that change when a model is saved and loaded.
FILE_ENTRIES = ("_name_or_path", "transformers_version", "architectures", "dtype")


@dataclass
class Teacher:
    """A model with its tokenizer and its name."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass
class TeacherOptions:
    """How a teacher translates; all options determine the output, so resuming requires identical ones."""

    num_beams: int = field(default=5, metadata={"help": "Beams of the search; 1 is greedy."})
    length_penalty: float = field(default=1.0, metadata={"help": "Above 1, beam search prefers longer translations."})
    nearest: bool = field(
        default=False,
        metadata={"help": "Write the beam that is nearest to the corpus's target, not the first."},
    )
    nearest_by: str = field(
        default="bleu", metadata={"help": f"Sentence metric that nearest compares by: {' or '.join(NEARNESS)}."}
    )
    max_length: int = field(
        default=256,
        metadata={"help": "Maximum number of tokens of a translation; longer sources are truncated to it and counted."},
    )
    source_prefix: str = field(
        default="", metadata={"help": "Text before every source, such as 'translate English to German: ' for T5."}
    )
    forced_bos_token: str | None = field(
        default=None,
        metadata={
            "help": "First token of every translation, such as the target language of a multilingual model: "
            "deu_Latn for NLLB, de_DE for mBART, __de__ for M2M100. Default: that of the teacher's generation config."
        },
    )
    batch_tokens: int = field(default=4096, metadata={"help": "Maximum number of tokens of a batch, padding included."})
    shard_sentences: int = field(
        default=500, metadata={"help": "Sentences of a shard; an interrupted process loses at most one shard."}
    )
    backend: str = field(
        default="transformers", metadata={"help": f"Library that runs the teacher: {' or '.join(BACKENDS)}."}
    )
    compute_type: str = field(
        default="float32", metadata={"help": "compute_type of ctranslate2; int8 is faster than float32."}
    )

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.type is int and value < 1:
                raise ValueError(f"{entry.name} must be at least 1, not {value}.")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend '{self.backend}' is unknown; choose {' or '.join(BACKENDS)}.")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty must be a number, not {self.length_penalty}.")
        if self.num_beams == 1 and self.length_penalty != 1:
            raise ValueError(f"length_penalty={self.length_penalty} has no effect on one beam; raise num_beams.")
        if self.num_beams == 1 and self.nearest:
            raise ValueError("nearest has no effect with one beam; raise num_beams.")
        if self.nearest_by not in NEARNESS:
            raise ValueError(f"nearest_by '{self.nearest_by}' is unknown; choose {' or '.join(NEARNESS)}.")
        if self.nearest_by != type(self).nearest_by and not self.nearest:
            raise ValueError(f"nearest_by={self.nearest_by} has no effect without nearest.")
        if self.backend == "transformers" and self.compute_type != "float32":
            raise ValueError(f"compute_type={self.compute_type} has no effect on backend transformers.")


def find_token_id(tokenizer: PreTrainedTokenizerBase, token: str, name: str) -> int:
    """The id of a token; an error if the tokenizer does not have it.

    Args:
        tokenizer: of the teacher.
        token: as its tokenizer writes it.
        name: of the teacher, for the error.
    """
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or (found == tokenizer.unk_token_id and token != tokenizer.unk_token):
        raise ValueError(
            f"{name} has no token '{token}' to begin translations with; write forced_bos_token as in its vocabulary, "
            "such as deu_Latn for NLLB or __de__ for M2M100."
        )
    return found


def fingerprint_of_teacher(teacher: Teacher) -> str:
    """Hash of everything that determines a teacher's translations, 32 hexadecimal digits; not of its path."""
    digest = hashlib.sha256()
    for settings in (teacher.model.config.to_dict(), teacher.model.generation_config.to_dict()):
        relevant = {key: value for key, value in settings.items() if key not in FILE_ENTRIES}
        digest.update(json.dumps(relevant, sort_keys=True, default=str).encode())
    digest.update(_tokenizer_as_text(teacher.tokenizer).encode())
    digest_weights(teacher.model, digest)
    return digest.hexdigest()[:32]


def _tokenizer_as_text(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.is_fast:
        return json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps({**settings, "truncation": None, "padding": None})  # state of the last call


def translate_texts(
    teacher: Teacher,
    translate: Translate,
    sentences: list[str],
    options: TeacherOptions,
    references: list[list[str]] | None = None,
) -> list[dict[str, Any]]:
    """Translate sentences; returns rows with the text and the numbers of tokens, in the order of the sentences.

    The batches depend on these sentences only, because padding changes floating point sums. The translation of an empty
    sentence is empty.

    Args:
        teacher: whose tokenizer is used.
        translate: the teacher as a function, from `make_translate`.
        sentences: the sources.
        options: of the translation.
        references: of every sentence, for `options.nearest`.
    """
    tokenizer, special = teacher.tokenizer, set(teacher.tokenizer.all_special_ids)
    longest = min(options.max_length, longest_source(teacher.model.config) or options.max_length)
    prefix = tokenizer(options.source_prefix.rstrip())["input_ids"] if options.source_prefix else []
    if len(prefix) >= longest:
        raise ValueError(
            f"source_prefix has {len(prefix)} tokens, and {teacher.name} takes at most {longest} (max_length is "
            f"{options.max_length}), which leaves none for the sentence."
        )
    texts = [clean_text(sentence) for sentence in sentences]
    texts = [options.source_prefix + text if text else "" for text in texts]
    untruncated = [tokenizer(text)["input_ids"] if text else [] for text in texts]
    sources = [
        tokenizer(text, truncation=True, max_length=longest)["input_ids"] if len(tokens) > longest else tokens
        for text, tokens in zip(texts, untruncated, strict=True)
    ]
    counts = [max(0, _count(source, special) - _count(prefix, special)) for source in sources]
    rows = [
        {"text": "", "source_tokens": count, "target_tokens": 0, "cut": len(tokens) > longest}
        for count, tokens in zip(counts, untruncated, strict=True)
    ]
    lengths = list(map(len, sources))
    order = sorted((index for index, text in enumerate(texts) if text), key=lambda index: (-lengths[index], index))
    beams_per_source = options.num_beams if options.nearest else 1
    for batch in within_budget(order, lengths, options.batch_tokens):
        found = translate([sources[index] for index in batch])
        for index, first in zip(batch, range(0, len(found), beams_per_source), strict=True):
            beams = found[first : first + beams_per_source]
            decoded = [tokenizer.decode(beam, skip_special_tokens=True).strip() for beam in beams]
            chosen = nearest_text(decoded, references[index], options.nearest_by) if options.nearest else 0
            rows[index]["text"], rows[index]["target_tokens"] = decoded[chosen], _count(beams[chosen], special)
    return rows


def nearest_text(texts: list[str], references: list[str], metric: str = "bleu") -> int:
    """Index of the text with the highest sentence BLEU or chrF against any of the references; the first one of equals.

    Args:
        texts: beams.
        references: of the same sentence.
        metric: `bleu` or `chrf`.

    >>> nearest_text(["Wo ist der Zug?", "Wo ist der Bahnhof?"], ["Wo ist der Bahnhof?", "Wo liegt der Bahnhof?"])
    1
    """
    if metric == "chrf":
        scores = [chrf_of(text, references) for text in texts]
    else:
        scores = [max(row) for row in sentence_bleu(texts, [references] * len(texts))]
    return scores.index(max(scores))


def _count(tokens: list[int], special: set[int]) -> int:
    return sum(token not in special for token in tokens)


def make_translate(teacher: Teacher, options: TeacherOptions, folder: Path) -> Translate:
    """The teacher as a function from token ids to token ids.

    Args:
        teacher: the model and its tokenizer.
        options: of the translation; `backend` selects the library.
        folder: where CTranslate2's converted model is stored.
    """
    return {"transformers": _with_transformers, "ctranslate2": _with_ctranslate2}[options.backend](
        teacher, options, folder
    )


def _with_transformers(teacher: Teacher, options: TeacherOptions, folder: Path) -> Translate:
    model = teacher.model.eval()
    settings = {"num_beams": options.num_beams, "max_new_tokens": _longest_translation(model, options)}
    # These override the teacher's generation config.
    settings |= {"max_length": None, "return_dict_in_generate": False}
    settings["num_return_sequences"] = options.num_beams if options.nearest else 1
    if options.num_beams > 1:
        settings["length_penalty"] = options.length_penalty
    if options.forced_bos_token is not None:
        settings["forced_bos_token_id"] = find_token_id(teacher.tokenizer, options.forced_bos_token, teacher.name)

    def translate(batch: list[list[int]]) -> list[list[int]]:
        padded = teacher.tokenizer.pad({"input_ids": batch}, return_tensors="pt").to(model.device)
        inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
        return model.generate(**inputs, **settings, do_sample=False).tolist()

    return translate


def _longest_translation(model: PreTrainedModel, options: TeacherOptions) -> int:
    """Maximum number of tokens of a translation; one position is that of the start token."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return options.max_length if positions is None else min(options.max_length, positions - 1)


def _with_ctranslate2(teacher: Teacher, options: TeacherOptions, folder: Path) -> Translate:
    try:
        import ctranslate2
    except ImportError as error:
        raise ImportError("backend=ctranslate2 needs ctranslate2: pip install 'hf_deqnar[ctranslate2]'.") from error
    device = teacher.model.device
    converted = str(_converted(teacher, folder))
    try:
        translator = ctranslate2.Translator(
            converted,
            device=device.type,
            device_index=device.index or 0,
            compute_type=options.compute_type,
            intra_threads=torch.get_num_threads(),
        )
    except ValueError as error:
        raise ValueError(f"CTranslate2 cannot use compute_type={options.compute_type} on {device}: {error}") from error
    generation, tokenizer = teacher.model.generation_config, teacher.tokenizer
    forbidden = [*(generation.bad_words_ids or []), *([token] for token in generation.suppress_tokens or [])]
    suppressed = [tokenizer.convert_ids_to_tokens(words) for words in forbidden]
    first = generation.forced_bos_token_id  # of multilingual models: the target language
    if options.forced_bos_token is not None:
        first = find_token_id(tokenizer, options.forced_bos_token, teacher.name)
    prefix = None if first is None else tokenizer.convert_ids_to_tokens([first])
    # transformers counts a forced end token among max_new_tokens; CTranslate2 adds it to max_decoding_length.
    longest = _longest_translation(teacher.model, options) - (generation.forced_eos_token_id is not None)

    def translate(batch: list[list[int]]) -> list[list[int]]:
        found = translator.translate_batch(
            [tokenizer.convert_ids_to_tokens(row) for row in batch],
            target_prefix=None if prefix is None else [prefix] * len(batch),
            beam_size=options.num_beams,
            num_hypotheses=options.num_beams if options.nearest else 1,
            length_penalty=options.length_penalty,
            max_input_length=0,
            min_decoding_length=0,
            max_decoding_length=max(1, longest),
            suppress_sequences=suppressed or None,
            no_repeat_ngram_size=generation.no_repeat_ngram_size or 0,
            repetition_penalty=generation.repetition_penalty or 1.0,
        )
        return [tokenizer.convert_tokens_to_ids(beam) for result in found for beam in result.hypotheses]

    return translate


def _converted(teacher: Teacher, folder: Path) -> Path:
    """Folder of the converted teacher; the first process converts it."""
    converted = folder / "ctranslate2"
    with wait_for_lock(folder / "ctranslate2.lock"):
        if not converted.is_dir():
            unfinished = folder / "ctranslate2.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _convert(teacher, unfinished)
            unfinished.rename(converted)
    return converted


def _convert(teacher: Teacher, folder: Path) -> None:
    from ctranslate2.converters.converter import Converter
    from ctranslate2.converters.transformers import _MODEL_LOADERS, BartLoader, MarianMTLoader

    class MarianLoader(MarianMTLoader):
        """Loads Marian models whose padding is not the last token.

        The base class removes the last token as padding and starts decoding from a zero embedding; this class retains
        all tokens and starts from the model's decoder_start_token_id.
        """

        get_vocabulary, set_config, set_decoder = (
            BartLoader.get_vocabulary,
            BartLoader.set_config,
            BartLoader.set_decoder,
        )

        def _remove_pad_weights(self, spec: Any) -> None:
            """Retain all weights."""

    class InMemoryConverter(Converter):
        def _load(self) -> Any:
            return loader(model, teacher.tokenizer)

    model = teacher.model
    config_class = type(model.config).__name__
    loader = MarianLoader() if config_class == "MarianConfig" else _MODEL_LOADERS.get(config_class)
    if loader is None:
        raise ValueError(
            f"{teacher.name} is a {type(model).__name__}, which CTranslate2 cannot convert; use backend transformers."
        )
    known = set(vars(model.config))
    try:
        with torch.no_grad():
            InMemoryConverter().convert(str(folder))
    except (AttributeError, KeyError, NotImplementedError) as error:  # raised by loaders for unexpected configurations
        raise ValueError(
            f"{teacher.name} is a {type(model).__name__} that CTranslate2 cannot convert ({error}); use backend "
            "transformers."
        ) from error
    finally:
        for name in set(vars(model.config)) - known:  # added by the loader
            delattr(model.config, name)
