//! Bad input: each a clear error in our shape, nothing else.

use hyper_util::rt::{TokioExecutor, TokioIo};
use reqwest::{Method, StatusCode};
use serde_json::json;

use crate::common::TestServer;

#[tokio::test]
async fn bodies_that_can_not_be_read() {
    let server = TestServer::start().await;
    let key = server.key(&server.organization("lab").await).await;
    let post = || server.request(Method::POST, "/v1/keys").bearer_auth(&key);
    let json = |body: Vec<u8>| post().header("content-type", "application/json").body(body);

    for (body, code, says) in [
        (b"".to_vec(), "bad_request", "empty"),
        (b"{".to_vec(), "bad_request", "not JSON"),
        (b"{\"name\": \"\xff\"}".to_vec(), "bad_request", "not UTF-8"),
        (b"[1]".to_vec(), "invalid_request", "invalid type"),
        (b"{\"name\": 5}".to_vec(), "invalid_request", "name: "),
        (b"{\"name\": \"a\", \"nme\": 1}".to_vec(), "invalid_request", "nme"),
        (b"{\"name\": \"a\", \"scopes\": [\"a\", 5]}".to_vec(), "invalid_request", "scopes[1]"),
        ("{\"name\": \"a\", \"x\": ".repeat(100_000).into_bytes(), "invalid_request", "x"),
    ] {
        let answer = server.send(json(body)).await.refused(code);
        assert!(answer.message().contains(says), "{}", answer.message());
        assert!(answer.body["error"]["requestId"].as_str().unwrap().starts_with("req_"));
        assert_eq!(answer.body["error"]["requestId"].as_str(), answer.headers["x-request-id"].to_str().ok());
    }
    server.send(post().body("{}")).await.refused("bad_request");
    server.send(post().header("content-type", "text/plain").body("{}")).await.refused("bad_request");
    server.send(post().header("content-type", "application/json; charset=utf-8").body("{\"name\":\"a\"}")).await.ok();
}

#[tokio::test]
async fn fifty_megabytes_are_refused() {
    let server = TestServer::start().await;
    let key = server.key(&server.organization("lab").await).await;
    let body = vec![b' '; 50 * 1024 * 1024];
    let request = || server.request(Method::POST, "/v1/keys").bearer_auth(&key).header("content-type", "application/json");
    // The server answers without reading all of it, so the client may see the connection end first.
    match server.http.execute(request().body(body.clone()).build().unwrap()).await {
        Ok(answer) => assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE),
        Err(error) => assert!(error.is_request() || error.is_body(), "{error:?}"),
    }
    // Without a declared length.
    let chunks = futures::stream::iter((0..50).map(|_| Ok::<_, std::io::Error>(vec![b' '; 1024 * 1024])));
    match server.http.execute(request().body(reqwest::Body::wrap_stream(chunks)).build().unwrap()).await {
        Ok(answer) => assert_eq!(answer.status(), StatusCode::PAYLOAD_TOO_LARGE),
        Err(error) => assert!(error.is_request() || error.is_body(), "{error:?}"),
    }
    server.get(&key, "/v1/me").await.ok();
}

#[tokio::test]
async fn addresses_methods_and_parameters_that_are_not_there() {
    let server = TestServer::start().await;
    let key = server.key(&server.organization("lab").await).await;
    let nowhere = server.get(&key, "/v1/nothing").await.refused("not_found");
    assert!(nowhere.message().contains("/v1/nothing"));
    server.send(server.request(Method::DELETE, "/v1/info")).await.refused("method_not_allowed");
    server.get(&key, "/v1/keys/nonsense").await.refused("not_found");
    server.get(&key, "/v1/keys/%ff").await.refused("not_found");
    let unknown = server.get(&key, "/v1/keys?limt=5").await.refused("bad_request");
    assert!(unknown.message().contains("'limt'") && unknown.message().contains("cursor, limit"), "{}", unknown.message());
    server.get(&key, "/v1/me?x=1").await.refused("bad_request");
    server.get(&key, "/v1/keys?limit=5&limit=6").await.refused("bad_request");
    server.get(&key, "/v1/keys?limit=many").await.refused("bad_request");
}

#[tokio::test]
async fn credentials_that_are_no_credentials() {
    let server = TestServer::start().await;
    for value in ["", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "Bearer a b", "Bearer a.b.c", "bearer rlm_key_short", "\u{e9}"] {
        let request = server.request(Method::GET, "/v1/me").header("authorization", value.as_bytes());
        let answer = server.send(request).await.refused("unauthenticated");
        assert!(!answer.text.contains("dXNlcjpwYXNz") && !answer.text.contains("rlm_key_short"), "{}", answer.text);
    }
    let mut key = server.key(&server.organization("lab").await).await;
    let last = if key.ends_with('a') { 'b' } else { 'a' };
    key.pop();
    key.push(last);
    assert!(server.get(&key, "/v1/me").await.refused("unauthenticated").message().contains("checksum"));
    let foreign = rlm_core::tokens::Secret::generate(rlm_core::tokens::SecretKind::ControlCredential);
    assert!(server.get(foreign.expose(), "/v1/me").await.refused("unauthenticated").message().contains("no API key"));
    let unknown = rlm_core::tokens::Secret::generate(rlm_core::tokens::SecretKind::ApiKey);
    server.get(unknown.expose(), "/v1/me").await.refused("unauthenticated");
}

#[tokio::test]
async fn http2_by_prior_knowledge_and_the_document() {
    let server = TestServer::start().await;
    let stream = tokio::net::TcpStream::connect(server.address()).await.unwrap();
    let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = hyper::Request::get(format!("{}/v1/info", server.url)).body(String::new()).unwrap();
    let answer = sender.send_request(request).await.unwrap();
    assert_eq!((answer.version(), answer.status().as_u16()), (hyper::Version::HTTP_2, 200));
    let document = server.send(server.request(Method::GET, "/v1/openapi.json")).await.ok();
    assert_eq!(document["openapi"], "3.1.0");
    let head = server.send(server.request(Method::HEAD, "/v1/info")).await;
    assert_eq!(head.status, StatusCode::OK);
    assert_eq!(document["components"]["schemas"]["ErrorBody"]["required"], json!(["error"]));
}
