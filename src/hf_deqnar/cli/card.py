"""The model card of a rung: what the ladder and its figures say, in the form that the Hub reads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import PreTrainedConfig

from .ladder import Ladder, Rung, table, wanted

MARK = "<!-- Made by hf-deqnar release, which replaces it. -->"
METRICS = {"bleu": "BLEU", "chrf": "chrF"}
EXAMPLES = {"en": "Where is the train station?", "de": "Wo ist der Bahnhof?", "fr": "Où est la gare ?"}


def make_card(
    ladder: Ladder, rung: Rung, decoding: str, config: PreTrainedConfig, *, name: str, half: bool, boxed: bool
) -> ModelCard:
    """The card of a rung's model.

    Args:
        decoding: the one whose options are the defaults of the release.
        name: what the model is called where the card shows how to load it.
        half: whether the weights are stored in half precision.
        boxed: whether it is the model in the box, which the package brings and carries no code of its own.
    """
    about, known = ladder.about, ladder.figures(rung.name)
    example = EXAMPLES.get(ladder.test["source"], "…")
    sections = {
        "How to use it": usage(config, name, example, boxed),
        "Data and licence": f"{about['attribution']}\n\nLicence of this model: {about['licence']}.",
        "How it was made": recipe(ladder, rung.name, known["machine"]),
        "Figures": figures(ladder, rung, decoding, known["decodings"][decoding], half),
        "Limits": about["limits"],
    }
    text = [f"# {about['title']}: {rung.title}", what_it_is(ladder, config, known["parameters"], half)]
    text += [f"## {heading}\n\n{content}" for heading, content in sections.items()]
    data = metadata(ladder, name, config, known["decodings"][decoding])
    return ModelCard("\n\n".join([f"---\n{data.to_yaml()}\n---", *text, MARK]) + "\n")


def metadata(ladder: Ladder, name: str, config: PreTrainedConfig, found: dict[str, Any]) -> ModelCardData:
    """What the Hub files the model under, with the figures of one decoding."""
    about, source, target = ladder.about, ladder.test["source"], ladder.test["target"]
    dataset = "-".join(about["dataset"].lower().split())
    test = {
        "task_type": "translation",
        "task_name": f"Translation {source} to {target}",
        "dataset_type": dataset,
        "dataset_name": about["dataset"],
        "dataset_config": f"{source}-{target}",
        "dataset_split": "test",
    }
    results = [
        EvalResult(
            metric_type=metric,
            metric_name=label,
            metric_value=round(found[metric], 2),
            metric_args={"signature": found[f"{metric}_signature"]},
            **test,
        )
        for metric, label in METRICS.items()
    ]
    return ModelCardData(
        language=[source, target],
        license=about["licence"],
        library_name="transformers",
        pipeline_tag="translation",
        tags=["hf_deqnar", *kinds(config)],
        datasets=[dataset],
        metrics=list(METRICS),
        model_name=name,
        eval_results=results,
    )


def kinds(config: PreTrainedConfig) -> list[str]:
    """Tags by which people look for such models."""
    if config.model_type != "deqnar":
        return [config.model_type]
    return ["non-autoregressive", *([] if config.refinement == "stacked" else ["deep-equilibrium"])]


def what_it_is(ladder: Ladder, config: PreTrainedConfig, parameters: int, half: bool) -> str:
    """Its languages, its way of writing and its size."""
    counted = f" and {config.ngram_entries:,} n-grams" if getattr(config, "ngram_entries", 0) else ""
    size = f"{parameters / 1e6:.1f} million parameters{counted}{', stored in half precision' if half else ''}"
    languages = f"Translates from `{ladder.test['source']}` to `{ladder.test['target']}`."
    if config.model_type != "deqnar":
        way = f"It writes one word after the other (an autoregressive {config.model_type} model)."
    elif config.refinement == "stacked":
        way = f"It writes all words of a sentence at once, in one pass through {layers(config.decoder_layers)}."
    else:
        way = (
            f"It writes all words of a sentence at once and then lets them settle: {layers(config.decoder_depth)} "
            f"{'is' if config.decoder_depth == 1 else 'are'} applied until nothing changes any more, a point that is "
            f"solved for directly (a deep equilibrium, `{config.refinement}`)."
        )
    return f"{languages} {way} It has {size}."


def layers(count: int) -> str:
    return "one decoder layer" if count == 1 else f"{count} decoder layers"


def usage(config: PreTrainedConfig, name: str, example: str, boxed: bool) -> str:
    """Blocks that run as they are, with the package and without it."""
    model = "hf_deqnar.BOX" if boxed else f'"{name}"'
    translated = f'print(translate("{example}"))'
    with_package = python(
        "from transformers import pipeline",
        "import hf_deqnar  # registers the models and the translation pipeline",
        "",
        f'translate = pipeline("translation", model={model})',
        translated,
    )
    if boxed:
        command = f'```\nhf-deqnar translate --watch "{example}"\n```'
        return f"It comes with the package `hf_deqnar`, and needs no download:\n\n{command}\n\n{with_package}"
    opening = f"`{name}` stands for where it lies: this folder, or its name on the Hub. With the package `hf_deqnar`:"
    if config.model_type.startswith("deqnar"):
        way = "Without the package, transformers runs the code that lies beside the weights, if you trust it:"
        without = python(
            "from transformers import pipeline",
            "",
            f'translate = pipeline("translation", model="{name}", trust_remote_code=True)',
            translated,
        )
    else:
        way = "Without the package:"
        without = python(
            "from transformers import AutoModelForSeq2SeqLM, AutoTokenizer",
            "",
            f'model = AutoModelForSeq2SeqLM.from_pretrained("{name}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            f'batch = tokenizer(["{example}"], return_tensors="pt")',
            "print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))",
        )
    return "\n\n".join([opening, with_package, way, without])


def python(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])


def recipe(ladder: Ladder, name: str, machine: dict[str, Any]) -> str:
    """The commands in their order, with all settings; data and results lie where a reader may put them."""
    shown = replace(ladder, data=Path("data"), output=Path())
    steps = []
    for number, each in enumerate(lineage(ladder, name), start=1):
        rung = ladder.rungs[each]
        settings = yaml.safe_dump(shown.filled(rung), allow_unicode=True, sort_keys=False)
        steps.append(f"{number}. `hf-deqnar {rung.verb} {each}.yaml` with\n\n```yaml\n{settings}```")
    where = (
        f"The last step ran on {machine['processor']} ({machine['threads']} threads) with torch {machine['torch']} and "
        f"transformers {machine['transformers']}."
    )
    return "\n\n".join(["`data` is the folder of the corpus.", *steps, where])


def lineage(ladder: Ladder, name: str) -> list[str]:
    """The rung and all that it learns from, one through another, in the order of the file."""
    found = {name}
    for other in reversed(ladder.rungs):  # a rung only learns from those above it
        if other in found:
            found |= ladder.rungs[other].learns_from()
    return [other for other in ladder.rungs if other in found]


def figures(ladder: Ladder, rung: Rung, decoding: str, found: dict[str, Any], half: bool) -> str:
    """What it scores, beside the rungs that it needs."""
    row = f"{rung.title}, {decoding}" if decoding else rung.title
    opening = (
        f"On the {found['sentences']:,} sentences of the test set of {ladder.about['dataset']}, beside what it learned "
        f"from. This model, with its default options, is the row '{row}'; evaluations are those of the decoder, per "
        "sentence."
    )
    if half:
        opening += " It was measured before its weights were rounded to half precision."
    return f"{opening}\n\n{table(ladder, wanted(ladder, [rung.name]))}\n\nchrF {found['chrf_signature']}"
