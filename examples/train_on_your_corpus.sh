# Train a small model on a parallel corpus, evaluate it and translate with it.
hf-deqnar train --train_data train.jsonl.gz --validation_data validation.jsonl.gz --source en --target de \
    --vocab_size 4000 --preset tiny --config length=ctc --objective ctc+glat --max_tokens 2048 \
    --learning_rate 1e-3 --warmup_steps 400 --max_steps 2000 --eval_strategy steps --eval_steps 500 --save_steps 500 \
    --output_dir runs/first
hf-deqnar evaluate runs/first --data test.jsonl.gz --source en --target de
hf-deqnar translate --model runs/first "I like tea."
