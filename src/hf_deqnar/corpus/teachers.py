"""Teachers that translate for distillation: any Hugging Face seq2seq model, by transformers or by CTranslate2."""

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

from ..pipeline_deqnar import clean_text, longest_source
from .evaluation import sentence_bleu
from .locks import awaited
from .tokenized import within_budget

# A batch of token ids → the token ids of its translations; with `nearest`, of all beams of the first, of the second, …
Translate = Callable[[list[list[int]]], list[list[int]]]

BACKENDS = ("transformers", "ctranslate2")

# Entries of a configuration that saving and loading change.
ABOUT_THE_FILE = ("_name_or_path", "transformers_version", "architectures", "dtype")


@dataclass
class Teacher:
    """A model with its own tokenizer, and what to call it."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@dataclass
class TeacherOptions:
    """How a teacher translates. All of it decides the result, byte for byte."""

    num_beams: int = field(default=5, metadata={"help": "Beams of the search; 1 is greedy."})
    length_penalty: float = field(default=1.0, metadata={"help": "Above 1 beam search prefers longer translations."})
    nearest: bool = field(
        default=False,
        metadata={"help": "Of all beams take the one nearest to the corpus's own target, not the teacher's first."},
    )
    max_length: int = field(
        default=256, metadata={"help": "Most tokens of a translation; longer sources are cut to it, and counted."}
    )
    source_prefix: str = field(
        default="", metadata={"help": "What stands before every source: 'translate English to German: ' for T5."}
    )
    forced_bos_token: str | None = field(
        default=None,
        metadata={
            "help": "Token with which every translation begins, such as the language of a many-language model: "
            "deu_Latn for NLLB, de_DE for mBART, __de__ for M2M100. Unset: as the teacher's own settings say."
        },
    )
    batch_tokens: int = field(default=4096, metadata={"help": "Most rows × longest source of a batch."})
    shard_sentences: int = field(
        default=500, metadata={"help": "Sentences of a piece of work; a crash costs no more than one piece."}
    )
    backend: str = field(default="transformers", metadata={"help": f"What runs the teacher: {' or '.join(BACKENDS)}."})
    compute_type: str = field(
        default="float32", metadata={"help": "Arithmetic of ctranslate2, such as int8, which is faster."}
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
            raise ValueError("nearest has no choice with one beam; raise num_beams.")
        if self.backend == "transformers" and self.compute_type != "float32":
            raise ValueError(f"compute_type={self.compute_type} has no effect on backend transformers.")


def id_of_token(tokenizer: PreTrainedTokenizerBase, token: str, name: str) -> int:
    """The number of a token of the teacher with this name."""
    found = tokenizer.convert_tokens_to_ids(token)
    if found is None or (found == tokenizer.unk_token_id and token != tokenizer.unk_token):
        raise ValueError(
            f"{name} has no token '{token}' to begin translations with; forced_bos_token is written as its tokenizer "
            "writes it, deu_Latn for NLLB say, or __de__ for M2M100."
        )
    return found


def fingerprint_of_teacher(teacher: Teacher) -> str:
    """One short name for everything that decides what a teacher says, wherever it is stored."""
    digest = hashlib.sha256()
    for settings in (teacher.model.config.to_dict(), teacher.model.generation_config.to_dict()):
        kept = {key: value for key, value in settings.items() if key not in ABOUT_THE_FILE}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    digest.update(_tokenizer_as_text(teacher.tokenizer).encode())
    digest_weights(teacher.model, digest)
    return digest.hexdigest()[:32]


def fingerprint_of_weights(model: PreTrainedModel) -> str:
    """One short name for a model's numbers."""
    digest = hashlib.sha256()
    digest_weights(model, digest)
    return digest.hexdigest()[:32]


def digest_weights(model: PreTrainedModel, digest: Any) -> None:
    for name, weights in sorted(model.state_dict().items()):
        digest.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
        digest.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def _tokenizer_as_text(tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.is_fast:
        return json.dumps([type(tokenizer).__name__, tokenizer.get_vocab()], sort_keys=True)
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps({**settings, "truncation": None, "padding": None})  # those are what it was last asked for


def translate_texts(
    teacher: Teacher,
    translate: Translate,
    sentences: list[str],
    options: TeacherOptions,
    references: list[list[str]] | None = None,
) -> list[dict[str, Any]]:
    """Translations of sentences, in their order, with the numbers of tokens.

    How sentences are put together in batches, which floating point sums feel, depends on these sentences alone. An
    empty sentence has an empty translation, whatever the teacher would say to it.

    Args:
        references: of every sentence, for `options.nearest`.
    """
    tokenizer, special = teacher.tokenizer, set(teacher.tokenizer.all_special_ids)
    longest = min(options.max_length, longest_source(teacher.model.config) or options.max_length)
    prefix = tokenizer(options.source_prefix.rstrip())["input_ids"] if options.source_prefix else []
    if len(prefix) >= longest:
        raise ValueError(
            f"source_prefix has {len(prefix)} tokens, and {teacher.name} reads at most {longest} (max_length is "
            f"{options.max_length}): no room is left for a sentence."
        )
    texts = [clean_text(sentence) for sentence in sentences]
    texts = [options.source_prefix + text if text else "" for text in texts]
    whole = [tokenizer(text)["input_ids"] if text else [] for text in texts]
    sources = [
        tokenizer(text, truncation=True, max_length=longest)["input_ids"] if len(tokens) > longest else tokens
        for text, tokens in zip(texts, whole, strict=True)
    ]
    counts = [max(0, _count(source, special) - _count(prefix, special)) for source in sources]
    rows = [
        {"text": "", "source_tokens": count, "target_tokens": 0, "cut": len(tokens) > longest}
        for count, tokens in zip(counts, whole, strict=True)
    ]
    lengths = list(map(len, sources))
    order = sorted((place for place, text in enumerate(texts) if text), key=lambda place: (-lengths[place], place))
    for batch in within_budget(order, lengths, options.batch_tokens):
        found = translate([sources[place] for place in batch])
        several = options.num_beams if options.nearest else 1
        for place, first in zip(batch, range(0, len(found), several), strict=True):
            beams = found[first : first + several]
            said = [tokenizer.decode(beam, skip_special_tokens=True).strip() for beam in beams]
            chosen = nearest_text(said, references[place]) if options.nearest else 0
            rows[place]["text"], rows[place]["target_tokens"] = said[chosen], _count(beams[chosen], special)
    return rows


def nearest_text(texts: list[str], references: list[str]) -> int:
    """Which text has the highest sentence BLEU with one of the references; the first of several such.

    >>> nearest_text(["Wo ist der Zug?", "Wo ist der Bahnhof?"], ["Wo ist der Bahnhof?", "Wo liegt der Bahnhof?"])
    1
    """
    scores = [max(row) for row in sentence_bleu(texts, [references] * len(texts))]
    return scores.index(max(scores))


def _count(tokens: list[int], special: set[int]) -> int:
    return sum(token not in special for token in tokens)


def make_translate(teacher: Teacher, options: TeacherOptions, folder: Path) -> Translate:
    """The teacher as a function; `folder` is where it may keep a converted copy of itself."""
    return {"transformers": _with_transformers, "ctranslate2": _with_ctranslate2}[options.backend](
        teacher, options, folder
    )


def _with_transformers(teacher: Teacher, options: TeacherOptions, folder: Path) -> Translate:
    model = teacher.model.eval()
    settings = {"num_beams": options.num_beams, "max_new_tokens": _longest_translation(model, options)}
    # What the teacher's own settings may say otherwise.
    settings |= {"max_length": None, "return_dict_in_generate": False}
    settings["num_return_sequences"] = options.num_beams if options.nearest else 1
    if options.num_beams > 1:
        settings["length_penalty"] = options.length_penalty
    if options.forced_bos_token is not None:
        settings["forced_bos_token_id"] = id_of_token(teacher.tokenizer, options.forced_bos_token, teacher.name)

    def translate(batch: list[list[int]]) -> list[list[int]]:
        padded = teacher.tokenizer.pad({"input_ids": batch}, return_tensors="pt").to(model.device)
        inputs = {name: padded[name] for name in ("input_ids", "attention_mask")}
        return model.generate(**inputs, **settings, do_sample=False).tolist()

    return translate


def _longest_translation(model: PreTrainedModel, options: TeacherOptions) -> int:
    """In tokens; one position is that of the start."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return options.max_length if positions is None else min(options.max_length, positions - 1)


def _with_ctranslate2(teacher: Teacher, options: TeacherOptions, folder: Path) -> Translate:
    try:
        import ctranslate2
    except ImportError as error:
        raise ImportError("This backend needs ctranslate2: pip install 'hf_deqnar[ctranslate2]'.") from error
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
    never = [*(generation.bad_words_ids or []), *([token] for token in generation.suppress_tokens or [])]
    suppressed = [tokenizer.convert_ids_to_tokens(words) for words in never]
    first = generation.forced_bos_token_id  # of many-language models: the language to translate into
    if options.forced_bos_token is not None:
        first = id_of_token(tokenizer, options.forced_bos_token, teacher.name)
    prefix = None if first is None else tokenizer.convert_ids_to_tokens([first])
    # transformers puts the end that such models are forced to into the last place; here it comes on top
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
    """The teacher's converted copy, made by whoever comes first."""
    copy = folder / "ctranslate2"
    with awaited(folder / "ctranslate2.lock"):
        if not copy.is_dir():
            unfinished = folder / "ctranslate2.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            _convert(teacher, unfinished)
            unfinished.rename(copy)
    return copy


def _convert(teacher: Teacher, folder: Path) -> None:
    from ctranslate2.converters.converter import Converter
    from ctranslate2.converters.transformers import _MODEL_LOADERS, BartLoader, MarianMTLoader

    class WithItsPadding(MarianMTLoader):
        """Marian models whose padding is any token. The library's loader cuts the last one off as padding, and starts
        from a zero embedding because that of the padding is; here it starts from the token that the model names."""

        get_vocabulary, set_config, set_decoder = (
            BartLoader.get_vocabulary,
            BartLoader.set_config,
            BartLoader.set_decoder,
        )

        def _remove_pad_weights(self, spec: Any) -> None:
            """All weights stay."""

    class FromMemory(Converter):
        def _load(self) -> Any:
            return loader(model, teacher.tokenizer)

    model = teacher.model
    kind = type(model.config).__name__
    loader = WithItsPadding() if kind == "MarianConfig" else _MODEL_LOADERS.get(kind)
    if loader is None:
        raise ValueError(
            f"{teacher.name} is a {type(model).__name__}, which CTranslate2 cannot convert; use backend transformers."
        )
    known = set(vars(model.config))
    try:
        with torch.no_grad():
            FromMemory().convert(str(folder))
    except (AttributeError, KeyError, NotImplementedError) as error:  # a loader that expects another configuration
        raise ValueError(
            f"{teacher.name} is a {type(model).__name__} that CTranslate2 cannot convert ({error}); use backend "
            "transformers."
        ) from error
    finally:
        for name in set(vars(model.config)) - known:  # a loader's notes to itself
            delattr(model.config, name)
