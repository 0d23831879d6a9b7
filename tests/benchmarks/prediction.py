"""How fast predictions are: `python tests/benchmarks/prediction.py`, on a quiet machine. Aims in the last column.

Processor time of the worker is shown beside wall time: on a busy machine only the former says something.
"""

import tempfile
import time
from pathlib import Path

import psutil

from workbench import Recipe, predict
from workbench.prediction import worker as prediction_worker
from workbench.techniques import GradientCheckpointing, MixedPrecision

GPT2 = Recipe(model="gpt2", effective_batch_size=8, sequence_length=1024)
XL = Recipe(model="gpt2-xl", effective_batch_size=8, sequence_length=1024)
CASES = (
    ("124M, cold", GPT2, 10),
    ("124M + checkpointing, warm", GPT2 | GradientCheckpointing(), 0.5),
    ("124M + mixed precision, warm", GPT2 | MixedPrecision(), 0.5),
    ("XL, warm", XL, 1.5),
    ("XL + checkpointing + mixed precision, warm", XL | GradientCheckpointing() | MixedPrecision(), 1.5),
    ("124M, cached", GPT2, 0.1),
)


def processor_time() -> float:
    worker = prediction_worker.SHADOWS.children.get("shadow")
    return sum(psutil.Process(worker.process.pid).cpu_times()[:2]) if worker else 0.0


def main() -> None:
    import os

    with tempfile.TemporaryDirectory() as folder:
        os.environ["WORKBENCH_RUNS"] = str(Path(folder))
        print(f"{'':46}{'wall s':>8}{'CPU s':>8}{'aim s':>8}")
        for title, recipe, aim in CASES:
            before = processor_time()
            start = time.perf_counter()
            predict(recipe)
            wall = time.perf_counter() - start
            print(f"{title:46}{wall:8.2f}{processor_time() - before:8.2f}{aim:8}")


if __name__ == "__main__":
    main()
