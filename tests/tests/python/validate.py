"""Checks values against JSON schemas: lines of {"schema": .., "text": ..} in, the number of those that are valid out."""

import json
import sys

import jsonschema

valid = 0
for line in open(sys.argv[1], encoding="utf-8"):
    case = json.loads(line)
    validator = jsonschema.Draft202012Validator(
        case["schema"], format_checker=jsonschema.FormatChecker(formats=["date"])
    )
    try:
        validator.validate(json.loads(case["text"]))
        valid += 1
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"not valid: {case['text']!r} under {case['schema']}: {error}", file=sys.stderr)
print(valid)
