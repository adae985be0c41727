"""Translate a corpus with a teacher. In one process, from the folder of the repository, with Multi30k in `data`:

python scripts/distill.py --teacher runs/teacher --data data/multi30k/train.jsonl.gz --source en --target de \
    --num_beams 5 --output runs/distilled.jsonl.gz

In several: `torchrun --standalone --nproc_per_node 2 scripts/distill.py …`, or start each process with
`--process 0 --processes 2` and so on. An interrupted run is resumed. `hf-deqnar distill` is the same command; a YAML
file named first contains any of the flags.
"""

import sys

from hf_deqnar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["distill", *sys.argv[1:]]))
