"""The command `maxsimd`, whose device fails as words in the texts ask for: `loop` (the step waits for
ever, without Python's lock), `spin` (it works for ever), `lose` (the device fails), `die` (an actor fails)
and `break` (the model fails).

`MAXSIMD_TEST_LOADS` makes loads after that number fail, `MAXSIMD_TEST_SLOW_LOADS` makes them endless."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from maxsimd.api.cli import main
from maxsimd.engine import ModelLoadError
from maxsimd.engine import runtime as launch_module
from maxsimd.engine.actors import runner as runner_module
from maxsimd.engine.device import shared as shared_module
from maxsimd.engine.processors.text.tokenization import TextTokenizer
from maxsimd.scheduler import Step


def _stay() -> None:
    threading.Event().wait()


def _work() -> None:
    while True:
        time.perf_counter()


def _lose() -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _break() -> None:
    raise RuntimeError("shapes cannot be multiplied")


ACTIONS: dict[str, Callable[[], None]] = {"loop": _stay, "spin": _work, "lose": _lose, "break": _break}
FATAL = "die"


def _patched(load: Callable[..., Any]) -> Callable[..., Any]:
    loads = 0

    def load_and_patch(config: Any, *others: Any) -> Any:
        nonlocal loads
        loads += 1
        if loads > int(os.environ.get("MAXSIMD_TEST_LOADS", "1000")):
            raise ModelLoadError("the model is gone")
        if loads > int(os.environ.get("MAXSIMD_TEST_SLOW_LOADS", "1000")):
            _stay()
        device_model = load(config, *others)
        tokenizer = TextTokenizer(device_model.model.tokenizer)
        words = {word: int(tokenizer.encode([word], "texts")[0][0]) for word in (*ACTIONS, FATAL)}
        runner = device_model.runner
        forward = runner.forward

        def failing(step: Step) -> Any:
            ids = {int(each) for chunk in step.chunks for each in chunk.sequence.tokens.ids}
            for word, action in ACTIONS.items():
                if words[word] in ids:
                    action()
            if words[FATAL] in ids:
                runner_module.RunnerActor._finish = _fail  # type: ignore[method-assign]
            return forward(step)

        runner.forward = failing
        return device_model

    return load_and_patch


_finish = runner_module.RunnerActor._finish


def _fail(*_: Any) -> None:
    runner_module.RunnerActor._finish = _finish  # type: ignore[method-assign]
    raise RuntimeError("beyond repair")


if __name__ == "__main__":
    for module in (launch_module, shared_module):
        module.load_device_model = _patched(module.load_device_model)
    main()
