"""Sums, posteriors and searches over graphs, compared with the enumeration of all paths."""

import itertools
import math

import pytest
import torch

from hf_deqnar.models.deqnar.dag import (
    GatedLinks,
    best_alignment,
    dag_beam_of_sentence,
    dag_loss,
    fuzzy_overlap,
    gated_links,
    has_path,
    joint_viterbi,
    lookahead_path,
    passing,
    path_sum,
    solve_forward,
    sum_of_powers,
)

MINUS = float("-inf")


def random_graph(vertices: int, width: int, seed: int) -> torch.Tensor:
    """log E of one graph, padded to a width."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(width)[None] < vertices
    logits = 2 * torch.randn(1, 2, width, width, dtype=torch.float64, generator=generator)
    gates = torch.randn(1, 2, width, dtype=torch.float64, generator=generator).log_softmax(dim=1)
    return gated_links(logits, gates, mask)[0]


def paths(vertices: int):
    """All paths from the first to the last vertex."""
    for count in range(vertices - 1):
        for inner in itertools.combinations(range(1, vertices - 1), count):
            yield (0, *inner, vertices - 1)
    if vertices == 1:
        yield (0,)


def log_chance(path, log_links) -> float:
    return sum(float(log_links[i, j]) for i, j in itertools.pairwise(path))


def batch(seed: int = 0, largest: int = 7, tokens: int = 5):
    """Graphs of 1 to `largest` vertices with targets of 1 to `tokens` tokens, in all combinations, padded."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(length, count) for length in range(1, largest + 1) for count in range(1, tokens + 1)]
    links = torch.stack([random_graph(length, largest, seed + place) for place, (length, _) in enumerate(sizes)])
    emitted = -3 * torch.rand(len(sizes), tokens, largest, dtype=torch.float64, generator=generator)
    lengths = torch.tensor(sizes)
    return emitted, links, lengths[:, 0], lengths[:, 1]


def scores_of_paths(emitted, log_links, vertices: int, tokens: int) -> dict[tuple[int, ...], float]:
    return {
        path: log_chance(path, log_links) + sum(float(emitted[t, j]) for t, j in enumerate(path))
        for path in paths(vertices)
        if len(path) == tokens
    }


def test_links_of_a_vertex_sum_to_one():
    links = random_graph(6, 8, seed=3).exp()
    assert torch.allclose(links[:5].sum(dim=1), torch.ones(5, dtype=torch.float64))
    assert not links[5:].any()
    assert not links.tril().any()


def test_fused_links_and_their_gradient_equal_the_plain_ones():
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(6)[None] < torch.tensor([6, 4, 1])[:, None]
    logits = torch.randn(3, 2, 6, 6, dtype=torch.float64, generator=generator).mul(3).requires_grad_()
    raw = torch.randn(3, 2, 6, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.rand(3, 6, 6, dtype=torch.float64, generator=generator)
    results = []
    for function in (gated_links, GatedLinks.apply):
        links = function(logits, raw.log_softmax(dim=1), mask)
        loss = (links.masked_fill(links == MINUS, 0.0) * weights).sum()
        results.append((links.detach(), *torch.autograd.grad(loss, (logits, raw))))
    for plain, fused in zip(*results, strict=True):
        assert torch.allclose(plain, fused, atol=1e-12)


def test_loss_and_posteriors_equal_enumeration():
    emitted, links, vertices, tokens = batch()
    total, of_vertices, of_links = path_sum(emitted, links, vertices, tokens)
    for row in range(len(emitted)):
        found = scores_of_paths(emitted[row], links[row], int(vertices[row]), int(tokens[row]))
        assert bool(has_path(vertices, tokens)[row]) == bool(found)
        if not found:
            assert total[row] == MINUS
            assert not of_vertices[row].any()
            assert not of_links[row].any()
            continue
        expected = math.log(sum(map(math.exp, found.values())))
        assert float(total[row]) == pytest.approx(expected, abs=1e-10)
        vertex, link = torch.zeros_like(of_vertices[row]), torch.zeros_like(of_links[row])
        for path, score in found.items():
            share = math.exp(score - expected)
            for t, j in enumerate(path):
                vertex[t, j] += share
            for i, j in itertools.pairwise(path):
                link[i, j] += share
        assert torch.allclose(of_vertices[row], vertex, atol=1e-10)
        assert torch.allclose(of_links[row], link, atol=1e-10)


def test_gradient_equals_finite_differences():
    emitted, links, vertices, tokens = batch(largest=5, tokens=4)
    chosen = has_path(vertices, tokens)
    emitted, links, vertices, tokens = emitted[chosen], links[chosen], vertices[chosen], tokens[chosen]
    real = links > MINUS

    def loss(scores, values):
        return dag_loss(scores, links.masked_scatter(real, values), vertices, tokens)[0].sum()

    arguments = (emitted.requires_grad_(), links[real].clone().requires_grad_())
    assert torch.autograd.gradcheck(loss, arguments)


def test_targets_without_a_path_have_no_loss_and_no_gradient():
    emitted, links, vertices, tokens = batch()
    emitted.requires_grad_()
    loss, fits = dag_loss(emitted, links, vertices, tokens)
    assert loss.isfinite().all()
    assert not fits.all()
    loss.sum().backward()
    assert emitted.grad.isfinite().all()
    assert not emitted.grad[~fits].any()
    assert emitted.grad[fits].flatten(1).any(dim=1).all()


def test_links_of_vanishing_probability_have_finite_loss_and_gradient():
    """In float32 such a link is exp(−500) = 0, but it is on the only path."""
    links = torch.tensor([[[MINUS, -500.0, 0.0], [MINUS, MINUS, 0.0], [MINUS, MINUS, MINUS]]], requires_grad=True)
    loss, _ = dag_loss(torch.zeros(1, 3, 3), links, torch.tensor([3]), torch.tensor([3]))
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(500.0)
    assert links.grad[0].tolist() == [[0.0, -1.0, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]


def test_best_alignment_equals_enumeration():
    emitted, links, vertices, tokens = batch(seed=5)
    alignment, total = best_alignment(emitted, links, vertices, tokens)
    for row in range(len(emitted)):
        found = scores_of_paths(emitted[row], links[row], int(vertices[row]), int(tokens[row]))
        if not found:
            assert total[row] == MINUS
            assert (alignment[row] == -100).all()
            continue
        best = max(found, key=found.get)
        expected = [-100] * emitted.shape[2]
        for token, vertex in enumerate(best):
            expected[vertex] = token
        assert alignment[row].tolist() == expected
        assert float(total[row]) == pytest.approx(found[best], abs=1e-10)


@pytest.mark.parametrize("beta", [None, 0.0, 0.7])
def test_lookahead_follows_the_best_link(beta):
    links = torch.stack([random_graph(7, 7, seed) for seed in range(5)])
    scores = -3 * torch.rand(5, 7, dtype=torch.float64)
    passed = lookahead_path(links, None if beta is None else scores, torch.full((5,), 7), beta or 0.0)
    for row in range(5):
        vertex, expected = 0, [0]
        while vertex < 6:
            vertex = max(
                range(vertex + 1, 7), key=lambda j: float(links[row, vertex, j] + (beta or 0.0) * scores[row, j])
            )
            expected.append(vertex)
        assert passed[row].nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 1.5])
def test_joint_viterbi_equals_enumeration(penalty):
    sizes = [2, 3, 5, 7, 7]
    links = torch.stack([random_graph(length, 7, seed) for seed, length in enumerate(sizes)])
    scores = -3 * torch.rand(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    passed, best = joint_viterbi(links, scores, torch.tensor(sizes), penalty)
    for row, length in enumerate(sizes):
        found = {
            path: (log_chance(path, links[row]) + sum(float(scores[row, j]) for j in path[1:]))
            / (len(path) - 1) ** penalty
            for path in paths(length)
        }
        expected = max(found, key=found.get)
        assert passed[row].nonzero()[:, 0].tolist() == list(expected)
        assert float(best[row]) == pytest.approx(found[expected], abs=1e-10)


def test_joint_viterbi_respects_the_most_tokens():
    links, scores = random_graph(7, 7, seed=2)[None], torch.zeros(1, 7, dtype=torch.float64)
    for longest in range(1, 7):
        passed, _ = joint_viterbi(links, scores, torch.tensor([7]), 5.0, longest)
        assert int(passed.sum()) - 1 <= longest


def texts_of_graph(log_probs, log_links) -> dict[tuple[int, ...], float]:
    """log p of all texts, summed over paths."""
    vertices, vocabulary = log_probs.shape
    found: dict[tuple[int, ...], float] = {}
    for path in paths(vertices):
        for text in itertools.product(range(vocabulary), repeat=len(path) - 1):
            score = log_chance(path, log_links)
            score += sum(float(log_probs[j, word]) for j, word in zip(path[1:], text, strict=True))
            found[text] = found.get(text, 0.0) + math.exp(score)
    return {text: math.log(chance) for text, chance in found.items()}


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("fluent", [False, True])
def test_wide_beam_equals_enumeration(penalty, fluent):
    vertices, vocabulary = 6, 3
    links = random_graph(vertices, vertices, seed=4)
    logits = torch.randn(vertices, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    log_probs = logits.log_softmax(dim=1)
    bonus = torch.randn(vocabulary + 1, vocabulary, generator=torch.Generator().manual_seed(3)).tolist()

    def added(prefix, word):
        return bonus[prefix[-1] if prefix else vocabulary][word]

    def of_end(prefix):
        return -0.3 * len(prefix)

    def score(text, log_p):
        terms = sum(added(text[:place], word) for place, word in enumerate(text)) + of_end(text) if fluent else 0.0
        return log_p / len(text) ** penalty + terms

    summed = texts_of_graph(log_probs, links)
    expected = {text: score(text, log_p) for text, log_p in summed.items()}
    ranked = sorted(expected, key=lambda text: (-expected[text], text))
    options = {"added": added, "of_end": of_end, "most_added": max(map(max, bonus))} if fluent else {}
    found = dag_beam_of_sentence(log_probs.numpy(), links.numpy(), 400, penalty, words_per_vertex=vocabulary, **options)
    assert len(found) == min(400, len(ranked))
    for (text, value, log_p), best in zip(found[:50], ranked[:50], strict=True):
        assert text == best
        assert value == pytest.approx(expected[best], abs=1e-9)
        assert log_p == pytest.approx(summed[best], abs=1e-9)


def test_narrow_beam_finds_the_likeliest_text_of_peaked_graphs():
    found = 0
    for seed in range(10):
        links = random_graph(6, 6, seed)
        logits = 4 * torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        log_probs = logits.log_softmax(dim=1)
        expected = texts_of_graph(log_probs, links)
        found += dag_beam_of_sentence(log_probs.numpy(), links.numpy(), 5)[0][0] == max(expected, key=expected.get)
    assert found >= 9


def test_beam_respects_the_most_tokens():
    links = random_graph(7, 7, seed=2)
    log_probs = torch.zeros(7, 2, dtype=torch.float64).log_softmax(dim=1)
    for longest in (1, 2, 4):
        texts = dag_beam_of_sentence(log_probs.numpy(), links.numpy(), 50, 2.0, longest=longest)
        assert max(len(text) for text, _, _ in texts) == longest


def test_passing_probabilities_and_positions_equal_enumeration():
    sizes = [1, 2, 4, 7]
    links = torch.stack([random_graph(length, 7, seed) for seed, length in enumerate(sizes)])
    passed, positions = passing(links)
    for row, length in enumerate(sizes):
        chance, moment = torch.zeros(7, dtype=torch.float64), torch.zeros(7, dtype=torch.float64)
        for path in paths(length):
            share = math.exp(log_chance(path, links[row]))
            for place, vertex in enumerate(path):
                chance[vertex] += share
                moment[vertex] += share * place
        assert torch.allclose(passed[row], chance, atol=1e-12)
        real = slice(0, length)
        assert torch.allclose(positions[row, real], moment[real] / chance[real], atol=1e-10)


def test_sum_of_powers_is_the_solution_of_the_triangular_system():
    links = torch.stack([random_graph(length, 9, seed) for seed, length in enumerate([1, 2, 5, 9])]).exp()
    right = torch.rand(4, 1, 9, dtype=torch.float64)
    torch.testing.assert_close(sum_of_powers(right, links, doublings=4), solve_forward(right, links))


@pytest.mark.parametrize("target", [[1, 2, 1, 2], [1, 2, 3, 1], [1], [1, 1, 1, 1, 1, 1, 1]])
def test_fuzzy_overlap_equals_enumeration(target):
    vertices = 6
    links = random_graph(vertices, vertices, seed=6)
    places = len(target) + 1
    chances = torch.rand(vertices, places, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    chances = chances / chances.sum(dim=1, keepdim=True) * 0.9
    pairs = list(itertools.pairwise(target)) if len(target) > 1 else [(word,) for word in target]
    expected = dict.fromkeys(pairs, 0.0)
    number = grams = 0.0
    for path in paths(vertices):
        share, written = math.exp(log_chance(path, links)), path[1:]
        number += share * len(written)
        windows = list(itertools.pairwise(written)) if len(target) > 1 else [(vertex,) for vertex in written]
        grams += share * len(windows)
        for gram in expected:
            for window in windows:
                expected[gram] += share * math.prod(float(chances[j, w]) for j, w in zip(window, gram, strict=True))
    matched = sum(min(pairs.count(gram), count) for gram, count in expected.items())
    brevity = min(1.0, math.exp(1 - len(target) / number))
    overlap, length = fuzzy_overlap(chances[None], links[None], torch.tensor([target]))
    assert float(length) == pytest.approx(number, abs=1e-10)
    assert float(overlap) == pytest.approx(brevity * matched / grams, abs=1e-10)


def test_gradient_of_the_fuzzy_overlap_equals_finite_differences():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 1, 5, 5, dtype=torch.float64, generator=generator).requires_grad_()
    chances = torch.rand(2, 5, 4, dtype=torch.float64, generator=generator).div(4).requires_grad_()
    gates = torch.zeros(2, 1, 5, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 3], [1, 2, -100]])

    def overlap(values, scores):
        return fuzzy_overlap(values, gated_links(scores, gates), labels)[0].sum()

    assert torch.autograd.gradcheck(overlap, (chances, logits))
