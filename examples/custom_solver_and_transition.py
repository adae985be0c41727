"""A solver and a transition of your own, used by a model without a change to the library.

python examples/custom_solver_and_transition.py
"""

from typing import Any

import torch
from torch import Tensor

import hf_deqnar
from hf_deqnar.models.deqnar.configuration_deqnar import CHOICES
from hf_deqnar.models.deqnar.solvers import SOLVERS, anderson
from hf_deqnar.models.deqnar.transition_deqnar import TRANSITIONS, ImplicitTransition

calls = []


def half_anderson(history: Any, step: Any, ridge: Any) -> Tensor:
    """Half of the weights of Anderson: between its steps and those of Picard. The signature is that of `Solver`."""
    calls.append(len(ridge))
    return 0.5 * anderson(history, step, ridge)


class BoundedTransition(ImplicitTransition):
    """The implicit transition with a state that cannot grow: z ← b·tanh(F(z)/b)."""

    bound = 2.0

    def next_state(self, features: Tensor, context: Any) -> Tensor:
        return self.bound * (super().next_state(features, context) / self.bound).tanh()


def register() -> None:
    """Add both to their tables, under new names."""
    SOLVERS["half_anderson"] = half_anderson
    TRANSITIONS["bounded"] = BoundedTransition
    for field, name in (("solver", "half_anderson"), ("refinement", "bounded")):
        if name not in CHOICES[field]:
            CHOICES[field] = (*CHOICES[field], name)


def main() -> dict[str, Any]:
    register()
    torch.manual_seed(0)
    fields = {"vocab_size": 50, "length": "ctc", "feedback": "sum"}
    config = hf_deqnar.DeqNarConfig.preset("tiny", refinement="bounded", solver="half_anderson", **fields)
    model = hf_deqnar.DeqNarForConditionalGeneration(config).eval()
    tokens = torch.randint(6, 50, (2, 7))
    out = model.generate(tokens, max_nfe=50, tol=1e-4, return_dict_in_generate=True)
    states = model(input_ids=tokens).last_hidden_state
    figures = {"evaluations": out.nfe.tolist(), "converged": out.converged.tolist(), "solver_calls": len(calls)}
    figures["largest_state"] = float(states.abs().max())
    print(figures)
    return figures


if __name__ == "__main__":
    main()
