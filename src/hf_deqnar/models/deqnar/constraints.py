"""Tokens that a translation must contain, such as the terms of a glossary."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

MAX_TERMS = 6  # of one sentence: the search has a state for every subset of them

# States of the search: ("free", used), ("after", used) and ("term", used, term, symbol), where `used` is the set of
# terms that are complete, as bits.
State = tuple


class ForcedSearch:
    """The most likely sequence of tokens on a canvas that contains given terms, each followed by the start of a word.

    argmax_a Σ_t log p(a_t) over the sequences a of one token per position in which the terms occur as contiguous tokens
    that do not overlap, in any order. With `merge`, what counts is the text of the sequence: equal neighbours are one
    token, and blanks are removed (CTC). Otherwise every position is a token of the text.

    Args:
        terms: token ids of each term.
        blank: id of the token that is not part of the text.
        merge: whether equal neighbours are one token of the text.
        word_starts: (vocabulary) bool, tokens that may follow a term; None for all.
    """

    def __init__(self, terms: list[list[int]], blank: int, merge: bool, word_starts: Tensor | None = None) -> None:
        if len(terms) > MAX_TERMS:
            raise ValueError(f"forced_tokens has {len(terms)} terms for a sentence; at most {MAX_TERMS} are possible.")
        self.terms, self.blank, self.merge, self.word_starts = terms, blank, merge, word_starts
        self.all_used = (1 << len(terms)) - 1
        # With `merge`, an optional blank stands between the tokens of a term; between equal ones it is required.
        self.symbols = [self.spread(term) if merge else list(term) for term in terms]

    def spread(self, term: list[int]) -> list[int]:
        return [symbol for token in term for symbol in (self.blank, token)][1:]

    def begins_word(self, token: int) -> bool:
        return self.word_starts is None or bool(self.word_starts[token])

    def moves(self, state: State) -> Iterator[tuple[State, int | None, int | None]]:
        """Following states, each with the token that is emitted; None for any, or for any start of a word but one.

        A start of a word is marked by the third value: the token that it must not be, −1 if there is none.
        """
        kind, used = state[:2]
        if kind == "free":
            yield state, None, None
            yield from self.entries(used, None)
        elif kind == "after":
            yield state, self.blank, None
            yield ("free", used), None, -1
            yield from self.entries(used, -1)
        else:
            _, _, term, place = state
            symbols = self.symbols[term]
            if self.merge:
                yield state, symbols[place], None
            if place + 1 < len(symbols):
                yield ("term", used, term, place + 1), symbols[place + 1], None
                skips = self.merge and place + 2 < len(symbols) and symbols[place] != self.blank
                if skips and symbols[place] != symbols[place + 2]:
                    yield ("term", used, term, place + 2), symbols[place + 2], None
            else:
                used |= 1 << term
                last = symbols[place] if self.merge else -1
                yield ("after", used), self.blank, None
                yield ("free", used), None, last
                yield from self.entries(used, last)

    def entries(self, used: int, last: int | None) -> Iterator[tuple[State, int, None]]:
        """The first tokens of terms that are left; after another term (`last`) only those that begin a word."""
        for term, symbols in enumerate(self.symbols):
            if not used >> term & 1 and (last is None or (symbols[0] != last and self.begins_word(symbols[0]))):
                yield ("term", used, term, 0), symbols[0], None

    def is_end(self, state: State) -> bool:
        if state[0] == "term":
            _, used, term, place = state
            return used | 1 << term == self.all_used and place + 1 == len(self.symbols[term])
        return state[1] == self.all_used

    def __call__(self, log_probs: Tensor) -> tuple[list[int], list[bool]] | None:
        """The tokens of all positions, and which of them belong to a term; None if the terms do not fit.

        Args:
            log_probs: (positions, vocabulary) of one canvas.
        """
        starts = log_probs.clone()
        starts[:, self.blank] = float("-inf")
        if self.word_starts is not None:
            starts[:, ~self.word_starts] = float("-inf")
        any_best, any_tokens = (values.tolist() for values in log_probs.max(dim=1))
        bests: dict[int, tuple[list[float], list[int]]] = {}

        def best_start(position: int, excluded: int) -> tuple[float, int]:
            if excluded not in bests:
                allowed = starts.clone()
                if excluded >= 0:
                    allowed[:, excluded] = float("-inf")
                best, tokens = allowed.max(dim=1)
                bests[excluded] = best.tolist(), tokens.tolist()
            return bests[excluded][0][position], bests[excluded][1][position]

        scores: dict[State, float] = {("free", 0): 0.0}
        history: list[dict[State, tuple[State, int]]] = []
        rows = log_probs.tolist()
        for position, row in enumerate(rows):
            reached: dict[State, float] = {}
            origins: dict[State, tuple[State, int]] = {}
            for state, score in scores.items():
                for following, token, excluded in self.moves(state):
                    if token is not None:
                        value = row[token]
                    elif excluded is None:
                        value, token = any_best[position], any_tokens[position]
                    else:
                        value, token = best_start(position, excluded)
                    if score + value > reached.get(following, float("-inf")):
                        reached[following], origins[following] = score + value, (state, token)
            scores = reached
            history.append(origins)
        ends = {state: score for state, score in scores.items() if self.is_end(state)}
        if not ends:
            return None
        state = max(ends, key=lambda end: ends[end])
        tokens, inside = [], []
        for origins in reversed(history):
            inside.append(state[0] == "term")
            state, token = origins[state]
            tokens.append(token)
        return tokens[::-1], inside[::-1]


def contains_terms(tokens: list[int], terms: list[list[int]], word_starts: Tensor | None) -> bool:
    """Whether a text contains all terms, without overlap, each at its end or followed by the start of a word.

    >>> contains_terms([7, 8, 9], [[8, 9], [7]], None), contains_terms([7, 8, 9], [[8, 9], [9]], None)
    (True, False)
    """

    def search(remaining: list[list[int]], taken: frozenset[int]) -> bool:
        if not remaining:
            return True
        term, *others = remaining
        for first in range(len(tokens) - len(term) + 1):
            places = frozenset(range(first, first + len(term)))
            end = first + len(term)
            follows = word_starts is None or end == len(tokens) or bool(word_starts[tokens[end]])
            here = follows and not places & taken and list(tokens[first:end]) == list(term)
            if here and search(others, taken | places):
                return True
        return False

    return search(terms, frozenset())


def check_forced(forced: Any, sentences: int) -> None:
    """Raise ValueError unless there is a list of terms, lists of token ids, for every sentence."""
    if not isinstance(forced, (list, tuple)) or len(forced) != sentences:
        raise ValueError(f"forced_tokens must be a list with the terms of each of the {sentences} sentences.")
    for terms in forced:
        for term in terms:
            if not isinstance(term, (list, tuple)) or not term or not all(isinstance(token, int) for token in term):
                raise ValueError(f"A term of forced_tokens must be a list of token ids, not {term!r}.")


__all__ = ["ForcedSearch", "check_forced", "contains_terms"]
