#!/usr/bin/env python3
"""Print how much of the time between two verify steps is not the target's forward.

Reads the timelines of recent sequences (`/console/requests` of a router's --admin address) from standard input. The
first steps of a sequence are left out: they have the prompt.
"""

import json
import statistics
import sys

PROMPT_STEPS = 3


def main():
    periods, forwards = [], []
    for sequence in json.load(sys.stdin):
        answered = [step for step in sequence["steps"] if step["role"] == "target" and step["answered_us"]]
        steps = answered[PROMPT_STEPS:]
        for step, following in zip(steps, steps[1:]):
            periods.append(following["sent_us"] - step["sent_us"])
            forwards.append(step["compute_us"])
    if not periods:
        sys.exit("no sequence has enough verify steps")
    share = 1 - sum(forwards) / sum(periods)
    print(
        f"{len(periods)} verify steps: {statistics.mean(periods) / 1000:.2f} ms from one to the next, "
        f"{statistics.mean(forwards) / 1000:.2f} ms of it the target's forward; {100 * share:.1f}% is not"
    )


if __name__ == "__main__":
    main()
