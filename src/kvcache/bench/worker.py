"""The loop of a peer's worker: `python -P worker.py vllm_worker.py`, by the python of the peer's own environment.

Not a module of kvcache and imports nothing of it. The file that is named has a class `Worker`, whose methods answer
requests, and may have `preload()`, called before anything is imported that it prepares for.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any


def main(file: str) -> None:
    """One answer a line for each request a line, until the input ends. Whatever else prints goes to stderr."""
    module = runpy.run_path(file)
    if "preload" in module:
        module["preload"]()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    worker: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            worker = worker or module["Worker"]()
            answer = getattr(worker, request.pop("do"))(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
