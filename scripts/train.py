"""Train a model. In one process, from the folder of the repository, with Multi30k in `data`:

accelerate launch scripts/train.py --train_data data/multi30k/train.jsonl.gz \
    --validation_data data/multi30k/validation.jsonl.gz --source en --target de --vocab_size 4000 \
    --preset tiny --config length=ctc refinement=implicit --objective ctc+glat --max_tokens 2048 --learning_rate 1e-3 \
    --warmup_steps 400 --max_steps 2000 --eval_strategy steps --eval_steps 500 --save_steps 500 --output_dir runs/first

In two CPU processes: `torchrun --standalone --nproc_per_node 2 scripts/train.py …`. `hf-deqnar train` is the same
command; a YAML file named first contains any of the flags.
"""

import sys

from hf_deqnar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
