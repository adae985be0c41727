"""Fingerprints of texts and weights, which decide whether a run may be resumed or a cache reused."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel


def fingerprint_of(texts: Iterable[str]) -> str:
    """Hash of a sequence of texts, 32 hexadecimal digits; depends on their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", errors="surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def fingerprint_of_weights(model: PreTrainedModel) -> str:
    """Hash of a model's parameters and buffers, 32 hexadecimal digits."""
    digest = hashlib.sha256()
    digest_weights(model, digest)
    return digest.hexdigest()[:32]


def digest_weights(model: PreTrainedModel, digest: Any) -> None:
    """Add the names, types, shapes and values of a model's parameters and buffers to a `hashlib` digest."""
    digest_tensors(model.state_dict(), digest)


def digest_tensors(tensors: Mapping[str, torch.Tensor], digest: Any) -> None:
    """Add the names, types, shapes and values of tensors to a `hashlib` digest."""
    for name, weights in sorted(tensors.items()):
        digest.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
        digest.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
