//! The migrations, as they lie in `migrations/`, in order. A file is never changed once released: add the next one.

use sqlx::SqlStr;
use sqlx::migrate::{Migration, MigrationType, Migrator};

const FILES: &[(i64, &str, &str)] = &[
    (1, "identity", include_str!("../../migrations/0001_identity.sql")),
    (2, "evaluations", include_str!("../../migrations/0002_evaluations.sql")),
    (3, "clusters", include_str!("../../migrations/0003_clusters.sql")),
];

pub(super) fn migrator() -> Migrator {
    let migrations = FILES
        .iter()
        .map(|(version, name, sql)| Migration::new(*version, (*name).into(), MigrationType::Simple, SqlStr::from_static(sql), false));
    Migrator::with_migrations(migrations.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_listed() {
        let mut on_disk: Vec<String> =
            std::fs::read_dir("migrations").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        on_disk.sort();
        let listed: Vec<String> = FILES.iter().map(|(version, name, _)| format!("{version:04}_{name}.sql")).collect();
        assert_eq!(on_disk, listed);
    }
}
