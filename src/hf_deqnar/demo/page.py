"""The page of `hf-deqnar demo` and of a Hugging Face Space, with Gradio."""

import math
import time
from collections.abc import Iterator
from typing import Any

import gradio

from ..documents.translator import Translator
from .convergence import STYLE, curve_svg, draft_html, figures_html, list_html
from .solves import Solve, compare, sentences_of, solve_all

EXAMPLES = ("Where is the train station?", "I would like a cup of coffee.", "My sister has two children and a dog.")
MOST_CHARACTERS = 2000
MODELS_OWN = "the model's"
FONT = ("system-ui", "-apple-system", "Segoe UI", "sans-serif")
FONT_MONO = ("ui-monospace", "Consolas", "monospace")


def launch_options() -> dict[str, Any]:
    """Options of `launch`: fonts of the reader's system, and nothing from other hosts."""
    theme = gradio.themes.Base(font=list(FONT), font_mono=list(FONT_MONO))
    return {"theme": theme, "css": STYLE, "footer_links": [], "ssr_mode": False, "quiet": True, "share": False}


def create_page(translator: Translator, others: dict[str, Translator] | None = None) -> gradio.Blocks:
    """The page.

    Args:
        translator: of the deqnar model whose evaluations are shown.
        others: models to compare with, by the name that the page shows.
    """
    others = others or {}
    beam_option = translator.model.length_model.beam_option
    own = translator.model.generation_config
    nothing = "None"

    def translate(
        text: str,
        evaluations: float,
        tolerance: float,
        solver: str,
        beam: float,
        nbest: float,
        seconds: float,
        other: str,
    ) -> Iterator[tuple[str, str, str, str, str, str]]:
        text = text or ""
        if len(text) > MOST_CHARACTERS:
            raise gradio.Error(
                f"The text has {len(text):,} characters; at most {MOST_CHARACTERS:,} are translated here."
            )
        sentences = sentences_of(text, translator)
        if not sentences:
            yield "", "", "", "", "", ""
            return
        options: dict[str, Any] = {
            beam_option: max(int(beam), int(nbest)),
            "max_nfe": int(evaluations),
            "tol": tolerance,
        }
        if solver != MODELS_OWN:
            options["solver"] = solver
        try:
            solves, duration = solve_all(translator, sentences, int(nbest), **options)
        except ValueError as error:
            raise gradio.Error(str(error)) from error
        steps = max(len(solve.drafts) for solve in solves)
        for step in range(1, steps):
            yield "", "", show_drafts(solves, step), show_curve(solves, step, tolerance), "", ""
            time.sleep(seconds)
        compared = ""
        if other in others:
            found, taken = compare(others[other], sentences)
            compared = figures_html([("Model", other), ("Translation", found), ("Time", f"{taken * 1000:.0f} ms")])
        yield (
            " ".join(solve.text for solve in solves),
            figures_html(figures_of(solves, duration)),
            show_drafts(solves, steps),
            show_curve(solves, steps, tolerance),
            "".join(list_html(solve.alternatives) for solve in solves) if nbest > 1 else "",
            compared,
        )

    with gradio.Blocks(title="hf_deqnar", analytics_enabled=False) as page:
        gradio.Markdown("# Translation as a fixed point\nAll words are predicted in parallel, until they converge.")
        with gradio.Row():
            with gradio.Column(min_width=280):
                text = gradio.Textbox(
                    label="Text", lines=3, max_length=MOST_CHARACTERS, autofocus=True, elem_id="text",
                    info="Shift and Enter translates.",
                )  # fmt: skip
                button = gradio.Button("Translate", variant="primary", elem_id="translate")
                gradio.Examples([[example] for example in EXAMPLES], text)
            with gradio.Column(min_width=280):
                translation = gradio.Textbox(label="Translation", lines=3, interactive=False, elem_id="translation")
                figures = gradio.HTML(elem_id="figures")
        gradio.Markdown(
            "## Convergence\nA number is the evaluation since which a word did not change. "
            "A beam search may choose other words from the last evaluation."
        )
        drafts = gradio.HTML(elem_id="drafts")
        curve = gradio.HTML(elem_id="curve")
        with gradio.Accordion("Options", open=False):
            with gradio.Row():
                evaluations = gradio.Slider(
                    1, 50, own.max_nfe or translator.model.config.max_nfe, step=1, label="Most evaluations"
                )
                tolerance = gradio.Number(
                    own.tol or translator.model.config.tol, label="Tolerance", minimum=1e-6, maximum=1
                )
                solver = gradio.Dropdown(
                    [MODELS_OWN, "picard", "anderson", "broyden"], value=MODELS_OWN, label="Solver"
                )
            with gradio.Row():
                beam = gradio.Slider(1, 10, getattr(own, beam_option), step=1, label="Beam size")
                nbest = gradio.Slider(1, 5, 1, step=1, label="Alternatives")
                seconds = gradio.Slider(0, 1, 0.3, step=0.1, label="Seconds between drafts")
            other = gradio.Dropdown([nothing, *others], value=nothing, label="Compare with", visible=bool(others))
        alternatives = gradio.HTML(elem_id="alternatives")
        compared = gradio.HTML(elem_id="compared")
        inputs = [text, evaluations, tolerance, solver, beam, nbest, seconds, other]
        outputs = [translation, figures, drafts, curve, alternatives, compared]
        gradio.on(
            [button.click, text.submit], translate, inputs, outputs, api_name="translate", show_progress="minimal"
        )
    return page


def show_drafts(solves: list[Solve], step: int) -> str:
    """The drafts of all sentences after an evaluation; a sentence that has converged does not change."""
    lines = [draft_html(solve.drafts[:step], len(solve.drafts)) for solve in solves]
    return "".join(f'<p class="deqnar-draft">{line}</p>' for line in lines)


def curve_title(number: int, count: int) -> str:
    """The heading of the curve of a sentence."""
    return "Relative residual" if count == 1 else f"Sentence {number}: relative residual"


def show_curve(solves: list[Solve], step: int, tolerance: float) -> str:
    """The residual curves of all sentences."""
    return "".join(
        curve_svg(solve.residuals[:step], len(solve.residuals), tolerance, curve_title(number, len(solves)))
        for number, solve in enumerate(solves, start=1)
        if solve.residuals
    )


def figures_of(solves: list[Solve], seconds: float) -> list[tuple[str, str]]:
    """Quality estimate, evaluations, residual and time."""
    rows = [quality_of(solves)]
    rows.append(("Evaluations of the decoder", ", ".join(str(solve.nfe) for solve in solves)))
    if all(solve.residuals for solve in solves):
        rows.append(("Residual", ", ".join(f"{solve.residuals[-1]:.1e}" for solve in solves)))
        rows.append(("Converged", ", ".join("yes" if solve.converged else "no" for solve in solves)))
    return [*rows, ("Time", f"{seconds * 1000:.0f} ms")]


def quality_of(solves: list[Solve]) -> tuple[str, str]:
    """The mean quality estimate of the sentences, or what is known without one."""
    known = [solve.quality for solve in solves if solve.quality is not None]
    if len(known) == len(solves):
        return "Quality estimate: expected chrF / 100", f"{sum(known) / len(known):.2f}"
    score = sum(solve.alternatives[0][0] for solve in solves) / len(solves)
    return "Quality estimate: mean probability of a token", f"{math.exp(score):.0%}"
