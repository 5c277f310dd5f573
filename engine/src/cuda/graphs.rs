//! Decides which kernel launches are replayed as CUDA graphs. A device that replays graphs collects launches.
//! Before any other operation it compares the collected list, grids and parameters included, with the lists
//! that ran before. A list that ran once is captured the second time and replayed from then on.
//!
//! Replay is correct by construction: only launches equal to the collected ones are replayed. Steps repeat
//! because their buffers are kept (`ops/step_buffer.rs`) and sizes are often equal: the same numbers of rows,
//! splits and tiles. Whether replay saves time has to be measured on a GPU.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::sources::Kernel;

/// Maximum number of launches in all known lists. A driver holds memory for each launch of a graph, so this
/// bounds its memory too. Steps of several ranks have a list between any two collectives: 162 lists of about
/// 800 launches for 80 layers, as many launches as a step on one device. When the limit is reached, the lists
/// that were not used for longest are dropped, and captured again on demand.
const MAX_LAUNCHES: usize = 1 << 16;

/// A kernel launch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Launch {
    /// Name of the kernel; names are unique.
    pub(crate) kernel: &'static str,
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) shared_bytes: u32,
    /// Blocks of a cluster.
    pub(crate) cluster: u32,
    pub(crate) grid: [u32; 3],
    pub(crate) params: Vec<u64>,
}

impl Launch {
    pub(crate) fn new(kernel: &'static Kernel, grid: [u32; 3], params: &[u64]) -> Self {
        let Kernel { name, threads, shared_bytes, cluster, .. } = *kernel;
        Self { kernel: name, threads, shared_bytes, cluster, grid, params: params.to_vec() }
    }
}

/// How to run the collected launches.
#[derive(Debug)]
pub(crate) enum LaunchAction {
    /// No launches were collected.
    Empty,
    /// Launch them one by one: this list is new.
    LaunchEach(Arc<[Launch]>),
    /// Second occurrence: capture a graph, run it, and pass it to [`LaunchRecorder::insert_graph`].
    Capture(Arc<[Launch]>),
    /// Replay the graph of the list with this number.
    Replay(u64),
}

/// A list that ran before.
#[derive(Debug)]
struct KnownList {
    number: u64,
    /// When it ran last; key in [`LaunchRecorder::by_use`].
    used_at: u64,
}

/// Collects launches, and holds the graphs `G` of lists that ran before.
#[derive(Debug)]
pub(crate) struct LaunchRecorder<G> {
    pending: Vec<Launch>,
    known: HashMap<Arc<[Launch]>, KnownList>,
    /// The same lists, by the time of their last use.
    by_use: BTreeMap<u64, Arc<[Launch]>>,
    /// Number of launches in the known lists.
    num_launches: usize,
    /// Graphs by the number of their list; none for lists that ran once.
    graphs: HashMap<u64, G>,
    clock: u64,
}

impl<G> Default for LaunchRecorder<G> {
    fn default() -> Self {
        Self {
            pending: Vec::new(),
            known: HashMap::new(),
            by_use: BTreeMap::new(),
            num_launches: 0,
            graphs: HashMap::new(),
            clock: 0,
        }
    }
}

impl<G> LaunchRecorder<G> {
    /// Adds a launch to the list.
    pub(crate) fn push(&mut self, launch: Launch) {
        self.pending.push(launch);
    }

    /// Takes the collected launches and says how to run them.
    pub(crate) fn next(&mut self) -> LaunchAction {
        if self.pending.is_empty() {
            return LaunchAction::Empty;
        }
        self.clock += 1;
        let Some(known) = self.known.get_mut(self.pending.as_slice()) else {
            let launches: Arc<[Launch]> = std::mem::take(&mut self.pending).into();
            self.insert_list(&launches);
            return LaunchAction::LaunchEach(launches);
        };
        self.pending.clear();
        let launches = self.by_use.remove(&known.used_at).expect("every known list has a time of use");
        known.used_at = self.clock;
        self.by_use.insert(self.clock, Arc::clone(&launches));
        match self.graphs.contains_key(&known.number) {
            true => LaunchAction::Replay(known.number),
            false => LaunchAction::Capture(launches),
        }
    }

    /// Adds a new list, and drops old ones to make room.
    fn insert_list(&mut self, launches: &Arc<[Launch]>) {
        while self.num_launches + launches.len() > MAX_LAUNCHES
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.num_launches -= oldest.len();
            let known = self.known.remove(&oldest).expect("every time of use is that of a known list");
            self.graphs.remove(&known.number);
        }
        self.num_launches += launches.len();
        self.by_use.insert(self.clock, Arc::clone(launches));
        self.known.insert(Arc::clone(launches), KnownList { number: self.clock, used_at: self.clock });
    }

    /// Stores the graph of these launches, of a [`LaunchAction::Capture`].
    pub(crate) fn insert_graph(&mut self, launches: &[Launch], graph: G) {
        if let Some(known) = self.known.get(launches) {
            self.graphs.insert(known.number, graph);
        }
    }

    /// The graph of a [`LaunchAction::Replay`].
    pub(crate) fn graph(&self, number: u64) -> &G {
        &self.graphs[&number]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(kernel: &'static str, x: u32, param: u64) -> Launch {
        Launch { kernel, threads: 32, shared_bytes: 0, cluster: 1, grid: [x, 1, 1], params: vec![param] }
    }

    /// How a list of launches is run: `e`ach, `c`apture, or the name of the replayed graph.
    fn step(recorder: &mut LaunchRecorder<String>, launches: &[Launch]) -> String {
        launches.iter().for_each(|launch| recorder.push(launch.clone()));
        match recorder.next() {
            LaunchAction::Empty => "-".to_owned(),
            LaunchAction::LaunchEach(_) => "e".to_owned(),
            LaunchAction::Capture(launches) => {
                let graph = launches.iter().map(|launch| launch.kernel).collect();
                recorder.insert_graph(&launches, graph);
                "c".to_owned()
            }
            LaunchAction::Replay(number) => recorder.graph(number).clone(),
        }
    }

    #[test]
    fn only_equal_launches_are_replayed() {
        let mut recorder = LaunchRecorder::default();
        let (a, b) = (launch("a", 1, 7), launch("b", 2, 8));
        let both = [a.clone(), b.clone()];
        let found: Vec<String> = (0..4).map(|_| step(&mut recorder, &both)).collect();
        assert_eq!(found, ["e", "c", "ab", "ab"]);
        // Another grid, parameter or order, and a part of the list, each count as new.
        for other in [
            vec![launch("a", 2, 7), b.clone()],
            vec![launch("a", 1, 9), b.clone()],
            vec![b.clone(), a.clone()],
            vec![a.clone()],
        ] {
            assert_eq!(step(&mut recorder, &other), "e");
        }
        assert_eq!(step(&mut recorder, &[]), "-");
        assert_eq!(step(&mut recorder, &both), "ab");
    }

    /// Lists of a step of 80 layers on several ranks.
    #[test]
    fn the_many_lists_of_a_step_of_ranks_are_replayed() {
        let mut recorder = LaunchRecorder::default();
        for round in 0..4 {
            for list in 0..162 {
                let launches: Vec<Launch> = (0..5).map(|i| launch("a", i, list)).collect();
                assert_eq!(step(&mut recorder, &launches), ["e", "c", "aaaaa", "aaaaa"][round]);
            }
        }
    }

    #[test]
    fn there_are_never_more_launches_than_are_kept() {
        let mut recorder = LaunchRecorder::default();
        let kept: Vec<Launch> = (0..1000).map(|i| launch("k", i, 0)).collect();
        let list = |param: u64| -> Vec<Launch> { (0..1000).map(|i| launch("a", i, param)).collect() };
        for param in 1..200 {
            for _ in 0..2 {
                step(&mut recorder, &list(param));
            }
            let found = step(&mut recorder, &kept);
            assert!(found.len() == if param < 3 { 1 } else { 1000 }, "a list in use is kept");
            let lists = recorder.known.len();
            assert!(recorder.num_launches == 1000 * lists && recorder.num_launches <= MAX_LAUNCHES);
            assert!(recorder.by_use.len() == lists && recorder.graphs.len() <= lists);
        }
        assert_eq!(recorder.known.len(), MAX_LAUNCHES / 1000);
        assert_eq!(step(&mut recorder, &list(1)), "e", "the oldest was dropped");
        let huge: Vec<Launch> = (0..=MAX_LAUNCHES as u32).map(|i| launch("h", i, 0)).collect();
        step(&mut recorder, &huge);
        assert_eq!(recorder.known.len(), 1);
    }
}
