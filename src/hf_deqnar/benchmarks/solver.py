"""Our solvers against torchdeq's, on the model's own transition and a ragged batch.

All contenders solve the same masked function to the same tolerance from the same start, and take turns. Ours let a row
leave when it has converged; torchdeq's go on until the slowest row has. An evaluation is one row seen by the transition
once.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.fixed_point import SOLVERS, measure_residual, solve
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.transition_deqnar import BoundTransition
from .common import interleaved_seconds, machine, markdown_table, untrained_model
from .options import SolverOptions

THEIR_NAMES = {"picard": "fixed_point_iter", "anderson": "anderson", "broyden": "broyden"}


@dataclass
class Problem:
    """One ragged batch, bound to a model's transition."""

    bound: BoundTransition
    mask: Tensor
    initial: Tensor

    @classmethod
    @torch.no_grad()
    def ragged(cls, model: DeqNarForConditionalGeneration, rows: int, shortest: int, longest: int) -> "Problem":
        """Random sentences with lengths spread evenly from shortest to longest; canvases are as long as they."""
        lengths = torch.linspace(shortest, longest, rows).round().long()
        config = model.config
        mask = torch.arange(longest)[None] < lengths[:, None]
        words = torch.randint(10, config.vocab_size, mask.shape)
        source = model.prepare(torch.where(mask, words, config.pad_token_id), mask)
        canvas = model.lay_out(source, lengths=lengths)
        found = model.solve(source, canvas, max_nfe=1)
        return cls(found.function, canvas.mask, torch.zeros_like(found.state))

    def function(self, state: Tensor) -> Tensor:
        """For solvers that know no masks: padding held at zero."""
        return self.bound(state) * self.mask[:, :, None]


def their_solver(name: str, problem: Problem, options: SolverOptions, calls: list) -> Callable[[], Tensor]:
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
        solver = get_solver(THEIR_NAMES[name])
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
        ours = lambda name=name: solve(problem.bound, problem.initial, solver=name, **settings)  # noqa: E731
        calls: list[int] = []
        theirs = their_solver(name, problem, options, calls)
        found, answer = ours(), theirs()
        runs[f"ours {name}"], runs[f"torchdeq {name}"] = ours, theirs
        results[f"ours {name}"] = {"evaluations": int(found.nfe.sum()), "residual": _worst(problem, found.value)}
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
        rival = figures["results"].get(name.replace("ours", "torchdeq"))
        speed = f"{rival['milliseconds'] / result['milliseconds']:.2f}×" if name.startswith("ours") else ""
        rows.append([name, f"{result['milliseconds']:.0f}", result["evaluations"], f"{result['residual']:.1e}", speed])
    headers = ["solver", "ms", "evaluations", "worst residual", "speed against torchdeq's"]
    return f"{figures['machine']}\n{figures['settings']}\n\n{markdown_table(headers, rows)}"
