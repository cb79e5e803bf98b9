"""Stand-ins for rknn-toolkit2 that compile nothing, to see what becomes of its answers and its failures.

`make_interpreter` is for `RknnToolkit`, which starts it as it starts a real one. The bytes of a "graph" are words that
say how the toolkit behaves. `StandInCompiler` answers in the real one's words.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from npu.rknn_toolkit import CompileJob, Shapes

__all__ = ["VERSION", "StandInCompiler", "make_interpreter"]

VERSION = "0.0.1"

_API = """
import os, sys, time
import numpy as np

class RKNN:
    def __init__(self, verbose): assert verbose
    def config(self, target_platform, dynamic_input=None):
        self.shapes = dynamic_input
        return 0
    def load_onnx(self, model):
        with open(model, "rb") as file: self.deed = file.read().decode()
        if self.deed == "load -1": return -1
        if self.deed == "raise": raise ValueError("Traceback of the toolkit\\n  a line\\nValueError: it cannot be\\n")
        return 0
    def build(self, do_quantization):
        if self.deed == "hang": time.sleep(60)
        os.write(1, b"I rknn building ...\\n")  # as the compiler prints: on file descriptors
        if self.deed == "abort":
            os.write(2, b"E RKNN: [00:00:00.000] buffer overflow!!!\\n")
            os.abort()
        if self.deed == "exit": os._exit(3)
        if self.deed == "read stdin": assert sys.stdin.read() == ""
        assert not do_quantization
        print("working in", os.getcwd(), "for", self.shapes)
        with open("check0_base_optimize.onnx", "w"): pass
        return 0
    def hybrid_quantization_step1(self, dataset):
        with open(dataset) as file: samples = [line.split() for line in file]
        print("sums", [[float(np.load(path).sum()) for path in paths] for paths in samples])
        values = "".join(f"    {name}:\\n        dtype: int8\\n" for name in ("out", "swiglu", "down"))
        head = "custom_layers: {}" if self.deed == "another format" else "custom_quantize_layers: {}"
        with open("graph.quantization.cfg", "w") as file: file.write(f"{head}\\nquantize_parameters:\\n{values}")
        return 0
    def hybrid_quantization_step2(self, model, data, config):
        self.deed = "hybrid"
        print("step 2:", model, data, config)
        print(open(config).read())
        return 0
    def export_rknn(self, path):
        with open(path, "w") as file: file.write(self.deed)
        return 0
    def init_runtime(self, target): return -1 if self.deed == "no runtime" else 0
    def inference(self, inputs, data_format, inputs_pass_through):
        assert data_format == ["nchw"] * len(inputs) and inputs_pass_through == [1] * len(inputs)
        if self.deed == "None": return None
        if self.deed == "abort in run": os.abort()
        return [array * 2 for array in inputs]
    def release(self): pass
"""


def make_interpreter(folder: Path) -> Path:
    """Write the stand-in and an executable that runs this Python with it."""
    package = folder / "site" / "rknn"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "api.py").write_text(_API)
    metadata = folder / "site" / f"rknn_toolkit2-{VERSION}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rknn-toolkit2\nVersion: {VERSION}\n")
    start = folder / "start.py"
    path = f"import runpy, sys\nsys.path.insert(0, {str(folder / 'site')!r})\n"
    start.write_text(path + "runpy.run_path(sys.argv[1], None, '__main__')\n")
    python = folder / "python"
    # Without -I the modules beside the worker would stand in for others; this Python needs its environment.
    python.write_text(f'#!/bin/sh\n[ "$1" = -I ] || exit 64\nshift\nexec "{sys.executable}" "{start}" "$@"\n')
    python.chmod(0o755)
    return python


@dataclass
class StandInCompiler:
    """Says of every set of shapes that it became one operator.

    Attributes:
        jobs: names of what was compiled.
        seen: the jobs themselves.
        operator: what the graph becomes, and where it runs.
        warning: printed in front of the tables.
        skip: sets of shapes left out.
    """

    version: str = "2.5.0"
    jobs: list[str] = field(default_factory=list)
    seen: list[CompileJob] = field(default_factory=list)
    operator: tuple[str, str] = ("exSDPAttention", "NPU")
    warning: str = ""
    skip: int = 0

    def __enter__(self) -> StandInCompiler:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compile(self, job: CompileJob, out: Path) -> str:
        """Write a file that depends on nothing but the job's name, and log its shapes."""
        self.jobs.append(job.name)
        self.seen.append(job)
        out.write_text(f"compiled {job.name}")
        return self.warning + "".join(self._table(shapes) for shapes in job.shapes[self.skip :])

    def _table(self, shapes: Shapes) -> str:
        rows = [("InputOperator", "CPU", "\\", "(" + ",".join(map(str, shape)) + ")") for shape in shapes]
        rows.append((*self.operator, "(1,2,3,4)", "(1,2,3,4)"))
        rows.append(("OutputOperator", "CPU", "(1,2,3,4)", "\\"))
        lines = [
            f"{number:<4} {op:18} FLOAT16  {target:6} {inputs:40} {output:22} 0/0/0   7  {op}:x"
            for number, (op, target, inputs, output) in enumerate(rows)
        ]
        lines += [f"Total Internal Memory Size: {shapes[0][0]}KB", "Total Weight Memory Size: 0KB"]
        return "".join(f"D RKNN: [00:00:00.000] {line}\n" for line in lines)
