//! CORS: which web pages of other origins may call the clients' HTTP API. Without origins no header is added
//! and browsers refuse such calls.

use std::time::Duration;

use axum::Router;
use http::{HeaderValue, Method};
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

/// How long a browser may remember the answer to a preflight.
const PREFLIGHT_MAX_AGE: Duration = Duration::from_secs(3_600);

/// Origins of web pages that may call the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AllowedOrigins {
    /// Any (`*`).
    Any,
    /// These; possibly none.
    Listed(Vec<HeaderValue>),
}

impl AllowedOrigins {
    /// Parses `*` alone, or a list of origins as browsers send them. The error names the faulty one.
    pub fn parse(origins: &[String]) -> Result<Self, String> {
        match origins {
            [any] if any == "*" => Ok(Self::Any),
            origins => {
                origins.iter().map(|origin| parse_origin(origin)).collect::<Result<_, _>>().map(Self::Listed)
            }
        }
    }
}

fn parse_origin(origin: &str) -> Result<HeaderValue, String> {
    let is_valid = origin.split_once("://").is_some_and(|(scheme, host)| {
        let is_allowed =
            |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '*' | ',') && !c.is_ascii_uppercase();
        !scheme.is_empty() && !host.is_empty() && origin.replacen("://", "", 1).chars().all(is_allowed)
    });
    let value = HeaderValue::from_str(origin).ok().filter(|_| is_valid);
    value.ok_or_else(|| {
        format!(
            "`{origin}` is not an origin: write SCHEME://HOST or SCHEME://HOST:PORT in lower case, or * alone"
        )
    })
}

/// Lets web pages of these origins call `app`. Preflights are answered before authentication, as browsers
/// send them without a key. Cookies are not used, so credentials in the sense of CORS are not allowed.
pub fn allow_origins(app: Router, origins: &AllowedOrigins) -> Router {
    let origin = match origins {
        AllowedOrigins::Listed(origins) if origins.is_empty() => return app,
        AllowedOrigins::Listed(origins) => AllowOrigin::list(origins.clone()),
        AllowedOrigins::Any => AllowOrigin::any(),
    };
    let layer = CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        // Client libraries send many headers of their own.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(Any)
        .max_age(PREFLIGHT_MAX_AGE);
    app.layer(layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_written_as_browsers_send_them() {
        let parse = |origins: &[&str]| {
            AllowedOrigins::parse(&origins.iter().map(|&origin| origin.to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(parse(&["*"]), Ok(AllowedOrigins::Any));
        assert_eq!(parse(&[]), Ok(AllowedOrigins::Listed(Vec::new())));
        for origin in ["https://a.example", "http://localhost:3000", "http://[::1]:80", "app://obsidian.md"] {
            assert_eq!(parse(&[origin]), Ok(AllowedOrigins::Listed(vec![HeaderValue::from_static(origin)])));
        }
        for origin in
            ["a.example", "https://", "://a", "https://a/", "https://a/b", "https://A", "https://*.a", ""]
        {
            assert!(
                parse(&["https://fine", origin]).unwrap_err().contains(&format!("`{origin}`")),
                "{origin}"
            );
        }
        assert!(parse(&["*", "https://a"]).is_err(), "* makes the others pointless");
    }
}
