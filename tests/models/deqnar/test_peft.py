"""Adapters of PEFT: a LoRA adapter trains, is saved, loaded and merged."""

import pytest
import torch
from transformers import DataCollatorForSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments

from hf_deqnar import DeqNarForConditionalGeneration

from ...conftest import SENTENCES, padded, random_sentences, small_model

peft = pytest.importorskip("peft", reason="peft is part of the test extra")


def lora_model(model: DeqNarForConditionalGeneration):
    options = {"r": 8, "lora_alpha": 16, "target_modules": ["query_key_value", "query", "key_value", "expand"]}
    return peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_2_SEQ_LM", **options))


def losses_of_training(model, tokenizer, folder) -> list[float]:
    """Loss of each of a few steps on the same batch with a plain `Seq2SeqTrainer`."""
    examples = [dict(tokenizer(source, text_target=target)) for source, target in SENTENCES]
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        max_steps=8,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=len(examples),
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    collate = DataCollatorForSeq2Seq(tokenizer)
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=examples, data_collator=collate)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_an_adapter_trains_and_translates_the_same_after_loading_and_merging(length, saved, tokenizer, tmp_path):
    base = DeqNarForConditionalGeneration.from_pretrained(saved[length])
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    adapted = lora_model(base)
    losses = losses_of_training(adapted, tokenizer, tmp_path / "run")
    assert losses[-1] < 0.9 * losses[0]

    adapted.eval().save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "model.safetensors").exists()  # the adapter alone
    batch = tokenizer([source for source, _ in SENTENCES], return_tensors="pt", padding=True)
    expected = adapted.generate(**batch)

    reloaded = DeqNarForConditionalGeneration.from_pretrained(saved[length])
    assert all(torch.equal(weight, before[name]) for name, weight in reloaded.state_dict().items())
    reloaded = peft.PeftModel.from_pretrained(reloaded, tmp_path / "adapter").eval()
    assert torch.equal(reloaded.generate(**batch), expected)

    merged = reloaded.merge_and_unload()
    assert torch.equal(merged.generate(**batch), expected)
    merged.save_pretrained(tmp_path / "merged")
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path / "merged")
    assert torch.equal(loaded.generate(**batch), expected)


def test_embedded_decoder_inputs_are_refused():
    model, tokens = small_model(), padded(random_sentences(2))
    embeddings = torch.zeros(2, 3, model.config.d_model)
    for network in (model, model.model):
        assert network(input_ids=tokens, decoder_inputs_embeds=None).last_hidden_state.isfinite().all()
        with pytest.raises(ValueError, match="decoder_input_ids instead of decoder_inputs_embeds"):
            network(input_ids=tokens, decoder_inputs_embeds=embeddings)
