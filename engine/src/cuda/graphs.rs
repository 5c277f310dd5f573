//! Launches that wait: a device that replays graphs collects what it is told to launch and, before anything else is asked of
//! it, looks whether exactly these launches, grids and parameters included, ran before. Then they are one replay.
//!
//! So a replay is right by construction: nothing is replayed but what would have been launched. Steps repeat because their
//! memory is kept (`ops/held.rs`) and sizes are the same: as many rows, splits and tiles. Whether launches are costly enough
//! to be worth it is for a GPU to say.

use std::collections::HashMap;

use super::sources::Kernel;

/// Graphs that are kept; when there are more all are dropped, and steps that still come are made anew.
const KEPT: usize = 128;

/// One launch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Launch {
    /// Kernels have unique names.
    pub(crate) kernel: &'static str,
    pub(crate) threads: u32,
    /// Dynamic shared memory of a block.
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

/// What is to be done with the launches that were collected.
#[derive(Debug)]
pub(crate) enum Next {
    /// There are none.
    Nothing,
    /// Launch them one by one: they are new.
    Each(Vec<Launch>),
    /// They come for the second time: make a graph of them, run it, and hand it to [`Recorder::keep`].
    Capture(Vec<Launch>),
    /// Replay the graph of this number.
    Replay(usize),
}

/// Collects launches and knows the graphs `G` of those that ran before.
#[derive(Debug)]
pub(crate) struct Recorder<G> {
    pending: Vec<Launch>,
    /// None for what came once.
    known: HashMap<Vec<Launch>, Option<usize>>,
    graphs: Vec<G>,
}

impl<G> Default for Recorder<G> {
    fn default() -> Self {
        Self { pending: Vec::new(), known: HashMap::new(), graphs: Vec::new() }
    }
}

impl<G> Recorder<G> {
    /// Collects a launch.
    pub(crate) fn push(&mut self, launch: Launch) {
        self.pending.push(launch);
    }

    /// Takes what was collected.
    pub(crate) fn next(&mut self) -> Next {
        if self.pending.is_empty() {
            return Next::Nothing;
        }
        match self.known.get(&self.pending) {
            Some(Some(graph)) => {
                self.pending.clear();
                Next::Replay(*graph)
            }
            Some(None) => Next::Capture(std::mem::take(&mut self.pending)),
            None => {
                if self.known.len() == KEPT {
                    self.known.clear();
                    self.graphs.clear();
                }
                let launches = std::mem::take(&mut self.pending);
                self.known.insert(launches.clone(), None);
                Next::Each(launches)
            }
        }
    }

    /// Keeps the graph of these launches.
    pub(crate) fn keep(&mut self, launches: Vec<Launch>, graph: G) {
        self.known.insert(launches, Some(self.graphs.len()));
        self.graphs.push(graph);
    }

    /// A graph that [`Next::Replay`] named.
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

    /// What happens to a list of launches: `e`ach, `c`apture, or the number of the graph that is replayed.
    fn step(recorder: &mut Recorder<String>, launches: &[Launch]) -> String {
        launches.iter().for_each(|launch| recorder.push(launch.clone()));
        match recorder.next() {
            Next::Nothing => "-".to_owned(),
            Next::Each(_) => "e".to_owned(),
            Next::Capture(launches) => {
                let graph = launches.iter().map(|launch| launch.kernel).collect();
                recorder.keep(launches, graph);
                "c".to_owned()
            }
            Next::Replay(number) => recorder.graph(number).clone(),
        }
    }

    #[test]
    fn only_equal_launches_are_replayed() {
        let mut recorder = Recorder::default();
        let (a, b) = (launch("a", 1, 7), launch("b", 2, 8));
        let both = [a.clone(), b.clone()];
        let found: Vec<String> = (0..4).map(|_| step(&mut recorder, &both)).collect();
        assert_eq!(found, ["e", "c", "ab", "ab"]);
        // Another grid, another parameter, another order, a part: each is new.
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
        let mut recorder = Recorder::default();
        for i in 0..3 * KEPT as u64 {
            for _ in 0..3 {
                step(&mut recorder, &[launch("a", 1, i)]);
            }
            assert!(recorder.known.len() <= KEPT && recorder.graphs.len() <= KEPT);
        }
    }
}
