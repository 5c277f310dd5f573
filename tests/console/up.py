"""Starts `outrider up` as a child process for a check."""

import subprocess


def start(outrider, *arguments, **options):
    """Starts `outrider up` on free ports."""
    ports = [word for flag in ("--http", "--grpc", "--admin") for word in (flag, "127.0.0.1:0")]
    return subprocess.Popen(
        [outrider, "up", *ports, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options,
    )


def told(up, beginning):
    """Prints lines up to the first that starts with `beginning`. Returns the word after that beginning."""
    for line in up.stdout:
        print(line, end="", flush=True)
        if line.startswith(beginning):
            return line.removeprefix(beginning).split()[0]
    raise SystemExit(f"`outrider up` ended with {up.wait()} and never said `{beginning}`")
