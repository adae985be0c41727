"""SIGTERM in training: the update in progress is finished, a checkpoint is written, and the process ends."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

STATUS = 128 + signal.SIGTERM  # as of a process that the signal ends


class Terminated(SystemExit):
    """Ends the process with status 143."""

    def __init__(self) -> None:
        super().__init__(STATUS)


class StopOnTermination(TrainerCallback):
    """Writes a checkpoint and raises `Terminated` after the update in which SIGTERM arrived.

    Nothing is evaluated, so that a resumed run is the same as one that was never interrupted.

    Args:
        any_process: whether a flag is set in any of the processes, which must stop at the same update.
    """

    def __init__(self, any_process: Callable[[bool], bool]) -> None:
        self.any_process = any_process
        self.requested = self.stopping = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM, if this is the main thread; others cannot."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self.request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def request(self, *_: Any) -> None:
        self.requested = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any
    ) -> TrainerControl:
        self.stopping = self.any_process(self.requested)
        control.should_save = control.should_save or self.stopping
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: Any) -> None:
        if not self.stopping:
            return
        if args.should_log:
            print(
                f"Ended by SIGTERM after update {state.global_step} of {state.max_steps}; checkpoint-"
                f"{state.global_step} is written, and the same command resumes from it.",
                file=sys.stderr,
            )
        raise Terminated
