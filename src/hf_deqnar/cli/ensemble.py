"""Combine several teachers to one that averages their predictions.

    hf-deqnar ensemble --models runs/teacher-1 runs/teacher-2 --output_dir runs/ensemble

The result is a model like any other: `hf-deqnar evaluate`, `distill --teacher` and `--reranker` take it. The models
need the same tokenizer; they may differ in size. It decodes with the generation config of the first one.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class EnsembleArguments:
    """The members, and where the ensemble is saved."""

    models: list[str] = field(metadata={"help": "Directories or hub ids of two or more encoder-decoder models."})
    output_dir: str = field(metadata={"help": "Folder of the ensemble; it must not exist."})


ARGUMENTS = (EnsembleArguments,)


def run(arguments: EnsembleArguments) -> None:
    from ..models.deqnar.configuration_deqnar import is_deqnar
    from ..models.deqnar.reranking import check_same_tokens
    from ..models.ensemble.modeling_ensemble import EnsembleForConditionalGeneration
    from .loading import load_model
    from .tables import save_atomically

    output = Path(arguments.output_dir)
    if output.exists():
        raise FileExistsError(f"{output} exists; choose another output_dir.")
    members = [load_model(name, "cpu", runtime="torch") for name in arguments.models]
    tokenizer = members[0][1]
    for name, (model, other_tokenizer) in zip(arguments.models, members, strict=True):
        check_same_tokens(tokenizer, other_tokenizer, name)
        if is_deqnar(model.config):
            raise ValueError(f"{name} is not autoregressive; an ensemble averages the next tokens of several teachers.")
    ensemble = EnsembleForConditionalGeneration.of([model for model, _ in members])
    save_atomically(ensemble, tokenizer, output)
    print(f"{output} averages {len(members)} models with {ensemble.num_parameters():,} parameters.")
