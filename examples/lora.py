"""Fine-tune the bundled model on your sentences with a LoRA adapter of PEFT.

python examples/lora.py --data corpus.jsonl --source en --target de --output_dir adapter
"""

import argparse

import peft
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, DataCollatorForSeq2Seq, Seq2SeqTrainer
from transformers import Seq2SeqTrainingArguments as Arguments

import hf_deqnar

# The projections of attention and the first one of feed-forward layers.
TARGETS = ["query_key_value", "query", "key_value", "expand"]


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="JSONL, TSV or CSV file, or prefix of aligned files")
    parser.add_argument("--source", default="en")
    parser.add_argument("--target", default="de")
    parser.add_argument("--model", default=hf_deqnar.PRETRAINED)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch_size", type=int, default=16)
    options = parser.parse_args(arguments)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForSeq2SeqLM.from_pretrained(options.model)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=8, lora_alpha=16, target_modules=TARGETS)
    )
    adapted.print_trainable_parameters()
    pairs = hf_deqnar.read_parallel(options.data, options.source, options.target)
    examples = [dict(tokenizer(pair.source, text_target=pair.references[0], truncation=True)) for pair in pairs]
    settings = Arguments(
        output_dir=options.output_dir,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-3,
        logging_steps=max(1, options.steps // 10),
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Seq2SeqTrainer(adapted, settings, train_dataset=examples, data_collator=DataCollatorForSeq2Seq(tokenizer))
    trainer.train()
    adapted.save_pretrained(options.output_dir)  # the adapter alone
    print(f"The adapter is in {options.output_dir}; load it with peft.PeftModel.from_pretrained(model, folder).")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
