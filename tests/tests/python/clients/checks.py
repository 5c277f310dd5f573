"""Runs checks one after another. A check is a function that raises an exception on failure. Each prints one
line, and the exit code is 0 if all passed."""

import argparse
import sys
import traceback

CHECKS = []

PROMPT = "Write a Python function that reverses a list."


def check(function):
    CHECKS.append(function)
    return function


def assert_equal(left, right):
    assert left == right, f"{left!r} is not {right!r}"


def assert_raises(error_class, call):
    """Returns the error that the call must raise. Its class must be `error_class`, not a subclass."""
    try:
        call()
    except error_class as error:
        assert type(error) is error_class, f"{error!r} is a {type(error).__name__}, not a {error_class.__name__}"
        return error
    raise AssertionError(f"no {error_class.__name__} was raised")


def run(name, version, make_cluster):
    """Runs every check with `make_cluster(url, model)`, then exits."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True, help="URL of a cluster without keys")
    parser.add_argument("--model", required=True, help="model that the cluster serves")
    arguments = parser.parse_args()
    cluster = make_cluster(arguments.url, arguments.model)
    failures = 0
    for function in CHECKS:
        title = function.__name__.replace("_", " ")
        try:
            function(cluster)
            print(f"ok    {title}", flush=True)
        except Exception:
            failures += 1
            print(f"FAIL  {title}\n{traceback.format_exc()}", flush=True)
    print(f"{name} {version}: {len(CHECKS) - failures} of {len(CHECKS)} checks passed")
    sys.exit(1 if failures else 0)
