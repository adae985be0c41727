"""Directed acyclic graphs of vertices: sum over paths, posteriors, best path, searches (Huang et al. 2022).

A path starts at vertex 0, follows links i → j with i < j, and ends at the last vertex of its row. It writes one token
at every vertex that it passes. `log_links` is log E, (batch, vertices, vertices): −∞ unless i < j < number of vertices.
`emitted` is log P(y_t | j), (batch, tokens, vertices). Vertices and tokens are numbered from 0 here.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.autograd import Function

MINUS = float("-inf")
LARGEST_EXPONENT = 600.0  # of a float64, with room for a product


def gated_links(logits: Tensor, log_gates: Tensor, mask: Tensor | None = None) -> Tensor:
    """log E_ij = log Σ_c g_ic · softmax_{j > i}(logits_cij): rows × vertices × vertices, −∞ where there is no link.

    Args:
        logits: rows × heads × vertices × vertices.
        log_gates: rows × heads × vertices, log g.
        mask: rows × vertices, which are not padding; None if all are vertices.
    """
    linked = forward_links(logits, mask)
    hidden = logits.masked_fill(~linked[:, None], torch.finfo(logits.dtype).min)
    mixed = (hidden.log_softmax(dim=-1) + log_gates[..., None]).logsumexp(dim=1)
    return mixed.masked_fill(~linked, MINUS)


def forward_links(like: Tensor, mask: Tensor | None) -> Tensor:
    """Which links exist: i < j, and j is not padding; rows (or 1) × vertices × vertices."""
    vertices = torch.arange(like.shape[-1], device=like.device)
    later = (vertices[None, :] > vertices[:, None])[None]
    return later if mask is None else later & mask[:, None, :] & mask[:, :, None]


class GatedLinks(Function):
    """`gated_links` with its own backward, which stores one tensor of the size of the logits instead of four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, log_gates: Tensor, mask: Tensor | None) -> Tensor:
        linked = forward_links(logits, mask)
        scores = logits.masked_fill(~linked[:, None], torch.finfo(logits.dtype).min)
        scores += (log_gates - scores.logsumexp(dim=-1))[..., None]  # log g_ic·A_cij
        highest = scores.amax(dim=1)
        summed = torch.zeros_like(highest)
        for head in range(scores.shape[1]):
            summed += (scores[:, head] - highest).exp_()
        log_links = summed.log_().add_(highest).masked_fill_(~linked, MINUS)
        ctx.save_for_backward(scores, log_gates, log_links, linked)
        return log_links

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        scores, log_gates, log_links, linked = ctx.saved_tensors
        gradient = gradient.masked_fill(~linked, 0.0)
        finite = log_links.masked_fill(~linked, 0.0)
        slope = torch.empty_like(scores)
        for head in range(scores.shape[1]):
            # ∂ log E_ij / ∂ log(g_ic·A_cij) is the share of head c; the rest is the gradient of a log-softmax
            share = (scores[:, head] - finite).exp_().masked_fill_(~linked, 0.0).mul_(gradient)
            total = share.sum(dim=-1, keepdim=True)
            attention = (scores[:, head] - log_gates[:, head, :, None]).exp_().masked_fill_(~linked, 0.0)
            slope[:, head] = share - attention * total
            scores_of_gate = total[..., 0]
            if head == 0:
                to_gates = torch.empty_like(log_gates)
            to_gates[:, head] = scores_of_gate
        return slope, to_gates, None


def has_path(canvas_lengths: Tensor, target_lengths: Tensor) -> Tensor:
    """Whether some path writes exactly so many tokens: 2 ≤ M ≤ L, or M = L = 1; (batch)."""
    one = (target_lengths == 1) & (canvas_lengths == 1)
    return one | ((target_lengths >= 2) & (target_lengths <= canvas_lengths))


def path_sum(
    emitted: Tensor, log_links: Tensor, canvas_lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """log Σ_paths P(path)·P(target | path) and, without a graph, the posteriors of vertices and links.

        α_0(0) = P(y_0 | 0);  α_t(j) = P(y_t | j)·Σ_i α_{t−1}(i)·E_ij;  the sum is α_{M−1}(L − 1)
        β_{M−1}(L − 1) = 1;   β_t(i) = Σ_j E_ij·P(y_{t+1} | j)·β_{t+1}(j)

    Every step multiplies a vector by E in float64, after a division by its largest entry; everything else is in log
    space. A target without a path has −∞ and posteriors of 0.

    Returns:
        the logarithm (batch); P(vertex j writes y_t), like `emitted`; the expected number of times that link (i, j) is
        taken, which is its probability, like `log_links`.
    """
    rows, tokens, vertices = emitted.shape
    device = emitted.device
    scores, links = emitted.double(), log_links.double().exp()
    fits = has_path(canvas_lengths, target_lengths)
    last = (canvas_lengths - 1).clamp_min(0)

    forward = scores.new_full((rows, tokens, vertices), MINUS)
    forward[:, 0, 0] = scores[:, 0, 0]
    for step in range(1, tokens):
        forward[:, step] = _log_product(forward[:, step - 1], links) + scores[:, step]

    row = torch.arange(rows, device=device)
    total = forward[row, (target_lengths - 1).clamp_min(0), last].masked_fill(~fits, MINUS)

    backward = scores.new_full((rows, tokens, vertices), MINUS)
    at_end = torch.full_like(backward[:, 0], MINUS)
    at_end[row, last] = 0.0
    turned = links.transpose(1, 2).contiguous() if tokens > 1 else links
    for step in range(tokens - 1, -1, -1):
        if step < tokens - 1:
            backward[:, step] = _log_product(scores[:, step + 1] + backward[:, step + 1], turned)
        ends = (target_lengths - 1 == step)[:, None]
        backward[:, step] = torch.where(ends, at_end, backward[:, step])
        beyond = (target_lengths - 1 < step)[:, None]
        backward[:, step].masked_fill_(beyond, MINUS)

    possible = total > MINUS
    known = total.masked_fill(~possible, 0.0)[:, None, None]
    of_vertices = (forward + backward - known).exp() * possible[:, None, None]
    # Σ_t α_{t−1}(i)·P(y_t | j)·β_t(j), with the factors of every t divided and multiplied by α at a likely vertex
    best = of_vertices[:, :-1].argmax(dim=2, keepdim=True)
    scale = forward[:, :-1].gather(2, best)
    scale = scale.masked_fill(scale == MINUS, 0.0)
    left = (forward[:, :-1] - scale).clamp_max(LARGEST_EXPONENT).exp()
    right = (scores[:, 1:] + backward[:, 1:] + scale - known).clamp_max(LARGEST_EXPONENT).exp()
    of_links = links * torch.bmm(left.transpose(1, 2), right) * possible[:, None, None]
    return total.to(emitted.dtype), of_vertices.to(emitted.dtype), of_links.to(log_links.dtype)


def _log_product(vector: Tensor, matrix: Tensor) -> Tensor:
    """log Σ_i exp(vector_i)·matrix_ij of every row."""
    highest = vector.amax(dim=1, keepdim=True)
    highest = highest.masked_fill(highest == MINUS, 0.0)
    return torch.bmm((vector - highest).exp()[:, None], matrix)[:, 0].log() + highest


class _PathSum(Function):
    """−log of `path_sum`, whose gradient is −posterior."""

    @staticmethod
    def forward(ctx: Any, emitted: Tensor, log_links: Tensor, canvas_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        total, of_vertices, of_links = path_sum(emitted, log_links, canvas_lengths, target_lengths)
        ctx.save_for_backward(of_vertices, of_links)
        return -total.masked_fill(total == MINUS, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_vertices, of_links = ctx.saved_tensors
        scale = -gradient[:, None, None]
        return scale * of_vertices, scale * of_links, None, None


def dag_loss(
    emitted: Tensor, log_links: Tensor, canvas_lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """−log Σ_paths P(path)·P(target | path) of every row, and whether the target has a path.

    A target without a path would have an infinite loss; it is returned as 0, with no gradient.

    Args:
        emitted: batch × tokens × vertices, log P(y_t | j); rows of padding are ignored.
        log_links: batch × vertices × vertices.
        canvas_lengths, target_lengths: vertices and tokens of every row.

    >>> links = torch.tensor([[[0.0, 0.5, 0.5], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]]).log()
    >>> dag_loss(torch.zeros(1, 3, 3), links, torch.tensor([3]), torch.tensor([3]))[0]   # −log 0.5
    tensor([0.6931])
    """
    loss = _PathSum.apply(emitted, log_links, canvas_lengths, target_lengths)
    return loss, has_path(canvas_lengths, target_lengths)


def best_alignment(
    emitted: Tensor, log_links: Tensor, canvas_lengths: Tensor, target_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """The likeliest path that writes the target: which token stands on every vertex, and log p of the path.

    The recursion of `path_sum` with max instead of Σ. Vertices that are not on the path, and all vertices of a target
    without a path, have −100; log p is −∞ for the latter.

    Returns:
        (batch, vertices) and (batch).
    """
    rows, tokens, vertices = emitted.shape
    device = emitted.device
    incoming = log_links.transpose(1, 2).contiguous()  # rows, j, i
    scores = emitted.new_full((rows, tokens, vertices), MINUS)
    scores[:, 0, 0] = emitted[:, 0, 0]
    for step in range(1, tokens):
        scores[:, step] = (incoming + scores[:, step - 1, None]).amax(dim=2) + emitted[:, step]
    row = torch.arange(rows, device=device)
    place = (canvas_lengths - 1).clamp_min(0)
    total = scores[row, (target_lengths - 1).clamp_min(0), place]
    total = total.masked_fill(~has_path(canvas_lengths, target_lengths), MINUS)
    alignment = torch.full((rows, vertices), -100, device=device)
    for step in range(tokens - 1, -1, -1):
        written = (step < target_lengths) & (total > MINUS)
        alignment[row, place] = torch.where(written, step, alignment[row, place])
        if step:
            before = (incoming[row, place] + scores[:, step - 1]).argmax(dim=1)
            place = torch.where(written, before, place)
    return alignment, total


def follow_links(following: Tensor, lengths: Tensor) -> Tensor:
    """Which vertices are passed when every vertex has one successor: (batch, vertices), the first and last included.

    >>> follow_links(torch.tensor([[2, 2, 3, 0]]), torch.tensor([4]))
    tensor([[ True, False,  True,  True]])
    """
    passed = torch.zeros(following.shape, dtype=torch.bool)
    for row, (successors, length) in enumerate(zip(following.tolist(), lengths.tolist(), strict=True)):
        vertex, vertices = 0, [0]
        while vertex < length - 1:
            vertex = successors[vertex]
            vertices.append(vertex)
        passed[row, vertices] = True
    return passed.to(following.device)


def lookahead_path(log_links: Tensor, scores: Tensor | None, lengths: Tensor, beta: float) -> Tensor:
    """The path that goes from i to argmax_j log E_ij + β·max_v log P(v | j); greedy, argmax_j E_ij, without scores.

    Args:
        scores: (batch, vertices), max_v log P(v | j).

    Returns:
        which vertices are passed, (batch, vertices).
    """
    values = log_links if scores is None or beta == 0 else log_links + beta * scores[:, None]
    return follow_links(values.argmax(dim=2), lengths)


def joint_viterbi(
    log_links: Tensor, scores: Tensor, lengths: Tensor, length_penalty: float, longest: int | None = None
) -> tuple[Tensor, Tensor]:
    """`joint_viterbi_of_sentence` of every row, without its padding.

    Args:
        scores: (batch, vertices), max_v log P(v | j).

    Returns:
        which vertices are passed, (batch, vertices), and the score of each path.
    """
    passed = torch.zeros(scores.shape, dtype=torch.bool)
    best = scores.new_empty(len(scores), device="cpu")
    inputs = (log_links.cpu().numpy(), scores.cpu().numpy(), lengths.tolist())
    for row, (links, values, length) in enumerate(zip(*inputs, strict=True)):
        vertices, score = joint_viterbi_of_sentence(links[:length, :length], values[:length], length_penalty, longest)
        passed[row, vertices] = True
        best[row] = score
    return passed.to(scores.device), best.to(scores.device)


def joint_viterbi_of_sentence(
    log_links: numpy.ndarray, scores: numpy.ndarray, length_penalty: float, longest: int | None = None
) -> tuple[list[int], float]:
    """The path and tokens with the highest (Σ log E_ij + Σ max_v log P(v | j)) / n^α, for n tokens.

    The first vertex writes nothing. For every n the best path that ends at the last vertex is known,

        s_0(0) = 0;  s_n(j) = max_v log P(v | j) + max_i s_{n−1}(i) + log E_ij,

    and α decides between the lengths, which is the length control that CTC lacks (Shao et al. 2022). After n tokens a
    path is at vertex n or later, so the recursion leaves earlier ones out. It ends when no longer path can be better:
    its score is at most max_j s_n(j) / N^α, for N tokens at most.

    Args:
        log_links: vertices × vertices.
        scores: max_v log P(v | j) of the vertices.
        length_penalty: α.
        longest: most tokens of a path; by default all vertices but the first.

    Returns:
        the vertices of the path, the first and last included, and its score.
    """
    vertices = len(scores)
    if vertices == 1:
        return [0], 0.0
    most = max(1, vertices - 1 if longest is None else min(longest, vertices - 1))
    states = numpy.full((most + 1, vertices), MINUS, dtype=scores.dtype)
    states[0, 0] = 0.0
    arrivals = numpy.empty_like(log_links)
    best, tokens = MINUS, 1
    for count in range(1, most + 1):
        sums = numpy.add(
            log_links[count - 1 :, count:], states[count - 1, count - 1 :, None], out=arrivals[count - 1 :, count:]
        )
        state = states[count, count:]
        numpy.maximum.reduce(sums, axis=0, out=state)
        state += scores[count:]
        score = float(state[-1]) / count**length_penalty
        if score > best:
            best, tokens = score, count
        if float(state.max()) / most**length_penalty <= best:
            break
    path = [vertices - 1]
    for count in range(tokens, 0, -1):
        path.append(int((log_links[:, path[-1]] + states[count - 1]).argmax()))
    return path[::-1], best


def dag_beam_of_sentence(
    log_probs: numpy.ndarray,
    log_links: numpy.ndarray,
    beam_size: int,
    length_penalty: float = 0.0,
    *,
    longest: int | None = None,
    words_per_vertex: int = 5,
    added: Callable[[tuple[int, ...], int], float] | None = None,
    of_end: Callable[[tuple[int, ...]], float] | None = None,
    most_added: float = 0.0,
    least_chance: float = 0.0,
) -> list[tuple[tuple[int, ...], float, float]]:
    """The likeliest texts of one graph, each summed over all paths that write it.

    A prefix of n words carries α(j) = P(the first n words are the prefix, and the path is at vertex j after them). With
    r = α·E, its extension by a word w has α'(j) = r_j·P(w | j). Σ_j α'(j) is the exact probability of the longer
    prefix, and α'(L − 1) that of the text that ends with it, because a path ends at the last vertex. The first vertex
    writes nothing. The search ends when no prefix can lead to a better text than those found.

    Args:
        log_probs: vertices × vocabulary.
        log_links: vertices × vertices.
        length_penalty: α; a text of n tokens has the score log p / n^α, plus what is added.
        longest: most tokens of a text; by default as many as there are vertices behind the first.
        words_per_vertex: likeliest words of every vertex that extend a prefix; all candidates are tried everywhere.
        added: prefix, word → the term added when the word extends the prefix, at most `most_added`.
        of_end: prefix → the term added for the end of a text, at most 0.
        least_chance: minimum probability of these words at their vertex; the likeliest is always one of them.

    Returns:
        at most `beam_size` texts with their score and log p, the best first; equal scores in the order of words.
    """
    links = numpy.exp(log_links.astype(numpy.float64))
    vertices = len(links)
    most = vertices - 1 if longest is None else min(longest, vertices - 1)
    words = _likely_words(log_probs, words_per_vertex, least_chance)
    emitted = numpy.exp(log_probs[:, words].astype(numpy.float64))  # vertices × words
    beam: list[tuple[tuple[int, ...], float]] = [((), 0.0)]  # prefixes and what was added to them
    mass = numpy.zeros((1, vertices))
    mass[0, 0] = 1.0
    scale = numpy.zeros(1)  # log of what the mass of a prefix was divided by
    finished: list[tuple[tuple[int, ...], float, float]] = []
    with numpy.errstate(divide="ignore"):
        for count in range(1, most + 1):
            reached = mass @ links
            ends = reached[:, -1:] * emitted[-1:]
            goes_on = reached[:, :-1] @ emitted[:-1]
            log_ends = numpy.log(ends) + scale[:, None]
            log_goes_on = numpy.log(goes_on) + scale[:, None]
            terms = numpy.array([bonus for _, bonus in beam])[:, None]
            divisor = count**length_penalty
            candidates = {}
            for kind, values in (("end", log_ends / divisor + terms), ("go", log_goes_on + terms)):
                candidates[kind] = _best_extensions(values, beam, words, beam_size, added, most_added)
            for place, number, term in candidates["end"]:
                text = (*beam[place][0], int(words[number]))
                log_p = float(log_ends[place, number])
                score = log_p / divisor + beam[place][1] + term
                finished.append((text, score + (0.0 if of_end is None else of_end(text)), log_p))
            finished = sorted(finished, key=lambda found: (-found[1], found[0]))[:beam_size]
            extended, states, scales = [], [], []
            for place, number, term in candidates["go"]:
                text, bonus = (*beam[place][0], int(words[number])), beam[place][1] + term
                # Longer texts have at most this log p, and every further word adds at most `most_added`.
                log_p = float(log_goes_on[place, number])
                bound = log_p / most**length_penalty + bonus + max(0.0, most_added) * (most - count)
                if len(finished) == beam_size and bound <= finished[-1][1]:
                    continue
                state = reached[place] * emitted[:, number]
                state[-1] = 0.0
                total = state.sum()
                extended.append((text, bonus))
                states.append(state / total)
                scales.append(scale[place] + math.log(total))
            if not extended:
                break
            beam, mass, scale = extended, numpy.stack(states), numpy.array(scales)
    return finished


def _likely_words(log_probs: numpy.ndarray, per_vertex: int, least: float) -> numpy.ndarray:
    """Words that are among the likeliest of some vertex behind the first, ascending."""
    values, words = torch.from_numpy(log_probs[1:]).topk(min(per_vertex, log_probs.shape[1]), dim=1)
    allowed = values >= (math.log(least) if least > 0 else torch.finfo(values.dtype).min)
    allowed[:, 0] = True
    return numpy.unique(words[allowed].numpy())


def _best_extensions(
    values: numpy.ndarray,
    beam: list[tuple[tuple[int, ...], float]],
    words: numpy.ndarray,
    count: int,
    added: Callable[[tuple[int, ...], int], float] | None,
    most_added: float,
) -> list[tuple[int, int, float]]:
    """The best extensions of a beam (place in the beam, index of the word, added term); those of −∞ are left out.

    Args:
        values: beam × words, without the added terms, which are asked for in the order of the values, until no further
            extension can be among the best.
    """
    order = numpy.argsort(-values, axis=None, kind="stable")
    found: list[tuple[float, int, int, float]] = []
    for flat in order[: count if added is None else len(order)]:
        place, number = divmod(int(flat), len(words))
        value = float(values[place, number])
        if value == MINUS or (len(found) == count and value + most_added <= found[-1][0]):
            break
        term = 0.0 if added is None else added(beam[place][0], int(words[number]))
        found.append((value + term, place, number, term))
        found.sort(key=lambda one: -one[0])
        del found[count:]
    return [(place, number, term) for _, place, number, term in found]


def passing(log_links: Tensor) -> tuple[Tensor, Tensor]:
    """P(a path passes vertex j), and the expected number of vertices before j on paths that pass it: (batch, vertices).

        π_0 = 1,  π_j = Σ_i π_i·E_ij;   m_j = Σ_i (π_i + m_i)·E_ij,  position m_j / π_j

    Both are solutions of triangular systems x·(I − E) = b, because links only go forward.
    """
    links = log_links.exp()
    start = (torch.arange(links.shape[-1], device=links.device) == 0).to(links.dtype).expand(links.shape[0], 1, -1)
    solve = sum_of_powers if torch.compiler.is_exporting() else solve_forward
    passed = solve(start, links)
    positions = solve(passed @ links, links) / passed.clamp_min(torch.finfo(links.dtype).tiny)
    return passed[:, 0], positions[:, 0]


def solve_forward(right: Tensor, links: Tensor) -> Tensor:
    """x with x·(I − E) = right: (batch, 1, vertices)."""
    system = torch.eye(links.shape[-1], dtype=links.dtype, device=links.device) - links
    return torch.linalg.solve_triangular(system, right, upper=True, left=False, unitriangular=True)


def sum_of_powers(right: Tensor, links: Tensor, doublings: int = 10) -> Tensor:
    """`solve_forward` with operations that ONNX has: right·Σ_k Eᵏ for k < 2ⁿ, as right·Π (I + E^(2ⁱ)) for i < n.

    Eᵏ is 0 for k of the number of vertices or more, so 2ⁿ vertices are exact.
    """
    for doubling in range(doublings):
        right = right + right @ links
        if doubling + 1 < doublings:
            links = links @ links
    return right


def fuzzy_overlap(own_probs: Tensor, log_links: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """BP·p₂: the expected 2-gram precision of the graph, clipped and with a brevity penalty (Ma et al. 2023, FA-DAT).

    With π of `passing` and links that leave the first vertex not counted (it writes nothing),

        E[count of (a, b)] = Σ_ij π_i·P(a | i)·E_ij·P(b | j),     E[number of 2-grams] = Σ_ij π_i·E_ij,
        p₂ = Σ_(a,b) min(count in the target, E[count of (a, b)]) / E[number of 2-grams],
        BP = min(1, exp(1 − M / E[number of tokens])).

    A target of one token has no 2-gram and is scored by 1-grams.

    Args:
        own_probs: batch × vertices × (1 + length), P of the target's own words; place 0 is unused.
        labels: batch × length, places in the own words: equal words have one place; −100 at padding.

    Returns:
        the overlap of every row, from 0 to 1, and the expected number of tokens.
    """
    rows, _, places = own_probs.shape
    passed, _ = passing(log_links)
    links = log_links.exp()
    writes = passed.clone()
    writes[:, 0] = 0.0
    flows = writes[:, :, None] * links  # probability that a link between two writing vertices is taken
    number = writes.sum(dim=1)
    lengths = (labels >= 0).sum(dim=1)
    brevity = (1 - lengths / number.clamp_min(1e-6)).clamp_max(0.0).exp()

    expected = own_probs.transpose(1, 2) @ flows @ own_probs  # batch, first word, second word
    counts = torch.zeros_like(expected).flatten(1)
    pair = labels[:, :-1].clamp_min(0) * places + labels[:, 1:].clamp_min(0)
    real = (labels[:, 1:] >= 0).to(expected.dtype)
    counts = counts.scatter_add(1, pair, real)
    matched = torch.minimum(counts, expected.flatten(1)).sum(dim=1)
    precision = matched / flows.sum(dim=(1, 2)).clamp_min(1e-6)

    single = torch.zeros(rows, places, dtype=expected.dtype, device=expected.device)
    single = single.scatter_add(1, labels.clamp_min(0), (labels >= 0).to(expected.dtype))
    of_words = torch.minimum(single, (writes[:, None] @ own_probs)[:, 0]).sum(dim=1) / number.clamp_min(1e-6)
    return brevity * torch.where(lengths > 1, precision, of_words), number
