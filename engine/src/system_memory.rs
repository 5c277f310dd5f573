//! How much memory this process may use: the machine's, or what the limits of its control groups (containers,
//! systemd services) leave of it.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

/// Total memory in bytes: the machine's, or the lowest limit of this process's control groups if that is
/// lower. `None` if the system does not report it.
pub fn total_bytes() -> Option<u64> {
    let machine = kibibytes(&read_to_string("/proc/meminfo").ok()?, "MemTotal:")?;
    let limit = own_groups().filter_map(|group| group.limit(&read)).min();
    Some(limit.map_or(machine, |limit| limit.min(machine)))
}

/// Bytes that this process may still allocate: the machine's available memory, or what a limit of its control
/// groups leaves if that is lower. `None` if the system does not report it.
pub fn free_bytes() -> Option<u64> {
    let machine = kibibytes(&read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let left = own_groups().filter_map(|group| group.left(&read)).min();
    Some(left.map_or(machine, |left| left.min(machine)))
}

fn read(file: &Path) -> Option<String> {
    read_to_string(file).ok()
}

fn own_groups() -> impl Iterator<Item = MemoryGroup> {
    // Without the file, assume that the root is the process's own group, as in a container.
    let groups = read_to_string("/proc/self/cgroup").unwrap_or_else(|_| "0::/".to_owned());
    memory_groups(&groups).into_iter()
}

/// A control group that may limit memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MemoryGroup {
    dir: PathBuf,
    files: &'static Files,
}

/// Names in one version of the interface.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    limit: &'static str,
    usage: &'static str,
    /// Page cache in the file `memory.stat`.
    cache: &'static str,
    /// The part of it that cannot be reclaimed: files on tmpfs and other shared memory.
    shared: &'static str,
}

const VERSION_1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: "total_cache ",
    shared: "total_shmem ",
};
const VERSION_2: Files =
    Files { limit: "memory.max", usage: "memory.current", cache: "file ", shared: "shmem " };

/// The groups in the text of `/proc/self/cgroup` and their ancestors. Only a container's own group looks like
/// the root: a service of systemd is below it.
fn memory_groups(text: &str) -> Vec<MemoryGroup> {
    let groups = text.lines().filter_map(|group| {
        let mut fields = group.splitn(3, ':');
        let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let (root, files) = match (id, controllers) {
            ("0", "") => ("/sys/fs/cgroup", &VERSION_2),
            (_, list) if list.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", &VERSION_1)
            }
            _ => return None,
        };
        let ancestors = Path::new(path.trim_start_matches('/')).ancestors();
        Some(ancestors.map(move |group| MemoryGroup { dir: Path::new(root).join(group), files }))
    });
    groups.flatten().collect()
}

impl MemoryGroup {
    /// Its limit in bytes, if it has one.
    fn limit(&self, read: &impl Fn(&Path) -> Option<String>) -> Option<u64> {
        // "max" does not parse as a number: no limit.
        read(&self.dir.join(self.files.limit))?.trim().parse().ok()
    }

    /// Bytes that its limit leaves, if it has one. Usage includes the page cache, which can be reclaimed
    /// except for shared memory. The kernel counts them at different times, so the cache may seem larger than
    /// the usage.
    fn left(&self, read: &impl Fn(&Path) -> Option<String>) -> Option<u64> {
        let limit = self.limit(read)?;
        let used: u64 = read(&self.dir.join(self.files.usage))?.trim().parse().ok()?;
        let stat = read(&self.dir.join("memory.stat")).unwrap_or_default();
        let number = |start| number_after(&stat, start).unwrap_or(0);
        let reclaimable = number(self.files.cache).saturating_sub(number(self.files.shared));
        Some(limit.saturating_sub(used.saturating_sub(reclaimable)))
    }
}

fn kibibytes(meminfo: &str, name: &str) -> Option<u64> {
    number_after(meminfo, name)?.checked_mul(1024)
}

/// The first number on the line that starts with `start`.
fn number_after(text: &str, start: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(start)?.split_whitespace().next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILES: [(&str, &str); 13] = [
        ("/sys/fs/cgroup/memory.max", "max\n"),
        ("/sys/fs/cgroup/system.slice/memory.max", "4096\n"),
        ("/sys/fs/cgroup/system.slice/memory.current", "3000\n"),
        ("/sys/fs/cgroup/system.slice/memory.stat", "anon 5\nfile 1200\nshmem 200\nfile_mapped 7\n"),
        ("/sys/fs/cgroup/system.slice/target.service/memory.max", "max\n"),
        ("/sys/fs/cgroup/small/memory.max", "1024\n"),
        ("/sys/fs/cgroup/small/memory.current", "1030\n"),
        ("/sys/fs/cgroup/idle/memory.max", "1024\n"),
        ("/sys/fs/cgroup/idle/memory.current", "100\n"),
        ("/sys/fs/cgroup/idle/memory.stat", "file 300\n"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2048\n"),
        ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "78\n"),
        ("/sys/fs/cgroup/memory/memory.stat", "cache 0\ntotal_cache 40\ntotal_shmem 10\n"),
    ];

    fn read(file: &Path) -> Option<String> {
        FILES.iter().find(|(path, _)| Path::new(path) == file).map(|(_, text)| (*text).to_owned())
    }

    #[test]
    fn the_lowest_limit_above_the_process_counts() {
        for (groups, limit, left) in [
            ("0::/\n", None, None),
            ("0::/system.slice/target.service\n", Some(4_096), Some(2_096)),
            ("0::/small\n", Some(1_024), Some(0)),
            ("0::/idle\n", Some(1_024), Some(1_024)),
            // Version 1, in a container that sees the host's path but only its own group.
            (
                "12:cpu,cpuacct:/docker/1\n9:memory:/docker/1\n1:name=systemd:/docker/1\n",
                Some(2_048),
                Some(2_000),
            ),
            ("nonsense\n", None, None),
        ] {
            let of =
                |value: fn(&MemoryGroup) -> Option<u64>| memory_groups(groups).iter().filter_map(value).min();
            assert_eq!(of(|group| group.limit(&read)), limit, "{groups}");
            assert_eq!(of(|group| group.left(&read)), left, "{groups}");
        }
    }

    #[test]
    fn system_files_are_parsed() {
        assert_eq!(
            kibibytes("MemTotal: 9 kB\nMemAvailable:   21000 kB\n", "MemAvailable:"),
            Some(21_000 * 1024)
        );
        assert_eq!(kibibytes("MemTotal: 9 kB\n", "MemAvailable:"), None);
        assert!(free_bytes() <= total_bytes());
    }
}
