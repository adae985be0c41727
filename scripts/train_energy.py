"""Train a model on the energy of an autoregressive teacher (ENGINE). In one process, from the folder of the repository:

accelerate launch scripts/train_energy.py --student runs/cmlm --teacher runs/teacher \
    --train_data data/multi30k/train.jsonl.gz --validation_data data/multi30k/validation.jsonl.gz \
    --source en --target de --learning_rate 1e-5 --num_train_epochs 30 --output_dir runs/energy

`--student` is a model that was trained with `--objective cmlm` or `glat` and predicts lengths, `--teacher` any seq2seq
model with its tokenizer. `hf-deqnar energy` is the same command; a YAML file named first contains any of the flags.
"""

import sys

from hf_deqnar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["energy", *sys.argv[1:]]))
