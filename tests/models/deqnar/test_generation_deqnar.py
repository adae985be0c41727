import io
import json
import math
import re
from fractions import Fraction

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TextStreamer,
)
from transformers.generation.streamers import TextDiffusionStreamer

from hf_deqnar import DeqNarForConditionalGeneration, DeqNarGenerateOutput, DeqNarGenerationConfig
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.models.deqnar.generation_deqnar import mask_least_likely
from hf_deqnar.models.deqnar.streaming import Candidates, TerminalStreamer

from ...conftest import PAD, REFINEMENTS, VOCABULARY, padded, random_sentences, small_model, with_input_predictor

MASK, BLANK, END = 4, 5, 2


def reranker(vocabulary: int = VOCABULARY, **fields) -> MarianMTModel:
    torch.manual_seed(1)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    tokens = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD, "forced_eos_token_id": END}
    return MarianMTModel(MarianConfig(vocab_size=vocabulary, **sizes, **heads, **tokens, **fields)).eval()


@pytest.mark.parametrize("length", ["predict", "ctc"])
@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_generate_returns_tensors_by_default_and_figures_on_request(refinement, length):
    model, tokens = small_model(torch.float32, refinement=refinement, length=length), padded(random_sentences(5))
    plain = model.generate(input_ids=tokens)
    assert isinstance(plain, torch.Tensor)
    assert plain.shape[0] == 5
    out = model.generate(input_ids=tokens, return_dict_in_generate=True, output_trajectory=True)
    assert isinstance(out, DeqNarGenerateOutput)
    assert torch.equal(out.sequences, plain)
    for figure in (out.sequences_scores, out.nfe, out.canvas_lengths, out.trajectory):
        assert len(figure) == 5
    assert out.token_scores.shape == out.sequences.shape
    assert (out.residual is None) == (refinement == "stacked")
    assert not {MASK, BLANK} & set(plain.flatten().tolist())


def test_tokens_are_the_arg_max_at_the_equilibrium():
    model, tokens = small_model(), padded(random_sentences(4))
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        out = model.generate(input_ids=tokens, return_dict_in_generate=True)
    logits[..., [PAD, MASK, 0]] = float("-inf")
    for row, length in enumerate(out.canvas_lengths.tolist()):
        expected, tokens = logits[row, :length].log_softmax(dim=-1).max(dim=-1)
        text = tokens[tokens != BLANK]
        assert out.sequences[row, : len(text)].tolist() == text.tolist()
        scores = out.token_scores[row, : len(text)].double()
        torch.testing.assert_close(scores, expected[tokens != BLANK], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(out.sequences_scores[row].double(), expected.mean(), rtol=1e-4, atol=1e-5)


def test_empty_tokens_are_not_part_of_the_text():
    model, tokens = small_model(), padded(random_sentences(2, shortest=5))
    usual = model.generate(input_ids=tokens)
    model.lm_head.weight.data[BLANK] = (
        1.5 * model.lm_head.weight.data[usual[0, 0]]
    )  # the blank is now predicted instead
    out = model.generate(input_ids=tokens, return_dict_in_generate=True, output_trajectory=True)
    assert BLANK not in out.sequences
    words = (out.sequences != PAD).sum(dim=1)
    assert (words < out.canvas_lengths).any()
    assert [len(drafts[-1].tokens) for drafts in out.trajectory] == words.tolist()


def test_length_beams_select_the_canvas_with_the_best_mean_log_probability():
    model, tokens = small_model(), padded(random_sentences(4, shortest=4))
    out = model.generate(input_ids=tokens, length_beams=4, num_return_sequences=4, return_dict_in_generate=True)
    with torch.no_grad():
        expected = model.length_model.likeliest_lengths(model.prepare(tokens), 4)
    for row in range(4):
        scores = out.sequences_scores[4 * row : 4 * row + 4]
        assert scores.tolist() == sorted(scores.tolist(), reverse=True)
        assert sorted(out.canvas_lengths[4 * row : 4 * row + 4].tolist()) == sorted(expected[row].tolist())
    best = model.generate(input_ids=tokens, length_beams=4)
    assert torch.equal(best, out.sequences[::4][:, : best.shape[1]])


def transcribed_rule(scores: list[float], tokens: list[int], masks: int) -> list[int]:
    """Mask-Predict by definition: the `masks` least likely tokens become <mask>."""
    weakest = sorted(range(len(tokens)), key=lambda position: scores[position])[:masks]
    return [MASK if position in weakest else token for position, token in enumerate(tokens)]


@pytest.mark.parametrize("passes", [2, 3, 10])
def test_number_of_masked_tokens_decreases_linearly(passes):
    lengths = [1, 5, 8]
    tokens, scores = torch.randint(6, 50, (3, 8)), torch.randn(3, 8)
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    tokens = tokens.masked_fill(~mask, PAD)
    candidates = Candidates(torch.arange(3), tokens, mask, tokens, scores, torch.zeros(3))
    for number in range(1, passes):
        canvas = mask_least_likely(candidates, number, passes, MASK)
        for row, length in enumerate(lengths):
            count = math.floor(length * (1 - Fraction(number, passes)))
            expected = transcribed_rule(scores[row, :length].tolist(), tokens[row, :length].tolist(), count)
            assert canvas[row, :length].tolist() == expected
            assert (canvas[row, length:] == PAD).all()


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_refinement_passes_agree_with_mask_predict(length):
    """`generate` with three passes compared with the algorithm in plain forward calls."""
    model = small_model(length=length, tol=1e-9, max_nfe=60)
    tokens = padded(random_sentences(1, shortest=7, longest=7))
    out = model.generate(input_ids=tokens, refinement_passes=3, return_dict_in_generate=True)
    size = int(out.canvas_lengths)
    canvas, chosen, scores, nfe = [MASK] * size, [0] * size, [0.0] * size, 0
    for number in range(3):
        if number:
            canvas = transcribed_rule(scores, chosen, math.floor(size * (1 - Fraction(number, 3))))
        with torch.no_grad():
            step = model(input_ids=tokens, decoder_input_ids=torch.tensor([canvas]))
        logits = step.logits[0].clone()
        logits[:, [PAD, MASK, 0]] = float("-inf")
        best = logits.log_softmax(dim=-1).max(dim=-1)
        for position in range(size):
            if canvas[position] == MASK:
                chosen[position], scores[position] = int(best.indices[position]), float(best.values[position])
        nfe += int(step.nfe)
    assert int(out.nfe) == nfe
    if length == "predict":
        assert out.sequences[0].tolist() == [token for token in chosen if token != BLANK]
    else:
        merged = [token for index, token in enumerate(chosen) if index == 0 or token != chosen[index - 1]]
        assert out.sequences[0].tolist() == [token for token in merged if token != BLANK]


def test_beam_keeps_tokens_fixed_by_earlier_passes(monkeypatch):
    """In the last pass the beam search has one token, with its score, at positions that are not masked."""
    model, tokens, canvases, searched = small_model(length="ctc"), padded(random_sentences(3, shortest=7)), [], []
    bind, search = type(model.model).bind, type(model)._search_beams

    def bound(self, source, canvas):
        canvases.append(canvas.tokens)
        return bind(self, source, canvas)

    def searching(self, log_probabilities, *rest):
        searched.append(log_probabilities)
        return search(self, log_probabilities, *rest)

    monkeypatch.setattr(type(model.model), "bind", bound)
    monkeypatch.setattr(type(model), "_search_beams", searching)
    first = model.generate(input_ids=tokens, ctc_beam_size=4)
    twice = model.generate(input_ids=tokens, ctc_beam_size=4, refinement_passes=2)
    before, (after, last) = searched[0], (searched[1], canvases[-1])
    known = (last != MASK) & (last != PAD)
    assert known.any()
    assert after[known].isfinite().sum(dim=-1).eq(1).all()
    assert torch.equal(after[known].argmax(dim=-1), last[known])
    assert torch.equal(after[known].amax(dim=-1), before[known].amax(dim=-1))
    assert after[last == MASK].isfinite().sum(dim=-1).gt(1).all()
    assert first.shape[0] == twice.shape[0] == 3


def test_texts_that_differ_only_in_end_tokens_are_duplicates(monkeypatch):
    model = small_model(length="ctc")
    texts = torch.tensor([[[9, 8, END], [9, 8, PAD], [9, 7, PAD]]])
    # Scores are divided by lengths; the better of two equal texts is retained at any index.
    for scores, first in (([-1.0, -1.5, -9.0], [9, 8, END]), ([-3.0, -1.5, -1.8], [9, 8, PAD])):
        lengths, log_probs = torch.tensor([[3, 2, 2]]), torch.tensor([scores])
        found = (texts, lengths, log_probs / lengths, log_probs)
        monkeypatch.setattr(type(model), "_search_beams", lambda *arguments, found=found: found)
        best = model.generate(input_ids=padded(random_sentences(1)), ctc_beam_size=3, num_return_sequences=2)
        longest = 3 if first[-1] == END else 2
        assert best.tolist() == [first[:longest], [9, 7, PAD][:longest]]


@pytest.mark.parametrize("length", ["predict", "ctc"])
@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_sampled_tokens_follow_the_predictor_and_stay_on_the_canvas(refinement, length, monkeypatch):
    """`generate` compared with plain forward calls on its canvases: nothing revealed, then arg-max tokens."""
    tokens, canvases = padded(random_sentences(3, shortest=7)), []
    model = with_input_predictor(tokens, refinement=refinement, length=length, tol=1e-9, max_nfe=60)
    original = model.model.bind
    monkeypatch.setattr(
        model.model, "bind", lambda source, canvas: canvases.append(canvas.tokens) or original(source, canvas)
    )
    out = model.generate(input_ids=tokens, input_sampling=True, return_dict_in_generate=True)
    unseen, sampled = canvases
    assert set(unseen.unique().tolist()) <= {PAD, MASK}
    assert torch.equal(unseen == PAD, sampled == PAD)
    with torch.no_grad():
        first, second = (model(input_ids=tokens, decoder_input_ids=canvas) for canvas in (unseen, sampled))
    assert out.nfe.tolist() == (first.nfe + second.nfe).tolist()
    for logits in (first.logits, second.logits):
        logits[..., [PAD, MASK, 0]] = float("-inf")
    revealed = (sampled != MASK) & (sampled != PAD)
    assert revealed.any()
    assert (sampled == MASK).any()
    assert torch.equal(sampled[revealed], first.logits.argmax(dim=-1)[revealed])
    output = torch.where(revealed, sampled, second.logits.argmax(dim=-1))
    for row, size in enumerate(out.canvas_lengths.tolist()):
        text = output[row, :size].tolist()
        if length == "ctc":
            text = [token for place, token in enumerate(text) if place == 0 or token != text[place - 1]]
        text = [token for token in text if token != BLANK]
        assert out.sequences[row][out.sequences[row] != PAD].tolist() == text


def test_positions_are_revealed_with_the_predicted_probability(monkeypatch):
    tokens, canvases = padded(random_sentences(4, shortest=6)), []
    model = with_input_predictor(tokens, max_nfe=4)
    original = model.model.bind
    monkeypatch.setattr(
        model.model, "bind", lambda source, canvas: canvases.append(canvas.tokens) or original(source, canvas)
    )
    for seed in range(150):
        model.generate(input_ids=tokens, input_sampling=True, sampling_seed=seed)
    canvas_mask = canvases[0] != PAD
    with torch.no_grad():
        features = model(input_ids=tokens).last_hidden_state
        chances = model.model.input_head(features).sigmoid()[canvas_mask]
    shares = (torch.stack(canvases[1::2]) == MASK).double().mean(dim=0)[canvas_mask]
    assert chances.min() < 0.3
    assert chances.max() > 0.7
    # 150 draws per position: the standard error of their mean is at most 0.04; the tolerance is four times that
    assert (shares - chances).abs().max() < 0.16
    assert (shares - chances).mean().abs() < 0.02


def test_predictor_that_masks_everything_changes_only_nfe():
    model, tokens = small_model(input_predictor=True), padded(random_sentences(3))
    model.model.input_head.bias.data.fill_(100.0)
    plain = model.generate(input_ids=tokens, length_beams=3, return_dict_in_generate=True)
    sampled = model.generate(input_ids=tokens, length_beams=3, input_sampling=True, return_dict_in_generate=True)
    assert torch.equal(plain.sequences, sampled.sequences)
    assert torch.equal(2 * plain.nfe, sampled.nfe)


def test_input_sampling_is_refused_for_unsupported_options():
    tokens = padded(random_sentences(2))
    for model, options, message in [
        (
            small_model(),
            {},
            "input_sampling=True needs an input predictor, which this model does not have; create it with",
        ),
        (
            with_input_predictor(tokens),
            {"refinement_passes": 3},
            "input_sampling=True and refinement_passes=3 are mutually exclusive",
        ),
        (
            with_input_predictor(tokens, length="ctc"),
            {"ctc_beam_size": 3},
            "input_sampling=True and ctc_beam_size=3 are mutually exclusive",
        ),
        (
            with_input_predictor(tokens),
            {"sampling_seed": -1},
            "sampling_seed must be an integer of at least 0, not -1",
        ),
        (with_input_predictor(tokens), {"input_sampling": "yes"}, "input_sampling must be True or False, not 'yes'"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate(input_ids=tokens, **{"input_sampling": True, **options})


def test_deduplication_merges_equal_neighbours():
    model = small_model()
    model.lm_head.weight.data[7] *= 50  # make one token dominate
    tokens = padded(random_sentences(3, shortest=6))
    plain = model.generate(input_ids=tokens)
    merged = model.generate(input_ids=tokens, deduplicate=True)
    for row in range(3):
        words = [token for token in plain[row].tolist() if token != PAD]
        expected = [token for index, token in enumerate(words) if index == 0 or token != words[index - 1]]
        assert [token for token in merged[row].tolist() if token != PAD] == expected
    assert merged.shape[1] < plain.shape[1]


def test_ctc_beam_is_at_least_as_likely_as_the_best_path():
    model, tokens = small_model(length="ctc"), padded(random_sentences(4, shortest=3))
    out = model.generate(input_ids=tokens, ctc_beam_size=6, num_return_sequences=6, return_dict_in_generate=True)
    assert out.sequences.shape[0] == 24
    assert out.token_scores is None
    for row in range(4):
        texts = [tuple(text) for text in out.sequences[6 * row : 6 * row + 6].tolist()]
        assert len(set(texts)) == 6
        scores = out.sequences_scores[6 * row : 6 * row + 6].tolist()
        assert scores == sorted(scores, reverse=True)


def test_reranker_selects_candidate_with_highest_score():
    model, teacher_model, tokens = small_model(torch.float32), reranker(), padded(random_sentences(3, shortest=3))
    out = model.generate(
        input_ids=tokens, length_beams=4, num_return_sequences=4, reranker=teacher_model, return_dict_in_generate=True
    )
    for index, text in enumerate(out.sequences):
        words = [token for token in text.tolist() if token != PAD]
        labels = torch.tensor([words if words[-1] == END else [*words, END]])
        source = tokens[index // 4 : index // 4 + 1]
        with torch.no_grad():
            loss = teacher_model(input_ids=source, attention_mask=(source != PAD).long(), labels=labels).loss
        assert float(out.sequences_scores[index]) == pytest.approx(-float(loss), rel=1e-4)
    for row in range(3):
        scores = out.sequences_scores[4 * row : 4 * row + 4].tolist()
        assert scores == sorted(scores, reverse=True)


def test_reranker_can_be_given_by_name(tmp_path):
    model, teacher_model, tokens = small_model(torch.float32), reranker(), padded(random_sentences(3))
    teacher_model.save_pretrained(tmp_path)
    named = model.generate(input_ids=tokens, length_beams=3, reranker=str(tmp_path))
    assert torch.equal(named, model.generate(input_ids=tokens, length_beams=3, reranker=teacher_model))


def test_row_stops_when_its_tokens_are_stable():
    model, tokens = small_model(tol=1e-12, max_nfe=60), padded(random_sentences(6))
    full = model.generate(input_ids=tokens, return_dict_in_generate=True, output_trajectory=True)
    stopped = model.generate(
        input_ids=tokens, stop_on_stable_tokens=2, return_dict_in_generate=True, output_trajectory=True
    )
    assert (stopped.nfe < full.nfe).all()
    for row in range(6):
        drafts = [draft.tokens.tolist() for draft in full.trajectory[row]]
        first = next(n for n in range(2, len(drafts)) if drafts[n] == drafts[n - 1] == drafts[n - 2])
        assert int(stopped.nfe[row]) == first + 1
    assert not stopped.converged.any()
    twice = model.generate(input_ids=tokens, stop_on_stable_tokens=2, refinement_passes=2, return_dict_in_generate=True)
    assert (twice.nfe >= stopped.nfe + 3).all()  # stability is counted per pass


@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("length", ["predict", "ctc"])
@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_trajectory_ends_with_the_output(refinement, length, passes):
    model = small_model(refinement=refinement, length=length, max_nfe=60)
    tokens = padded(random_sentences(4))
    options = {"return_dict_in_generate": True, "output_trajectory": True, "refinement_passes": passes}
    out = model.generate(input_ids=tokens, **options)
    for row in range(4):
        assert len(out.trajectory[row]) == int(out.nfe[row])
        if out.converged is not None and not out.converged[row]:
            continue  # the result is the best iterate, not the last
        answer = [token for token in out.sequences[row].tolist() if token != PAD]
        assert out.trajectory[row][-1].tokens.tolist() == answer
        if refinement not in ("stacked", "explicit"):
            assert out.trajectory[row][-1].residual == pytest.approx(float(out.residual[row]))


def test_max_length_bounds_the_text():
    for length in ("predict", "ctc"):
        model = small_model(length=length)
        assert model.generate(input_ids=padded(random_sentences(4, shortest=9)), max_length=3).shape[1] <= 3


def test_options_are_saved_with_the_model_and_restored(tmp_path):
    model = small_model(torch.float32)
    model.generation_config.update(length_beams=5, tol=2e-4, refinement_passes=2, stop_on_stable_tokens=3)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "generation_config.json").read_text())
    assert saved["length_beams"] == 5
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert isinstance(loaded.generation_config, DeqNarGenerationConfig)
    assert loaded.generation_config.to_dict() == model.generation_config.to_dict()
    tokens = padded(random_sentences(3))
    assert torch.equal(loaded.generate(input_ids=tokens), model.generate(input_ids=tokens))
    other = DeqNarForConditionalGeneration.from_pretrained(
        tmp_path, generation_config=DeqNarGenerationConfig(length_beams=2)
    )
    assert other.generation_config.length_beams == 2
    plain = DeqNarForConditionalGeneration.from_pretrained(tmp_path, generation_config=GenerationConfig(max_length=20))
    assert plain.generation_config.max_length == 20


def test_unreadable_saved_options_are_an_error_and_missing_ones_are_not(tmp_path):
    small_model(torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text("{oops", encoding="utf-8")
    with pytest.raises(OSError, match="generation_config.json' is not a valid JSON file"):
        DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    file.unlink()
    assert DeqNarForConditionalGeneration.from_pretrained(tmp_path).generation_config.length_beams == 1


def test_a_reranker_object_is_not_written_to_disk(tmp_path):
    model = small_model(torch.float32)
    model.generation_config.reranker = reranker()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["reranker"] is None
    assert model.generation_config.reranker is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_nef": 5}, "max_nef is not an option of generate; did you mean max_nfe?"),
        ({"do_sample": True}, "do_sample=True is not supported by this model: translations are deterministic"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 is not supported by this model: deduplicate=True"),
        ({"min_length": 5}, "min_length=5 is not supported by this model: leave it out"),
        ({"xyzzy": 5}, "xyzzy is not an option of generate; choose one of max_length, length_beams"),
        ({"length_beams": 0}, "length_beams must be an integer of at least 1, not 0"),
        ({"tol": 0.0}, "tol must be unset or above 0"),
        ({"solver": "newton"}, "Unknown solver 'newton'"),
        ({"num_return_sequences": 3}, "num_return_sequences=3 is more than length_beams=1"),
        ({"ctc_beam_size": 4}, "ctc_beam_size=4 needs config.length='ctc'"),
        ({"length_beams": 100}, "length_beams=100, but only 16 lengths exist"),
        ({"deduplicate": "false"}, "deduplicate must be True or False, not 'false'"),
        ({"tol": "small"}, "tol must be unset or above 0, not 'small'"),
        ({"stop_on_stable_tokens": 0}, "stop_on_stable_tokens must be unset or an integer of at least 1"),
    ],
)
def test_invalid_option_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        small_model().generate(input_ids=padded(random_sentences(2)), **options)


def test_options_that_do_not_fit_a_ctc_model_are_refused():
    model, tokens = small_model(length="ctc"), padded(random_sentences(2))
    with pytest.raises(ValueError, match="length_beams=3 needs config.length='predict'"):
        model.generate(input_ids=tokens, length_beams=3)
    with pytest.raises(ValueError, match="deduplicate=True needs config.length='predict'"):
        model.generate(input_ids=tokens, deduplicate=True)
    with pytest.raises(ValueError, match="has no effect: refinement='stacked'"):
        small_model(refinement="stacked").generate(input_ids=tokens, stop_on_stable_tokens=2)


def test_a_reranker_with_another_vocabulary_is_refused():
    model, tokens = small_model(torch.float32), padded(random_sentences(2))
    with pytest.raises(ValueError, match="The reranker has 60 tokens but the model has 50"):
        model.generate(input_ids=tokens, reranker=reranker(vocabulary=60))


def test_a_real_trainer_evaluates_by_generating(tmp_path):
    """Texts as long as max_length, several batches: the trainer pads, and fills in defaults after each batch."""
    pytest.importorskip("accelerate", reason="accelerate is part of the train extra")
    model = small_model(torch.float32)
    model.generation_config.update(max_length=30, length_beams=2)
    before = model.generation_config.to_dict()
    sentences = random_sentences(6, shortest=25, longest=35)
    examples = [{"input_ids": sentence, "labels": sentence} for sentence in sentences]

    def collate(batch):
        tokens = padded([example["input_ids"] for example in batch])
        labels = tokens.masked_fill(tokens == PAD, -100)
        return {"input_ids": tokens, "attention_mask": (tokens != PAD).long(), "labels": labels}

    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path), predict_with_generate=True, per_device_eval_batch_size=2, use_cpu=True, report_to=[]
    )
    tokenizer = train_tokenizer(["a"], vocab_size=262)  # only its padding token is used
    trainer = Seq2SeqTrainer(model, arguments, data_collator=collate, processing_class=tokenizer)
    predicted = trainer.predict(examples)
    assert predicted.predictions.shape[0] == 6
    assert model.generation_config.to_dict() == before
    for row, sentence in enumerate(sentences):
        single = model.generate(input_ids=torch.tensor([sentence]))[0].tolist()
        assert predicted.predictions[row, : len(single)].tolist() == single


@pytest.mark.parametrize(("length", "option"), [("predict", "length_beams"), ("ctc", "ctc_beam_size")])
def test_options_of_transformers_are_mapped_or_accepted_without_effect(length, option):
    model, tokens = small_model(length=length), padded(random_sentences(3))
    plain = model.generate(input_ids=tokens)
    neutral = {"use_cache": True, "do_sample": False, "early_stopping": True, "min_length": 0, "top_k": None}
    assert torch.equal(model.generate(inputs=tokens, **neutral, num_beams=1), plain)
    several = model.generate(input_ids=tokens, **{option: 4}, num_return_sequences=2)
    assert torch.equal(model.generate(input_ids=tokens, num_beams=4, num_return_sequences=2), several)
    config = GenerationConfig(num_beams=4, num_return_sequences=2)
    assert torch.equal(model.generate(input_ids=tokens, generation_config=config), several)
    assert torch.equal(model.generate(input_ids=tokens, max_new_tokens=2), model.generate(tokens, max_length=2))
    assert model.generate(input_ids=tokens, generation_config=GenerationConfig(max_new_tokens=2)).shape[1] <= 2
    with pytest.raises(ValueError, match="the same argument"):
        model.generate(tokens, inputs=tokens)


@pytest.mark.parametrize("config_class", [GenerationConfig, DeqNarGenerationConfig])
def test_a_generation_config_changes_only_what_it_sets(config_class):
    model, tokens = small_model(), padded(random_sentences(3))
    model.generation_config.update(length_beams=3, refinement_passes=2, max_nfe=3, num_return_sequences=2)
    expected = model.generate(tokens, max_length=4, return_dict_in_generate=True)
    call = config_class(max_length=4, return_dict_in_generate=True)
    found = model.generate(tokens, generation_config=call)
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(found.nfe, expected.nfe)
    single = model.generate(tokens, generation_config=config_class(num_return_sequences=1))
    assert len(single) == 3  # a default that is set explicitly counts
    before = model.generation_config.to_dict()
    model.generation_config = GenerationConfig(max_length=4)
    assert model.generation_config.to_dict() == {**before, "max_length": 4}


@pytest.mark.parametrize("option", [{"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 3}])
def test_advice_against_repetition_suits_the_length_model(option):
    tokens = padded(random_sentences(1))
    with pytest.raises(ValueError, match="is not supported by this model: deduplicate=True"):
        small_model(length="predict").generate(input_ids=tokens, **option)
    for passed in (option, {"generation_config": GenerationConfig(**option)}):
        with pytest.raises(ValueError, match="is not supported by this model: CTC merges repeated neighbours already"):
            small_model(length="ctc").generate(input_ids=tokens, **passed)
    with pytest.raises(ValueError, match="with length='predict' or 'dag' merge repeated neighbours"):
        DeqNarGenerationConfig(**option)


def test_a_trainer_with_its_own_generation_config_predicts(tmp_path):
    model = small_model(torch.float32)
    model.generation_config.update(length_beams=2)
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(tmp_path),
        predict_with_generate=True,
        generation_config=GenerationConfig(max_length=20, min_length=0, num_beams=3),
        use_cpu=True,
        report_to=[],
    )
    sentence = random_sentences(1)[0]
    expected = model.generate(torch.tensor([sentence]), length_beams=3, max_length=20)[0].tolist()
    trainer = Seq2SeqTrainer(model, arguments, processing_class=train_tokenizer(["a"], vocab_size=262))
    predicted = trainer.predict([{"input_ids": sentence, "labels": sentence}]).predictions[0].tolist()
    assert predicted[: len(expected)] == expected


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_empty_output_has_one_column(length):
    model, tokens = small_model(torch.float32, length=length), padded(random_sentences(2))
    says = torch.nn.functional.one_hot(torch.tensor(BLANK), VOCABULARY).float()
    model.lm_head.forward = lambda hidden: says.expand(*hidden.shape[:2], VOCABULARY).clone()
    out = model.generate(input_ids=tokens, return_dict_in_generate=True)
    assert out.sequences.tolist() == [[PAD], [PAD]]
    assert out.token_scores.shape == (2, 1)
    assert model.generate(input_ids=tokens, reranker=reranker()).tolist() == [[PAD], [PAD]]


def test_nbest_lists_have_duplicates_only_after_all_other_texts():
    model = small_model(length="ctc")
    options = {"ctc_beam_size": 6, "num_return_sequences": 6, "max_length": 2, "return_dict_in_generate": True}
    out = model.generate(input_ids=padded(random_sentences(1, shortest=5)), **options)
    texts = [tuple(text) for text in out.sequences.tolist()]
    distinct = len(set(texts))
    assert len(set(texts[:distinct])) == distinct
    assert out.sequences_scores[:distinct].isfinite().all()
    assert (out.sequences_scores[distinct:] == float("-inf")).all()


def test_a_text_too_long_for_the_reranker_is_refused():
    model, tokens = small_model(torch.float32), padded(random_sentences(1, shortest=70, longest=70))
    with pytest.raises(ValueError, match="too long for the reranker, which supports 64"):
        model.generate(input_ids=tokens, length_beams=2, reranker=reranker())


def test_arguments_of_the_trainer_are_accepted():
    model, tokens = small_model(), padded(random_sentences(2))
    assert torch.equal(
        model.generate(input_ids=tokens, labels=tokens, synced_gpus=False), model.generate(input_ids=tokens)
    )
    assert isinstance(model.generation_config.max_length, int)
    assert model.can_generate()


class Watching(TextStreamer):
    """A custom streamer with `put_draft`."""

    def __init__(self):
        self.drafts, self.final, self.ended = [], None, False

    def put_draft(self, value):
        self.drafts.append(value.tolist())

    def put(self, value):
        self.final = value.tolist()

    def end(self):
        self.ended = True


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_drafts_are_passed_to_streamers_with_put_draft(length):
    model, tokens = small_model(length=length), padded(random_sentences(1, shortest=6))
    streamer = Watching()
    out = model.generate(input_ids=tokens, streamer=streamer, return_dict_in_generate=True)
    assert len(streamer.drafts) == int(out.nfe)
    assert streamer.drafts[-1] == streamer.final == out.sequences[0].tolist()
    assert streamer.ended
    with pytest.raises(ValueError, match="one sentence, but the batch has 2"):
        model.generate(input_ids=padded(random_sentences(2)), streamer=streamer)


def test_streamers_of_transformers_are_supported(tokenizer, capsys):
    model = small_model(torch.float32, vocab_size=len(tokenizer))
    batch = tokenizer("A man is riding a horse.", return_tensors="pt")
    for streamer in (TextStreamer(tokenizer), TextDiffusionStreamer(tokenizer)):
        sequences = model.generate(**batch, streamer=streamer)
        assert tokenizer.decode(sequences[0]).split()[-1] in capsys.readouterr().out


def test_terminal_streamer_numbers_the_evaluations_that_changed_the_draft(tokenizer):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    first, second = tokenizer("A man is riding")["input_ids"], tokenizer("A horse is riding")["input_ids"]
    for stream in (Terminal(), io.StringIO()):
        streamer = TerminalStreamer(tokenizer, stream)
        for _ in range(2):  # a second sentence starts again
            for tokens in (first, first, second):
                streamer.put_draft(value=torch.tensor(tokens))
            streamer.put(torch.tensor(second))
            streamer.end()
        marked = stream.getvalue()
        plain = re.sub(r"\033\[\dm", "", marked)
        assert plain == "   1  A man is riding\n   3  A horse is riding\n  =>  A horse is riding\n" * 2
        assert re.findall(r"\033\[1m(\w+)", marked) == (["horse"] * 2 if stream.isatty() else [])


def test_nan_in_the_weights_is_an_error():
    model = small_model(refinement="stacked")
    model.lm_head.weight.data[9] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite"):
        model.generate(input_ids=torch.tensor([[7, 8]]))


def test_translation_can_be_used_in_a_loss():
    """Translations are computed in inference mode, whose tensors autograd refuses; a copy is returned."""
    model = small_model()
    source = torch.tensor([[7, 8, 9, 10]])
    out = model.generate(input_ids=source, return_dict_in_generate=True, output_trajectory=True)
    tensors = [value for value in out.values() if isinstance(value, torch.Tensor)]
    tensors += [draft.tokens for drafts in out.trajectory for draft in drafts]
    assert len(tensors) > 7
    assert not any(tensor.is_inference() for tensor in tensors)
    assert not model.generate(input_ids=source).is_inference()
    embedded = model.get_input_embeddings()(out.sequences)
    (embedded.sum(dim=-1) * out.token_scores).sum().backward()
    assert model.get_input_embeddings().weight.grad.any()


@pytest.mark.parametrize("length", ["ctc", "predict"])
def test_requesting_scores_does_not_change_the_translation(length):
    model = small_model(length=length)
    source = torch.tensor([[7, 8, 9, 10, 11], [12, 13, 1, 1, 1]])
    plain = model.generate(input_ids=source)
    scored = model.generate(input_ids=source, return_dict_in_generate=True)
    assert torch.equal(plain, scored.sequences)
    assert scored.sequences_scores.isfinite().all()


def test_score_is_the_log_probability_of_the_most_likely_token():
    model = small_model()
    features = torch.randn(2, 5, model.config.d_model, dtype=model.dtype)
    with torch.no_grad():
        tokens, scores, _ = model.read_scored(features, keep_all=False)
        same, again, log_probabilities = model.read_scored(features, keep_all=True)
        expected, best = log_probabilities.max(dim=-1)
        assert torch.equal(tokens, best)
        assert torch.equal(same, best)
        assert torch.equal(model.read_tokens(features), best)
    torch.testing.assert_close(scores, expected)
    torch.testing.assert_close(again, expected)
