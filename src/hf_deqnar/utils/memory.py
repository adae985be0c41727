"""Recognising that memory was exhausted, on any device."""

import torch

# Beginnings of messages of torch's allocators, which raise plain RuntimeErrors on processors and older devices.
MESSAGES = ("out of memory", "not enough memory", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a tensor did not fit into memory.

    >>> is_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    True
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)
