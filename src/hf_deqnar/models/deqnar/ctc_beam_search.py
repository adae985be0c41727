"""CTC beam search: the most likely texts, each summed over all paths that collapse to it (Graves 2008).

There are three implementations of the same search: with tensors for GPUs (`prefix_beam_search`), in NumPy for several
sentences on a CPU (`prefix_beams_in_numpy`), and with Python floats for a single one (`prefix_beam_of_sentence`).
"""

import math
from collections.abc import Callable
from heapq import nlargest
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from .ctc import full_precision

MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407  # of a rolling hash
Hashes = TypeVar("Hashes", int, Tensor, numpy.ndarray)
NUMPY_ROWS = 3  # sentences of a batch from which NumPy is faster than Python floats


def prefix_beam_search(
    log_probs: Tensor,
    lengths: Tensor,
    blank: int,
    beam_size: int,
    padding: int,
    tokens_per_step: int = 20,
    added: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    least_chance: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The most likely texts, each summed over all paths that collapse to it (Graves 2008), for a batch.

    A prefix carries two probabilities: of its paths that end in a blank, p_b, and of those that end in its last token,
    p_t. With p = p_b + p_t, one more position of the canvas gives

        p_b ← p·p(blank);   p_t ← p_t·p(last token);   p_t(prefix + c) = p(c)·(p_b if c repeats the last token, else p).

    pyctcdecode is not used because it searches sentence by sentence and needs numpy 1, torchaudio's decoder because it
    needs a compiled extension.

    An extended prefix may already be in the beam, then the two are added; prefixes are identified by a 64-bit hash.

    Args:
        log_probs: rows × canvas × vocabulary.
        tokens_per_step: number of most likely tokens that extend a prefix at each position.
        added: prefixes (rows × beam × canvas), their lengths, tokens (rows × 1 × candidates) → the term added to
            log p of a prefix when a token extends it, such as a language model score. At most 2·beam_size tokens at
            each position then extend a prefix, as in `prefix_beam_of_sentence`.
        least_chance: minimum probability of tokens that extend a prefix.

    Returns:
        texts (rows × beam × longest), their lengths, and log p of each; the best first. A beam that cannot be filled
        ends with texts of log p = −∞.
    """
    rows, canvas, vocabulary = log_probs.shape
    device, minus = log_probs.device, float("-inf")
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    without_blank = log_probs.clone()
    without_blank[:, :, blank] = minus
    tokens_per_step = tokens_per_step if added is None else 2 * beam_size
    step_scores, step_tokens = without_blank.topk(min(tokens_per_step, vocabulary - 1), dim=-1)

    if least_chance > 0:
        step_scores = step_scores.masked_fill(step_scores < math.log(least_chance), minus)

    texts = torch.full((rows, beam_size, canvas), padding, device=device)
    counts = torch.zeros(rows, beam_size, dtype=torch.long, device=device)
    hashes = torch.zeros(rows, beam_size, dtype=torch.long, device=device)
    last = torch.full((rows, beam_size), -1, device=device)
    ends_blank = torch.full((rows, beam_size), minus, dtype=log_probs.dtype, device=device)
    ends_blank[:, 0] = 0.0  # log p of the empty prefix
    ends_token = torch.full_like(ends_blank, minus)

    for position in range(canvas):
        scores, tokens = step_scores[:, position, None], step_tokens[:, position, None]  # rows, 1, candidates
        total = torch.logaddexp(ends_blank, ends_token)
        repeated = log_probs[:, position].gather(1, last.clamp_min(0)).masked_fill(last < 0, minus)
        stay_blank = total + log_probs[:, position, blank, None]
        stay_token = ends_token + repeated
        extended = scores + torch.where(tokens == last[:, :, None], ends_blank[:, :, None], total[:, :, None])
        if added is not None:
            extended = extended + added(texts, counts, tokens)
        extended_hashes = extend_hash(hashes[:, :, None], tokens)  # rows, beam, candidates

        alive = total > minus
        same = (extended_hashes[:, :, :, None] == hashes[:, None, None, :]) & alive[:, None, None, :]
        same = same & (counts[:, :, None, None] + 1 == counts[:, None, None, :])
        merged = extended[:, :, :, None].masked_fill(~same, minus).flatten(1, 2).logsumexp(dim=1)
        stay_token = torch.logaddexp(stay_token, merged)
        extended = extended.masked_fill(same.any(dim=3), minus)

        pool = torch.cat([torch.logaddexp(stay_blank, stay_token), extended.flatten(1)], dim=1)
        chosen = pool.topk(beam_size, dim=1).indices  # rows, beam
        grown = chosen >= beam_size
        index = (chosen - beam_size).clamp_min(0)
        parent = torch.where(grown, index // tokens.shape[2], chosen)
        token = tokens[:, 0].gather(1, index % tokens.shape[2])

        update = (position < lengths)[:, None]
        new_texts = texts.gather(1, parent[:, :, None].expand_as(texts))
        slot = counts.gather(1, parent)
        new_texts = torch.where(
            grown[:, :, None] & (torch.arange(canvas, device=device) == slot[:, :, None]), token[:, :, None], new_texts
        )
        texts = torch.where(update[:, :, None], new_texts, texts)
        hashes = torch.where(
            update, torch.where(grown, extend_hash(hashes.gather(1, parent), token), hashes.gather(1, parent)), hashes
        )
        last = torch.where(update, torch.where(grown, token, last.gather(1, parent)), last)
        counts = torch.where(update, slot + grown, counts)
        new_blank = stay_blank.gather(1, parent).masked_fill(grown, minus)
        new_token = torch.where(grown, extended.flatten(1).gather(1, index), stay_token.gather(1, parent))
        ends_blank = torch.where(update, new_blank, ends_blank)
        ends_token = torch.where(update, new_token, ends_token)

    return texts[:, :, : max(1, int(counts.max()))], counts, torch.logaddexp(ends_blank, ends_token)


def extend_hash(hashes: Hashes, tokens: Hashes) -> Hashes:
    """Rolling hashes of token sequences, each extended by a token, modulo 2⁶⁴; the empty sequence has hash 0."""
    return hashes * MULTIPLIER + (tokens + 1) * INCREMENT


def prefix_beam_of_sentence(
    log_probs: numpy.ndarray,
    candidates: numpy.ndarray,
    blank: int,
    beam_size: int,
    added: Callable[[tuple[int, ...], int], float] | None = None,
    most_added: float = 0.0,
    least_chance: float = 0.0,
) -> list[tuple[tuple[int, ...], float]]:
    """`prefix_beam_search` for one sentence with Python floats, which avoids the overhead of tensor operations.

    Probabilities are divided by the largest at every position, to avoid underflow. 2·`beam_size` tokens are
    sufficient to extend a prefix: at most `beam_size` − 1 of them lead to another prefix of the beam, and one repeats
    the last token; the others are at least `beam_size`, and more likely than all further tokens.

    Args:
        log_probs: canvas × vocabulary.
        candidates: canvas × (2·beam_size + 1) or more; the most likely tokens of every position, the best first, with
            or without the blank.
        added: prefix, token → the term added to log p when the token extends the prefix, at most `most_added`.
        least_chance: minimum probability of tokens that extend a prefix.

    Returns:
        texts and log p of each, the best first.

    >>> chances, candidates = numpy.array([[0.2, 0.7, 0.1]] * 2), numpy.array([[1, 0, 2]] * 2)
    >>> prefix_beam_of_sentence(numpy.log(chances), candidates, blank=0, beam_size=2)[0]  # 0.7·0.7 + 2·0.7·0.2 = 0.77
    ((1,), -0.26...)
    """
    likely_tokens = candidates.tolist()
    chances = numpy.exp(numpy.take_along_axis(log_probs, candidates, axis=1).astype(numpy.float64)).tolist()
    blanks = numpy.exp(log_probs[:, blank].astype(numpy.float64)).tolist()
    beam: dict[tuple[int, ...], tuple[float, float]] = {(): (1.0, 0.0)}  # prefix: p_b, p_t, in units of exp(scale)
    scale = 0.0
    ceiling = math.exp(most_added)
    for row, tokens, token_chances, blank_chance in zip(log_probs, likely_tokens, chances, blanks, strict=True):
        both = zip(tokens, token_chances, strict=True)
        likely = [(token, chance) for token, chance in both if token != blank and chance >= least_chance]
        known = dict(likely[: 2 * beam_size])
        stays = {}
        for prefix, (ends_blank, ends_token) in beam.items():
            again = 0.0
            if prefix:
                repeated, parent = prefix[-1], beam.get(prefix[:-1])
                chance = known[repeated] if repeated in known else math.exp(row[repeated])
                again = ends_token * chance
                if parent is not None and (added is None or repeated in known):  # the extended parent is this prefix
                    repeats = len(prefix) > 1 and prefix[-2] == repeated
                    chance *= 1.0 if added is None else math.exp(added(prefix[:-1], repeated))
                    again += chance * (parent[0] if repeats else parent[0] + parent[1])
            stays[prefix] = ((ends_blank + ends_token) * blank_chance, again)
        entries = [(sum(parts), parts, prefix, None) for prefix, parts in stays.items()]
        least = 0.0 if len(entries) < beam_size else min(entry[0] for entry in entries)
        for prefix, (ends_blank, ends_token) in beam.items():
            total, last = ends_blank + ends_token, prefix[-1] if prefix else None
            for token, chance in known.items():
                if chance * total * ceiling <= least:
                    break  # all following tokens are less likely
                if (*prefix, token) in stays:
                    continue
                extended = chance * (ends_blank if token == last else total)
                if added is not None and extended * ceiling > least:
                    extended *= math.exp(added(prefix, token))
                if extended > least:
                    entries.append((extended, (0.0, extended), prefix, token))
        best = nlargest(beam_size, entries, key=lambda entry: entry[0])
        largest = best[0][0]
        scale += math.log(largest)
        beam = {
            prefix if token is None else (*prefix, token): (parts[0] / largest, parts[1] / largest)
            for _, parts, prefix, token in best
        }
    return [(text, scale + math.log(sum(parts))) for text, parts in beam.items() if sum(parts) > 0]


def prefix_beams_in_numpy(
    log_probs: numpy.ndarray,
    candidates: numpy.ndarray,
    lengths: numpy.ndarray,
    blank: int,
    beam_size: int,
    context: numpy.ndarray | None = None,
    added: Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray] | None = None,
    least_chance: float = 0.0,
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """`prefix_beam_search` for several sentences; of all extensions of a prefix, only those with a token that is likely
    enough are computed.

    Args:
        log_probs: rows × canvas × vocabulary.
        candidates: rows × canvas × (2·beam_size + 1) or more; the most likely tokens of every position.
        context: the tokens before a text that `added` needs, (order − 1).
        added: contexts (extensions × (order − 1)), tokens (extensions) → the terms added to log p.
        least_chance: minimum probability of tokens that extend a prefix.

    Returns:
        texts (rows × beam × longest; −1 behind the end), their lengths, and log p of each; the best first. Entries of a
        beam that cannot be filled have log p = −∞.
    """
    rows, canvas, _ = log_probs.shape
    width = candidates.shape[2]
    row = numpy.arange(rows)[:, None]
    chances = numpy.exp(numpy.take_along_axis(log_probs, candidates, axis=2), dtype=numpy.float64)
    outside = numpy.arange(canvas) >= lengths[:, None]
    usable = (candidates != blank) & (chances >= least_chance) & (chances > 0) & ~outside[:, :, None]
    usable &= usable.cumsum(axis=2) <= 2 * beam_size
    blanks = numpy.where(outside, 1.0, numpy.exp(log_probs[:, :, blank], dtype=numpy.float64))

    unused = -1 - numpy.arange(beam_size)  # hashes of entries without a text, which no text should have
    hashes = numpy.repeat(unused[None], rows, axis=0)
    of_parent = hashes - beam_size  # hashes of the texts without their last token
    hashes[:, 0] = 0
    last = numpy.full((rows, beam_size), -1)
    contexts = None if context is None else numpy.broadcast_to(context, (rows, beam_size, len(context)))
    ends_blank, ends_token = numpy.zeros((rows, beam_size)), numpy.zeros((rows, beam_size))
    ends_blank[:, 0] = 1.0  # in units of exp(scale)
    scale = numpy.zeros(rows)
    history = []  # parent and token of every entry after every position
    for position in range(canvas):
        total = ends_blank + ends_token
        repeated = numpy.exp(log_probs[row, position, last], dtype=numpy.float64)
        repeated[(last < 0) | outside[:, position, None]] = 0.0
        stay_blank, stay_token = total * blanks[:, position, None], ends_token * repeated

        # All extensions in one dimension: of which row and entry, by which candidate.
        of_row, entry, number = numpy.nonzero(usable[:, position, None, :] & (total[:, :, None] > 0))
        token = candidates[of_row, position, number]
        before = numpy.where(token == last[of_row, entry], ends_blank[of_row, entry], total[of_row, entry])
        extended = chances[of_row, position, number] * before
        if added is not None:
            assert contexts is not None
            extended = extended * numpy.exp(added(contexts[of_row, entry], token))
        known = extend_hash(hashes[of_row, entry], token)[:, None] == hashes[of_row]
        extended[known.any(axis=1)] = 0.0  # the following lines add them to the entries of the beam that they equal

        member, child, parent = numpy.nonzero(of_parent[:, :, None] == hashes[:, None, :])
        repeat = last[member, child]
        before = numpy.where(repeat == last[member, parent], ends_blank[member, parent], total[member, parent])
        again = repeated[member, child] * before
        if added is not None:
            assert contexts is not None
            listed = ((candidates[member, position] == repeat[:, None]) & usable[member, position]).any(axis=1)
            again = again * listed * numpy.exp(added(contexts[member, parent], repeat))
        stay_token[member, child] += again

        pool = numpy.zeros((rows, beam_size * (1 + width)))
        pool[:, :beam_size] = stay_blank + stay_token
        pool[of_row, beam_size + entry * width + number] = extended
        chosen = numpy.argpartition(-pool, beam_size - 1, axis=1)[:, :beam_size]
        found = pool[row, chosen]
        grown = chosen >= beam_size
        place = numpy.maximum(chosen - beam_size, 0)
        parent = numpy.where(grown, place // width, chosen)
        token = candidates[row, position, place % width]

        largest = found.max(axis=1, keepdims=True)
        scale += numpy.log(largest[:, 0])
        ends_blank = numpy.where(grown, 0.0, stay_blank[row, parent]) / largest
        ends_token = numpy.where(grown, found, stay_token[row, parent]) / largest
        shorter = hashes[row, parent]
        of_parent = numpy.where(grown, shorter, of_parent[row, parent])
        hashes = numpy.where(grown, extend_hash(shorter, token), shorter)
        hashes = numpy.where(found > 0, hashes, unused)
        of_parent = numpy.where(found > 0, of_parent, unused - beam_size)
        last = numpy.where(grown, token, last[row, parent])
        if contexts is not None:
            contexts = contexts[row, parent]
            following = numpy.concatenate([contexts[:, :, 1:], token[:, :, None]], axis=2)
            contexts = numpy.where(grown[:, :, None], following, contexts)
        history.append((parent, numpy.where(grown, token, -1)))

    total = ends_blank + ends_token
    entry = numpy.argsort(-total, axis=1, kind="stable")
    with numpy.errstate(divide="ignore"):
        scores = scale[:, None] + numpy.log(total[row, entry])
    written = numpy.full((rows, beam_size, canvas), -1)
    for position in range(canvas - 1, -1, -1):
        parent, token = history[position]
        written[:, :, position] = token[row, entry]
        entry = parent[row, entry]
    order = numpy.argsort(written < 0, axis=2, kind="stable")
    counts = (written >= 0).sum(axis=2)
    return numpy.take_along_axis(written, order, axis=2)[:, :, : max(1, counts.max())], counts, scores


def prefix_beams_on_cpu(
    log_probs: Tensor, lengths: Tensor, blank: int, beam_size: int, padding: int, fluency: Any, least_chance: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Result of `prefix_beam_search`, in NumPy or, for a few sentences, with Python floats: the overhead of tensor
    operations exceeds the search itself.

    Args:
        fluency: terms of n-grams, or None.
    """
    log_probs = full_precision(log_probs)
    likely = log_probs.topk(min(2 * beam_size + 1, log_probs.shape[2]), dim=-1).indices
    search = prefix_beams_by_sentence if len(log_probs) < NUMPY_ROWS else prefix_beams_by_batch
    texts, counts, scores = search(
        log_probs.numpy(), likely.numpy(), lengths.numpy(), blank, beam_size, fluency, least_chance
    )
    texts = numpy.where(texts < 0, padding, texts)
    return torch.from_numpy(texts), torch.from_numpy(counts), torch.from_numpy(scores).to(log_probs.dtype)


def prefix_beams_by_batch(
    log_probs: numpy.ndarray,
    candidates: numpy.ndarray,
    lengths: numpy.ndarray,
    blank: int,
    beam_size: int,
    fluency: Any,
    least_chance: float,
    names: numpy.ndarray | None = None,
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """`prefix_beams_in_numpy` with terms of n-grams.

    Args:
        names: token ids of the indices 0, 1, … of the vocabulary. Default: the indices are token ids.
    """
    context, added = (None, None) if fluency is None else fluency.by_array(names)
    return prefix_beams_in_numpy(log_probs, candidates, lengths, blank, beam_size, context, added, least_chance)


def prefix_beams_by_sentence(
    log_probs: numpy.ndarray,
    candidates: numpy.ndarray,
    lengths: numpy.ndarray,
    blank: int,
    beam_size: int,
    fluency: Any,
    least_chance: float,
    names: numpy.ndarray | None = None,
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """The same, row by row with `prefix_beam_of_sentence`."""
    added, bonus = (None, 0.0) if fluency is None else (fluency.one_by_one(names)[0], fluency.bonus)
    options, found = (blank, beam_size, added, bonus, least_chance), []
    for row, likely, length in zip(log_probs, candidates, lengths, strict=True):
        beam = prefix_beam_of_sentence(row[:length], likely[:length], *options)
        found.append([*beam, *[((), float("-inf"))] * (beam_size - len(beam))])
    counts = numpy.array([[len(text) for text, _ in row] for row in found])
    scores = numpy.array([[score for _, score in row] for row in found])
    texts = numpy.full((*counts.shape, max(1, counts.max())), -1)
    for number, row in enumerate(found):
        for place, (text, _) in enumerate(row):
            texts[number, place, : len(text)] = text
    return texts, counts, scores
