//! Which models are listed, and under which names, at each point in time.

use router::catalog::Catalog;
use router::catalog::settings::{ModelSettings, RequestDefaults};
use router::error::RouterError;

use crate::client::{demo_text, entry};

#[test]
fn an_alias_is_listed_while_its_model_is() {
    let defaults = RequestDefaults { temperature: Some(0.5), ..RequestDefaults::default() };
    let serves = |served: &str, defaults| ModelSettings { serves: Some(served.to_owned()), defaults };
    let own = RequestDefaults { top_k: Some(3), ..RequestDefaults::default() };
    let settings = [
        ("other", serves("demo", defaults.clone())),
        ("demo", ModelSettings { serves: None, defaults: own }),
        ("absent", serves("nobody", RequestDefaults::default())),
    ];
    let catalog = Catalog::new(settings.map(|(name, settings)| (name.to_owned(), settings)).into());
    let ids = || catalog.list().iter().map(|entry| entry.id.clone()).collect::<Vec<_>>();
    assert!(ids().is_empty());
    catalog.publish([entry("large", demo_text())]);
    assert_eq!(ids(), ["large"]);
    catalog.publish([entry("large", demo_text()), entry("demo", demo_text())]);
    assert_eq!(ids(), ["demo", "large", "other"]);
    let other = catalog.get("other").unwrap();
    assert_eq!((other.id.as_str(), other.model.as_str(), &other.defaults), ("other", "demo", &defaults));
    assert_eq!(catalog.get("demo").unwrap().defaults.top_k, Some(3));
    assert!(matches!(catalog.get("absent"), Err(RouterError::ModelNotFound { .. })));
}
