//! Roles of clients, by the user and groups of the process at the other end of the socket.
//!
//! ```text
//! use       generate, tokenize, score; look at models, cache and status
//! manage    and load, unload, preload, pin, clear, test the card
//! admin     and change budget and policy, and have the settings read anew
//! ```
//!
//! A role includes those above it in this table. If nothing is configured for a role, everyone with
//! the role above it in the table has it; if nothing is configured at all, everyone who may connect
//! has all roles. Root and the daemon's own user have all roles: they could end the daemon as well.

use std::collections::{BTreeSet, HashMap};
use std::ffi::CString;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::unistd::{Gid, Group, Uid, User, geteuid, getgrouplist};

use crate::arrival::Caller;

/// Maximum number of users and groups in a role's list.
const ENTRIES_MAX: usize = 256;
/// How long a user's groups are cached. They come from the system's directory, which may be on
/// another machine.
const GROUPS_KEPT: Duration = Duration::from_secs(60);
/// Maximum number of users whose groups are cached.
const GROUPS_MAX: usize = 1024;

/// The role that a call requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// May use loaded models.
    Use,
    /// May load and unload models, and control what is resident.
    Manage,
    /// May change the budget, the policy and the settings.
    Admin,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Use => "use",
            Self::Manage => "manage",
            Self::Admin => "admin",
        })
    }
}

/// Users and groups that have a role.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Who {
    /// Everyone who may connect.
    #[default]
    Everyone,
    /// These users, and the members of these groups, have the role.
    Listed {
        /// User ids in the list.
        users: BTreeSet<u32>,
        /// Group ids in the list.
        groups: BTreeSet<u32>,
    },
}

impl Who {
    /// Reads a list of users and `@groups`, by name or number; `*` means everyone, an empty list no
    /// user.
    ///
    /// # Errors
    /// A message that names the unknown user or group.
    pub fn parse(entries: &[String]) -> Result<Self, String> {
        if entries.len() > ENTRIES_MAX {
            return Err(format!(
                "{} entries; at most {ENTRIES_MAX} are allowed, use a group",
                entries.len()
            ));
        }
        let (mut users, mut groups) = (BTreeSet::new(), BTreeSet::new());
        for entry in entries {
            match entry.trim() {
                "" => {}
                "*" => return Ok(Self::Everyone),
                text => {
                    // Named twice is named.
                    let _ = match text.strip_prefix('@') {
                        Some(group) => groups.insert(group_number(group)?),
                        None => users.insert(user_number(text)?),
                    };
                }
            }
        }
        Ok(Self::Listed { users, groups })
    }

    pub(crate) fn has_groups(&self) -> bool {
        matches!(self, Self::Listed { groups, .. } if !groups.is_empty())
    }

    fn holds(&self, uid: u32, gids: &[u32]) -> bool {
        match self {
            Self::Everyone => true,
            Self::Listed { users, groups } => {
                users.contains(&uid) || gids.iter().any(|gid| groups.contains(gid))
            }
        }
    }
}

fn user_number(name: &str) -> Result<u32, String> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    match User::from_name(name) {
        Ok(Some(user)) => Ok(user.uid.as_raw()),
        Ok(None) => Err(format!(
            "there is no user '{name}'; a group is written @{name}"
        )),
        Err(error) => Err(format!(
            "the user '{name}' cannot be looked up: {error}; give the user's number instead"
        )),
    }
}

fn group_number(name: &str) -> Result<u32, String> {
    if let Ok(number) = name.parse() {
        return Ok(number);
    }
    match Group::from_name(name) {
        Ok(Some(group)) => Ok(group.gid.as_raw()),
        Ok(None) => Err(format!(
            "there is no group '{name}'; create it, or give its number"
        )),
        Err(error) => Err(format!(
            "the group '{name}' cannot be looked up: {error}; give its number instead"
        )),
    }
}

/// The configuration of all roles.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Roles {
    /// Clients with the role `use`.
    pub use_by: Who,
    /// Clients with the role `manage`.
    pub manage_by: Who,
    /// Clients with the role `admin`.
    pub admin_by: Who,
}

impl Roles {
    /// The highest role of a user with these groups, if any.
    fn highest(&self, uid: u32, gids: &[u32]) -> Option<Role> {
        if uid == 0 || uid == geteuid().as_raw() {
            return Some(Role::Admin);
        }
        [
            (Role::Admin, &self.admin_by),
            (Role::Manage, &self.manage_by),
            (Role::Use, &self.use_by),
        ]
        .into_iter()
        .find_map(|(role, who)| who.holds(uid, gids).then_some(role))
    }

    fn need_groups(&self) -> bool {
        [&self.use_by, &self.manage_by, &self.admin_by]
            .into_iter()
            .any(Who::has_groups)
    }
}

/// For each user the groups, and when they were looked up.
type KnownGroups = HashMap<u32, (Instant, Arc<[u32]>)>;

/// Determines the roles of clients, with a cache of users' groups.
#[derive(Debug)]
pub struct RoleBook {
    roles: Roles,
    groups: Mutex<KnownGroups>,
}

impl RoleBook {
    /// The roles of clients by this configuration.
    pub fn new(roles: Roles) -> Self {
        Self {
            roles,
            groups: Mutex::default(),
        }
    }

    /// The highest role of a user, if any. Looks groups up on a blocking thread if they matter.
    pub async fn highest(&self, uid: u32, gid: u32) -> Option<Role> {
        if !self.roles.need_groups() {
            return self.roles.highest(uid, &[]);
        }
        let caller = Caller { uid, gid, pid: 0 };
        self.roles.highest(uid, &self.groups(caller).await)
    }

    /// The groups of a client's user, looked up on a blocking thread.
    pub(crate) async fn groups(&self, caller: Caller) -> Arc<[u32]> {
        let Caller { uid, gid, .. } = caller;
        let kept = |groups: &KnownGroups| {
            let (at, gids) = groups.get(&uid)?;
            (at.elapsed() < GROUPS_KEPT).then(|| Arc::clone(gids))
        };
        let known = kept(&self.groups.lock().unwrap_or_else(PoisonError::into_inner));
        let gids = match known {
            Some(gids) => gids,
            None => {
                let looked = tokio::task::spawn_blocking(move || groups_of(uid, gid)).await;
                let gids: Arc<[u32]> = looked.unwrap_or_default().into();
                let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
                if groups.len() >= GROUPS_MAX {
                    groups.clear();
                }
                groups.insert(uid, (Instant::now(), Arc::clone(&gids)));
                gids
            }
        };
        // The group that the process has now, too, which the directory may not know of.
        if gids.contains(&gid) {
            gids
        } else {
            [&gids[..], &[gid]].concat().into()
        }
    }
}

/// The groups of a user, according to the system's directory.
fn groups_of(uid: u32, gid: u32) -> Vec<u32> {
    let name = match User::from_uid(Uid::from_raw(uid)) {
        Ok(Some(user)) => user.name,
        Ok(None) | Err(_) => return Vec::new(),
    };
    let groups = CString::new(name)
        .ok()
        .and_then(|name| getgrouplist(&name, Gid::from_raw(gid)).ok());
    let groups = groups.unwrap_or_default();
    groups.into_iter().map(Gid::as_raw).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRANGER: u32 = 4_000_000_001;

    fn who(entries: &[&str]) -> Who {
        let entries: Vec<String> = entries.iter().map(|e| (*e).to_owned()).collect();
        Who::parse(&entries).unwrap()
    }

    #[test]
    fn without_configuration_everyone_has_all_roles() {
        assert_eq!(Roles::default().highest(STRANGER, &[]), Some(Role::Admin));
    }

    #[test]
    fn a_role_includes_the_lower_ones_and_root_has_all() {
        let roles = Roles {
            use_by: who(&["@7000"]),
            manage_by: who(&["4000000001"]),
            admin_by: who(&[]),
        };
        assert_eq!(roles.highest(STRANGER, &[]), Some(Role::Manage));
        assert_eq!(roles.highest(STRANGER + 1, &[1, 7000]), Some(Role::Use));
        assert_eq!(roles.highest(STRANGER + 1, &[1]), None);
        assert_eq!(roles.highest(0, &[]), Some(Role::Admin));
        assert!(Role::Admin > Role::Manage && Role::Manage > Role::Use);
    }

    #[test]
    fn names_are_looked_up_and_unknown_ones_refused() {
        let mut expected = BTreeSet::new();
        expected.insert(0);
        assert_eq!(
            who(&["root", "@root"]),
            Who::Listed {
                users: expected.clone(),
                groups: expected,
            }
        );
        assert_eq!(who(&["root", "*"]), Who::Everyone);
        for entry in ["no-such-user-here", "@no-such-group-here"] {
            let error = Who::parse(&[entry.to_owned()]).unwrap_err();
            assert!(error.contains("no-such"), "{error}");
        }
    }

    #[tokio::test]
    async fn groups_of_the_process_count() {
        let book = RoleBook::new(Roles {
            use_by: who(&["@7000"]),
            manage_by: who(&[]),
            admin_by: who(&[]),
        });
        assert_eq!(book.highest(STRANGER, 7000).await, Some(Role::Use));
        assert_eq!(book.highest(STRANGER, 7000).await, Some(Role::Use));
        assert_eq!(book.highest(STRANGER + 1, 1).await, None);
    }
}
