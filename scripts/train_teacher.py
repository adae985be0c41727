"""Train an autoregressive teacher. From the folder of the repository, with Multi30k in `data`:

accelerate launch scripts/train_teacher.py --train_data data/multi30k/train.jsonl.gz \
    --validation_data data/multi30k/validation.jsonl.gz --source en --target de --vocab_size 4000 \
    --size tiny --config dropout=0.3 --max_tokens 4096 --learning_rate 2e-3 --warmup_steps 1000 --max_steps 6000 \
    --eval_strategy steps --eval_steps 500 --save_steps 500 --output_dir runs/teacher

`hf-deqnar teacher` is the same command; a YAML file named first contains any of the flags.
"""

import sys

from hf_deqnar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["teacher", *sys.argv[1:]]))
