# Train a non-autoregressive student on the energy of its autoregressive teacher (ENGINE).
hf-deqnar energy --student runs/cmlm --teacher runs/teacher --train_data train.jsonl.gz \
    --validation_data validation.jsonl.gz --source en --target de --max_steps 450 \
    --eval_strategy steps --eval_steps 150 --save_strategy steps --save_steps 150 --output_dir runs/energy
hf-deqnar evaluate runs/cmlm runs/energy --data test.jsonl.gz --source en --target de
