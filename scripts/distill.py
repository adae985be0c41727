"""Distil a teacher. On one process, from the folder of the repository, with Multi30k in `data`:

python scripts/distill.py --teacher runs/teacher --data data/multi30k/train.jsonl.gz --source en --target de \
    --num_beams 5 --output runs/distilled.jsonl.gz

On several: `torchrun --standalone --nproc_per_node 2 scripts/distill.py …`, or start it by hand as often as you like,
with `--process 0 --processes 2` and so on. A run that was stopped goes on where it was. `hf-deqnar distill` is the same
thing; a YAML file named first holds any of the flags.
"""

import sys

from hf_deqnar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["distill", *sys.argv[1:]]))
