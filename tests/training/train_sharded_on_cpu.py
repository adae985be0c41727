"""`scripts/train.py` with FSDP on CPUs, for the tests: accelerate shards on accelerators only and would use DDP."""

import os
import sys

from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from hf_deqnar.cli.main import main

create = AcceleratorState.__init__


def create_sharded(self, *arguments, fsdp_plugin=None, **options):
    create(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None and os.environ["ACCELERATE_USE_FSDP"] == "true":
        self._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": fsdp_plugin}


if __name__ == "__main__":
    AcceleratorState.__init__ = create_sharded
    sys.exit(main(["train", *sys.argv[1:]]))
