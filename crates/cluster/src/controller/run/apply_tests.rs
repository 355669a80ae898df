use super::*;
use crate::controller::run::classify::component;
use crate::controller::run::component::Role;

/// A cluster that lets a policy and no pod through.
struct NoPods(WriteError);

#[async_trait]
impl Writes for NoPods {
    async fn apply_policy(&self, _: &NetworkPolicy) -> Result<(), WriteError> {
        Ok(())
    }

    async fn create_pod(&self, _: &Pod) -> Result<(), WriteError> {
        Err(self.0.clone())
    }

    async fn delete_pod(&self, _: &Deletion) -> Result<(), WriteError> {
        Err(self.0.clone())
    }

    async fn apply_status(&self, _: &str, _: &RunStatus) -> Result<(), WriteError> {
        Ok(())
    }
}

#[tokio::test]
async fn a_pod_that_can_not_be_made_is_said_of_its_component_and_tried_again_unless_it_is_refused() {
    let now = Timestamp::from_second(1_800_000_000).unwrap();
    let attempt = Attempt { role: Role::Runner, number: 1 };
    let table = [
        (WriteError::Refused("denied".to_owned()), ComponentPhase::Failed, Reason::AdmissionRefused, None),
        (WriteError::Quota("exceeded quota: q".to_owned()), ComponentPhase::Pending, Reason::QuotaExceeded, Some(QUOTA_PAUSE)),
        (WriteError::Unavailable("webhook down".to_owned()), ComponentPhase::Pending, Reason::ApiUnavailable, Some(UNAVAILABLE_PAUSE)),
    ];
    for (error, phase, reason, pause) in table {
        let creating = component(attempt, ComponentPhase::Pending, Some(Reason::Creating), None, now);
        let plan = Plan { create: vec![(attempt, Pod::default())], components: vec![creating], wanted: 1, ..Plan::default() };
        let applied = apply(plan, &NoPods(error.clone()), now).await.unwrap();
        let found = &applied.components[0];
        assert_eq!((found.phase, found.reason), (phase, Some(reason)), "{error}");
        assert_eq!(found.message.as_deref(), Some(error.why()));
        assert_eq!(applied.look_again, pause.map(|pause| now.checked_add(pause).unwrap()));
    }
}

#[tokio::test]
async fn a_deletion_that_is_refused_hides_nothing_of_what_was_seen() {
    let now = Timestamp::from_second(1_800_000_000).unwrap();
    let ready = component(Attempt { role: Role::Runner, number: 1 }, ComponentPhase::Ready, None, None, now);
    let delete = ["one", "two"].map(|name| Deletion { name: name.to_owned(), uid: name.to_owned() }).to_vec();
    let plan = Plan { delete, components: vec![ready.clone()], wanted: 1, ..Plan::default() };
    let error = WriteError::Refused("a webhook says no".to_owned());
    let applied = apply(plan, &NoPods(error.clone()), now).await.unwrap();
    assert_eq!((applied.components, applied.deleted), (vec![ready], Err(error)));
}
