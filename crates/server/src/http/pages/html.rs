//! The few server-rendered pages: one layout, escaped text, no scripts. Light and dark by the browser's preference.

use std::fmt::Write as _;
use std::sync::LazyLock;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use base64::Engine as _;
use sha2::{Digest as _, Sha256};

const STYLE: &str = "\
:root{color-scheme:light dark;--line:#d0d5dd;--text:#101828;--soft:#475467;--page:#f9fafb;--card:#fff;--accent:#1d4ed8;--on-accent:#fff;--bad:#b42318}\
@media(prefers-color-scheme:dark){:root{--line:#344054;--text:#f2f4f7;--soft:#98a2b3;--page:#0c111d;--card:#161b26;--accent:#84adff;--on-accent:#0c111d;--bad:#f97066}}\
*{box-sizing:border-box}body{margin:0;min-height:100vh;display:grid;place-items:center;padding:1rem;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}\
main{width:100%;max-width:26rem;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:1.75rem}\
h1{font-size:1.25rem;margin:0 0 .75rem}p{margin:.5rem 0;color:var(--soft)}\
label{display:block;margin:.9rem 0 .25rem;font-weight:600}\
input,select{width:100%;padding:.6rem .7rem;font:inherit;color:inherit;background:var(--page);border:1px solid var(--line);border-radius:8px}\
button{margin-top:1.1rem;width:100%;padding:.65rem;font:inherit;font-weight:600;border-radius:8px;border:1px solid var(--line);background:transparent;color:inherit;cursor:pointer}\
button.first{background:var(--accent);border-color:var(--accent);color:var(--on-accent)}\
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}\
.code{font:600 1.6rem/1.4 ui-monospace,monospace;letter-spacing:.12em;text-align:center;color:var(--text);border:1px dashed var(--line);border-radius:8px;padding:.5rem}\
.bad{color:var(--bad);font-weight:600}a{color:var(--accent)}";

/// No script runs, nothing is loaded, nobody frames the page, forms go to this server.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = base64::engine::general_purpose::STANDARD.encode(Sha256::digest(STYLE.as_bytes()));
    let text = format!("default-src 'none'; style-src 'sha256-{hash}'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'");
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static("default-src 'none'"))
});

/// Text for HTML, in content and in quoted attributes.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// A page. `title` is text; `body` is HTML whose parts are escaped.
pub fn page(status: StatusCode, title: &str, body: &str) -> Response {
    let title = escape(title);
    let mut html = String::with_capacity(STYLE.len() + body.len() + 400);
    let _ = write!(
        html,
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"><title>{title} - RLMesh</title>\
         <style>{STYLE}</style></head><body><main><h1>{title}</h1>{body}</main></body></html>"
    );
    let mut response = (status, Html(html)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::CONTENT_SECURITY_POLICY, POLICY.clone());
    // Not "no-referrer": with it browsers send "Origin: null" with forms.
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_gets_out_of_text() {
        assert_eq!(escape("<a href=\"x\" id='y'>&</a>"), "&lt;a href=&quot;x&quot; id=&#39;y&#39;&gt;&amp;&lt;/a&gt;");
    }

    #[test]
    fn the_policy_names_the_style() {
        assert!(POLICY.to_str().is_ok_and(|text| text.contains("style-src 'sha256-")));
    }
}
