"""Peak memory of a training step, by gradient and by the maximum number of evaluations of the solver.

One training step is measured: forward, backward and Adam, with the parameters themselves. Bytes are those allocated by
torch, so the figures do not depend on the machine. The tolerance cannot be reached, so that every solve uses its full
budget. The last rows are a stacked decoder of --layers layers. Checkpointed rows recompute the layers of encoder and
decoder in the backward pass.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from .common import machine, markdown_table, untrained_model
from .options import MemoryOptions

GRADIENTS = {
    "one_step": {"gradient": "one_step"},
    "phantom": {"gradient": "phantom"},
    "ift": {"gradient": "ift"},
    "unrolled": {"gradient": "unrolled"},
    "unrolled, checkpointed": {"gradient": "unrolled"},
}


def measure(options: MemoryOptions) -> dict:
    results = {}
    for name, fields in GRADIENTS.items():
        results[name] = {}
        for budget in options.budgets:
            steps = {"gradient_steps": budget, "max_nfe": budget} if "unrolled" in name else {"max_nfe": budget}
            model = _model(options, refinement="implicit", tol=1e-30, gradient_tol=1e-30, **fields, **steps)
            if "checkpointed" in name:
                model.gradient_checkpointing_enable()
            results[name][str(budget)] = _step_bytes(model, options)
    stacked = _step_bytes(_model(options, refinement="stacked"), options)
    checkpointed = _model(options, refinement="stacked")
    checkpointed.gradient_checkpointing_enable()
    settings = {key: getattr(options, key) for key in ("preset", "vocabulary", "layers", "rows", "length", "seed")}
    return {
        "machine": machine(torch.get_num_threads()),
        "settings": settings,
        "bytes": results,
        "stacked_bytes": stacked,
        "stacked_checkpointed_bytes": _step_bytes(checkpointed, options),
    }


def _model(options: MemoryOptions, **fields) -> DeqNarForConditionalGeneration:
    torch.manual_seed(options.seed)
    layers = {"encoder_layers": options.layers, "decoder_layers": options.layers}
    config = DeqNarConfig.preset(options.preset, vocab_size=options.vocabulary, **layers, **fields)
    return untrained_model(config).train()


def _step_bytes(model: DeqNarForConditionalGeneration, options: MemoryOptions) -> int:
    """Bytes of the parameters, plus the peak of further allocations during one training step."""
    tokens = torch.randint(10, options.vocabulary, (options.rows, options.length))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()

    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return parameters + peak_bytes(step)


def peak_bytes(run: Callable[[], None]) -> int:
    """Peak of the bytes allocated on the CPU during a call, beyond those allocated before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    allocated = peak = 0
    for _, change in changes:
        allocated += change
        peak = max(peak, allocated)
    return peak


def table(figures: dict) -> str:
    budgets = list(next(iter(figures["bytes"].values())))
    first, last = budgets[0], budgets[-1]
    stacked = figures["stacked_bytes"]
    rows = []
    for name, measured in figures["bytes"].items():
        megabytes = [f"{measured[budget] / 1e6:.0f}" for budget in budgets]
        growth, ratio = measured[last] / measured[first], measured[last] / stacked
        rows.append([name, *megabytes, f"{growth:.2f}×", f"{ratio:.2f}×"])
    depth = figures["settings"]["layers"]
    for name, measured in (("", stacked), (", checkpointed", figures["stacked_checkpointed_bytes"])):
        megabytes = [f"{measured / 1e6:.0f}"] * len(budgets)
        rows.append([f"stacked, {depth} layers{name}", *megabytes, "", f"{measured / stacked:.2f}×"])
    headers = ["gradient", *(f"MB at {budget}" for budget in budgets), f"{last} to {first}", "to stacked"]
    return f"{figures['machine']}\n{figures['settings']}\n\n{markdown_table(headers, rows)}"
