"""From an equilibrium to text: generation options and `generate`.

A candidate is one canvas of one sentence: one for CTC, one for every length beam otherwise. All candidates of a batch
are solved together, each is read as text and scored, and the best of every sentence are returned.
"""

import copy
import difflib
import hashlib
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput, cached_file

from .alignment import likeliest, pack, prefix_beam_search, prefix_beams_in_turn, starts_of_runs
from .drafts_deqnar import Candidates, Draft, DraftReader
from .ngrams_deqnar import LEAST_CHANCE, Fluency
from .scoring_deqnar import check_scorer, load_reranker, teacher_forced, with_end
from .shortlist_deqnar import Words, never_written


@dataclass
class Options:
    """Every generation option, with its default and help; the flags of the command line take theirs from here."""

    max_length: int = field(default=256, metadata={"help": "Most tokens of a translation."})
    length_beams: int = field(default=1, metadata={"help": "How many of the likeliest lengths are tried."})
    max_nfe: int | None = field(
        default=None, metadata={"help": "Most evaluations of a solve; the model's own if unset."}
    )
    tol: float | None = field(default=None, metadata={"help": "Residual to stop at; the model's own if unset."})
    solver: str | None = field(
        default=None, metadata={"help": "picard, anderson or broyden; the model's own if unset."}
    )
    refinement_passes: int = field(
        default=1, metadata={"help": "Solves per sentence; from the second on, the weakest tokens are masked again."}
    )
    input_sampling: bool = field(
        default=False,
        metadata={"help": "Let the input predictor choose tokens to reveal, and solve a second time with them."},
    )
    sampling_seed: int = field(default=0, metadata={"help": "Another number, another draw of input_sampling."})
    ctc_beam_size: int = field(default=1, metadata={"help": "Prefixes kept by CTC beam search; 1 takes the best path."})
    ngram_weight: float = field(
        default=0.0, metadata={"help": "Weight of the model's n-grams, log p of a text, in CTC beam search."}
    )
    token_bonus: float = field(
        default=0.0, metadata={"help": "What every token adds to a text in CTC beam search with n-grams."}
    )
    shortlist: bool | None = field(
        default=None,
        metadata={"help": "Look only at the tokens on the model's shortlist; if unset, wherever it has one."},
    )
    deduplicate: bool = field(default=False, metadata={"help": "Merge equal neighbouring tokens."})
    reranker: Any = field(
        default=None, metadata={"help": "A seq2seq model (or its name) with the same vocabulary that picks the best."}
    )
    num_return_sequences: int = field(default=1, metadata={"help": "Translations returned per sentence."})
    stop_on_stable_tokens: int | None = field(
        default=None, metadata={"help": "Stop a row whose tokens did not change for this many evaluations."}
    )
    return_dict_in_generate: bool = field(default=False, metadata={"help": "Return a DeqNarGenerateOutput."})
    output_trajectory: bool = field(default=False, metadata={"help": "Also return every evaluation's tokens."})


TOKENS = ("bos_token_id", "pad_token_id", "eos_token_id")
KNOWN = frozenset((*(option.name for option in fields(Options)), *TOKENS))


class DeqNarGenerationConfig(GenerationConfig):
    """The options of `generate`, saved in and restored from `generation_config.json`.

    Only what has an effect on these models is accepted: an unknown name is refused with the nearest known one.
    """

    def __init__(self, **kwargs) -> None:
        for option in fields(Options):
            setattr(self, option.name, kwargs.pop(option.name, option.default))
        for name in TOKENS:
            setattr(self, name, kwargs.pop(name, None))
        self.max_new_tokens = None  # Seq2SeqTrainer reads it; our texts are bounded by max_length
        if kwargs.get("max_new_tokens", 0) is None:
            del kwargs["max_new_tokens"]
        self._from_model_config = kwargs.pop("_from_model_config", None)
        self.transformers_version = kwargs.pop("transformers_version", None)
        kwargs.pop("_commit_hash", None)
        refuse_unknown(kwargs)
        self.validate()

    def validate(self, **unused) -> None:
        """Refuse values no model could use. What depends on the model is checked by `generate`."""
        at_least_one = ("max_length", "length_beams", "refinement_passes", "ctc_beam_size", "num_return_sequences")
        for name in at_least_one:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, not {getattr(self, name)!r}.")
        for name in ("max_nfe", "stop_on_stable_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be unset or a whole number of at least 1, not {value!r}.")
        if not isinstance(self.sampling_seed, int) or self.sampling_seed < 0:
            raise ValueError(f"sampling_seed must be a whole number of at least 0, not {self.sampling_seed!r}.")
        for name in ("input_sampling", "deduplicate", "return_dict_in_generate", "output_trajectory"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        for name in ("ngram_weight", "token_bonus"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 100:
                raise ValueError(f"{name} must be a number from 0 to 100, not {value!r}.")
        if self.shortlist not in (None, True, False):
            raise ValueError(f"shortlist must be unset, True or False, not {self.shortlist!r}.")
        if not (self.reranker is None or isinstance(self.reranker, str) or hasattr(self.reranker, "config")):
            raise ValueError(f"reranker must be a seq2seq model or its name, not {self.reranker!r}.")
        if self.tol is not None and not (isinstance(self.tol, (int, float)) and self.tol > 0):
            raise ValueError(f"tol must be unset or above 0, not {self.tol!r}.")

    @classmethod
    def from_model_config(cls, model_config: Any) -> "DeqNarGenerationConfig":
        """Special tokens from the model; everything else is asked for when generating."""
        values = model_config if isinstance(model_config, dict) else model_config.to_dict()
        tokens = {name: values.get(name) for name in TOKENS}
        config = cls(max_length=min(256, values["max_position_embeddings"]), **tokens)
        config._original_object_hash = hash(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """A reranker that is a model, not a name, stays with this process."""
        kept, self.reranker = self.reranker, self.reranker if isinstance(self.reranker, str) else None
        try:
            return super().to_dict()
        finally:
            self.reranker = kept

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs) -> dict[str, Any]:
        """Set options; what is not one is returned, as transformers expects.

        With `defaults_only` what has a value keeps it; custom entries are never taken.
        """
        for name in KNOWN & kwargs.keys():
            value = kwargs.pop(name)
            if not defaults_only or getattr(self, name) is None:
                setattr(self, name, value)
        self.validate()
        return kwargs


def as_ours(config: GenerationConfig) -> DeqNarGenerationConfig:
    """A copy; of a plain one, what it asks for beyond its defaults, which must exist here."""
    if isinstance(config, DeqNarGenerationConfig):
        return copy.copy(config)
    return DeqNarGenerationConfig.from_dict(config.to_diff_dict())


# What others call our options, where the spelling does not tell.
COUNTERPARTS = {"num_beams": "length_beams or ctc_beam_size", "max_new_tokens": "max_length"}


def refuse_unknown(names: dict[str, Any]) -> None:
    """An error that names the first unknown option and the known one most like it."""
    if not names:
        return
    name = next(iter(names))
    known = [option.name for option in fields(Options)]
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    meant = COUNTERPARTS.get(name) or (nearest[0] if nearest else None)
    advice = f"did you mean {meant}?" if meant else f"choose among {', '.join(known)}."
    raise ValueError(f"{name} is not an option of generate; {advice}")


@dataclass
class DeqNarGenerateOutput(ModelOutput):
    """What `generate` returns with `return_dict_in_generate=True`; one entry per returned sequence.

    Attributes:
        sequences: token ids, padded behind the end.
        sequences_scores: mean log-probability of the tokens; of the path's positions for the best CTC path; log p(text)
            per token for CTC beam search, and with n-grams the score that the search itself gives; the reranker's mean
            log-likelihood if there is one.
        token_scores: log-probability of every token, 0 at padding; None for CTC beam search.
        nfe: evaluations of the sequence's own canvas, over all passes.
        residual, converged: of the last solve; None for `stacked` models.
        canvas_lengths: how long the chosen canvas was.
        trajectory: with `output_trajectory`, the drafts of every evaluation.
    """

    sequences: Tensor | None = None
    sequences_scores: Tensor | None = None
    token_scores: Tensor | None = None
    nfe: Tensor | None = None
    residual: Tensor | None = None
    converged: Tensor | None = None
    canvas_lengths: Tensor | None = None
    trajectory: list[list[Draft]] | None = None


class DeqNarGenerationMixin:
    """`generate` for whatever has a `config`, a `generation_config` and a `model` that can encode, bind and refine.

    `model` needs `read_source`, `bind`, `input_head` and what `RefinementMixin` gives. Tokens are read by `read_tokens`
    and `read_scored`, here through an `lm_head`.
    """

    output_modalities = ("text",)

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: DeqNarGenerationConfig | None = None,
        streamer: Any = None,
        labels: Tensor | None = None,
        synced_gpus: bool | None = None,
        **options,
    ) -> Tensor | DeqNarGenerateOutput:
        """Translate a batch. Returns token ids, or a `DeqNarGenerateOutput` with `return_dict_in_generate=True`.

        Args:
            input_ids, attention_mask: the source, padded on the right.
            generation_config: options for this call; the model's own if not given.
            streamer: receives the final tokens and, if it has `put_draft`, every draft; one sentence at a time.
            labels, synced_gpus: passed by `Seq2SeqTrainer`; they have no influence on the translation.
            options: any option of `DeqNarGenerationConfig`, for this call.
        """
        settings = as_ours(self.generation_config if generation_config is None else generation_config)
        refuse_unknown(settings.update(**options))
        take_back_ngrams(settings, options)
        self._check_options(settings)
        source_mask = self.model.check_source(input_ids, attention_mask, None)
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(
                f"A streamer shows one sentence, but the batch has {len(input_ids)}; pass them one by one."
            )

        with torch.inference_mode():
            found = self._translate(input_ids, source_mask, settings, streamer)
        found = leave_inference_mode(found)
        if streamer is not None:
            streamer.put(found["sequences"][0].cpu())
            streamer.end()
        return DeqNarGenerateOutput(**found) if settings.return_dict_in_generate else found["sequences"]

    def _translate(
        self, input_ids: Tensor, source_mask: Tensor, settings: DeqNarGenerationConfig, streamer: Any
    ) -> dict[str, Any]:
        """What `generate` returns, by name; all but the sequences only if it was asked for."""
        candidates, drafts = self._refine_candidates(input_ids, source_mask, settings, streamer)
        texts, scores, token_scores, candidate = self._read_texts(candidates, settings)
        if settings.reranker is not None:
            judged = self._rerank(settings.reranker, input_ids, source_mask, texts, candidates.sentence[candidate])
            scores = judged if scores is None else judged.masked_fill(scores == float("-inf"), float("-inf"))
        chosen: Tensor | slice = slice(None)
        if len(texts) > len(input_ids):
            scores = demote_repeated(scores, self._without_end(texts), candidates.sentence[candidate])
            chosen = best_per_sentence(scores, candidates.sentence[candidate], settings.num_return_sequences)
        sequences = trim_padding(texts[chosen], self.config.pad_token_id)
        if not settings.return_dict_in_generate:
            return {"sequences": sequences}
        candidate = candidate[chosen]
        return {
            "sequences": sequences,
            "sequences_scores": scores[chosen],
            "token_scores": None if token_scores is None else token_scores[chosen][:, : sequences.shape[1]],
            "nfe": candidates.nfe[candidate],
            "residual": None if candidates.residual is None else candidates.residual[candidate],
            "converged": None if candidates.converged is None else candidates.converged[candidate],
            "canvas_lengths": candidates.mask.sum(dim=1)[candidate],
            "trajectory": None if drafts is None else [drafts[index] for index in candidate.tolist()],
        }

    def _check_options(self, settings: DeqNarGenerationConfig) -> None:
        """Refuse combinations that this model cannot do, naming both sides."""
        if self.config.length == "ctc":
            beams, name = settings.ctc_beam_size, "ctc_beam_size"
            for option in ("length_beams", "deduplicate"):
                if getattr(settings, option) > 1 or getattr(settings, option) is True:
                    raise ValueError(
                        f"{option}={getattr(settings, option)} needs config.length='predict', but this is a CTC model: "
                        "its canvas has one length and repetitions are merged anyway; use ctc_beam_size instead."
                    )
        else:
            beams, name = settings.length_beams, "length_beams"
            if settings.ctc_beam_size > 1:
                raise ValueError(
                    f"ctc_beam_size={settings.ctc_beam_size} needs config.length='ctc', but this model predicts "
                    "lengths; use length_beams instead."
                )
            if beams > 2 * self.config.length_offsets:
                raise ValueError(f"length_beams={beams}, but only {2 * self.config.length_offsets} lengths exist.")
        if settings.num_return_sequences > beams:
            raise ValueError(
                f"num_return_sequences={settings.num_return_sequences} is more than {name}={beams} candidates; "
                f"raise {name}."
            )
        if settings.stop_on_stable_tokens is not None and self.config.refinement == "stacked":
            raise ValueError("stop_on_stable_tokens has nothing to stop: refinement='stacked' evaluates once.")
        if settings.shortlist and self.model.shortlist is None:
            raise ValueError("shortlist=True, but this model has none; give it one with hf-deqnar shortlist.")
        if settings.ngram_weight and self.model.ngrams is None:
            raise ValueError(
                f"ngram_weight={settings.ngram_weight}, but this model has no n-grams; give it some with hf-deqnar "
                "ngrams."
            )
        if settings.ngram_weight and not self.model.ngrams.learned:
            raise ValueError("This model's n-grams were never learned; give it some with hf-deqnar ngrams.")
        if settings.ngram_weight and settings.ctc_beam_size == 1:
            raise ValueError(
                f"ngram_weight={settings.ngram_weight} is for a beam search; raise ctc_beam_size above 1, or set "
                "ngram_weight=0."
            )
        if settings.token_bonus and not settings.ngram_weight:
            raise ValueError(
                f"token_bonus={settings.token_bonus} has no effect without ngram_weight; set both or none."
            )
        if settings.input_sampling:
            self._check_input_sampling(settings)

    def _check_input_sampling(self, settings: DeqNarGenerationConfig) -> None:
        if self.model.input_head is None:
            raise ValueError(
                "input_sampling=True needs an input predictor, which this model has not; "
                "give it one with hf_deqnar.objectives.input_predictor.fit_input_predictor."
            )
        for option in ("refinement_passes", "ctc_beam_size"):
            if getattr(settings, option) > 1:
                raise ValueError(
                    f"input_sampling=True and {option}={getattr(settings, option)} exclude each other: "
                    "tokens that were sampled stay as they are; set one of them only."
                )

    def _refine_candidates(
        self, input_ids: Tensor, source_mask: Tensor, settings: DeqNarGenerationConfig, streamer: Any
    ) -> tuple[Candidates, list[list[Draft]] | None]:
        """Encode, lay out the canvases, and refine them in `refinement_passes` solves; two if inputs are sampled."""
        source = self.model.read_source(input_ids, source_mask)
        words = self._words(input_ids, source_mask, settings)
        canvas_lengths = self._canvas_lengths(source.length_logits, source_mask, settings)  # sentences, beams
        sentence = torch.arange(len(input_ids), device=input_ids.device)
        if canvas_lengths.shape[1] > 1:
            sentence = sentence.repeat_interleave(canvas_lengths.shape[1])
            source, source_mask = source.select(sentence), source_mask[sentence]
            words = None if words is None else words.select(sentence)

        canvas = self.model.masked_canvas(canvas_lengths.flatten())
        mask = self.model.check_canvas(canvas, None)
        candidates = Candidates(
            sentence=sentence,
            canvas=canvas,
            mask=mask,
            tokens=canvas,
            scores=None,
            nfe=torch.zeros_like(sentence),
        )
        watching = settings.stop_on_stable_tokens is not None or settings.output_trajectory
        watching = watching or hasattr(streamer, "put_draft")
        reader = DraftReader(self.config, candidates, settings, streamer) if watching else None
        passes = 2 if settings.input_sampling else settings.refinement_passes
        for number in range(passes):
            if number > 0 and settings.input_sampling:
                noise = sampling_noise(input_ids[sentence], source_mask, mask, settings.sampling_seed)
                candidates.canvas = reveal_sampled(candidates, noise)
            elif number > 0:
                candidates.canvas = mask_weakest(candidates, number, passes, self.config.mask_token_id)
            bound = self.model.bind(candidates.canvas, mask, source.seen, source_mask, source.projected, words)
            if reader is not None:
                reader.restart(partial(self._read_draft, bound))
            found = self.model.refine(
                bound, mask, max_nfe=settings.max_nfe, tol=settings.tol, solver=settings.solver, observe=reader
            )
            if reader is not None and self.config.refinement == "explicit" and int(found.nfe.max()) > 1:
                # The evaluation that gives the features comes after the solve, which the reader has watched.
                reader(torch.arange(len(sentence), device=sentence.device), found.value, found.residual)
            scored = passes > 1 or settings.return_dict_in_generate or canvas_lengths.shape[1] > 1
            self._update(candidates, found, words, scored, keep_all=settings.ctc_beam_size > 1)
            if settings.input_sampling:
                candidates.masked_chances = self.model.input_head(found.value).float().sigmoid()
        return candidates, None if reader is None else reader.drafts

    def _canvas_lengths(
        self, length_logits: Tensor | None, source_mask: Tensor, settings: DeqNarGenerationConfig
    ) -> Tensor:
        """sentences × beams."""
        if self.config.length == "ctc":
            return self.model.canvas_lengths(source_mask, None, None)[:, None]
        lengths = self.model.predicted_lengths(length_logits, source_mask.sum(dim=1), settings.length_beams)
        return lengths.clamp_max(min(settings.max_length, self.config.max_position_embeddings))

    def _words(self, input_ids: Tensor, source_mask: Tensor, settings: DeqNarGenerationConfig) -> Words | None:
        """What each sentence may be made of; None for the whole vocabulary."""
        if self.model.shortlist is None or settings.shortlist is False:
            return None
        return self.model.shortlist(input_ids, source_mask)

    def _logits(self, features: Tensor, words: Words | None) -> Tensor:
        """Logits of the words, or of all tokens; without those that are never part of a text."""
        if words is None:
            logits = self.lm_head(features).float()
        else:
            logits = functional.linear(features, self.lm_head.weight[words.tokens]).float()
        if not logits.sum().isfinite():
            raise FloatingPointError("The logits are not finite; check the weights for NaN or infinity.")
        never = never_written(self.config)
        if words is not None:
            logits, never = words.hide(logits), words.places(never)
        for place in never:
            logits[..., place].fill_(float("-inf"))
        return logits

    def read_tokens(self, features: Tensor, words: Words | None = None) -> Tensor:
        """The likeliest token of every position."""
        tokens = likeliest(self._logits(features, words))
        return tokens if words is None else words.tokens[tokens]

    def read_scored(
        self, features: Tensor, keep_all: bool, words: Words | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The likeliest token of every position, its log-probability and, with `keep_all`, those of all tokens."""
        logits = self._logits(features, words)
        best = likeliest(logits)
        tokens = best if words is None else words.tokens[best]
        if not keep_all:
            return tokens, logits.gather(-1, best[..., None])[..., 0] - logits.logsumexp(dim=-1), None
        log_probabilities = logits.log_softmax(dim=-1)
        scores = log_probabilities.gather(-1, best[..., None])[..., 0]
        return tokens, scores, log_probabilities if words is None else words.spread(log_probabilities, self.config)

    def _read_draft(self, bound: Any, rows: Tensor, value: Tensor) -> Tensor:
        """Tokens from the last evaluation; an explicit model's state is not what they are read from."""
        features = bound.context.latest["features"] if self.config.refinement == "explicit" else value
        words = bound.context.words
        return self.read_tokens(features, None if words is None else words.select(rows))

    def _update(self, candidates: Candidates, found: Any, words: Words | None, scored: bool, keep_all: bool) -> None:
        """Read tokens where the canvas was masked; known tokens and their scores stay as they are."""
        masked = candidates.canvas == self.config.mask_token_id
        if scored or keep_all:
            tokens, scores, log_probabilities = self.read_scored(found.value, keep_all, words)
            if scores.isnan().any():
                raise FloatingPointError("The logits are not finite; check the weights for NaN or infinity.")
            known = torch.zeros_like(scores) if candidates.scores is None else candidates.scores
            if keep_all and candidates.scores is not None:
                log_probabilities = hold_known(log_probabilities, candidates.tokens, known, masked)
            candidates.log_probabilities = log_probabilities
            candidates.scores = torch.where(masked, scores, known)
        else:
            tokens = self.read_tokens(found.value, words)
        candidates.tokens = torch.where(masked, tokens, candidates.tokens)
        candidates.nfe = candidates.nfe + found.nfe
        candidates.residual, candidates.converged = found.residual, found.converged

    def _read_texts(
        self, candidates: Candidates, settings: DeqNarGenerationConfig
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """Texts (padded), their scores, token scores, and the candidate each was read from."""
        padding, lengths = self.config.pad_token_id, candidates.mask.sum(dim=1)
        every = torch.arange(len(lengths), device=lengths.device)
        if settings.ctc_beam_size > 1:
            fluency = self._fluency(settings)
            texts, counts, scores = self._search_beams(candidates.log_probabilities, lengths, settings, fluency)
            # What a beam with n-grams finds best is the score itself; without them long texts would be at a loss.
            ranked = scores / counts.clamp_min(1) if fluency is None else scores + fluency.of_end(texts, counts)
            scores = ranked.flatten()
            texts = texts.flatten(0, 1)[:, : settings.max_length]
            return texts, scores, None, every.repeat_interleave(settings.ctc_beam_size)
        # Without CTC a blank is the empty token that a model trained with AXE puts where it has nothing to say.
        kept = candidates.mask & (candidates.tokens != self.config.blank_token_id)
        if self.config.length == "ctc" or settings.deduplicate:
            kept = kept & starts_of_runs(candidates.tokens, lengths)
        texts, _ = pack(candidates.tokens, kept, padding)
        if candidates.scores is None:
            return texts[:, : settings.max_length], None, None, every
        token_scores, _ = pack(candidates.scores, kept, 0.0)
        scores = (candidates.scores * candidates.mask).sum(dim=1) / lengths
        return texts[:, : settings.max_length], scores, token_scores[:, : settings.max_length], every

    def _without_end(self, texts: Tensor) -> Tensor:
        """Padding in the place of what marks an end: who reads a text does not see it."""
        ends = self.config.eos_token_id
        if ends is None:
            return texts
        return texts.masked_fill(torch.isin(texts, torch.tensor(ends, device=texts.device)), self.config.pad_token_id)

    def _search_beams(
        self, log_probabilities: Tensor, lengths: Tensor, settings: DeqNarGenerationConfig, fluency: Fluency | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The texts of every row's beam, their lengths, and log p of each with what n-grams add."""
        question = (log_probabilities, lengths, self.config.blank_token_id, settings.ctc_beam_size)
        options = {"padding": self.config.pad_token_id, "least_chance": 0.0 if fluency is None else LEAST_CHANCE}
        if not in_turn(log_probabilities):
            return prefix_beam_search(*question, **options, added=fluency)
        added = None if fluency is None else fluency.one_by_one()[0]
        return prefix_beams_in_turn(*question, **options, added=added, most_added=settings.token_bonus)

    def _fluency(self, settings: DeqNarGenerationConfig) -> Fluency | None:
        """What n-grams add in a beam search; None if they are not asked."""
        if not settings.ngram_weight:
            return None
        return Fluency(self.model.ngrams, settings.ngram_weight, settings.token_bonus, self.config.eos_token_id)

    def _rerank(self, reranker: Any, input_ids: Tensor, source_mask: Tensor, texts: Tensor, sentence: Tensor) -> Tensor:
        """Mean log-likelihood per token of every text under the reranker, in one teacher-forced pass."""
        if isinstance(reranker, str):
            reranker = load_reranker(reranker, input_ids.device)
        check_scorer(reranker, self.config.vocab_size, "The reranker")
        padding, end = self.config.pad_token_id, self.config.eos_token_id
        labels, real = texts, texts != padding
        if isinstance(end, int):  # the reranker also judges where a text ends
            labels, real = with_end(texts, real, end)
        scores = teacher_forced(reranker, input_ids[sentence], source_mask[sentence], labels, real, "the reranker")
        return scores.sum(dim=1) / real.sum(dim=1).clamp_min(1)

    def adjust_generation_fn(
        self,
        generation_config: GenerationConfig | None,
        from_auto_class: bool,
        from_pipeline: str | None,
        pretrained_model_name_or_path: str | None,
        cache_dir: str | None,
        force_download: bool,
        proxies: dict | None,
        local_files_only: bool,
        token: str | bool | None,
        revision: str | None,
        subfolder: str,
        trust_remote_code: bool,
        **rest,
    ) -> None:
        """Called by `from_pretrained`: take up the saved options, ours included."""
        if generation_config is not None:
            self.generation_config = as_ours(generation_config)
        elif pretrained_model_name_or_path is not None:
            where = {"cache_dir": cache_dir, "force_download": force_download, "proxies": proxies, "token": token}
            where |= {"local_files_only": local_files_only, "revision": revision, "subfolder": subfolder}
            path, file = pretrained_model_name_or_path, GENERATION_CONFIG_NAME
            # Without the file the defaults of __init__ stand; one that cannot be read is an error.
            if cached_file(path, file, _raise_exceptions_for_missing_entries=False, **where) is not None:
                self.generation_config = DeqNarGenerationConfig.from_pretrained(path, **where)


def in_turn(values: Tensor) -> bool:
    """Whether rows are better searched one after the other, by a processor that need not be told every step."""
    return values.device.type == "cpu"


def take_back_ngrams(settings: DeqNarGenerationConfig, asked: dict[str, Any]) -> None:
    """Who asks for the best path, or for no n-grams, need not take back the model's other options of them, too."""
    if asked.get("ctc_beam_size") == 1 and "ngram_weight" not in asked:
        settings.ngram_weight = 0.0
    if {"ctc_beam_size", "ngram_weight"} & asked.keys() and not settings.ngram_weight and "token_bonus" not in asked:
        settings.token_bonus = 0.0


def leave_inference_mode(found: dict[str, Any]) -> dict[str, Any]:
    """Copies: what was made in inference mode can have no part in a loss, which a translation may."""
    copies = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
    if found.get("trajectory") is not None:
        copies["trajectory"] = [
            [Draft(draft.tokens.clone(), draft.residual) for draft in drafts] for drafts in found["trajectory"]
        ]
    return copies


def mask_weakest(candidates: Candidates, number: int, passes: int, mask_token: int) -> Tensor:
    """The canvas of pass t of T: the ⌊N·(1 − t/T)⌋ least sure tokens become `<mask>` again (Mask-Predict)."""
    count = candidates.mask.sum(dim=1) * (passes - number) // passes
    rank = candidates.scores.masked_fill(~candidates.mask, float("inf")).argsort(dim=1).argsort(dim=1)
    return torch.where(rank < count[:, None], mask_token, candidates.tokens).where(candidates.mask, candidates.canvas)


def hold_known(log_probabilities: Tensor, tokens: Tensor, scores: Tensor, masked: Tensor) -> Tensor:
    """Where a token was known, it alone is possible, with the score it has had: a beam must not lose it again."""
    only = torch.full_like(log_probabilities, float("-inf")).scatter(2, tokens[..., None], scores[..., None])
    return torch.where(masked[..., None], log_probabilities, only)


def reveal_sampled(candidates: Candidates, noise: Tensor) -> Tensor:
    """Z drawn from the input predictor: arg-max P(t_i | X) where z_i is not masked (MPLE paper, appendix E.6)."""
    revealed = (noise >= candidates.masked_chances) & candidates.mask
    return torch.where(revealed, candidates.tokens, candidates.canvas)


def sampling_noise(source: Tensor, source_mask: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Uniform in [0, 1), candidates × positions: a function of the candidate's own source and length, and the seed."""
    noise = torch.zeros(mask.shape)
    for place, canvas in enumerate(mask.sum(dim=1).tolist()):
        tokens = source[place][source_mask[place]].tolist()
        digest = hashlib.blake2b(repr((seed, canvas, tokens)).encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        noise[place, :canvas] = torch.rand(canvas, generator=generator)
    return noise.to(mask.device)


def demote_repeated(scores: Tensor, texts: Tensor, sentence: Tensor) -> Tensor:
    """Of equal texts in a sentence's list all but the best go to the end: lengths are clamped, texts may be cut."""
    sentences = int(sentence.max()) + 1
    grouped, score = texts.reshape(sentences, -1, texts.shape[1]), scores.reshape(sentences, -1)
    same = (grouped[:, :, None] == grouped[:, None]).all(dim=-1)  # sentences, texts, texts
    worse = score[:, :, None] < score[:, None]
    later = torch.ones_like(same).tril(diagonal=-1) & (score[:, :, None] == score[:, None])
    return scores.masked_fill((same & (worse | later)).any(dim=2).flatten(), float("-inf"))


def best_per_sentence(scores: Tensor, sentence: Tensor, count: int) -> Tensor:
    """Which texts to return: the `count` best of every sentence, sentence by sentence."""
    sentences = int(sentence.max()) + 1
    grouped = scores.reshape(sentences, -1)  # texts stand sentence by sentence
    best = grouped.topk(count, dim=1).indices
    return (best + torch.arange(sentences, device=scores.device)[:, None] * grouped.shape[1]).flatten()


def trim_padding(sequences: Tensor, padding: int) -> Tensor:
    """Drop columns that are padding in every row, but leave one."""
    longest = int((sequences != padding).sum(dim=1).max())
    return sequences[:, : max(1, longest)]


__all__ = ["DeqNarGenerateOutput", "DeqNarGenerationConfig", "DeqNarGenerationMixin"]
