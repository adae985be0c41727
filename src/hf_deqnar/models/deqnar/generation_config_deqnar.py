"""The options of `generate` and their configuration file, `generation_config.json`."""

import copy
import difflib
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import GenerationConfig

from .quality import check_quality


@dataclass
class Options:
    """Generation options with defaults and help texts, which are also used by the command line."""

    max_length: int = field(default=256, metadata={"help": "Maximum number of tokens of a translation."})
    length_beams: int = field(default=1, metadata={"help": "Number of candidate lengths per sentence."})
    max_nfe: int | None = field(
        default=None, metadata={"help": "Maximum number of evaluations of a solve. Default: the model's."}
    )
    tol: float | None = field(
        default=None,
        metadata={"help": "Relative residual below which a sentence has converged. Default: the model's."},
    )
    solver: str | None = field(default=None, metadata={"help": "picard, anderson or broyden. Default: the model's."})
    refinement_passes: int = field(
        default=1, metadata={"help": "Solves per sentence; from the second on, the least likely tokens are masked."}
    )
    input_sampling: bool = field(
        default=False,
        metadata={"help": "Reveal tokens selected by the input predictor, and solve a second time."},
    )
    sampling_seed: int = field(default=0, metadata={"help": "Seed of input_sampling."})
    ctc_beam_size: int = field(default=1, metadata={"help": "Beam size of CTC prefix search; 1 takes the best path."})
    dag_search: str = field(
        default="lookahead", metadata={"help": "How a path of a graph is chosen: greedy, lookahead or viterbi."}
    )
    dag_beta: float = field(default=1.0, metadata={"help": "Weight of the token's log-probability in lookahead."})
    dag_length_penalty: float = field(
        default=1.0, metadata={"help": "α of score / length^α in the viterbi and beam search of a graph."}
    )
    dag_beam_size: int = field(default=1, metadata={"help": "Beam size of the search of texts in a graph; 1 for none."})
    ngram_weight: float = field(
        default=0.0, metadata={"help": "Weight of the n-gram log-probability in CTC or graph beam search."}
    )
    token_bonus: float = field(default=0.0, metadata={"help": "Score added per token in a beam search with n-grams."})
    shortlist: bool | None = field(
        default=None,
        metadata={"help": "Compute logits of shortlist tokens only. Default: if the model has a shortlist."},
    )
    deduplicate: bool = field(default=False, metadata={"help": "Merge equal neighbouring tokens."})
    reranker: Any = field(
        default=None,
        metadata={"help": "A seq2seq model (or its name) with the same vocabulary that selects the best candidate."},
    )
    num_return_sequences: int = field(default=1, metadata={"help": "Translations returned per sentence."})
    stop_on_stable_tokens: int | None = field(
        default=None, metadata={"help": "Stop a sentence whose tokens did not change for this many evaluations."}
    )
    quality: dict | None = field(
        default=None,
        metadata={"help": "Parameters of the quality estimate, written by hf-deqnar calibrate. Default: the model's."},
    )
    forced_tokens: Any = field(
        default=None,
        metadata={"help": "For every sentence, the terms that its translation must contain: lists of token ids."},
    )
    word_starts: Any = field(
        default=None,
        metadata={"help": "Bool tensor over the vocabulary: tokens that may follow a term of forced_tokens."},
    )
    return_dict_in_generate: bool = field(default=False, metadata={"help": "Return a DeqNarGenerateOutput."})
    output_trajectory: bool = field(default=False, metadata={"help": "Also return the tokens of every evaluation."})


DAG_SEARCHES = ("greedy", "lookahead", "viterbi")
SEARCH_OPTIONS = ("ctc_beam_size", "dag_beam_size")  # beam searches that n-grams can be used in
TOKENS = ("bos_token_id", "pad_token_id", "eos_token_id")
KNOWN = frozenset((*(option.name for option in fields(Options)), *TOKENS))

# Options of transformers without effect on these models.
WITHOUT_EFFECT = frozenset(("use_cache", "early_stopping", "decoder_start_token_id", "synced_gpus", "disable_compile"))
# Unsupported options of transformers, with the values at which they have no effect.
NEUTRAL_VALUES = {
    "min_length": (0,),
    "do_sample": (False,),
    "temperature": (1.0,),
    "top_k": (0, 50),
    "top_p": (1.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "length_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0.0,),
    "remove_invalid_values": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
}
REMEDIES = {
    "do_sample": "translations are deterministic; request alternatives with num_return_sequences and num_beams.",
    "output_scores": "return_dict_in_generate=True returns sequences_scores and token_scores.",
    "output_logits": "call the model itself, model(**batch).logits.",
    "output_attentions": "call the model itself, model(**batch, output_attentions=True).",
    "output_hidden_states": "call the model itself, model(**batch, output_hidden_states=True).",
    "length_penalty": "token_bonus favours longer texts in a beam search with n-grams, dag_length_penalty in graphs.",
}
# Remedies of the options against repetition, by the beam option of the length model.
REPETITION_OPTIONS = ("no_repeat_ngram_size", "repetition_penalty")
REPETITION_REMEDIES = {
    "length_beams": "deduplicate=True merges repeated neighbours.",
    "ctc_beam_size": "CTC merges repeated neighbours already; leave it out.",
    "dag_beam_size": "deduplicate=True merges repeated neighbours.",
    None: "models with length='predict' or 'dag' merge repeated neighbours with deduplicate=True, CTC models always.",
}


class DeqNarGenerationConfig(GenerationConfig):
    """The options of `generate`, saved in and restored from `generation_config.json`.

    Unsupported options raise ValueError with the most similar supported one. When this configuration is passed to
    `generate`, options that are not set are taken from that of the model.
    """

    def __init__(self, **kwargs) -> None:
        self.max_new_tokens = None  # read by Seq2SeqTrainer; max_length limits the translation
        self._from_model_config = kwargs.pop("_from_model_config", None)
        self.transformers_version = kwargs.pop("transformers_version", None)
        kwargs.pop("_commit_hash", None)
        options = without_neutral(kwargs)
        if "max_new_tokens" in options:
            options["max_length"] = options.pop("max_new_tokens")
        self._given = frozenset(KNOWN & options.keys())
        for option in fields(Options):
            setattr(self, option.name, options.pop(option.name, option.default))
        for name in TOKENS:
            setattr(self, name, options.pop(name, None))
        refuse_unknown(options)
        self.validate()

    def validate(self, **unused) -> None:
        """Raise ValueError for invalid values. `generate` checks what depends on the model."""
        at_least_one = ("max_length", "length_beams", "refinement_passes", *SEARCH_OPTIONS, "num_return_sequences")
        for name in at_least_one:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be an integer of at least 1, not {getattr(self, name)!r}.")
        for name in ("max_nfe", "stop_on_stable_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be unset or an integer of at least 1, not {value!r}.")
        if not isinstance(self.sampling_seed, int) or self.sampling_seed < 0:
            raise ValueError(f"sampling_seed must be an integer of at least 0, not {self.sampling_seed!r}.")
        for name in ("input_sampling", "deduplicate", "return_dict_in_generate", "output_trajectory"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        if self.dag_search not in DAG_SEARCHES:
            raise ValueError(f"dag_search must be one of {', '.join(DAG_SEARCHES)}, not {self.dag_search!r}.")
        for name in ("ngram_weight", "token_bonus", "dag_beta", "dag_length_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
                raise ValueError(f"{name} must be a number from 0 to 100, not {value!r}.")
        check_quality(self.quality)
        if self.shortlist not in (None, True, False):
            raise ValueError(f"shortlist must be unset, True or False, not {self.shortlist!r}.")
        if not (self.reranker is None or isinstance(self.reranker, str) or hasattr(self.reranker, "config")):
            raise ValueError(f"reranker must be a seq2seq model or its name, not {self.reranker!r}.")
        if self.tol is not None and not (isinstance(self.tol, (int, float)) and self.tol > 0):
            raise ValueError(f"tol must be unset or above 0, not {self.tol!r}.")

    @classmethod
    def from_model_config(cls, model_config: Any) -> "DeqNarGenerationConfig":
        """Special tokens of the model; other options are resolved by `generate`."""
        values = model_config if isinstance(model_config, dict) else model_config.to_dict()
        tokens = {name: values.get(name) for name in TOKENS}
        config = cls(max_length=min(256, values["max_position_embeddings"]), **tokens)
        config._original_object_hash = hash(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """All options. A reranker that is a model, not a name, is omitted, and so are the terms of one batch."""
        saved = copy.copy(self)
        for name in ("forced_tokens", "word_starts"):
            delattr(saved, name)
        saved.reranker = self.reranker if isinstance(self.reranker, str) else None
        del saved._given
        return GenerationConfig.to_dict(saved)

    def given(self) -> dict[str, Any]:
        """Options that were set, or that differ from their defaults."""
        defaults = {option.name: option.default for option in fields(Options)} | dict.fromkeys(TOKENS)
        values = {name: getattr(self, name) for name in defaults}
        return {name: value for name, value in values.items() if name in self._given or differs(value, defaults[name])}

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs) -> dict[str, Any]:
        """Set options; return what is not an option of these models, as transformers expects.

        With `defaults_only`, options that have a value keep it; custom entries are never accepted.
        """
        for name in KNOWN & kwargs.keys():
            value = kwargs.pop(name)
            if not defaults_only or getattr(self, name) is None:
                setattr(self, name, value)
                self._given |= {name}
        self.validate()
        return kwargs


def differs(value: Any, default: Any) -> bool:
    """Whether an option is set; a tensor has no default."""
    return value is not default if default is None else bool(value != default)


def merge_options(
    own: DeqNarGenerationConfig, call: GenerationConfig | None, options: dict[str, Any], beam_option: str
) -> DeqNarGenerationConfig:
    """The options of one call of `generate`.

    Args:
        own: the configuration of the model, for options that the call does not set.
        call: a configuration for this call, `DeqNarGenerationConfig` or `GenerationConfig`.
        options: single options for this call; they take precedence.
        beam_option: the option that `num_beams` sets: `length_beams`, `ctc_beam_size` or `dag_beam_size`.
    """
    requested = {} if call is None else given_options(call, beam_option)
    requested |= from_transformers(options, beam_option)
    refuse_unknown({name: value for name, value in requested.items() if name not in KNOWN})
    settings = copy.copy(own)
    settings.update(**requested, **implied_options(own, requested))
    return settings


def given_options(config: GenerationConfig, beam_option: str) -> dict[str, Any]:
    """Options set by a configuration, under the names of `Options`."""
    if isinstance(config, DeqNarGenerationConfig):
        return config.given()
    values = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    return from_transformers(values, beam_option)


def from_transformers(options: dict[str, Any], beam_option: str) -> dict[str, Any]:
    """Rename options of transformers to those of this model, and remove those without effect."""
    options = without_neutral(options, beam_option)
    for name, own_name in (("num_beams", beam_option), ("max_new_tokens", "max_length")):
        if name in options:
            options[own_name] = options.pop(name)
    return options


def without_neutral(options: dict[str, Any], beam_option: str | None = None) -> dict[str, Any]:
    """Remove options of transformers without effect; unsupported ones raise ValueError."""
    foreign = {name: value for name, value in options.items() if name not in KNOWN}
    for name, value in foreign.items():
        if name in NEUTRAL_VALUES and value is not None and value not in NEUTRAL_VALUES[name]:
            raise ValueError(f"{name}={value!r} is not supported by this model: {remedy(name, beam_option)}")
    dropped = {name for name, value in foreign.items() if value is None or name in NEUTRAL_VALUES}
    return {name: value for name, value in options.items() if name not in dropped | WITHOUT_EFFECT}


def remedy(name: str, beam_option: str | None) -> str:
    """What to do instead of setting this option of transformers, for the length model with this beam option."""
    if name in REPETITION_OPTIONS:
        return REPETITION_REMEDIES.get(beam_option, REPETITION_REMEDIES[None])
    return REMEDIES.get(name, "leave it out.")


def implied_options(own: DeqNarGenerationConfig, requested: dict[str, Any]) -> dict[str, Any]:
    """A beam size of 1 disables the n-grams of the model; without n-grams there is no token bonus."""
    implied = {}
    if any(requested.get(name) == 1 for name in SEARCH_OPTIONS) and "ngram_weight" not in requested:
        implied["ngram_weight"] = 0.0
    weight = {"ngram_weight": own.ngram_weight, **requested, **implied}["ngram_weight"]
    if {*SEARCH_OPTIONS, "ngram_weight"} & requested.keys() and not weight and "token_bonus" not in requested:
        implied["token_bonus"] = 0.0
    return implied


def refuse_unknown(names: dict[str, Any]) -> None:
    """Raise ValueError for the first unknown option, with the most similar known one."""
    if not names:
        return
    name = next(iter(names))
    known = [option.name for option in fields(Options)]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    meant = "length_beams, ctc_beam_size or dag_beam_size" if name == "num_beams" else nearest[0] if nearest else None
    advice = f"did you mean {meant}?" if meant else f"choose one of {', '.join(known)}."
    raise ValueError(f"{name} is not an option of generate; {advice}")


__all__ = ["DeqNarGenerationConfig"]
