"""Draw how one sentence converges: the residual after each evaluation, and each draft of the translation.

    python scripts/plot_convergence.py docs/convergence.png

The model is the bundled one. Drafts are read from the best CTC path; the final translation comes from the beam search
with n-grams, as in `hf-deqnar translate`.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_deqnar

SENTENCE = "I didn't know you had a week off last month."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="file of the drawing, PNG or SVG")
    parser.add_argument("--sentence", default=SENTENCE, help="English source (default: %(default)s)")
    parser.add_argument("--tol", type=float, default=1e-3, help="residual to stop at (default: %(default)s)")
    options = parser.parse_args(arguments)
    draw(*converge(options.sentence, options.tol), options.sentence, options.tol).savefig(options.output, dpi=150)


def converge(sentence: str, tol: float) -> tuple[list[str], list[float], str]:
    """Draft and residual of each evaluation, and the translation."""
    model = AutoModelForSeq2SeqLM.from_pretrained(hf_deqnar.PRETRAINED)
    tokenizer = AutoTokenizer.from_pretrained(hf_deqnar.PRETRAINED)
    batch = tokenizer([sentence], return_tensors="pt")
    out = model.generate(**batch, tol=tol, return_dict_in_generate=True, output_trajectory=True)
    steps = out.trajectory[0]
    drafts = tokenizer.batch_decode([step.tokens for step in steps], skip_special_tokens=True)
    (translation,) = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
    return drafts, [step.residual for step in steps], translation


def draw(drafts: list[str], residuals: list[float], translation: str, sentence: str, tol: float) -> Figure:
    """Residual against evaluations; a draft is written where it differs from the previous one."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots()
    evaluations = range(1, len(residuals) + 1)
    axes.semilogy(evaluations, residuals, marker="o", color="C0")
    axes.axhline(tol, color="grey", linestyle=":", linewidth=1)
    labels = {number: draft for number, draft in enumerate(drafts) if number == 0 or draft != drafts[number - 1]}
    for number, text in [*labels.items(), (len(drafts) - 1, f"beam search with n-grams: {translation}")]:
        last = number == len(drafts) - 1
        axes.annotate(
            text,
            (number + 1, residuals[number]),
            xytext=(-12, -3) if last else (10, 4),
            textcoords="offset points",
            ha="right" if last else "left",
            fontsize=9,
        )
    axes.set_xticks(evaluations)
    axes.set(title=sentence, xlabel="evaluations of the transition f", ylabel="‖f(z) − z‖ / ‖f(z)‖")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
