//! Who holds a token: the API server says for which pod it was made. Takes no word of the holder's own.

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, TokenReviewStatus};
use kube::api::PostParams;
use kube::{Api, Client};
use tonic::Status;

use crate::controller::run::pod;
use crate::discovery;
use crate::runners::Reviewer;

const DEADLINE: Duration = Duration::from_secs(10);
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";
const NODE_NAME: &str = "authentication.kubernetes.io/node-name";

/// Whose tokens are taken.
#[derive(Debug, Clone)]
enum Accounts {
    /// Every service account whose user begins like this: those of a namespace.
    Beginning(String),
    /// The service account of this user.
    One(String),
}

/// Asks the API server.
pub struct TokenReviewer {
    reviews: Api<TokenReview>,
    audience: &'static str,
    accounts: Accounts,
}

/// The pod that a token was made for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub pod: String,
    /// Kubernetes 1.30 and later say it.
    pub node: Option<String>,
}

impl TokenReviewer {
    /// For runners: the pods of the namespace of runs.
    #[must_use]
    pub fn of_runs(client: Client, namespace: &str) -> Self {
        let accounts = Accounts::Beginning(format!("system:serviceaccount:{namespace}:"));
        Self { reviews: Api::all(client), audience: pod::AUDIENCE, accounts }
    }

    /// For GPU discovery in the agent's namespace.
    #[must_use]
    pub fn of_discovery(client: Client, namespace: &str) -> Self {
        let accounts = Accounts::One(format!("system:serviceaccount:{namespace}:{}", discovery::ACCOUNT));
        Self { reviews: Api::all(client), audience: discovery::AUDIENCE, accounts }
    }

    pub async fn holder(&self, token: &str) -> Result<Holder, Status> {
        let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![self.audience.to_owned()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let parameters = PostParams::default();
        let asked = tokio::time::timeout(DEADLINE, self.reviews.create(&parameters, &review)).await;
        let answer = asked
            .map_err(|_| Status::unavailable("the API server did not say in time whose token this is"))?
            .map_err(|error| Status::unavailable(format!("the API server can't say whose token this is: {error}")))?;
        let holder = answer.status.and_then(|status| holder(status, self.audience, &self.accounts));
        holder.ok_or_else(|| Status::unauthenticated("the token is not one of a pod that this is for"))
    }
}

fn holder(status: TokenReviewStatus, audience: &str, accounts: &Accounts) -> Option<Holder> {
    if status.authenticated != Some(true) || !status.audiences.iter().flatten().any(|one| one == audience) {
        return None;
    }
    let user = status.user?;
    let name = user.username?;
    let taken = match accounts {
        Accounts::Beginning(beginning) => name.starts_with(beginning),
        Accounts::One(user) => name == *user,
    };
    let mut extra = user.extra.filter(|_| taken)?;
    let mut first = |key| extra.remove(key).and_then(|values| values.into_iter().next()).filter(|value| !value.is_empty());
    Some(Holder { pod: first(POD_NAME)?, node: first(NODE_NAME) })
}

#[async_trait]
impl Reviewer for TokenReviewer {
    async fn pod_of(&self, token: &str) -> Result<String, Status> {
        self.holder(token).await.map(|holder| holder.pod)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn said(status: Value, accounts: &Accounts) -> Option<Holder> {
        holder(serde_json::from_value(status).unwrap(), "a", accounts)
    }

    #[test]
    fn only_a_pods_token_for_this_audience_and_account_is_taken() {
        let good = json!({
            "authenticated": true,
            "audiences": ["a"],
            "user": {"username": "system:serviceaccount:s:d", "extra": {POD_NAME: ["p"], NODE_NAME: ["n"]}},
        });
        let one = Accounts::One("system:serviceaccount:s:d".to_owned());
        let namespace = Accounts::Beginning("system:serviceaccount:s:".to_owned());
        let holder = Some(Holder { pod: "p".to_owned(), node: Some("n".to_owned()) });
        assert_eq!((said(good.clone(), &one), said(good.clone(), &namespace)), (holder.clone(), holder));
        for (pointer, value) in [
            ("/authenticated", json!(false)),
            ("/audiences", json!(["b"])),
            ("/audiences", Value::Null),
            ("/user/username", json!("system:serviceaccount:s2:d")),
            ("/user/extra", Value::Null),
            ("/user/extra", json!({NODE_NAME: ["n"]})),
        ] {
            let mut bad = good.clone();
            *bad.pointer_mut(pointer).unwrap() = value;
            assert_eq!((said(bad.clone(), &one), said(bad.clone(), &namespace)), (None, None), "{bad}");
        }
        let mut other = good.clone();
        other["user"]["username"] = json!("system:serviceaccount:s:d2");
        assert_eq!(said(other, &one), None);
        let mut without = good;
        without["user"]["extra"] = json!({POD_NAME: ["p"]});
        assert_eq!(said(without, &one), Some(Holder { pod: "p".to_owned(), node: None }));
    }
}
