//! Who may do what: roles, scopes and the caller of a request. Pure; the transport finds out who calls, this says what
//! that caller may do.

use rlm_core::error::{Code, Error};
use rlm_core::ids::{OrganizationId, UserId};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

macro_rules! scopes {
    ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
        /// One thing that a caller may be allowed to do.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
        pub enum Scope {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
        }

        impl Scope {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

scopes! {
    EvaluationsRead = "evaluations:read";
    EvaluationsWrite = "evaluations:write";
    /// Registered models and environments.
    ModelsRead = "models:read";
    ModelsWrite = "models:write";
    ClustersRead = "clusters:read";
    ClustersWrite = "clusters:write";
    /// Make and revoke API keys of one's own.
    KeysWrite = "keys:write";
    OrganizationRead = "organization:read";
    OrganizationWrite = "organization:write";
    AuditRead = "audit:read";
}

impl Scope {
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|scope| scope.as_str() == text)
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// A set of scopes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scopes(u32);

impl Scopes {
    pub const NONE: Self = Self(0);

    #[must_use]
    pub fn of(scopes: &[Scope]) -> Self {
        Self(scopes.iter().fold(0, |bits, scope| bits | (1 << *scope as u32)))
    }

    #[must_use]
    pub fn all() -> Self {
        Self::of(Scope::ALL)
    }

    #[must_use]
    pub const fn contains(self, scope: Scope) -> bool {
        self.0 & (1 << scope as u32) != 0
    }

    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// The scopes of `self` that `other` lacks.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    #[must_use]
    pub fn to_vec(self) -> Vec<Scope> {
        Scope::ALL.iter().copied().filter(|scope| self.contains(*scope)).collect()
    }

    /// As stored: names with a space between.
    #[must_use]
    pub fn to_text(self) -> String {
        self.to_vec().into_iter().map(Scope::as_str).collect::<Vec<_>>().join(" ")
    }

    /// Reads the stored form; a name that this version does not know grants nothing.
    #[must_use]
    pub fn from_text(text: &str) -> Self {
        let known: Vec<Scope> = text.split_whitespace().filter_map(Scope::parse).collect();
        Self::of(&known)
    }
}

/// What a member is in an organization.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads evaluations, models, environments, clusters.
    Viewer,
    /// Also submits and changes evaluations, registers models and environments, makes keys.
    Member,
    /// Also connects clusters, manages members, reads the audit log.
    Admin,
    /// Also makes and unmakes owners.
    Owner,
}

impl Role {
    pub const ALL: [Self; 4] = [Self::Viewer, Self::Member, Self::Admin, Self::Owner];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Viewer => "viewer",
            Self::Member => "member",
            Self::Admin => "admin",
            Self::Owner => "owner",
        }
    }

    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.as_str() == text)
    }

    /// Everything a member of this role may do.
    #[must_use]
    pub fn scopes(self) -> Scopes {
        use Scope::{
            AuditRead, ClustersRead, ClustersWrite, EvaluationsRead, EvaluationsWrite, KeysWrite, ModelsRead, ModelsWrite,
            OrganizationRead, OrganizationWrite,
        };
        match self {
            Self::Viewer => Scopes::of(&[EvaluationsRead, ModelsRead, ClustersRead, OrganizationRead]),
            Self::Member => {
                Scopes::of(&[EvaluationsRead, EvaluationsWrite, ModelsRead, ModelsWrite, ClustersRead, KeysWrite, OrganizationRead])
            }
            Self::Admin | Self::Owner => Scopes::of(&[
                EvaluationsRead,
                EvaluationsWrite,
                ModelsRead,
                ModelsWrite,
                ClustersRead,
                ClustersWrite,
                KeysWrite,
                OrganizationRead,
                OrganizationWrite,
                AuditRead,
            ]),
        }
    }
}

/// Who changes something, as the audit log names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor {
    pub organization_id: OrganizationId,
    /// `user:<id>`, `key:<id>`, `cluster:<id>`, `system`.
    pub name: String,
    pub remote_address: String,
}

impl Actor {
    /// The platform itself, acting in `organization_id`.
    #[must_use]
    pub fn system(organization_id: OrganizationId) -> Self {
        Self { organization_id, name: "system".to_owned(), remote_address: String::new() }
    }
}

/// How a caller proved who they are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credential {
    /// An access token; its family is the sign-in that it belongs to.
    AccessToken {
        family: String,
    },
    ApiKey {
        id: String,
    },
    /// A browser session, by the hash of its cookie.
    Browser {
        hash: String,
    },
}

/// The signed-in caller of a request, acting in one organization.
#[derive(Debug, Clone)]
pub struct Caller {
    pub user_id: UserId,
    pub organization_id: OrganizationId,
    pub role: Role,
    pub scopes: Scopes,
    /// `user:<id>` or `key:<id>`.
    pub actor: String,
    pub remote_address: String,
    pub credential: Credential,
}

impl Caller {
    /// Refuses callers without `scope`, and says what they lack.
    pub fn require(&self, scope: Scope) -> Result<(), Error> {
        if self.scopes.contains(scope) {
            return Ok(());
        }
        let why = if self.role.scopes().contains(scope) {
            format!("this API key was made without the scope {scope}; make one that has it")
        } else {
            format!(
                "your role in {} is {}, which does not include {scope}; ask an admin of the organization",
                self.organization_id,
                self.role.as_str()
            )
        };
        Err(Error::new(Code::Forbidden, format!("not allowed: {why}")))
    }

    #[must_use]
    pub fn actor(&self) -> Actor {
        Actor { organization_id: self.organization_id, name: self.actor.clone(), remote_address: self.remote_address.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_can_do_what_the_one_below_can() {
        for pair in Role::ALL.windows(2) {
            assert_eq!(pair[0].scopes().without(pair[1].scopes()), Scopes::NONE, "{:?} loses something", pair[1]);
        }
        assert_eq!(Role::Owner.scopes(), Scopes::all());
    }

    #[test]
    fn a_viewer_changes_nothing() {
        for scope in Role::Viewer.scopes().to_vec() {
            assert!(scope.as_str().ends_with(":read"), "{scope}");
        }
    }

    #[test]
    fn scopes_read_back() {
        for scope in Scope::ALL {
            assert_eq!(Scopes::from_text(&Scopes::of(&[*scope]).to_text()), Scopes::of(&[*scope]));
        }
        assert_eq!(Scopes::from_text("root evaluations:read"), Scopes::of(&[Scope::EvaluationsRead]));
        assert_eq!(Scopes::from_text(&Scopes::all().to_text()), Scopes::all());
    }
}
