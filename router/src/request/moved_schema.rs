//! [`moved_schema`]: moves a whole JSON schema among the definitions of another one, with its references.

use serde_json::{Map, Value};

/// Keywords that hold subschemas by name. The names are no keywords.
const BY_NAME: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];
/// Keywords that hold values. What looks like a reference there is none.
const VALUES: [&str; 4] = ["const", "default", "enum", "examples"];

/// Returns the schema as it must be at `#/$defs/{name}` of another one. Its own identifier is removed: it
/// would remain the root of the references, and another schema may have the same one.
pub(super) fn moved_schema(name: &str, mut schema: Map<String, Value>) -> Value {
    let ids = ["$id", "id"].map(|keyword| schema.shift_remove(keyword));
    let id = ids.iter().flatten().find_map(Value::as_str).map(|id| id.trim_end_matches('#'));
    Place { name, id }.keywords(&mut schema);
    Value::Object(schema)
}

/// The new place of a schema.
struct Place<'a> {
    /// Its name in `$defs` of the other schema.
    name: &'a str,
    /// Its identifier at the old place.
    id: Option<&'a str>,
}

impl Place<'_> {
    /// Changes the references of a schema.
    fn keywords(&self, keywords: &mut Map<String, Value>) {
        for (keyword, value) in keywords {
            match (keyword.as_str(), value) {
                ("$ref", Value::String(reference)) => {
                    if let Some(moved) = self.reference(reference) {
                        *reference = moved;
                    }
                }
                ("$anchor", Value::String(anchor)) => *anchor = self.anchor(anchor),
                (keyword, _) if VALUES.contains(&keyword) => {}
                (keyword, Value::Object(named)) if BY_NAME.contains(&keyword) => {
                    named.values_mut().for_each(|value| self.subschema(value));
                }
                (_, value) => self.subschema(value),
            }
        }
    }

    /// Changes a subschema, or each of a list.
    fn subschema(&self, value: &mut Value) {
        match value {
            Value::Array(items) => items.iter_mut().for_each(|item| self.subschema(item)),
            // An identifier makes it the root of its own references.
            Value::Object(keywords) if keywords.get("$id").is_some_and(Value::is_string) => {}
            Value::Object(keywords) => self.keywords(keywords),
            _ => {}
        }
    }

    /// Returns what a reference becomes; `None` if it leads to another document.
    fn reference(&self, reference: &str) -> Option<String> {
        let local = self.id.and_then(|id| reference.strip_prefix(id)).unwrap_or(reference);
        match local {
            "" | "#" => Some(format!("#/$defs/{}", self.name)),
            _ => match local.strip_prefix('#')? {
                pointer if pointer.starts_with('/') => Some(format!("#/$defs/{}{pointer}", self.name)),
                anchor => Some(format!("#{}", self.anchor(anchor))),
            },
        }
    }

    /// Returns the new name of an anchor, since another schema may have one of the same name.
    fn anchor(&self, anchor: &str) -> String {
        format!("{}-{anchor}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[track_caller]
    fn check(schema: Value, expected: Value) {
        let Value::Object(schema) = schema else { panic!("an object") };
        assert_eq!(moved_schema("t", schema), expected);
    }

    #[test]
    fn references_lead_to_the_new_place() {
        for (reference, expected) in [
            ("#", "#/$defs/t"),
            ("#/properties/a~1b", "#/$defs/t/properties/a~1b"),
            ("#/$defs/a", "#/$defs/t/$defs/a"),
            ("#name", "#t-name"),
            ("https://example.com/b#/c", "https://example.com/b#/c"),
            ("b", "b"),
        ] {
            check(json!({ "$ref": reference }), json!({ "$ref": expected }));
            check(
                json!({ "type": "array", "items": [{ "anyOf": [{ "$ref": reference }] }] }),
                json!({ "type": "array", "items": [{ "anyOf": [{ "$ref": expected }] }] }),
            );
        }
        check(
            json!({ "$defs": { "a": { "$anchor": "x" } } }),
            json!({ "$defs": { "a": { "$anchor": "t-x" } } }),
        );
    }

    #[test]
    fn only_keywords_are_references() {
        let unchanged = json!({
            "type": "object",
            "properties": {
                "$ref": { "type": "string" },
                "a": { "const": { "$ref": "#" } },
                "b": { "enum": [{ "$ref": "#" }], "default": { "$ref": "#" }, "examples": [{ "$ref": "#" }] },
                "c": { "$ref": 5 },
            },
            "required": ["$ref"],
        });
        check(unchanged.clone(), unchanged);
        // Here these are names of properties and definitions.
        check(
            json!({ "properties": { "enum": { "$ref": "#" } }, "$defs": { "default": { "$ref": "#" } } }),
            json!({ "properties": { "enum": { "$ref": "#/$defs/t" } }, "$defs": { "default": { "$ref": "#/$defs/t" } } }),
        );
        // Not a keyword of schemas, but references may lead there.
        check(
            json!({ "components": { "schemas": { "a": { "$ref": "#/components/schemas/b" } } } }),
            json!({ "components": { "schemas": { "a": { "$ref": "#/$defs/t/components/schemas/b" } } } }),
        );
    }

    #[test]
    fn references_through_identifiers() {
        for id in ["$id", "id"] {
            check(
                json!({ id: "https://example.com/a#", "items": [{ "$ref": "https://example.com/a#/b" },
                    { "$ref": "https://example.com/a" }, { "$ref": "https://example.com/ab" }, { "$ref": "#" }] }),
                json!({ "items": [{ "$ref": "#/$defs/t/b" },
                    { "$ref": "#/$defs/t" }, { "$ref": "https://example.com/ab" }, { "$ref": "#/$defs/t" }] }),
            );
        }
        let own_root = json!({ "items": { "$id": "https://example.com/b", "items": { "$ref": "#" } } });
        check(own_root.clone(), own_root);
        // A property of this name.
        check(
            json!({ "properties": { "$id": { "$ref": "#" } } }),
            json!({ "properties": { "$id": { "$ref": "#/$defs/t" } } }),
        );
    }
}
