"""The solvers of hf_deqnar and torchdeq on the transition of a model and a batch of sentences of different lengths.

All solve the same masked function to the same tolerance from the same initial state, with interleaved runs. The solvers
of hf_deqnar remove a row from the batch when it has converged; those of torchdeq iterate until the slowest row has. One
evaluation is one row in one call of the transition.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.fixed_point import measure_residual, solve
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.solvers import SOLVERS
from ..models.deqnar.transition_deqnar import BoundTransition
from .common import interleaved_seconds, machine, markdown_table, untrained_model
from .options import SolverOptions

TORCHDEQ_NAMES = {"picard": "fixed_point_iter", "anderson": "anderson", "broyden": "broyden"}


@dataclass
class Problem:
    """A batch of sentences of different lengths, bound to the transition of a model."""

    bound: BoundTransition
    mask: Tensor
    initial: Tensor

    @classmethod
    @torch.no_grad()
    def ragged(cls, model: DeqNarForConditionalGeneration, rows: int, shortest: int, longest: int) -> "Problem":
        """Random sentences with lengths evenly spaced from shortest to longest; canvases have the same lengths."""
        lengths = torch.linspace(shortest, longest, rows).round().long()
        config = model.config
        mask = torch.arange(longest)[None] < lengths[:, None]
        words = torch.randint(10, config.vocab_size, mask.shape)
        source = model.prepare(torch.where(mask, words, config.pad_token_id), mask)
        canvas = model.lay_out(source, lengths=lengths)
        found = model.solve(source, canvas, max_nfe=1)
        return cls(found.function, canvas.mask, torch.zeros_like(found.state))

    def function(self, state: Tensor) -> Tensor:
        """The transition for solvers without masks: zero at padding."""
        return self.bound(state) * self.mask[:, :, None]


def torchdeq_solver(name: str, problem: Problem, options: SolverOptions, calls: list) -> Callable[[], Tensor]:
    try:
        from torchdeq.solver import get_solver
    except ImportError as error:
        raise ImportError("The comparison needs torchdeq: pip install 'hf_deqnar[test]'.") from error
    memory = {"anderson": {"m": options.memory + 1}, "broyden": {"LBFGS_thres": options.memory}}.get(name, {})

    def function(state: Tensor) -> Tensor:
        calls.append(len(state))
        return problem.function(state)

    @torch.no_grad()
    def run() -> Tensor:
        calls.clear()
        solver = get_solver(TORCHDEQ_NAMES[name])
        return solver(function, problem.initial, max_iter=options.max_nfe, tol=options.tol, stop_mode="rel", **memory)[
            0
        ]

    return run


def measure(options: SolverOptions) -> dict:
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    if options.model is None:
        model = untrained_model(DeqNarConfig.preset("small", vocab_size=4000))
    else:
        model = DeqNarForConditionalGeneration.from_pretrained(options.model)
    problem = Problem.ragged(model.eval(), options.rows, options.shortest, options.longest)
    settings = {"mask": problem.mask, "max_nfe": options.max_nfe, "tol": options.tol, "memory": options.memory}

    runs, results = {}, {}
    for name in SOLVERS:
        own = lambda name=name: solve(problem.bound, problem.initial, solver=name, **settings)  # noqa: E731
        calls: list[int] = []
        other = torchdeq_solver(name, problem, options, calls)
        found, answer = own(), other()
        runs[f"hf_deqnar {name}"], runs[f"torchdeq {name}"] = own, other
        results[f"hf_deqnar {name}"] = {"evaluations": int(found.nfe.sum()), "residual": _worst(problem, found.value)}
        results[f"torchdeq {name}"] = {"evaluations": sum(calls), "residual": _worst(problem, answer)}
    for name, seconds in interleaved_seconds(runs, options.repeats).items():
        results[name]["milliseconds"] = 1000 * seconds
    settings = {
        key: getattr(options, key) for key in ("rows", "shortest", "longest", "tol", "memory", "repeats", "seed")
    }
    settings |= {"model": options.model or "random, small", "d_model": model.config.d_model}
    return {"machine": machine(options.threads), "settings": settings, "results": results}


@torch.no_grad()
def _worst(problem: Problem, answer: Tensor) -> float:
    """The largest residual of any row, from one more evaluation at the answer."""
    return float(measure_residual(answer, problem.bound(answer), problem.mask).max())


def table(figures: dict) -> str:
    rows = []
    for name, result in figures["results"].items():
        other = figures["results"].get(name.replace("hf_deqnar", "torchdeq"))
        speed = f"{other['milliseconds'] / result['milliseconds']:.2f}×" if name.startswith("hf_deqnar") else ""
        rows.append([name, f"{result['milliseconds']:.0f}", result["evaluations"], f"{result['residual']:.1e}", speed])
    headers = ["solver", "ms", "evaluations", "worst residual", "speed relative to torchdeq"]
    return f"{figures['machine']}\n{figures['settings']}\n\n{markdown_table(headers, rows)}"
