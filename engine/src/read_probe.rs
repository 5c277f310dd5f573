//! Measures the memory read speed of this machine, as a reference for a forward: a decode step is at its
//! limit when it reads its bytes as fast as these loops, which do nothing else.

use std::ops::Range;
use std::time::Instant;

use cpu_kernels::{Cpu, READ_CHUNK, ReadBuffer, ReadSum};

use crate::EngineError;

/// A buffer that is read repeatedly, slice after slice, so that the next slice is in no cache.
pub struct ReadProbe {
    buffer: ReadBuffer,
    cpu: Cpu,
    threads: usize,
    next: usize,
}

/// Numbers of streams that a thread may read in parallel.
const STREAMS: [usize; 3] = [1, 2, 4];

/// Minimum size of the buffer.
const MIN_BYTES: usize = 1 << 19;

/// Fewest numbers that a read takes: a chunk for each possible stream of each thread.
fn piece(threads: usize) -> usize {
    READ_CHUNK * STREAMS[STREAMS.len() - 1] * threads
}

/// Size of the buffer if `bytes` were requested: it holds at least one read.
fn buffer_bytes(bytes: usize, threads: usize) -> usize {
    bytes.max(MIN_BYTES).max(piece(threads) * size_of::<u64>())
}

impl ReadProbe {
    /// Creates a buffer of about `bytes` bytes, but enough for one read by all of `threads` threads.
    pub fn new(bytes: usize, threads: usize) -> Result<Self, EngineError> {
        let buffer = ReadBuffer::new(buffer_bytes(bytes, threads))?;
        Ok(Self { buffer, cpu: Cpu::new(threads)?, threads, next: 0 })
    }

    /// Size of the buffer in bytes.
    pub fn bytes(&self) -> usize {
        size_of_val(self.buffer.numbers())
    }

    /// Returns the number of streams that reads fastest on this machine; measures each over the whole buffer.
    pub fn best_streams(&mut self) -> usize {
        let bytes = self.bytes();
        let speed = STREAMS.map(|streams| self.read(streams, bytes));
        (0..STREAMS.len()).max_by(|&a, &b| speed[a].total_cmp(&speed[b])).map_or(1, |best| STREAMS[best])
    }

    /// Reads about the next `bytes` of the buffer (at most all of it), with `streams` streams per thread, and
    /// returns bytes per second.
    pub fn read(&mut self, streams: usize, bytes: usize) -> f64 {
        let piece = piece(self.threads);
        let all = self.buffer.numbers();
        let numbers = (bytes / size_of::<u64>()).clamp(piece, all.len()) / piece * piece;
        if self.next + numbers > all.len() {
            self.next = 0;
        }
        let part = &all[self.next..self.next + numbers];
        self.next += numbers;
        let share = numbers / self.threads;
        let shares: Vec<Range<usize>> = (0..self.threads).map(|i| i * share..(i + 1) * share).collect();
        let begin = Instant::now();
        let sums = self
            .cpu
            .threads()
            .map(&shares, |share| self.cpu.read(ReadSum { part: &part[share.clone()], streams }));
        let seconds = begin.elapsed().as_secs_f64();
        std::hint::black_box(sums);
        size_of_val(part) as f64 / seconds
    }
}

impl std::fmt::Debug for ReadProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadProbe").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_size_gives_a_rate() {
        let small = |bytes, threads| ReadProbe::new(bytes, threads).unwrap();
        // 520 threads read more at once than the smallest buffer holds. This test reads their shares with one.
        let (buffer, cpu) = (ReadBuffer::new(buffer_bytes(0, 520)).unwrap(), Cpu::new(1).unwrap());
        let many = ReadProbe { buffer, cpu, threads: 520, next: 0 };
        for mut probe in [small(1 << 20, 1), small(1 << 20, 3), many] {
            assert!(STREAMS.contains(&probe.best_streams()));
            for bytes in [0, 12_345, 1 << 19, 1 << 30] {
                let speed = probe.read(2, bytes);
                assert!(speed.is_finite() && speed > 0.0);
            }
        }
    }
}
