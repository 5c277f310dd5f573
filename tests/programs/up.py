"""Starts `outrider up` as a child process."""

import subprocess
import tempfile


def start(outrider, *arguments, **options):
    """Starts `outrider up` on free ports. Its standard error goes to the file `errors` of the process."""
    ports = [word for flag in ("--http", "--grpc", "--admin") for word in (flag, "127.0.0.1:0")]
    errors = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(
        [outrider, "up", *ports, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True, **options,
    )
    process.errors = errors
    return process


def wait_for_line(process, prefix, show=True):
    """Reads, and prints if `show`, lines up to the first that starts with `prefix`. Returns the word after the
    prefix."""
    for line in process.stdout:
        if show:
            print(line, end="", flush=True)
        if line.startswith(prefix):
            return line.removeprefix(prefix).split()[0]
    process.errors.seek(0)
    raise SystemExit(f"`outrider up` exited with status {process.wait()} before it printed `{prefix}`:\n{process.errors.read()}")
