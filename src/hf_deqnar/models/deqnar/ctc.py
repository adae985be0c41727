"""CTC: loss, Viterbi alignment, collapsing and prefix beam search."""

import math
from collections.abc import Callable
from heapq import nlargest
from typing import TypeVar

import numpy
import torch
from torch import Tensor
from torch.nn import functional

MULTIPLIER, INCREMENT = 6364136223846793005, 1442695040888963407  # of a rolling hash
Hashes = TypeVar("Hashes", int, Tensor, numpy.ndarray)


def ctc_loss(
    logits: Tensor, targets: Tensor, canvas_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """−log Σ_a Π_t p(a_t), over the paths a that collapse to the target, for every row (Graves et al. 2006).

    A target that does not fit on its canvas has no path. Its loss would be infinite; it is returned as 0, with no
    gradient, and the second result is false there.

    Args:
        logits: rows × canvas × vocabulary.
        targets: rows × length; positions beyond `target_lengths` are ignored.
        blank: id of the blank token, which is never part of a target.
    """
    # The log-softmax must span all classes: the gradient of torch's CTC loss is only correct after one.
    log_probs = functional.log_softmax(full_precision(logits), dim=-1)
    loss = ctc_of_log_probs(log_probs, targets, canvas_lengths, target_lengths, blank)
    return loss, needed_canvas(targets, target_lengths) <= canvas_lengths


def ctc_of_log_probs(
    log_probs: Tensor, targets: Tensor, canvas_lengths: Tensor, target_lengths: Tensor, blank: int
) -> Tensor:
    """CTC loss of log-probabilities, which may cover a part of the vocabulary; 0 for a target that does not fit."""
    return functional.ctc_loss(
        log_probs.transpose(0, 1),
        targets.clamp_min(0),
        canvas_lengths,
        target_lengths,
        blank=blank,
        reduction="none",
        zero_infinity=True,
    )


def expected_bigrams(own_probs: Tensor, mask: Tensor) -> Tensor:
    """Expected counts of bigrams in the texts of all paths, (rows, words, words); the blank has none.

    A bigram (v, w) of a text is a pair of positions i < j with blanks between them: the last position of v and the
    first of w (Shao and Feng 2022).

        C(v, w) = Σ_{i<j} p_i(v) · Π_{i<k<j} p_k(blank) · p_j(w),

    where j = i + 1 is left out if v = w, because equal neighbours are merged.

    Args:
        own_probs: probabilities of some words at every position, the blank first, (rows, canvas, words).
        mask: (rows, canvas).
    """
    blank = own_probs[:, :, 0].masked_fill(~mask, 1.0)
    words = own_probs * mask[:, :, None]
    words = torch.cat([torch.zeros_like(words[:, :, :1]), words[:, :, 1:]], dim=2)
    # Products of blanks between i and j, from the sum of their logarithms up to every position.
    total = blank.clamp_min(torch.finfo(blank.dtype).tiny).log().cumsum(dim=1)
    before = torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], dim=1)  # of positions before j
    between = before[:, None, :] - total[:, :, None]  # (rows, i, j)
    canvas = blank.shape[1]
    later = torch.ones(canvas, canvas, dtype=torch.bool, device=blank.device).triu(1)
    joined = between.masked_fill(~later, float("-inf")).exp()
    counts = words.transpose(1, 2) @ (joined @ words)
    neighbours = (words[:, :-1] * words[:, 1:]).sum(dim=1)  # p_i(v)·p_{i+1}(v)
    return counts - torch.diag_embed(neighbours)


def expected_length(probs: Tensor, mask: Tensor, blank: int) -> Tensor:
    """Expected number of tokens in the texts of all paths, (rows): Σ_i Σ_{v≠blank} p_i(v)·(1 − p_{i−1}(v)).

    Args:
        probs: probabilities of the whole vocabulary, (rows, canvas, vocabulary).
    """
    starts = (1 - probs[:, :, blank]) * mask
    repeated = (probs[:, :-1] * probs[:, 1:]).sum(dim=2) - probs[:, :-1, blank] * probs[:, 1:, blank]
    return starts.sum(dim=1) - (repeated * mask[:, 1:]).sum(dim=1)


def bigram_overlap(probs: Tensor, mask: Tensor, words: Tensor, labels: Tensor, blank: int) -> Tensor:
    """The overlap of expected and target bigrams, (rows), from 0 to 1: 2·Σ min(C(g), C_y(g)) / (Σ C(g) + Σ C_y(g)).

    It rewards bigrams of the target wherever they are and counts surplus ones, so that dropped words cost as much as
    added ones (Shao and Feng 2022: non-monotonic latent alignments).

    Args:
        probs: probabilities of the whole vocabulary, (rows, canvas, vocabulary).
        words: token ids of every row's own words, the blank first, (rows, words).
        labels: the target as places in `words`, (rows, length); −100 at padding.
    """
    own = probs.gather(2, words[:, None, :].expand(-1, probs.shape[1], -1))
    expected = expected_bigrams(own, mask)
    first, second = labels[:, :-1].clamp_min(0), labels[:, 1:].clamp_min(0)
    target = torch.zeros_like(expected).flatten(1)
    target = target.scatter_add(1, first * words.shape[1] + second, (labels[:, 1:] >= 0).to(probs.dtype))
    matched = torch.minimum(expected.flatten(1), target).sum(dim=1)
    empty = probs[:, :, blank].masked_fill(~mask, 1.0).prod(dim=1)
    total = expected_length(probs, mask, blank) - 1 + empty  # a text of n > 0 tokens has n − 1 bigrams, an empty one 0
    return 2 * matched / (total + target.sum(dim=1)).clamp_min(torch.finfo(probs.dtype).tiny)


def full_precision(values: Tensor) -> Tensor:
    """Convert to at least float32, for sums over the vocabulary."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def likeliest(logits: Tensor, block: int = 64) -> Tensor:
    """Arg-max over the last dimension, block by block: on a CPU `torch.argmax` takes as long as the projection.

    >>> likeliest(torch.tensor([[0.0, 3.0, 1.0, 2.0, 3.0]]), block=2)
    tensor([1])
    """
    divisible = logits.shape[-1] // block * block
    if divisible == 0:
        return logits.argmax(dim=-1)
    blocks = logits[..., :divisible].unflatten(-1, (-1, block))
    highest, index = blocks.amax(dim=-1).max(dim=-1)  # of every block, then among blocks
    inside = blocks.gather(-2, index[..., None, None].expand(*index.shape, 1, block))[..., 0, :].argmax(dim=-1)
    best = index * block + inside
    if divisible == logits.shape[-1]:
        return best
    rest, place = logits[..., divisible:].max(dim=-1)
    return torch.where(rest > highest, divisible + place, best)


def needed_canvas(targets: Tensor, target_lengths: Tensor) -> Tensor:
    """The shortest canvas of every row: its tokens, and a blank between equal neighbours."""
    inside = torch.arange(1, targets.shape[1], device=targets.device)[None] < target_lengths[:, None]
    return target_lengths + ((targets[:, 1:] == targets[:, :-1]) & inside).sum(dim=1)


def collapse(path: Tensor, lengths: Tensor, blank: int, padding: int) -> tuple[Tensor, Tensor]:
    """The text of a CTC path: merge repetitions, then remove blanks. Rows × longest, and their lengths.

    >>> collapse(torch.tensor([[7, 7, 0, 7, 8, 0]]), torch.tensor([6]), blank=0, padding=1)[0]
    tensor([[7, 7, 8]])
    """
    selected = starts_of_runs(path, lengths) & (path != blank)
    return pack(path, selected, padding)


def starts_of_runs(path: Tensor, lengths: Tensor) -> Tensor:
    """True at the first position of every run of equal tokens, within each row's length."""
    inside = torch.arange(path.shape[1], device=path.device)[None] < lengths[:, None]
    changes = torch.ones_like(inside)
    changes[:, 1:] = path[:, 1:] != path[:, :-1]
    return changes & inside


def pack(values: Tensor, selected: Tensor, padding: float) -> tuple[Tensor, Tensor]:
    """Move selected values to the front of each row, in order: rows × longest, and their number."""
    counts = selected.sum(dim=1)
    if len(values) == 1 and int(counts) > 0:
        return values[selected][None], counts
    order = (~selected).to(torch.int8).argsort(dim=1, stable=True)
    longest = max(1, int(counts.max()))  # at least one column
    packed = values.gather(1, order)[:, :longest]
    beyond = torch.arange(longest, device=values.device)[None] >= counts[:, None]
    return packed.masked_fill(beyond, padding), counts


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


def prefix_beams_by_sentence(
    log_probs: Tensor,
    lengths: Tensor,
    blank: int,
    beam_size: int,
    padding: int,
    added: Callable[[tuple[int, ...], int], float] | None = None,
    most_added: float = 0.0,
    least_chance: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Result of `prefix_beam_search`, computed row by row with `prefix_beam_of_sentence`: on CPUs the overhead of
    tensor operations exceeds the search itself.

    Args:
        added, most_added: as in `prefix_beam_of_sentence`.
    """
    log_probs = full_precision(log_probs)
    likely = log_probs.topk(min(2 * beam_size + 1, log_probs.shape[2]), dim=-1).indices
    options, found = (blank, beam_size, added, most_added, least_chance), []
    for row, candidates, length in zip(log_probs.numpy(), likely.numpy(), lengths.tolist(), strict=True):
        beam = prefix_beam_of_sentence(row[:length], candidates[:length], *options)
        found.append([*beam, *[((), float("-inf"))] * (beam_size - len(beam))])
    counts = torch.tensor([[len(text) for text, _ in row] for row in found])
    scores = torch.tensor([[score for _, score in row] for row in found], dtype=log_probs.dtype)
    texts = torch.full((*counts.shape, max(1, int(counts.max()))), padding)
    for number, row in enumerate(found):
        for place, (text, _) in enumerate(row):
            texts[number, place, : len(text)] = torch.tensor(text, dtype=torch.long)
    return texts, counts, scores


def viterbi_path(
    log_probs: Tensor, targets: Tensor, canvas_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """argmax_a Π_t p(a_t) over the CTC paths a that collapse to the target: rows × canvas, and log p of each path.

    A path may stay at a symbol, advance to the next, or skip a blank between two different tokens. A target that does
    not fit on its canvas has no path: its row is all blank and its log p is −∞. Positions beyond the canvas are blank.

    >>> uniform = torch.zeros(1, 3, 9).log_softmax(-1)
    >>> viterbi_path(uniform, torch.tensor([[7, 7]]), torch.tensor([3]), torch.tensor([2]), blank=0)[0]
    tensor([[7, 0, 7]])
    """
    rows, canvas, _ = log_probs.shape
    device, minus = log_probs.device, float("-inf")
    symbols = torch.full((rows, 2 * targets.shape[1] + 1), blank, device=device)  # blank, y₁, blank, y₂, …, blank
    symbols[:, 1::2] = targets.clamp_min(0)
    emitted = log_probs.gather(2, symbols[:, None].expand(-1, canvas, -1))  # rows, canvas, symbols
    may_skip = torch.zeros_like(symbols, dtype=torch.bool)
    may_skip[:, 2:] = (symbols[:, 2:] != blank) & (symbols[:, 2:] != symbols[:, :-2])

    score = torch.full(symbols.shape, minus, dtype=log_probs.dtype, device=device)
    score[:, :2] = emitted[:, 0, :2]
    moves = torch.zeros(rows, canvas, symbols.shape[1], dtype=torch.long, device=device)  # how many symbols forward
    for position in range(1, canvas):
        one = functional.pad(score, (1, 0), value=minus)[:, :-1]
        two = functional.pad(score, (2, 0), value=minus)[:, :-2].masked_fill(~may_skip, minus)
        best, move = torch.stack([score, one, two]).max(dim=0)
        inside = (position < canvas_lengths)[:, None]
        score = torch.where(inside, best + emitted[:, position], score)
        moves[:, position] = torch.where(inside, move, 0)

    last = 2 * target_lengths[:, None]
    ends = torch.cat(
        [score.gather(1, last), score.gather(1, last - 1)], dim=1
    )  # on the last blank, or on the last token
    total, choice = ends.max(dim=1)
    place = last[:, 0] - choice
    path = torch.full((rows, canvas), blank, device=device)
    for position in range(canvas - 1, -1, -1):
        inside = position < canvas_lengths
        path[:, position] = torch.where(inside, symbols.gather(1, place[:, None])[:, 0], path[:, position])
        place = (place - moves[:, position].gather(1, place[:, None])[:, 0]).clamp_min(0)
    return path.masked_fill((total == minus)[:, None], blank), total
