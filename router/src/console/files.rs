//! The console's static files. They are embedded in the binary, refer to nothing outside it and use no inline
//! scripts; their content security policy enforces that.

use axum::extract::Path;
use axum::response::{IntoResponse as _, Response};
use http::{HeaderValue, Method, Uri, header};

use crate::error::RouterError;

/// Allows scripts, styles and requests of this origin only.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Name, content type and content of a file.
type File = (&'static str, &'static str, &'static str);

const INDEX: File = ("index.html", HTML, include_str!("../../console/index.html"));

const FILES: [File; 11] = [
    INDEX,
    ("style.css", CSS, include_str!("../../console/style.css")),
    ("app.js", JAVASCRIPT, include_str!("../../console/app.js")),
    ("api.js", JAVASCRIPT, include_str!("../../console/api.js")),
    ("dom.js", JAVASCRIPT, include_str!("../../console/dom.js")),
    ("answer.js", JAVASCRIPT, include_str!("../../console/answer.js")),
    ("playground.js", JAVASCRIPT, include_str!("../../console/playground.js")),
    ("lanes.js", JAVASCRIPT, include_str!("../../console/lanes.js")),
    ("pools.js", JAVASCRIPT, include_str!("../../console/pools.js")),
    ("requests.js", JAVASCRIPT, include_str!("../../console/requests.js")),
    ("pair.js", JAVASCRIPT, include_str!("../../console/pair.js")),
];

/// `GET /`.
pub(super) async fn index() -> Response {
    respond(INDEX)
}

/// `GET /console/{name}`.
pub(super) async fn file(Path(name): Path<String>, method: Method, uri: Uri) -> Response {
    match FILES.into_iter().find(|(file_name, ..)| *file_name == name) {
        Some(file) => respond(file),
        None => RouterError::RouteNotFound { method: method.to_string(), path: uri.path().to_owned() }
            .into_response(),
    }
}

fn respond((_, content_type, text): File) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        // The address may be served by another version of the router tomorrow.
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Prompts, answers and names of models are untrusted.
    #[test]
    fn no_script_parses_text_as_markup_or_code() {
        for (name, _, text) in FILES {
            for sink in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
                assert!(!text.contains(sink), "{name} contains {sink}");
            }
        }
    }

    #[test]
    fn every_element_that_a_script_looks_up_is_on_the_page() {
        let (.., page) = INDEX;
        for (name, _, text) in FILES {
            for rest in text.split("byId(\"").skip(1) {
                let id = rest.split('"').next().unwrap();
                assert!(page.contains(&format!("id=\"{id}\"")), "{name} looks up {id}");
            }
        }
    }
}
