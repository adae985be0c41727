"""Open a page that shows translations while they converge.

    hf-deqnar demo
    hf-deqnar demo --model my-model --compare my-teacher --port 7861

The page needs no network. Text is translated on this machine.
"""

from dataclasses import dataclass, field

from .extras import requires_extra


@dataclass
class DemoArguments:
    """Models and address."""

    model: str | None = field(default=None, metadata={"help": "Directory or hub id. Default: the bundled model."})
    compare: list[str] = field(
        default_factory=list, metadata={"help": "Other seq2seq models that the page can compare with."}
    )
    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0 for all networks."})
    port: int = field(default=7860, metadata={"help": "Port to listen on."})
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda:0. Default: cuda if available, else cpu."}
    )
    threads: int | None = field(
        default=None, metadata={"help": "Maximum number of threads. Default: one per processor core."}
    )

    def __post_init__(self) -> None:
        if not 1 <= self.port <= 65535:
            raise ValueError(f"--port must be from 1 to 65535, not {self.port}.")


ARGUMENTS = (DemoArguments,)


def run(arguments: DemoArguments) -> None:
    with requires_extra("demo", "hf-deqnar demo"):
        from ..demo.page import create_page, launch_options
    from ..documents.translator import Translator
    from ..models.deqnar.configuration_deqnar import is_deqnar
    from .addresses import listen
    from .loading import bundled_model, load_model

    listen(arguments.host, arguments.port).close()  # reports a port in use before the models are loaded
    name = arguments.model or bundled_model()
    model, tokenizer = load_model(name, arguments.device, "torch", arguments.threads)
    if not is_deqnar(model.config):
        raise ValueError(
            f"The page shows a deqnar model, but {name} is of type {model.config.model_type}; name it with --compare."
        )
    others = {other: Translator(*load_model(other, arguments.device)) for other in arguments.compare}
    page = create_page(Translator(model, tokenizer), others)
    print(f"Listening on http://{arguments.host}:{arguments.port}", flush=True)
    page.launch(server_name=arguments.host, server_port=arguments.port, **launch_options())
