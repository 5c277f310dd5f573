//! Pages of a list, by the ids of its items, as OpenAI's and Anthropic's APIs have them.

use crate::error::RouterError;

/// Query parameters, in the client's order.
pub(super) type Parameters = Vec<(String, String)>;

/// Items of a page unless the client names another number.
const LIMIT_DEFAULT: usize = 20;

/// Where a page begins or ends.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PageRequest<'a> {
    /// The page begins behind the item with this id.
    pub(super) after: Option<(&'static str, &'a str)>,
    /// The page ends before the item with this id.
    pub(super) before: Option<(&'static str, &'a str)>,
    /// Maximum number of items.
    pub(super) limit: Option<usize>,
}

/// A part of a list.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Page<T> {
    pub(super) items: Vec<T>,
    /// Whether more items follow, or precede if the request has an end only.
    pub(super) has_more: bool,
}

impl PageRequest<'_> {
    /// Returns the page; `id_of` returns the id of an item.
    pub(super) fn select<T>(
        self,
        mut items: Vec<T>,
        id_of: impl Fn(&T) -> &str,
    ) -> Result<Page<T>, RouterError> {
        let limit = self.limit.unwrap_or(LIMIT_DEFAULT);
        if let Some((name, id)) = self.before {
            let end = position(&items, &id_of, (name, id))?;
            items.truncate(end);
        }
        if let Some((name, id)) = self.after {
            let start = position(&items, &id_of, (name, id))? + 1;
            items.drain(..start);
        }
        let has_more = items.len() > limit;
        if has_more && self.before.is_some() && self.after.is_none() {
            items.drain(..items.len() - limit);
        }
        items.truncate(limit);
        Ok(Page { items, has_more })
    }
}

fn position<T>(
    items: &[T],
    id_of: impl Fn(&T) -> &str,
    (name, id): (&'static str, &str),
) -> Result<usize, RouterError> {
    let missing = || RouterError::invalid(name, format!("{name} is `{id}`, which is not in this list"));
    items.iter().position(|item| id_of(item) == id).ok_or_else(missing)
}

/// Reads the parameter `limit`, which is between 1 and `max`.
pub(super) fn read_limit(value: &str, max: usize) -> Result<usize, RouterError> {
    let limit = value.parse().ok().filter(|limit| (1..=max).contains(limit));
    limit.ok_or_else(|| RouterError::must_be("limit", format_args!("between 1 and {max}, not `{value}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_in_both_directions() {
        let (after, before) = (|id| Some(("after", id)), |id| Some(("before", id)));
        for (request, expected, has_more) in [
            (PageRequest::default(), &["a", "b", "c", "d"][..], false),
            (PageRequest { limit: Some(3), ..Default::default() }, &["a", "b", "c"], true),
            (PageRequest { after: after("a"), limit: Some(2), ..Default::default() }, &["b", "c"], true),
            (PageRequest { after: after("c"), limit: Some(2), ..Default::default() }, &["d"], false),
            (PageRequest { after: after("d"), ..Default::default() }, &[], false),
            (PageRequest { before: before("d"), limit: Some(2), ..Default::default() }, &["b", "c"], true),
            (PageRequest { before: before("b"), limit: Some(2), ..Default::default() }, &["a"], false),
            (PageRequest { after: after("a"), before: before("d"), limit: Some(1) }, &["b"], true),
        ] {
            let page = request.select(vec!["a", "b", "c", "d"], |item| item).unwrap();
            assert_eq!((page.items.as_slice(), page.has_more), (expected, has_more), "{request:?}");
        }
        let unknown = PageRequest { after: after("x"), ..Default::default() };
        assert!(unknown.select(vec!["a"], |item| item).is_err());
        for (value, expected) in
            [("1", Ok(1)), ("100", Ok(100)), ("0", Err(())), ("101", Err(())), ("x", Err(()))]
        {
            assert_eq!(read_limit(value, 100).map_err(drop), expected, "{value}");
        }
    }
}
