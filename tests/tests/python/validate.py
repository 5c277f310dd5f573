"""Checks values against JSON schemas: lines of {"schema": .., "text": ..} in, the number of those that are valid out."""

import datetime
import json
import sys

import jsonschema

formats = jsonschema.FormatChecker(formats=[])


@formats.checks("date", raises=ValueError)
def is_date(value):
    """RFC 3339 has a year 0000, which is a leap year like 2000; Python's dates begin with 0001."""
    if isinstance(value, str):
        datetime.date.fromisoformat("2000" + value[4:] if value.startswith("0000-") else value)
        # Python reads other ISO forms of a date too.
        return len(value) == 10 and value[4] == value[7] == "-"
    return True


valid = 0
for line in open(sys.argv[1], encoding="utf-8"):
    case = json.loads(line)
    validator = jsonschema.Draft202012Validator(case["schema"], format_checker=formats)
    try:
        validator.validate(json.loads(case["text"]))
        valid += 1
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"not valid: {case['text']!r} under {case['schema']}: {error}", file=sys.stderr)
print(valid)
