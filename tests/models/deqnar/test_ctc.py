import itertools
import math
from collections import defaultdict

import pytest
import torch

from hf_deqnar.models.deqnar.ctc import (
    bigram_overlap,
    collapse,
    ctc_loss,
    expected_bigrams,
    expected_length,
    likeliest,
    needed_canvas,
    viterbi_path,
)
from hf_deqnar.objectives.matching import aligned_target, edit_distance, matched_target


def by_definition(path: tuple[int, ...], blank: int) -> list[int]:
    """Merge repetitions, then remove blanks, by definition."""
    return [token for token, _ in itertools.groupby(path) if token != blank]


@pytest.mark.parametrize("target", [[1], [2, 2], [1, 2, 1], [3]])
def test_ctc_sums_over_all_paths(target):
    blank, canvas, vocabulary = 0, 4, 4
    logits = torch.randn(1, canvas, vocabulary, dtype=torch.float64)
    probabilities = logits.softmax(dim=-1)[0]
    total = sum(
        torch.stack([probabilities[t, token] for t, token in enumerate(path)]).prod()
        for path in itertools.product(range(vocabulary), repeat=canvas)
        if by_definition(path, blank) == target
    )
    loss, fits = ctc_loss(logits, torch.tensor([target]), torch.tensor([canvas]), torch.tensor([len(target)]), blank)
    assert fits.all()
    torch.testing.assert_close(loss[0].double(), -total.log(), rtol=1e-5, atol=1e-6)


def test_target_that_does_not_fit_has_zero_loss_and_is_marked():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.tensor([[1, 1, 1], [1, 2, -100]])
    loss, fits = ctc_loss(logits, targets, torch.tensor([3, 3]), torch.tensor([3, 2]), blank=0)
    loss.sum().backward()
    assert fits.tolist() == [False, True]
    assert loss[0] == 0
    assert logits.grad.isfinite().all()
    assert (logits.grad[0] == 0).all()


def padded_canvas(canvas: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a canvas with two positions of padding behind it, and its mask."""
    logits = torch.randn(1, canvas + 2, vocabulary, dtype=torch.float64, requires_grad=True)
    return logits, torch.arange(canvas + 2)[None] < canvas


@pytest.mark.parametrize("canvas", [1, 2, 5])
def test_expected_bigrams_and_length_are_sums_over_all_paths(canvas):
    vocabulary, blank = 4, 0
    logits, mask = padded_canvas(canvas, vocabulary)
    probs = logits.softmax(dim=-1)
    bigrams, length = torch.zeros(vocabulary, vocabulary, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for path in itertools.product(range(vocabulary), repeat=canvas):
        probability = torch.stack([probs[0, t, token] for t, token in enumerate(path)]).prod()
        text = by_definition(path, blank)
        length = length + len(text) * probability
        for pair in itertools.pairwise(text):
            bigrams[pair] = bigrams[pair] + probability
    found = expected_bigrams(probs, mask)[0], expected_length(probs, mask, blank)[0]
    for value, expected in zip(found, (bigrams, length), strict=True):
        torch.testing.assert_close(value, expected)
        weights = torch.randn_like(value)
        if expected.requires_grad:  # a canvas of one position has no bigrams
            gradient, by_paths = (
                torch.autograd.grad((one * weights).sum(), logits, retain_graph=True)[0] for one in (value, expected)
            )
            torch.testing.assert_close(gradient, by_paths)


def test_bigram_overlap_is_the_f1_of_expected_counts():
    vocabulary, blank, canvas = 4, 0, 5
    logits, mask = padded_canvas(canvas, vocabulary)
    probs = logits.softmax(dim=-1)
    expected = defaultdict(float)
    for text, probability in all_texts(probs[0, :canvas].detach().log(), blank).items():
        for pair in itertools.pairwise(text):
            expected[pair] += probability
    counts = {(2, 3): 2, (3, 2): 1}
    matched = sum(min(expected[pair], count) for pair, count in counts.items())
    overlap = 2 * matched / (sum(expected.values()) + sum(counts.values()))
    words, labels = torch.tensor([[0, 2, 3, 2, 3]]), torch.tensor([[1, 2, 1, 2, -100]])  # equal words have one place
    found = bigram_overlap(probs, mask, words, labels, blank)
    assert found.item() == pytest.approx(overlap)
    sure = torch.nn.functional.one_hot(torch.tensor([[2, 3, 0, 2, 3, 3, 3]]), vocabulary).double()
    assert bigram_overlap(sure, mask, words, labels, blank).item() == pytest.approx(1.0)
    shorter = torch.nn.functional.one_hot(torch.tensor([[2, 3, 0, 0, 0, 0, 0]]), vocabulary).double()
    assert bigram_overlap(shorter, mask, words, labels, blank).item() == pytest.approx(2 * 1 / (1 + 3))


def all_texts(log_probabilities: torch.Tensor, blank: int) -> dict[tuple[int, ...], float]:
    """Every text and its probability, by enumerating every path."""
    canvas, vocabulary = log_probabilities.shape
    texts = defaultdict(float)
    for path in itertools.product(range(vocabulary), repeat=canvas):
        probability = math.exp(sum(float(log_probabilities[t, token]) for t, token in enumerate(path)))
        texts[tuple(by_definition(path, blank))] += probability
    return dict(sorted(texts.items(), key=lambda item: -item[1]))


def test_collapse_merges_repetitions_and_then_removes_blanks():
    for path in itertools.product(range(3), repeat=5):
        for length in range(1, 6):
            tokens, counts = collapse(torch.tensor([path]), torch.tensor([length]), blank=0, padding=9)
            assert tokens[0, : int(counts)].tolist() == by_definition(path[:length], blank=0)


def test_collapse_pads_shorter_rows():
    paths = torch.tensor([[1, 0, 1, 2], [0, 0, 0, 0], [5, 5, 5, 5]])
    tokens, counts = collapse(paths, torch.tensor([4, 4, 4]), blank=0, padding=9)
    assert tokens.tolist() == [[1, 1, 2], [9, 9, 9], [5, 9, 9]]
    assert counts.tolist() == [3, 0, 1]


def random_case(seed: int, rows: int, canvas: int, target: int, vocabulary: int = 5):
    """Log-probabilities, targets without the symbol 0, and different lengths."""
    torch.manual_seed(seed)
    log_probabilities = (2 * torch.randn(rows, canvas, vocabulary, dtype=torch.float64)).log_softmax(dim=-1)
    targets = torch.randint(1, vocabulary, (rows, target))
    canvas_lengths = torch.randint(target, canvas + 1, (rows,))
    target_lengths = torch.randint(1, target + 1, (rows,))
    behind = torch.arange(target)[None] >= target_lengths[:, None]
    return log_probabilities, targets.masked_fill(behind, -100), canvas_lengths, target_lengths


@pytest.mark.parametrize("seed", range(6))
def test_viterbi_path_is_the_most_likely_path(seed):
    log_probabilities, targets, canvas_lengths, target_lengths = random_case(
        seed, rows=4, canvas=5, target=3, vocabulary=4
    )
    paths, scores = viterbi_path(log_probabilities, targets, canvas_lengths, target_lengths, blank=0)
    for row in range(4):
        canvas, target = int(canvas_lengths[row]), targets[row, : target_lengths[row]].tolist()
        best = max(
            (sum(float(log_probabilities[row, t, token]) for t, token in enumerate(path)), path)
            for path in itertools.product(range(4), repeat=canvas)
            if by_definition(path, 0) == target
        ) if needed_canvas(targets, target_lengths)[row] <= canvas else (-math.inf, (0,) * canvas)  # fmt: skip
        assert float(scores[row]) == pytest.approx(best[0])
        assert paths[row, :canvas].tolist() == list(best[1])
        assert (paths[row, canvas:] == 0).all()


def test_target_that_does_not_fit_has_no_viterbi_path():
    log_probabilities = torch.zeros(1, 2, 4).log_softmax(dim=-1)
    path, score = viterbi_path(log_probabilities, torch.tensor([[3, 3]]), torch.tensor([2]), torch.tensor([2]), blank=0)
    assert path.tolist() == [[0, 0]]
    assert score.item() == -math.inf


def monotone_alignments(canvas: int, target: int):
    """Every monotonic alignment of target tokens with predictions."""
    return itertools.combinations_with_replacement(range(canvas), target)


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(4))
def test_axe_is_the_monotonic_alignment_with_the_least_cost(seed, penalty):
    log_probabilities, targets, canvas_lengths, target_lengths = random_case(seed, rows=5, canvas=5, target=4)
    proxies, costs = aligned_target(log_probabilities, targets, canvas_lengths, target_lengths, 0, penalty)
    for row in range(5):
        canvas, length, table = int(canvas_lengths[row]), int(target_lengths[row]), -log_probabilities[row]
        options = []
        for alignment in monotone_alignments(canvas, length):
            proxy, cost = [0] * canvas, 0.0
            for token, position in zip(targets[row, :length].tolist(), alignment, strict=True):
                if proxy[position] == 0:
                    proxy[position], cost = token, cost + float(table[position, token])
                else:
                    cost += penalty * float(table[position, token])
            cost += sum(float(table[position, 0]) for position in range(canvas) if proxy[position] == 0)
            options.append((cost, proxy))
        best_cost, best_proxy = min(options)
        assert float(costs[row]) == pytest.approx(best_cost)
        assert proxies[row, :canvas].tolist() == best_proxy
        assert (proxies[row, canvas:] == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_oaxe_is_the_permutation_with_the_least_cost(seed):
    pytest.importorskip("scipy", reason="scipy is part of the train extra")
    log_probabilities, targets, _, lengths = random_case(seed, rows=5, canvas=5, target=5, vocabulary=7)
    proxies = matched_target(log_probabilities, targets, lengths)
    for row in range(5):
        length = int(lengths[row])

        def cost(tokens, row=row):
            return -sum(float(log_probabilities[row, position, token]) for position, token in enumerate(tokens))

        words = targets[row, :length].tolist()
        found = proxies[row, :length].tolist()
        assert sorted(found) == sorted(words)
        assert cost(found) == pytest.approx(min(cost(order) for order in itertools.permutations(words)))
        assert (proxies[row, length:] == -100).all()


def test_edit_distance_is_the_levenshtein_distance():
    def by_recursion(first, second):
        if not first or not second:
            return len(first) + len(second)
        return min(
            by_recursion(first[1:], second) + 1,
            by_recursion(first, second[1:]) + 1,
            by_recursion(first[1:], second[1:]) + (first[0] != second[0]),
        )

    torch.manual_seed(0)
    first, second = torch.randint(0, 3, (30, 5)), torch.randint(0, 3, (30, 4))
    lengths = torch.randint(0, 6, (30,)), torch.randint(0, 5, (30,))
    found = edit_distance(first, second, *lengths)
    for row in range(30):
        expected = by_recursion(first[row, : lengths[0][row]].tolist(), second[row, : lengths[1][row]].tolist())
        assert int(found[row]) == expected


@pytest.mark.parametrize("vocabulary", [3, 64, 130, 256])
def test_likeliest_equals_argmax(vocabulary):
    logits = torch.randn(50, 7, vocabulary)
    logits[0, 0] = 0.0  # all equal: the first
    logits[1] = float("-inf")
    logits[1, :, -1] = -1.0
    assert torch.equal(likeliest(logits), logits.argmax(dim=-1))
