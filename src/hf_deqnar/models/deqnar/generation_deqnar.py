"""`generate`: translation with a model.

A candidate is one canvas of one sentence: one for CTC, one for every length beam otherwise. All candidates of a batch
are solved together and scored, and the best texts of every sentence are returned.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, ModelOutput, cached_file

from .ctc import likeliest, pack
from .forced_generation import ForcedTokensMixin, fix_known_tokens
from .generation_config_deqnar import DeqNarGenerationConfig, merge_options
from .ngrams import MIN_PROB, Fluency
from .quality import features_of, sentence_logits, token_log_probs, token_quality
from .reranking import check_scorer, load_reranker, teacher_forced, with_end
from .shortlist import Words, never_written
from .streaming import Candidates, Draft, DraftReader

if TYPE_CHECKING:
    from .fixed_point import FixedPoint
    from .lengths import LengthModel
    from .refinement_deqnar import Canvas, Source


@dataclass
class DeqNarGenerateOutput(ModelOutput):
    """What `generate` returns with `return_dict_in_generate=True`; one entry per returned sequence.

    Attributes:
        sequences: token ids, padded on the right.
        sequences_scores: log-probability of the text per token, at most 0: the mean over tokens for predicted lengths,
            the mean over the path's positions for the best CTC path, the mean over tokens, with the links to them, for
            a path of a graph, log p(text) / tokens for beam searches (without n-gram scores and `token_bonus`, which
            only affect the order), the mean log-likelihood of the reranker if there is one. −∞ for a duplicate,
            returned if there are too few different texts.
        token_scores: log-probability of every token, in a graph with that of the link to it, 0 at padding; None for
            beam searches.
        nfe: evaluations of the canvas of the sequence, over all passes.
        residual, converged: of the last solve; None for `stacked` models.
        quality: estimate from 0 to 1, the chrF / 100 that is expected of the text; None if the option `quality` is
            unset, which `hf-deqnar calibrate` writes.
        token_quality: probability that a reference has the word of a token, for every token; the quality of a word is
            the smallest of its tokens.
        quality_features: what the estimate is computed from; see `quality.FEATURES`.
        canvas_lengths: length of the selected canvas.
        trajectory: with `output_trajectory`, the drafts of every evaluation.
    """

    sequences: Tensor | None = None
    sequences_scores: Tensor | None = None
    token_scores: Tensor | None = None
    nfe: Tensor | None = None
    residual: Tensor | None = None
    converged: Tensor | None = None
    quality: Tensor | None = None
    token_quality: Tensor | None = None
    quality_features: Tensor | None = None
    canvas_lengths: Tensor | None = None
    trajectory: list[list[Draft]] | None = None


@dataclass
class Texts:
    """Texts of the candidates of a batch, one entry per text, sentence by sentence."""

    tokens: Tensor  # padded
    candidate: Tensor  # index of the candidate of each text
    ranking: Tensor | None = None  # score that ranks the texts of a sentence
    scores: Tensor | None = None  # log-probability per token
    token_scores: Tensor | None = None


class DeqNarGenerationMixin(ForcedTokensMixin):
    """`generate` for a class with a `config`, a `generation_config` and a `model` that is a `RefinementMixin`.

    Tokens are predicted by `read_tokens` and `read_scored`, here with `lm_head`.
    """

    config: Any
    model: Any
    lm_head: Any
    output_modalities = ("text",)
    _generation_config: DeqNarGenerationConfig | None = None

    @property
    def generation_config(self) -> DeqNarGenerationConfig | None:
        """Default options of the model. Assigning a `GenerationConfig` of transformers changes the options it sets."""
        return self._generation_config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig | None) -> None:
        if config is None or isinstance(config, DeqNarGenerationConfig):
            self._generation_config = config
        else:
            own = self._generation_config or DeqNarGenerationConfig.from_model_config(self.config)
            self._generation_config = merge_options(own, config, {}, self.length_model.beam_option)

    @property
    def length_model(self) -> "LengthModel":
        """Length model: canvas lengths, likelihood and decoding."""
        return self.model.length_model

    def prepare(self, *inputs: Any, **options: Any) -> "Source":
        """Encode the source; see `DeqNarModel.prepare`."""
        return self.model.prepare(*inputs, **options)

    def lay_out(self, source: "Source", *inputs: Any, **options: Any) -> "Canvas":
        """A canvas for every source; see `RefinementMixin.lay_out`."""
        return self.model.lay_out(source, *inputs, **options)

    def solve(self, source: "Source", canvas: "Canvas", **options: Any) -> "FixedPoint":
        """Solve z = f(z); see `RefinementMixin.solve`."""
        return self.model.solve(source, canvas, **options)

    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        streamer: Any = None,
        labels: Tensor | None = None,
        inputs: Tensor | None = None,
        **options,
    ) -> Tensor | DeqNarGenerateOutput:
        """Translate a batch. Returns token ids, or a `DeqNarGenerateOutput` with `return_dict_in_generate=True`.

        Args:
            input_ids, attention_mask: the source, padded on the right.
            generation_config: options of this call, also a `GenerationConfig` of transformers. Default: the model's.
            streamer: receives the final tokens and, if it has `put_draft`, every draft; one sentence at a time.
            labels: passed by `Seq2SeqTrainer`; they have no influence on the translation.
            inputs: another name of `input_ids`, as in transformers.
            options: any option of `DeqNarGenerationConfig`, for this call. Of transformers' options, `num_beams` sets
                the number of candidates and `max_new_tokens` the maximum length; those without effect are accepted.
        """
        if inputs is not None:
            if input_ids is not None:
                raise ValueError("inputs and input_ids are the same argument; pass one of them.")
            input_ids = inputs
        assert self.generation_config is not None  # set in __init__
        settings = merge_options(self.generation_config, generation_config, options, self.length_model.beam_option)
        self._check_options(settings)
        if settings.forced_tokens is not None and input_ids is not None:
            self.check_forced_tokens(settings, len(input_ids))
        source_mask = self.model.check_source(input_ids, attention_mask, None)
        assert input_ids is not None  # check_source requires it
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(
                f"A streamer shows one sentence, but the batch has {len(input_ids)}; pass them one by one."
            )

        with gathered_weights(self), torch.inference_mode():
            found = self._translate(input_ids, source_mask, settings, streamer)
        found = leave_inference_mode(found)
        if streamer is not None:
            streamer.put(found["sequences"][0].cpu())
            streamer.end()
        return DeqNarGenerateOutput(**found) if settings.return_dict_in_generate else found["sequences"]

    def _translate(
        self, input_ids: Tensor, source_mask: Tensor, settings: DeqNarGenerationConfig, streamer: Any
    ) -> dict[str, Any]:
        """Outputs of `generate` by name; only the sequences without `return_dict_in_generate`."""
        candidates, drafts = self._refine_candidates(input_ids, source_mask, settings, streamer)
        texts = self._read_texts(candidates, settings)
        if settings.reranker is not None:
            scores = self._rerank(
                settings.reranker, input_ids, source_mask, texts.tokens, candidates.sentence[texts.candidate]
            )
            if texts.ranking is not None:  # unfilled entries of a beam
                scores = scores.masked_fill(texts.ranking == float("-inf"), float("-inf"))
            texts.scores = texts.ranking = scores
        chosen: Tensor | slice = slice(None)
        if len(texts.tokens) > len(input_ids):
            sentence = candidates.sentence[texts.candidate]
            assert texts.ranking is not None  # several texts are always scored
            assert texts.scores is not None
            ranking = demote_repeated(texts.ranking, self._without_end(texts.tokens), sentence)
            texts.scores = texts.scores.masked_fill(ranking == float("-inf"), float("-inf"))
            chosen = best_per_sentence(ranking, sentence, settings.num_return_sequences)
        sequences = trim_padding(texts.tokens[chosen], self.config.pad_token_id)
        if not settings.return_dict_in_generate:
            return {"sequences": sequences}
        assert texts.scores is not None  # required by return_dict_in_generate
        candidate, token_scores = texts.candidate[chosen], texts.token_scores
        token_scores = None if token_scores is None else token_scores[chosen][:, : sequences.shape[1]]
        estimates = self._estimate_quality(
            input_ids, source_mask, candidates, candidate, sequences, token_scores, settings.quality
        )
        return {
            "sequences": sequences,
            "sequences_scores": texts.scores[chosen],
            "token_scores": token_scores,
            **estimates,
            "nfe": candidates.nfe[candidate],
            "residual": None if candidates.residual is None else candidates.residual[candidate],
            "converged": None if candidates.converged is None else candidates.converged[candidate],
            "canvas_lengths": candidates.mask.sum(dim=1)[candidate],
            "trajectory": None if drafts is None else [drafts[index] for index in candidate.tolist()],
        }

    def _estimate_quality(
        self,
        input_ids: Tensor,
        source_mask: Tensor,
        candidates: Candidates,
        selected: Tensor,
        sequences: Tensor,
        token_scores: Tensor | None,
        quality: dict[str, Any] | None,
    ) -> dict[str, Tensor]:
        """`quality`, `token_quality` and their features for the returned sequences; see `quality.py`."""
        if quality is None:
            return {}
        padding = self.config.pad_token_id
        if token_scores is None:
            token_scores = token_log_probs(candidates, selected, sequences, padding, self.config.blank_token_id)
        assert token_scores is not None  # either there are scores, or log-probabilities of all tokens
        assert candidates.scores is not None  # required by return_dict_in_generate
        sentence, real = candidates.sentence[selected], sequences != padding
        features = features_of(
            token_scores,
            real,
            candidates.scores[selected],
            candidates.mask[selected],
            input_ids[sentence],
            source_mask[sentence].bool(),
            None if candidates.converged is None else candidates.converged[selected],
            quality,
        )
        logits = sentence_logits(features, quality)
        return {
            "quality": logits.sigmoid(),
            "token_quality": token_quality(logits, token_scores, quality).masked_fill(~real, 0.0),
            "quality_features": features,
        }

    def _check_options(self, settings: DeqNarGenerationConfig) -> None:
        """Raise ValueError for options that this model does not support."""
        self.length_model.check_options(settings)
        name = self.length_model.beam_option
        beams = getattr(settings, name)
        if settings.num_return_sequences > beams:
            raise ValueError(
                f"num_return_sequences={settings.num_return_sequences} is more than {name}={beams} candidates; "
                f"raise {name}."
            )
        if settings.stop_on_stable_tokens is not None and not self.config.seeks_equilibrium:
            raise ValueError("stop_on_stable_tokens has no effect: refinement='stacked' evaluates once.")
        if settings.shortlist and self.model.shortlist is None:
            raise ValueError("shortlist=True, but this model has no shortlist; create it with hf-deqnar shortlist.")
        if settings.ngram_weight and self.model.ngrams is None:
            raise ValueError(
                f"ngram_weight={settings.ngram_weight}, but this model has no n-grams; create them with hf-deqnar "
                "ngrams."
            )
        if settings.ngram_weight and not self.model.ngrams.learned:
            raise ValueError("The n-grams of this model are empty; create them with hf-deqnar ngrams.")
        if settings.ngram_weight and len(self.model.ngrams.first_chances) != self.config.vocab_size:
            raise ValueError(
                f"The n-grams know {len(self.model.ngrams.first_chances):,} tokens, but the model has "
                f"{self.config.vocab_size:,}: they are of another vocabulary; create them with hf-deqnar ngrams."
            )
        if settings.ngram_weight and not self._searches_texts(settings):
            raise ValueError(
                f"ngram_weight={settings.ngram_weight} needs a beam search; set "
                f"{self.length_model.search_option or 'ctc_beam_size'} above 1, or ngram_weight=0."
            )
        if settings.token_bonus and not settings.ngram_weight:
            raise ValueError(
                f"token_bonus={settings.token_bonus} has no effect without ngram_weight; set both or none."
            )
        if settings.input_sampling:
            self._check_input_sampling(settings)

    def _searches_texts(self, settings: DeqNarGenerationConfig) -> bool:
        """Whether texts are found by a beam search that needs the log-probabilities of all tokens."""
        option = self.length_model.search_option
        return option is not None and getattr(settings, option) > 1

    def _check_input_sampling(self, settings: DeqNarGenerationConfig) -> None:
        if self.model.input_head is None:
            raise ValueError(
                "input_sampling=True needs an input predictor, which this model does not have; "
                "create it with hf-deqnar report MODEL,save=FOLDER."
            )
        for option in ("refinement_passes", "ctc_beam_size"):
            if getattr(settings, option) > 1:
                raise ValueError(
                    f"input_sampling=True and {option}={getattr(settings, option)} are mutually exclusive, "
                    "because sampled tokens are not changed; set one of them."
                )

    def _refine_candidates(
        self, input_ids: Tensor, source_mask: Tensor, settings: DeqNarGenerationConfig, streamer: Any
    ) -> tuple[Candidates, list[list[Draft]] | None]:
        """Encode, lay out the canvases and solve for their equilibria in each pass; `input_sampling` has two."""
        forced = settings.forced_tokens
        source = self.prepare(input_ids, source_mask, shortlist=settings.shortlist is not False and forced is None)
        lengths = self.length_model.candidate_lengths(source, settings)  # (sentences, candidates of each)
        if forced is not None:
            needed = torch.tensor([sum(map(len, terms)) for terms in forced], device=lengths.device)
            lengths = self.length_model.room_for(lengths, needed)
        beams = lengths.shape[1]
        sentence = torch.arange(len(input_ids), device=input_ids.device).repeat_interleave(beams)
        source = source.select(sentence) if beams > 1 else source
        canvas = self.lay_out(source, lengths=lengths.flatten())
        candidates = Candidates(
            sentence=sentence,
            canvas=canvas.tokens,
            mask=canvas.mask,
            tokens=canvas.tokens,
            scores=None,
            nfe=torch.zeros_like(sentence),
        )
        observed = settings.stop_on_stable_tokens is not None or settings.output_trajectory
        observed = observed or hasattr(streamer, "put_draft")
        read = partial(self._read_draft, source.words, candidates.mask, settings)
        reader = DraftReader(self.config, self.length_model, candidates, settings, streamer, read) if observed else None
        passes = 2 if settings.input_sampling else settings.refinement_passes
        for number in range(passes):
            if number > 0 and settings.input_sampling:
                noise = sampling_noise(input_ids[sentence], source.mask, canvas.mask, settings.sampling_seed)
                candidates.canvas = reveal_sampled(candidates, noise)
            elif number > 0:
                candidates.canvas = mask_least_likely(candidates, number, passes, self.config.mask_token_id)
            if reader is not None:
                reader.restart()
            found = self.solve(
                source,
                self.lay_out(source, tokens=candidates.canvas),
                max_nfe=settings.max_nfe,
                tol=settings.tol,
                solver=settings.solver,
                observe_features=reader,
            )
            scored = passes > 1 or settings.return_dict_in_generate or beams > 1
            self._update(candidates, found, source.words, settings, scored, keep_all=self._searches_texts(settings))
            if settings.input_sampling:
                candidates.masked_chances = self.model.input_head(found.value).float().sigmoid()
        if forced is not None:
            self.force_tokens(candidates, source, found.value, settings)
        return candidates, None if reader is None else reader.drafts

    def _logits(self, features: Tensor, words: Words | None) -> Tensor:
        """Logits of the shortlist or of all tokens; −∞ for tokens that are never generated."""
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
        """The most likely token of every position."""
        tokens = likeliest(self._logits(features, words))
        return tokens if words is None else words.tokens[tokens]

    def read_scored(
        self, features: Tensor, keep_all: bool, words: Words | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The most likely token of every position, its log-probability and, with `keep_all`, those of all tokens."""
        logits = self._logits(features, words)
        best = likeliest(logits)
        tokens = best if words is None else words.tokens[best]
        if not keep_all:
            return tokens, logits.gather(-1, best[..., None])[..., 0] - logits.logsumexp(dim=-1), None
        log_probs = logits.log_softmax(dim=-1)
        scores = log_probs.gather(-1, best[..., None])[..., 0]
        return tokens, scores, log_probs if words is None else words.spread(log_probs, self.config)

    def _read_draft(
        self, words: Words | None, mask: Tensor, settings: DeqNarGenerationConfig, rows: Tensor, features: Tensor
    ) -> Tensor:
        """Tokens of an evaluation of some rows."""
        words = None if words is None else words.select(rows)
        mask = mask[rows, : features.shape[1]]
        log_links = self.length_model.log_links(self.model, features, mask)
        if log_links is None or not self.length_model.needs_scores(settings):
            tokens, scores = self.read_tokens(features, words), None
        else:
            tokens, scores, _ = self.read_scored(features, False, words)
        return self.length_model.select_path(tokens, scores, log_links, mask, settings)[0]

    def _update(
        self,
        candidates: Candidates,
        found: Any,
        words: Words | None,
        settings: DeqNarGenerationConfig,
        scored: bool,
        keep_all: bool,
    ) -> None:
        """Predict tokens at masked positions; known tokens and their scores do not change."""
        masked = candidates.canvas == self.config.mask_token_id
        candidates.log_links = self.length_model.log_links(self.model, found.value, candidates.mask)
        if scored or keep_all or self.length_model.needs_scores(settings):
            tokens, scores, log_probs = self.read_scored(found.value, keep_all, words)
            if scores.isnan().any():
                raise FloatingPointError("The logits are not finite; check the weights for NaN or infinity.")
            known = torch.zeros_like(scores) if candidates.scores is None else candidates.scores
            if log_probs is not None and candidates.scores is not None:
                log_probs = fix_known_tokens(log_probs, candidates.tokens, known, masked)
            candidates.log_probs = log_probs
            tokens, scores = self._select_path(candidates, tokens, scores, settings)
            candidates.scores = torch.where(masked, scores, known)
        else:
            tokens, _ = self._select_path(candidates, self.read_tokens(found.value, words), None, settings)
        candidates.tokens = torch.where(masked, tokens, candidates.tokens)
        candidates.nfe = candidates.nfe + found.nfe
        candidates.residual, candidates.converged = found.residual, found.converged

    def _select_path(
        self, candidates: Candidates, tokens: Tensor, scores: Any, settings: DeqNarGenerationConfig
    ) -> tuple[Tensor, Any]:
        """The tokens of the path that the length model chooses; a beam search chooses among all paths itself."""
        if candidates.log_probs is not None:
            return tokens, scores
        return self.length_model.select_path(tokens, scores, candidates.log_links, candidates.mask, settings)

    def _read_texts(self, candidates: Candidates, settings: DeqNarGenerationConfig) -> "Texts":
        """The text of every candidate, or all texts of every candidate's beam."""
        padding, lengths = self.config.pad_token_id, candidates.mask.sum(dim=1)
        rows = torch.arange(len(lengths), device=lengths.device)
        if candidates.log_probs is not None:
            fluency = self._fluency(settings)
            inputs = (candidates.log_probs, candidates.log_links, lengths)
            tokens, counts, ranking, log_probs = self._search_beams(*inputs, settings, fluency)
            if candidates.forced:
                beams = (tokens, counts, ranking, log_probs)
                tokens, counts, ranking, log_probs = self.select_forced(candidates, *beams, settings)
            scores = log_probs.clamp_max(0) / counts.clamp_min(1)
            beam, tokens = tokens.shape[1], tokens.flatten(0, 1)[:, : settings.max_length]
            return Texts(tokens, rows.repeat_interleave(beam), ranking.flatten(), scores.flatten())
        in_text = self.length_model.text_positions(
            candidates.tokens, candidates.mask, merge_repetitions=settings.deduplicate
        )
        tokens, _ = pack(candidates.tokens, in_text, padding)
        tokens = tokens[:, : settings.max_length]
        if candidates.scores is None:
            return Texts(tokens, rows)
        token_scores, _ = pack(candidates.scores, in_text, 0.0)
        scored = self.length_model.scored_positions(candidates.tokens, candidates.mask)
        scores = (candidates.scores * scored).sum(dim=1) / scored.sum(dim=1).clamp_min(1)
        return Texts(tokens, rows, scores, scores, token_scores[:, : settings.max_length])

    def _without_end(self, texts: Tensor) -> Tensor:
        """Replace end tokens by padding."""
        ends = self.config.eos_token_id
        if ends is None:
            return texts
        return texts.masked_fill(torch.isin(texts, torch.tensor(ends, device=texts.device)), self.config.pad_token_id)

    def _search_beams(
        self, log_probs: Tensor, log_links: Tensor | None, lengths: Tensor, settings: Any, fluency: Fluency | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The texts of every row's beam, their lengths, ranking and log-probability."""
        least = 0.0 if fluency is None else MIN_PROB
        return self.length_model.search_beams(log_probs, log_links, lengths, settings, fluency, least)

    def _fluency(self, settings: DeqNarGenerationConfig) -> Fluency | None:
        """The n-gram terms of a beam search; None without n-grams."""
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
        if isinstance(end, int):  # the reranker also scores the end token
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
        """Called by `from_pretrained`: load the saved options."""
        if generation_config is not None:
            self.generation_config = generation_config
        elif pretrained_model_name_or_path is not None:
            options = {"cache_dir": cache_dir, "force_download": force_download, "proxies": proxies, "token": token}
            options |= {"local_files_only": local_files_only, "revision": revision, "subfolder": subfolder}
            path, file = pretrained_model_name_or_path, GENERATION_CONFIG_NAME
            # Without the file the defaults of __init__ are used; an unreadable file is an error.
            if cached_file(path, file, _raise_exceptions_for_missing_entries=False, **options) is not None:
                self.generation_config = DeqNarGenerationConfig.from_pretrained(path, **options)


@contextmanager
def gathered_weights(model: Any) -> Iterator[None]:
    """Gather the weights of a model sharded by `fully_shard`; no effect on other models.

    Sharded modules gather their weights in `forward`, which generation does not call. Every process must enter.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        yield
        return
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    sharded = [
        module
        for module in model.modules()
        if any(isinstance(weight, DTensor) for weight in module.parameters()) and isinstance(module, FSDPModule)
    ]
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def leave_inference_mode(found: dict[str, Any]) -> dict[str, Any]:
    """Copy the outputs, because inference tensors cannot be used in autograd."""
    copies: dict[str, Any] = {name: value.clone() for name, value in found.items() if isinstance(value, Tensor)}
    if found.get("trajectory") is not None:
        copies["trajectory"] = [
            [Draft(draft.tokens.clone(), draft.residual) for draft in drafts] for drafts in found["trajectory"]
        ]
    return copies


def mask_least_likely(candidates: Candidates, number: int, passes: int, mask_token: int) -> Tensor:
    """The canvas of pass t of T: the ⌊N·(1 − t/T)⌋ least likely tokens are masked (Mask-Predict)."""
    assert candidates.scores is not None  # every pass but the last is scored
    count = candidates.mask.sum(dim=1) * (passes - number) // passes
    rank = candidates.scores.masked_fill(~candidates.mask, float("inf")).argsort(dim=1).argsort(dim=1)
    return torch.where(rank < count[:, None], mask_token, candidates.tokens).where(candidates.mask, candidates.canvas)


def reveal_sampled(candidates: Candidates, noise: Tensor) -> Tensor:
    """Z drawn from the input predictor: arg-max P(t_i | X) where z_i is not masked (MPLE paper, appendix E.6)."""
    assert candidates.masked_chances is not None  # set by the first pass
    revealed = (noise >= candidates.masked_chances) & candidates.mask
    return torch.where(revealed, candidates.tokens, candidates.canvas)


def sampling_noise(source: Tensor, source_mask: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Uniform in [0, 1), candidates × positions: a function of source, canvas length and seed."""
    noise = torch.zeros(mask.shape)
    for place, canvas in enumerate(mask.sum(dim=1).tolist()):
        tokens = source[place][source_mask[place]].tolist()
        digest = hashlib.blake2b(repr((seed, canvas, tokens)).encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        noise[place, :canvas] = torch.rand(canvas, generator=generator)
    return noise.to(mask.device)


def demote_repeated(scores: Tensor, texts: Tensor, sentence: Tensor) -> Tensor:
    """Set the score of duplicate texts of a sentence to −∞, except for the best."""
    sentences = int(sentence.max()) + 1
    grouped, score = texts.reshape(sentences, -1, texts.shape[1]), scores.reshape(sentences, -1)
    same = (grouped[:, :, None] == grouped[:, None]).all(dim=-1)  # sentences, texts, texts
    worse = score[:, :, None] < score[:, None]
    later = torch.ones_like(same).tril(diagonal=-1) & (score[:, :, None] == score[:, None])
    return scores.masked_fill((same & (worse | later)).any(dim=2).flatten(), float("-inf"))


def best_per_sentence(scores: Tensor, sentence: Tensor, count: int) -> Tensor:
    """Indices of the `count` best texts of every sentence, sentence by sentence."""
    sentences = int(sentence.max()) + 1
    grouped = scores.reshape(sentences, -1)  # texts are ordered by sentence
    best = grouped.topk(count, dim=1).indices
    return (best + torch.arange(sentences, device=scores.device)[:, None] * grouped.shape[1]).flatten()


def trim_padding(sequences: Tensor, padding: int) -> Tensor:
    """Remove columns that are padding in every row, but at least one column remains."""
    longest = int((sequences != padding).sum(dim=1).max())
    return sequences[:, : max(1, longest)]


__all__ = ["DeqNarGenerateOutput", "DeqNarGenerationConfig", "DeqNarGenerationMixin"]
