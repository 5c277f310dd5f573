//! Decides which kernel launches are replayed as CUDA graphs. A device that replays graphs collects launches.
//! Before any other operation it compares the collected list, grids and parameters included, with the lists
//! that ran before. A list that ran once is captured the second time and replayed from then on.
//!
//! Replay is correct by construction: only launches equal to the collected ones are replayed. Steps repeat
//! because their buffers are kept (`ops/step_buffer.rs`) and sizes are often equal: the same numbers of rows,
//! splits and tiles. Whether replay saves time has to be measured on a GPU.

use std::collections::HashMap;

use super::sources::Kernel;

/// Maximum number of known launch lists. When it is reached, all lists and graphs are dropped and captured
/// again on demand.
const MAX_LAUNCH_LISTS: usize = 128;

/// A kernel launch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Launch {
    /// Name of the kernel; names are unique.
    pub(crate) kernel: &'static str,
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block, in bytes.
    pub(crate) shared_bytes: u32,
    pub(crate) grid: [u32; 3],
    pub(crate) params: Vec<u64>,
}

impl Launch {
    pub(crate) fn new(kernel: &'static Kernel, grid: [u32; 3], params: &[u64]) -> Self {
        let Kernel { name, threads, shared_bytes, .. } = *kernel;
        Self { kernel: name, threads, shared_bytes, grid, params: params.to_vec() }
    }
}

/// How to run the collected launches.
#[derive(Debug)]
pub(crate) enum LaunchAction {
    /// No launches were collected.
    Empty,
    /// Launch them one by one: this list is new.
    LaunchEach(Vec<Launch>),
    /// Second occurrence: capture a graph, run it, and pass it to [`LaunchRecorder::insert_graph`].
    Capture(Vec<Launch>),
    /// Replay the graph with this number.
    Replay(usize),
}

/// Collects launches, and holds the graphs `G` of lists that ran before.
#[derive(Debug)]
pub(crate) struct LaunchRecorder<G> {
    pending: Vec<Launch>,
    /// Number of the graph; `None` for lists that ran once.
    known: HashMap<Vec<Launch>, Option<usize>>,
    graphs: Vec<G>,
}

impl<G> Default for LaunchRecorder<G> {
    fn default() -> Self {
        Self { pending: Vec::new(), known: HashMap::new(), graphs: Vec::new() }
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
        match self.known.get(&self.pending) {
            Some(Some(graph)) => {
                self.pending.clear();
                LaunchAction::Replay(*graph)
            }
            Some(None) => LaunchAction::Capture(std::mem::take(&mut self.pending)),
            None => {
                if self.known.len() == MAX_LAUNCH_LISTS {
                    self.known.clear();
                    self.graphs.clear();
                }
                let launches = std::mem::take(&mut self.pending);
                self.known.insert(launches.clone(), None);
                LaunchAction::LaunchEach(launches)
            }
        }
    }

    /// Stores the graph of these launches.
    pub(crate) fn insert_graph(&mut self, launches: Vec<Launch>, graph: G) {
        self.known.insert(launches, Some(self.graphs.len()));
        self.graphs.push(graph);
    }

    /// The graph of a [`LaunchAction::Replay`].
    pub(crate) fn graph(&self, number: usize) -> &G {
        &self.graphs[number]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(kernel: &'static str, x: u32, param: u64) -> Launch {
        Launch { kernel, threads: 32, shared_bytes: 0, grid: [x, 1, 1], params: vec![param] }
    }

    /// How a list of launches is run: `e`ach, `c`apture, or the name of the replayed graph.
    fn step(recorder: &mut LaunchRecorder<String>, launches: &[Launch]) -> String {
        launches.iter().for_each(|launch| recorder.push(launch.clone()));
        match recorder.next() {
            LaunchAction::Empty => "-".to_owned(),
            LaunchAction::LaunchEach(_) => "e".to_owned(),
            LaunchAction::Capture(launches) => {
                let graph = launches.iter().map(|launch| launch.kernel).collect();
                recorder.insert_graph(launches, graph);
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

    #[test]
    fn there_are_never_more_than_are_kept() {
        let mut recorder = LaunchRecorder::default();
        for i in 0..3 * MAX_LAUNCH_LISTS as u64 {
            for _ in 0..3 {
                step(&mut recorder, &[launch("a", 1, i)]);
            }
            assert!(recorder.known.len() <= MAX_LAUNCH_LISTS && recorder.graphs.len() <= MAX_LAUNCH_LISTS);
        }
    }
}
