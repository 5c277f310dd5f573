"""Checks texts against JSON schemas. Reads lines of {"schema": .., "text": ..} and prints the number of valid
ones."""

import datetime
import json
import sys

import jsonschema

formats = jsonschema.FormatChecker(formats=[])


@formats.checks("date", raises=ValueError)
def is_date(value):
    """Accepts RFC 3339 dates. Python has no year 0000, so 2000 stands in for it: both are leap years."""
    if isinstance(value, str):
        datetime.date.fromisoformat("2000" + value[4:] if value.startswith("0000-") else value)
        # Python also accepts other ISO 8601 forms.
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
