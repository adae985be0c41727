# Distil an autoregressive model, such as a Marian checkpoint, into an equilibrium model with its tokenizer.
hf-deqnar distill --teacher runs/teacher --data train.jsonl.gz --source en --target de --output distilled.jsonl.gz
hf-deqnar train --teacher runs/teacher --train_data distilled.jsonl.gz --validation_data validation.jsonl.gz \
    --source en --target de --config length=ctc --objective ctc+glat --max_tokens 2048 --learning_rate 1e-3 \
    --warmup_steps 400 --max_steps 2000 --eval_strategy steps --eval_steps 500 --save_steps 500 --output_dir runs/student
hf-deqnar evaluate runs/student runs/teacher,num_beams=5 --data test.jsonl.gz --source en --target de
