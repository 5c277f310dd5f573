#!/usr/bin/env python3
"""Count properties of the sources that affect readability: import cycles, files on a request's path,
constants of the lane, batching and health rules, unused public items, lines by crate, long functions,
parameters packed in tuples, and unit tests of the scheduler.

    tests/count_structure.py [CHECKOUT ..]      one column for each checkout (default: this one)

It matches text patterns instead of parsing. Every checkout is matched by the same patterns, so results can be
compared.
"""

import collections
import pathlib
import re
import sys

RULES = ["scheduling/src", "speculation/src/batch", "speculation/src/lane", "speculation/src/cost", "speculation/src/draft",
         "router/src/lane", "worker/src/device/formation"]
SCHEDULER = ["scheduling/src/scheduler", "router/src/lane/owner", "router/src/lane/running"]
LONG_FUNCTION = 70
PARAMETERS_MAX = 5


def sources(root):
    """Yields the name and text of every Rust file of the checkout, except build output and hidden folders."""
    for path in sorted(root.rglob("*.rs")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("target/", ".")):
            yield name, path.read_text()


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


def production(text):
    """Returns the text before the file's test module."""
    return text.split("#[cfg(test)]\nmod tests {")[0]


def is_test_file(name):
    return bool(re.search(r"(^|/)(tests?|examples|benches)(/|\.rs|_)|_tests\.rs$|/testdata\.rs$", name))


def import_cycles(files):
    """Returns the router's modules that are part of an import cycle, or that import one that is."""
    arrows = collections.defaultdict(set)
    for name, text in files:
        if not name.startswith("router/src/") or is_test_file(name):
            continue
        module = name.split("/")[2].removesuffix(".rs")
        if module in ("lib", "main"):
            continue
        code = without_comments(production(text))
        used = set(re.findall(r"crate::(\w+)", code))
        for group in re.findall(r"use crate::\{([^;]*)\};", code):
            used |= set(re.findall(r"(?:^|[,{\s])(\w+)(?:::|,|\s*$|\s*\})", group))
        arrows[module] |= used - {module}
    left = {module: used & set(arrows) for module, used in arrows.items()}
    while True:
        free = [module for module, used in left.items() if not used & set(left)]
        if not free:
            return sorted(left)
        for module in free:
            del left[module]


def files_of_a_request(root):
    text = (root / "ARCHITECTURE.md").read_text()
    life = text.split("## The life of one request")[1].split("\n## ")[0].split("\nWhat a request leaves behind")[0].split("\nWhen the client leaves")[0]
    return len(set(re.findall(r"`([\w/-]+\.rs|[\w-]+/[\w/-]+/)`", life)))


def functions(text):
    """Yields (lines, parameters, has a tuple parameter) of every function. Each tuple element counts as
    one."""
    for match in re.finditer(r"^( *)(?:pub(?:\([\w ]+\))? )?(?:const )?(?:async )?(?:unsafe )?fn \w+(?:<[^(]*>)?\(", text, re.M):
        end = re.compile(rf"^{match.group(1)}\}}", re.M).search(text, match.end())
        depth, at = 1, match.end()
        while depth and at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        parameters = text[match.end():at - 1]
        parameters = re.sub(r"fn\([^)]*\)(\s*->\s*[\w:<>]+)?|Fn\w*\([^)]*\)", "F", parameters)
        parameters = re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", parameters))
        plain = re.sub(r"^\s*&?(?:mut )?self\s*,?", "", parameters)
        types = re.sub(r"\([^()]*\)\s*:", "x:", plain)
        count = 0
        for one in re.split(r",(?![^(\[]*[)\]])", types):
            if one.strip():
                inner = re.search(r":\s*&?\(([^()]*)\)", one)
                count += len([part for part in inner.group(1).split(",") if part.strip()]) if inner else 1
        has_tuple = bool(re.search(r":\s*&?\(", types))
        lines = text.count("\n", match.start(), end.start()) + 1 if end else 0
        yield lines, count, has_tuple


def constants(text):
    return len(re.findall(r"^\s*(?:pub(?:\([\w :]+\))? )?const [A-Z]\w*\s*:", text, re.M))


def defaults(text):
    """Numbers that stand as the default of a struct of rules."""
    blocks = re.findall(r"^impl Default for \w*Rules \{(.*?)^\}", text, re.M | re.S)
    return sum(len(re.findall(r"\w+: [\d_.]+", block)) for block in blocks)


def count(root):
    files = list(sources(root))
    code = [(name, without_comments(production(text))) for name, text in files if not is_test_file(name)]
    every = [each for _, text in code for each in functions(text)]
    words = collections.Counter(word for _, text in files for word in re.findall(r"\w+", without_comments(text)))
    public = [word for _, text in code for word in re.findall(r"pub (?:fn|struct|enum|const|trait|type) (\w+)", text)]
    lines = collections.Counter()
    for name, text in files:
        lines[name.split("/")[0]] += text.count("\n")
    rules = [text for name, text in code if name.startswith(tuple(RULES)) and "/profile" not in name]
    tests = [text for name, text in files if name.startswith(tuple(SCHEDULER))]
    cycles = import_cycles(files)
    rows = {
        "modules of the router in import cycles": len(cycles),
        "files that a request passes, as ARCHITECTURE.md names them": files_of_a_request(root),
        "constants of lanes, batching and health": sum(map(constants, rules)),
        "numbers of theirs that stand as defaults of rules": sum(map(defaults, rules)),
        "public items whose name appears once": sum(1 for word in public if words[word] == 1),
        f"functions over {LONG_FUNCTION} lines": sum(1 for long, *_ in every if long > LONG_FUNCTION),
        f"functions past {PARAMETERS_MAX} parameters by tuples": sum(1 for _, many, packed in every if packed and many > PARAMETERS_MAX),
        "unit tests of the scheduler": sum(len(re.findall(r"#\[(?:tokio::)?test", text)) for text in tests),
        "lines of Rust": sum(lines.values()),
    }
    return rows | {f"lines of {crate}/": number for crate, number in sorted(lines.items())}


def main():
    checkouts = [pathlib.Path(arg) for arg in sys.argv[1:]] or [pathlib.Path(__file__).resolve().parent.parent]
    columns = [count(root) for root in checkouts]
    names = dict.fromkeys(name for column in columns for name in column)
    for name in names:
        print(f"| {name} | " + " | ".join(f"{column.get(name, 0):,}" for column in columns) + " |")


if __name__ == "__main__":
    main()
