//! Descriptions of registered metrics, for the page docs/metrics.md. Name, help and label values come from
//! the tables of names, the names of labels from the type of a family's labels. Must not read any value.

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

use super::{Counter, Family, Labels};

/// A label and its values, as noted in a table of names.
pub type Label = (&'static str, LabelValues);

/// The values of a label.
#[derive(Clone, Copy, Debug)]
pub enum LabelValues {
    /// Returns all of them; there are no others.
    Listed(fn() -> Vec<&'static str>),
    /// Describes them.
    Described(&'static str),
}

/// A registered metric.
#[derive(Clone, Debug)]
pub struct MetricDescription {
    /// Name as on `/metrics`, including `_total`.
    pub name: &'static str,
    /// `counter`, `gauge` or `histogram`.
    pub kind: &'static str,
    /// One sentence without a full stop.
    pub help: &'static str,
    /// Labels in the order of `/metrics`.
    pub labels: Vec<LabelDescription>,
}

/// A label of a metric.
#[derive(Clone, Debug)]
pub struct LabelDescription {
    /// Its name.
    pub name: String,
    /// Its values, if the table of names has them.
    pub values: Option<LabelValues>,
}

/// What is known of a metric when it is registered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Registered {
    pub(super) name: &'static str,
    pub(super) kind: &'static str,
    pub(super) help: &'static str,
    pub(super) labels: &'static [Label],
    /// Names of the labels according to their type; empty if the type does not fix them.
    pub(super) label_names: fn() -> Vec<String>,
}

impl Registered {
    pub(super) fn describe(&self) -> MetricDescription {
        let mut names = (self.label_names)();
        for (name, _) in self.labels {
            if !names.iter().any(|known| known == name) {
                names.push((*name).to_owned());
            }
        }
        let values_of =
            |name: &str| self.labels.iter().find(|(label, _)| *label == name).map(|label| label.1);
        let described = |name: String| LabelDescription { values: values_of(&name), name };
        let labels = names.into_iter().map(described).collect();
        MetricDescription { name: self.name, kind: self.kind, help: self.help, labels }
    }
}

/// Names of the labels of a family, read from a series with default values, which need no escaping.
pub(super) fn label_names<L: Labels>() -> Vec<String> {
    let family = Family::<L, Counter>::default();
    drop(family.get_or_create(&L::default()));
    let mut registry = Registry::default();
    registry.register("series", "", family);
    let mut page = String::new();
    text::encode_registry(&mut page, &registry).expect("writing into a string cannot fail");
    let labels = page.lines().find_map(|line| line.strip_prefix("series_total{")?.split('}').next());
    let names = labels.into_iter().flat_map(|labels| labels.split(','));
    names.filter_map(|label| label.split_once('=')).map(|(name, _)| name.to_owned()).collect()
}
