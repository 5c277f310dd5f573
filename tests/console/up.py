"""`outrider up` as a process that a check starts and ends."""

import subprocess


def start(outrider, *arguments, **options):
    """Starts it on free ports."""
    ports = [word for flag in ("--http", "--grpc", "--admin") for word in (flag, "127.0.0.1:0")]
    return subprocess.Popen(
        [outrider, "up", *ports, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **options,
    )


def told(up, beginning):
    """The word that it prints behind `beginning`, once it does; what it prints before is passed on."""
    for line in up.stdout:
        print(line, end="", flush=True)
        if line.startswith(beginning):
            return line.removeprefix(beginning).split()[0]
    raise SystemExit(f"`outrider up` ended with {up.wait()} and never said `{beginning}`")
