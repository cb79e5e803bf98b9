"""Forks in the middle of a conversation and prints what became of parent and child: `fork_probe.py MODEL RUNTIME`."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

from hostcache.errors import UsageError
from npu.engine import Engine
from npu.sampler import SamplingParams

PROMPT = list(range(10, 60))


def main(model: Path, runtime: str) -> None:
    engine = Engine.load(model, runtime=runtime, pool_bytes=1 << 20, threads=3, cache_dir=model.parent)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    alone = "".join(engine.generate(PROMPT, params))
    engine.prefix.invalidate()
    engine.add_request(PROMPT, params)
    text = "".join(output.text for _ in range(3) for output in engine.step())

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        errors = []
        for _ in range(2):  # it stays one clear error
            try:
                engine.step()
            except UsageError as error:
                errors.append([str(error), error.values])
        seen = int(engine.cache.buffer.any())
        engine.close()
        del engine
        gc.collect()  # destructors must not wait for threads that are not here
        os.write(writer, json.dumps({"errors": errors, "sees_kv": seen}).encode())
        sys.exit(7)  # the whole way out, not _exit
    os.close(writer)
    with os.fdopen(reader) as pipe:
        report = json.loads(pipe.read())
    _, status = os.waitpid(child, 0)
    while not engine.idle:
        text += "".join(output.text for output in engine.step())
    engine.close()
    report |= {"child": child, "parent": os.getpid(), "status": os.waitstatus_to_exitcode(status)}
    json.dump(report | {"alone": alone, "text": text}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
