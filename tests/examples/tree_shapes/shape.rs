//! The drafts that can be measured.

/// Kind of draft, with the rule by which the target verifies it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Coupled: the draft draws with the noise of the target, which accepts what it draws itself.
    Chain,
    /// Coupled: a chain with leaves, the next best tokens at each position.
    Leaves,
    /// Coupled: several rows per forward, as a draft worker runs them.
    Branches,
    /// Like `Branches` but by ranks only: each step has the same tree, the best one on average.
    Static,
    /// A chain of the draft's most likely tokens, drawn without noise, with leaves if there are more tokens
    /// than positions; the target accepts what it draws itself. Rejection sampling of a draft that puts all
    /// probability on one token accepts as many.
    Point,
    /// A chain drawn with separate noise and judged token by token (contract B5).
    Rejection,
    /// The same chain, judged as a whole ([`tests::block_verification`]).
    Block,
}

impl Kind {
    const ALL: [Self; 7] =
        [Self::Chain, Self::Leaves, Self::Branches, Self::Static, Self::Point, Self::Rejection, Self::Block];

    fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }

    /// Whether a sampled text is the one that the target generates alone. Otherwise it only has the same
    /// distribution. Greedy texts are always equal.
    pub(crate) fn keeps_text(self) -> bool {
        !matches!(self, Self::Rejection | Self::Block)
    }

    fn is_chain_only(self) -> bool {
        matches!(self, Self::Rejection | Self::Block)
    }
}

/// A draft's kind, positions and tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    pub(crate) depth: usize,
    pub(crate) tokens: usize,
    /// Maximum rows per forward, if more than a draft worker's least.
    pub(crate) rows: Option<usize>,
}

impl Shape {
    /// No draft: the target generates alone.
    pub(crate) const NONE: Self = Self { kind: Kind::Chain, depth: 0, tokens: 0, rows: None };

    /// Parses KIND:POSITIONS:TOKENS or KIND:POSITIONS:TOKENS:ROWS.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let parts: Vec<&str> = text.split(':').collect();
        let (name, depth, tokens, rows) = match parts[..] {
            [name, depth, tokens] => (name, depth, tokens, None),
            [name, depth, tokens, rows] => (name, depth, tokens, Some(number(rows)?)),
            _ => return Err("expected KIND:POSITIONS:TOKENS or KIND:POSITIONS:TOKENS:ROWS".to_owned()),
        };
        let (depth, tokens) = (number(depth)?, number(tokens)?);
        let Some(kind) = Kind::ALL.into_iter().find(|kind| kind.name() == name) else {
            let names = Kind::ALL.map(Kind::name).join(", ");
            return Err(format!("unknown kind `{name}`, expected one of {names}"));
        };
        if kind.is_chain_only() && depth != tokens {
            return Err(format!("`{name}` is a chain: write {name}:{depth}:{depth}"));
        }
        Ok(Self { kind, depth, tokens, rows })
    }

    /// The shape of a draft in a text that may have only `remaining` further drafted tokens.
    pub(crate) fn within(self, remaining: usize) -> Self {
        Self { depth: self.depth.min(remaining), tokens: self.tokens.min(remaining), ..self }
    }

    /// Kind, positions and rows in words.
    pub(crate) fn name(&self) -> String {
        let limit = self.rows.map(|rows| format!(", {rows} rows a forward")).unwrap_or_default();
        format!("{}, {} positions{limit}", self.kind.name(), self.depth)
    }
}

/// Parses a count.
pub(crate) fn number(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("`{text}` is not a whole number"))
}
