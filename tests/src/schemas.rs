//! JSON schemas generated from a seed, small enough for a model that writes nonsense to reach the end.

use serde_json::{Map, Value, json};

/// Generates the schema for a seed: always an object.
pub fn schema(seed: u64) -> Value {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5bd1_e995);
    for _ in 0..4 {
        rng.below(2);
    }
    object(&mut rng, 2)
}

/// A repeatable random generator.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

const NAMES: [&str; 12] = [
    "id",
    "name",
    "total price",
    "is_open",
    "größe",
    "tags",
    "a\"b",
    "city",
    "kind",
    "when",
    "note",
    "\u{1f600}",
];

fn object(rng: &mut Rng, depth: u32) -> Value {
    let (mut properties, mut required) = (Map::new(), Vec::new());
    let num_properties = 1 + rng.below(3);
    let first = rng.below(NAMES.len() as u64);
    for i in 0..num_properties {
        let name = NAMES[((first + i * 5) % NAMES.len() as u64) as usize];
        properties.insert(name.to_owned(), value(rng, depth.saturating_sub(1)));
        if rng.below(3) > 0 {
            required.push(name);
        }
    }
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}

fn value(rng: &mut Rng, depth: u32) -> Value {
    match rng.below(if depth > 0 { 12 } else { 9 }) {
        0 => json!({ "type": "boolean" }),
        1 => {
            let low = rng.below(2_000) as i64 - 1_000;
            json!({ "type": "integer", "minimum": low, "maximum": low + rng.below(500) as i64 })
        }
        2 => json!({ "type": "string", "minLength": rng.below(3), "maxLength": 3 + rng.below(8) }),
        3 => json!({ "enum": ["low", "middle", 7, null, "h\u{f6}ch\nst", true] }),
        4 => json!({ "const": NAMES[rng.below(NAMES.len() as u64) as usize] }),
        5 => json!({ "type": ["null", "boolean"] }),
        6 => json!({ "type": "string", "pattern": "^[A-Z]{2}-[0-9]{2,4}$" }),
        7 => json!({ "type": "string", "format": "date" }),
        8 => json!({ "type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25 }),
        9 => json!({ "type": "array", "items": value(rng, depth - 1), "maxItems": 1 + rng.below(3) }),
        10 => json!({ "anyOf": [value(rng, depth - 1), { "type": "null" }] }),
        _ => object(rng, depth - 1),
    }
}
