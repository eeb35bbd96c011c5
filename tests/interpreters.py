"""Runs code as a new interpreter that has imported torch alone, and graphar not yet, would run it.

The import of torch takes longer than most programs. Here one process imports it, and a program is a fork of that.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_LIMIT_S = 120  # of a program, which is killed then

# Each line of input is a program. Its fork leaves the loop, and goes on as if nothing had been before it.
_SERVER = """
import json, os, signal, sys, tempfile, torch
for line in sys.stdin:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        if not (child := os.fork()):
            for file, number in ((out, 1), (err, 2)):
                os.dup2(file.fileno(), number)
            break
        _, status = os.waitpid(child, 0)
        out.seek(0), err.seek(0)
        print(json.dumps([os.waitstatus_to_exitcode(status), out.read(), err.read()]), flush=True)
else:
    sys.exit()
code, environment, limit_s = json.loads(line)
signal.alarm(limit_s)
os.environ.clear()
os.environ.update(environment)
exec(code, {"__name__": "__main__"})
"""


@contextlib.contextmanager
def interpreters() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Gives a function of a program's text, and of its environment: this process's unless another is given."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER], cwd=_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:

        def run(code: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
            server.stdin.write(json.dumps([code, environment or dict(os.environ), _LIMIT_S]) + "\n")
            server.stdin.flush()
            return subprocess.CompletedProcess(code, *json.loads(server.stdout.readline()))

        yield run
