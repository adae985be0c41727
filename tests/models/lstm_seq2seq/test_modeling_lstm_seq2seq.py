"""The LSTM teacher with attention, and the bidirectional LSTM student."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.models.lstm_seq2seq.modeling_lstm_seq2seq import RecurrentConfig, RecurrentForConditionalGeneration
from hf_deqnar.objectives.objective import parse_objective

from ...conftest import PAD, VOCABULARY, padded, random_sentences, small_config, small_model


def recurrent_teacher(dtype: torch.dtype = torch.float64, vocabulary: int = VOCABULARY):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_units": 12, "decoder_units": 20, "dropout": 0.0}
    return RecurrentForConditionalGeneration(RecurrentConfig(vocab_size=vocabulary, **sizes)).to(dtype).eval()


def test_logits_do_not_depend_on_the_batch():
    model, sentences = recurrent_teacher(), random_sentences(4)
    tokens = padded(sentences)
    labels = tokens.masked_fill(tokens == PAD, -100)
    with torch.no_grad():
        batched = model(input_ids=tokens, attention_mask=(tokens != PAD).long(), labels=labels).logits
        for row, sentence in enumerate(sentences):
            single = torch.tensor([sentence])
            logits = model(input_ids=single, labels=single).logits[0]
            torch.testing.assert_close(batched[row, : len(sentence)], logits)


def test_one_hot_embeddings_give_the_logits_of_the_tokens():
    model, tokens = recurrent_teacher(), padded(random_sentences(3, shortest=5, longest=5))
    embedded = torch.nn.functional.one_hot(tokens, VOCABULARY).double() @ model.get_input_embeddings().weight
    with torch.no_grad():
        first = model(input_ids=tokens, decoder_input_ids=tokens).logits
        second = model(input_ids=tokens, decoder_inputs_embeds=embedded).logits
    torch.testing.assert_close(first, second)


def test_decoder_is_causal():
    model, tokens = recurrent_teacher(), padded(random_sentences(3, shortest=6, longest=6))
    changed = tokens.clone()
    changed[:, 4:] = 9
    with torch.no_grad():
        first = model(input_ids=tokens, decoder_input_ids=tokens).logits
        second = model(input_ids=tokens, decoder_input_ids=changed).logits
    assert torch.equal(first[:, :4], second[:, :4])
    assert not torch.equal(first[:, 4:], second[:, 4:])


def test_trained_teacher_copies_with_greedy_and_beam_search(tmp_path):
    model = recurrent_teacher(torch.float32).train()
    sentences = [[*words, 2] for words in random_sentences(8, shortest=3, longest=5)]
    tokens = padded(sentences)
    labels = tokens.masked_fill(tokens == PAD, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        model(input_ids=tokens, attention_mask=(tokens != PAD).long(), labels=labels).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    for beams in (1, 3):
        out = loaded.generate(tokens, attention_mask=(tokens != PAD).long(), num_beams=beams, max_length=12)
        for row, sentence in enumerate(sentences):
            assert out[row, 1 : 1 + len(sentence)].tolist() == sentence  # after the start token


def test_saved_teacher_loads_as_remote_code(tmp_path):
    recurrent_teacher(torch.float32).save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['hf_deqnar'] = None\n"
        "from transformers import AutoModelForSeq2SeqLM\n"
        f"model = AutoModelForSeq2SeqLM.from_pretrained({str(tmp_path)!r}, trust_remote_code=True)\n"
        "print(type(model).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "RecurrentForConditionalGeneration", done.stderr[-1000:]


def recurrent_student(dtype: torch.dtype = torch.float64, **overrides):
    return small_model(dtype, architecture="bilstm", refinement="stacked", **overrides)


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_student_translation_does_not_depend_on_batch(length):
    model, sentences = recurrent_student(length=length), random_sentences(4)
    batched = model.generate(padded(sentences, extra=3), return_dict_in_generate=True)
    for row, sentence in enumerate(sentences):
        single = model.generate(torch.tensor([sentence]), return_dict_in_generate=True)
        count = int((single.sequences[0] != PAD).sum())
        assert batched.sequences[row, :count].tolist() == single.sequences[0, :count].tolist()
        torch.testing.assert_close(batched.sequences_scores[row], single.sequences_scores[0])


def test_student_trains_and_survives_save_and_load(tmp_path):
    model = recurrent_student(torch.float32, dropout=0.0).train()
    tokens = padded(random_sentences(6, shortest=4))
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == PAD, -100)}
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(120):
        optimizer.zero_grad()
        terms = parse_objective("ce")(model, batch)
        terms["loss"].backward()
        optimizer.step()
        losses.append(terms["nat"].item())
    assert losses[-1] < 0.2 * losses[0]
    model.eval().save_pretrained(tmp_path)
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(tokens), model.generate(tokens))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refinement": "implicit"}, "it needs refinement='stacked', not 'implicit'"),
        ({"refinement": "stacked", "latent": "vae"}, "it needs latent='none', not 'vae'"),
        ({"refinement": "stacked", "source_copy": "none"}, "sees the source only as a copy; use source_copy='uniform'"),
    ],
)
def test_unsupported_student_config_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small_config(architecture="bilstm", **options)


@pytest.mark.parametrize("make_model", [recurrent_teacher, recurrent_student])
def test_gradient_checkpointing_is_reported_as_unsupported(make_model):
    model = make_model()
    assert not model.supports_gradient_checkpointing
    with pytest.raises(ValueError, match="does not support gradient checkpointing"):
        model.gradient_checkpointing_enable()


def test_transformer_student_supports_gradient_checkpointing():
    model = small_model()
    assert model.supports_gradient_checkpointing
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
