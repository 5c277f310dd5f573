//! The `--discovery` setting: kind and location of the source of membership.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// Source of membership of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiscoveryUri {
    /// `memory`: within one process.
    Memory,
    /// `static:FILE`: a TOML list maintained by an operator.
    Static(PathBuf),
    /// `etcd://HOST:PORT[,HOST:PORT]/PREFIX`.
    Etcd {
        /// `HOST:PORT` of each member of the etcd cluster.
        endpoints: Vec<String>,
        /// Prefix of all keys, without slashes at its ends.
        prefix: String,
    },
}

/// Why a text is not a source of membership.
#[derive(Debug, thiserror::Error)]
#[error("{reason}; give memory, static:FILE or etcd://HOST:PORT[,HOST:PORT]/PREFIX")]
pub struct BadUri {
    reason: String,
}

impl FromStr for DiscoveryUri {
    type Err = BadUri;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|reason| BadUri { reason })
    }
}

fn parse(text: &str) -> Result<DiscoveryUri, String> {
    if text == "memory" {
        return Ok(DiscoveryUri::Memory);
    }
    if let Some(file) = text.strip_prefix("static:") {
        return if file.is_empty() {
            Err("no file is named".to_owned())
        } else {
            Ok(DiscoveryUri::Static(file.into()))
        };
    }
    let Some(etcd) = text.strip_prefix("etcd://") else {
        return Err("unknown source of workers".to_owned());
    };
    let (hosts, prefix) = etcd.split_once('/').unwrap_or((etcd, ""));
    let prefix = prefix.trim_matches('/').to_owned();
    if hosts.contains('@') {
        // The text is not repeated, because it contains a password.
        return Err(
            "a user and a password do not belong into the URI, which logs and process lists show: give \
            --discovery-user NAME and OUTRIDER_DISCOVERY_PASSWORD"
                .to_owned(),
        );
    }
    let endpoints: Vec<String> = hosts.split(',').map(str::to_owned).collect();
    if let Some(endpoint) = endpoints.iter().find(|endpoint| !is_host_and_port(endpoint)) {
        return Err(format!("endpoint `{endpoint}` is not HOST:PORT"));
    }
    if prefix.is_empty() {
        return Err("the prefix is missing: it separates clusters that share an etcd".to_owned());
    }
    if prefix.contains(|character: char| character.is_whitespace() || matches!(character, '?' | '#')) {
        return Err(format!("prefix `{prefix}` holds a space, `?` or `#`"));
    }
    Ok(DiscoveryUri::Etcd { endpoints, prefix })
}

fn is_host_and_port(endpoint: &str) -> bool {
    let authority = endpoint.parse::<http::uri::Authority>();
    authority.is_ok_and(|authority| {
        let has_port = authority.port_u16().is_some_and(|port| port > 0);
        !authority.host().is_empty() && has_port
    })
}

impl fmt::Display for DiscoveryUri {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory => f.write_str("memory"),
            Self::Static(path) => write!(f, "static:{}", path.display()),
            Self::Etcd { endpoints, prefix } => write!(f, "etcd://{}/{prefix}", endpoints.join(",")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DiscoveryUri;

    #[test]
    fn good_uris_read_back_as_written() {
        let rows = [
            "memory",
            "static:workers.toml",
            "static:/etc/outrider/workers.toml",
            "etcd://127.0.0.1:2379/outrider",
            "etcd://one:2379,two:2379,[::1]:2379/team/outrider",
        ];
        for row in rows {
            assert_eq!(row.parse::<DiscoveryUri>().unwrap().to_string(), row);
        }
        let DiscoveryUri::Etcd { endpoints, prefix } = "etcd://a:1,b:2//x/".parse().unwrap() else {
            panic!("etcd was asked for");
        };
        assert_eq!((endpoints.join(" ").as_str(), prefix.as_str()), ("a:1 b:2", "x"));
    }

    #[test]
    fn bad_uris_say_what_is_wrong_and_what_to_give() {
        let rows = [
            ("", "unknown source of workers"),
            ("Memory", "unknown source of workers"),
            ("memory:", "unknown source of workers"),
            ("consul://h:1/p", "unknown source of workers"),
            ("workers.toml", "unknown source of workers"),
            ("etcd:h:1/p", "unknown source of workers"),
            ("static:", "no file"),
            ("etcd://", "endpoint ``"),
            ("etcd:///p", "endpoint ``"),
            ("etcd://host/p", "endpoint `host`"),
            ("etcd://host:0/p", "endpoint `host:0`"),
            ("etcd://host:99999/p", "endpoint `host:99999`"),
            ("etcd://:2379/p", "endpoint `:2379`"),
            ("etcd://a:1,,b:1/p", "endpoint ``"),
            ("etcd://user:word@host:1/p", "give --discovery-user NAME"),
            ("etcd://http://host:1/p", "endpoint `http:`"),
            ("etcd://host:1", "the prefix is missing"),
            ("etcd://host:1/", "the prefix is missing"),
            ("etcd://host:1///", "the prefix is missing"),
            ("etcd://host:1/a b", "prefix `a b`"),
            ("etcd://host:1/p?x=1", "prefix `p?x=1`"),
        ];
        for (uri, expected) in rows {
            let error = uri.parse::<DiscoveryUri>().expect_err(uri).to_string();
            assert!(
                error.contains(expected)
                    && error.contains("; give memory, static:FILE or")
                    && !error.contains("word@"),
                "{uri}: {error}"
            );
        }
    }
}
