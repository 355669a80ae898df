//! The cell protocol over a real connection: join, session, leases, and what goes wrong with them.

mod join;
mod leases;
mod link;
pub mod plane;
mod recovery;

use self::plane::Plane;
use crate::common::postgres_url;

/// Runs the named tests once more with PostgreSQL below, each with an organization of its own.
macro_rules! on_postgres {
    ($($module:ident::$test:ident),* $(,)?) => {
        #[tokio::test]
        async fn the_same_on_postgresql() {
            $(
                let Some(url) = postgres_url().await else { return };
                eprintln!(stringify!($test));
                $module::$test(&Plane::with(|config| config.database_url = url).await).await;
            )*
        }
    };
}

on_postgres! {
    leases::a_run_is_assigned_and_its_results_count_on,
    leases::results_that_are_sent_again_count_once_and_acknowledgements_are_merged_on,
    leases::a_cancelled_evaluation_ends_when_the_cluster_says_so_on,
    leases::drain_places_nothing_and_is_done_when_nothing_is_left_on,
    leases::a_disconnected_clusters_run_moves_after_its_time_and_late_results_count_on,
    leases::what_can_not_run_fails_with_the_reason_on,
    link::another_agent_is_refused_while_the_first_is_connected_on,
    link::loss_is_shown_within_thirty_seconds_and_by_the_servers_clock_on,
    link::an_archived_cluster_is_told_and_let_in_no_more_on,
    link::a_rotated_credential_is_handed_over_and_the_old_one_works_for_a_day_on,
    link::a_heartbeat_shows_nodes_and_conditions_on,
}
