"""The solver and its gradients on a problem without text: PageRank, and learning its damping factor.

PageRank is the fixed point of p = d·A·p + (1 − d)/n, where column j of A spreads the weight of page j over its links.

    python examples/fixed_point_outside_translation.py
"""

import argparse

import torch

from hf_deqnar import GradientOptions, equilibrium, solve


def random_web(pages: int, links: int = 5) -> torch.Tensor:
    """A, (pages, pages): every page links to a few others."""
    targets = torch.rand(pages, pages).topk(links, dim=0).indices
    return torch.zeros(pages, pages).scatter(0, targets, 1.0 / links)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=500)
    parser.add_argument("--steps", type=int, default=60, help="steps of learning the damping factor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    pages = options.pages
    web = random_web(pages)

    def pagerank(damping: torch.Tensor | float):  # noqa: ANN202
        # The first dimension of a state is rows, which converge separately; here there is one.
        return lambda ranks: damping * ranks @ web.T + (1 - damping) / pages

    figures = {}
    start = torch.full((1, pages), 1 / pages)
    exact = torch.linalg.solve(torch.eye(pages) - 0.85 * web, torch.full((pages,), 0.15 / pages))
    for solver in ("picard", "anderson", "broyden"):
        found = solve(pagerank(0.85), start, solver=solver, max_nfe=100, tol=1e-5)
        error = float((found.value[0] - exact).norm() / exact.norm())
        figures[solver] = error
        print(f"{solver:>8}: {int(found.nfe)} evaluations, error {error:.1e}")

    # The damping factor that explains observed ranks, through the implicit function theorem.
    logit = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([logit], lr=0.1)
    gradient = GradientOptions("ift", tol=1e-6, max_nfe=50)
    for _ in range(options.steps):
        found = equilibrium(pagerank(logit.sigmoid()), start, gradient=gradient, max_nfe=100, tol=1e-6)
        loss = (pages * (found.value[0] - exact)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    figures["damping"] = float(logit.detach().sigmoid())
    print(f"learned damping factor: {figures['damping']:.3f}; the ranks were made with 0.850")
    return figures


if __name__ == "__main__":
    main()
