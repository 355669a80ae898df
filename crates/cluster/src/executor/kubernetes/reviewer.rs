//! Who a runner is: the API server says which pod its token was made for.

use std::time::Duration;

use async_trait::async_trait;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use tonic::Status;

use crate::controller::run::pod::AUDIENCE;
use crate::runners::Reviewer;

const DEADLINE: Duration = Duration::from_secs(10);
const POD_NAME: &str = "authentication.kubernetes.io/pod-name";

/// Asks the API server.
pub struct TokenReviewer {
    reviews: Api<TokenReview>,
    /// Users of the namespace's service accounts begin with this.
    user: String,
}

impl TokenReviewer {
    #[must_use]
    pub fn new(client: Client, namespace: &str) -> Self {
        Self { reviews: Api::all(client), user: format!("system:serviceaccount:{namespace}:") }
    }
}

#[async_trait]
impl Reviewer for TokenReviewer {
    async fn pod_of(&self, token: &str) -> Result<String, Status> {
        let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![AUDIENCE.to_owned()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let parameters = PostParams::default();
        let asked = tokio::time::timeout(DEADLINE, self.reviews.create(&parameters, &review)).await;
        let answer = asked
            .map_err(|_| Status::unavailable("the API server did not say in time whose token this is"))?
            .map_err(|error| Status::unavailable(format!("the API server can't say whose token this is: {error}")))?;
        let refused = || Status::unauthenticated("the token is not one of a runner's pod");
        let status = answer.status.filter(|status| status.authenticated == Some(true)).ok_or_else(refused)?;
        if !status.audiences.iter().flatten().any(|audience| audience == AUDIENCE) {
            return Err(refused());
        }
        let user = status.user.ok_or_else(refused)?;
        if !user.username.as_deref().is_some_and(|name| name.starts_with(&self.user)) {
            return Err(refused());
        }
        user.extra.and_then(|mut extra| extra.remove(POD_NAME)).and_then(|names| names.into_iter().next()).ok_or_else(refused)
    }
}
