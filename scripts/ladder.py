"""Climb a ladder of experiments. From the folder of the repository, with Multi30k in `data`:

python scripts/ladder.py ladders/multi30k.yaml --data data/multi30k --output runs/ladder
python scripts/ladder.py ladders/multi30k.yaml --data data/multi30k --output runs/ladder --table

Stopped at any moment it goes on by the same command; started twice, both share the work. `hf-deqnar ladder` is the same
thing, and its --help says how a ladder is written.
"""

import sys

from hf_deqnar.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["ladder", *sys.argv[1:]]))
