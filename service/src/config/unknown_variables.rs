//! Finds environment variables with Outrider's prefix that no program of Outrider reads: most likely the name
//! of a setting is misspelled. They are no fault, because several programs may share an environment.

use super::ENV_PREFIX;
use super::layers::nearest;

/// Variables that are no settings of a server: the key of clients that `outrider` starts, and the name of a
/// build.
const OTHERS: [&str; 2] = ["api_key", "build"];

/// Keys of all settings of all servers, sorted. A server knows only its own ones.
pub fn settings() -> impl Iterator<Item = &'static str> + Clone {
    include_str!("settings.txt").lines()
}

/// The names that no program reads, each with the most similar one, if there is one.
pub(super) fn find(names: &[String]) -> Vec<(&str, Option<String>)> {
    let known = settings().chain(OTHERS);
    let unknown = |name: &&str| {
        let key = name.strip_prefix(ENV_PREFIX).unwrap_or_default().to_lowercase();
        let key = key.split("__").next().unwrap_or_default();
        !key.is_empty() && known.clone().all(|known| known != key) && !is_service_link(name, names)
    };
    let hint = |name: &str| {
        let key = name.strip_prefix(ENV_PREFIX)?.to_lowercase();
        nearest(&key, known.clone()).map(|nearest| format!("{ENV_PREFIX}{}", nearest.to_uppercase()))
    };
    names.iter().map(String::as_str).filter(unknown).map(|name| (name, hint(name))).collect()
}

/// Whether Kubernetes has set the variable for a service whose name begins as the prefix does: for each
/// service `x` it sets `X_SERVICE_HOST`, `X_SERVICE_PORT..` and `X_PORT..`, unless a pod has
/// `enableServiceLinks: false`.
fn is_service_link(name: &str, names: &[String]) -> bool {
    names.iter().filter_map(|other| other.strip_suffix("_SERVICE_HOST")).any(|service| {
        let rest = name.strip_prefix(service);
        rest.is_some_and(|rest| rest.starts_with("_SERVICE_") || rest.starts_with("_PORT"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelled_setting_is_found_and_others_are_not() {
        let names = [
            "PATH",
            "OUTRIDER_MAX_DRAFT_TOKENS",
            "OUTRIDER_DRAFT_AHEAD",
            "OUTRIDER_LANES__code",
            "OUTRIDER_API_KEY",
            "OUTRIDER_BUILD",
            "OUTRIDER_MAX_DRAFT_TOKEN",
            "OUTRIDER_ZZZZ",
            "OUTRIDER_HTTP_PORT",
            "OUTRIDER_ROUTER_SERVICE_HOST",
            "OUTRIDER_ROUTER_SERVICE_PORT_HTTP",
            "OUTRIDER_ROUTER_PORT_8000_TCP_ADDR",
        ]
        .map(str::to_owned);
        let found = find(&names);
        let unknown: Vec<&str> = found.iter().map(|(name, _)| *name).collect();
        assert_eq!(unknown, ["OUTRIDER_MAX_DRAFT_TOKEN", "OUTRIDER_ZZZZ", "OUTRIDER_HTTP_PORT"]);
        assert_eq!(found[0].1.as_deref(), Some("OUTRIDER_MAX_DRAFT_TOKENS"));
        assert_eq!(found[1].1, None);
    }
}
