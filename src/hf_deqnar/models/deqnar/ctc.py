"""CTC: loss, Viterbi alignment and collapsing."""

import torch
from torch import Tensor
from torch.nn import functional


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
