#!/usr/bin/env python3
"""Count properties of the sources that affect readability: import cycles, files on a request's path,
constants of the lane, batching and health rules, unused public items, lines by crate, long functions,
parameters packed into tuples, and unit tests of the scheduler.

    tests/count_structure.py [CHECKOUT ..]      one column for each checkout (default: this one)

It matches text patterns instead of parsing. The same patterns are used for every checkout, so results can be
compared.
"""

import collections
import pathlib
import re
import sys

RULE_FOLDERS = ["scheduling/src", "speculation/src/batch", "speculation/src/lane", "speculation/src/cost", "speculation/src/draft",
         "router/src/lane", "worker/src/device/formation"]
SCHEDULER_FOLDERS = ["scheduling/src/scheduler", "router/src/lane/owner", "router/src/lane/running"]
MAX_FUNCTION_LINES = 70
MAX_PARAMETERS = 5


def sources(root):
    """Yields the name and text of every Rust file of the checkout, except build output and hidden folders."""
    for path in sorted(root.rglob("*.rs")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("target/", ".")):
            yield name, path.read_text()


def without_comments(text):
    return re.sub(r"//[^\n]*", "", text)


def without_tests(text):
    """Returns the text before the file's test module."""
    return text.split("#[cfg(test)]\nmod tests {")[0]


def is_test_file(name):
    return bool(re.search(r"(^|/)(tests?|examples|benches)(/|\.rs|_)|_tests\.rs$|/testdata\.rs$", name))


def import_cycles(files):
    """Returns the router's modules that are part of an import cycle, or import a module that is."""
    imports = collections.defaultdict(set)
    for name, text in files:
        if not name.startswith("router/src/") or is_test_file(name):
            continue
        module = name.split("/")[2].removesuffix(".rs")
        if module in ("lib", "main"):
            continue
        code = without_comments(without_tests(text))
        used = set(re.findall(r"crate::(\w+)", code))
        for group in re.findall(r"use crate::\{([^;]*)\};", code):
            used |= set(re.findall(r"(?:^|[,{\s])(\w+)(?:::|,|\s*$|\s*\})", group))
        imports[module] |= used - {module}
    remaining = {module: used & set(imports) for module, used in imports.items()}
    while True:
        acyclic = [module for module, used in remaining.items() if not used & set(remaining)]
        if not acyclic:
            return sorted(remaining)
        for module in acyclic:
            del remaining[module]


def request_path_files(root):
    text = (root / "ARCHITECTURE.md").read_text()
    section = text.split("## The life of one request")[1].split("\n## ")[0]
    # Paragraphs after the steps, by their beginnings in the checkouts that are compared.
    for after_steps in ("What a request leaves behind", "When a request ends", "When the client leaves", "When the client disconnects"):
        section = section.split(f"\n{after_steps}")[0]
    return len(set(re.findall(r"`([\w/-]+\.rs|[\w-]+/[\w/-]+/)`", section)))


def functions(text):
    """Yields (lines, parameters, has a tuple parameter) of every function. Each tuple element counts as one
    parameter."""
    for match in re.finditer(r"^( *)(?:pub(?:\([\w ]+\))? )?(?:const )?(?:async )?(?:unsafe )?fn \w+(?:<[^(]*>)?\(", text, re.M):
        end = re.compile(rf"^{match.group(1)}\}}", re.M).search(text, match.end())
        depth, at = 1, match.end()
        while depth and at < len(text):
            depth += {"(": 1, ")": -1}.get(text[at], 0)
            at += 1
        parameters = text[match.end():at - 1]
        parameters = re.sub(r"fn\([^)]*\)(\s*->\s*[\w:<>]+)?|Fn\w*\([^)]*\)", "F", parameters)
        parameters = re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", parameters))
        without_self = re.sub(r"^\s*&?(?:mut )?self\s*,?", "", parameters)
        types = re.sub(r"\([^()]*\)\s*:", "x:", without_self)
        count = 0
        for parameter in re.split(r",(?![^(\[]*[)\]])", types):
            if parameter.strip():
                inner = re.search(r":\s*&?\(([^()]*)\)", parameter)
                count += len([part for part in inner.group(1).split(",") if part.strip()]) if inner else 1
        has_tuple = bool(re.search(r":\s*&?\(", types))
        lines = text.count("\n", match.start(), end.start()) + 1 if end else 0
        yield lines, count, has_tuple


def constants(text):
    return len(re.findall(r"^\s*(?:pub(?:\([\w :]+\))? )?const [A-Z]\w*\s*:", text, re.M))


def defaults(text):
    """Counts the numbers that are defaults of fields of `*Rules` structs."""
    blocks = re.findall(r"^impl Default for \w*Rules \{(.*?)^\}", text, re.M | re.S)
    return sum(len(re.findall(r"\w+: [\d_.]+", block)) for block in blocks)


def count(root):
    files = list(sources(root))
    code = [(name, without_comments(without_tests(text))) for name, text in files if not is_test_file(name)]
    all_functions = [function for _, text in code for function in functions(text)]
    words = collections.Counter(word for _, text in files for word in re.findall(r"\w+", without_comments(text)))
    public = [word for _, text in code for word in re.findall(r"pub (?:fn|struct|enum|const|trait|type) (\w+)", text)]
    lines_by_crate = collections.Counter()
    for name, text in files:
        lines_by_crate[name.split("/")[0]] += text.count("\n")
    rules = [text for name, text in code if name.startswith(tuple(RULE_FOLDERS)) and "/profile" not in name]
    tests = [text for name, text in files if name.startswith(tuple(SCHEDULER_FOLDERS))]
    cycles = import_cycles(files)
    rows = {
        "router modules in import cycles": len(cycles),
        "files on the path of a request, according to ARCHITECTURE.md": request_path_files(root),
        "constants of the lane, batching and health rules": sum(map(constants, rules)),
        "numbers that are defaults of `*Rules` fields": sum(map(defaults, rules)),
        "public items whose name appears only once": sum(1 for word in public if words[word] == 1),
        f"functions over {MAX_FUNCTION_LINES} lines": sum(1 for lines, *_ in all_functions if lines > MAX_FUNCTION_LINES),
        f"functions with more than {MAX_PARAMETERS} parameters, counting tuple elements": sum(1 for _, parameters, has_tuple in all_functions if has_tuple and parameters > MAX_PARAMETERS),
        "unit tests of the scheduler": sum(len(re.findall(r"#\[(?:tokio::)?test", text)) for text in tests),
        "lines of Rust": sum(lines_by_crate.values()),
    }
    return rows | {f"lines of {crate}/": number for crate, number in sorted(lines_by_crate.items())}


def main():
    checkouts = [pathlib.Path(arg) for arg in sys.argv[1:]] or [pathlib.Path(__file__).resolve().parent.parent]
    columns = [count(root) for root in checkouts]
    names = dict.fromkeys(name for column in columns for name in column)
    for name in names:
        print(f"| {name} | " + " | ".join(f"{column.get(name, 0):,}" for column in columns) + " |")


if __name__ == "__main__":
    main()
