//! A device that runs nothing. It hands out addresses without memory behind them, answers reads with zeros,
//! and records launches and copies: what a step of a large model asks of a GPU, on a host that could not hold
//! the model. Ranks exchange as over NCCL, without waiting for each other.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::EngineError;
use crate::collective::RankBarrier;
use crate::cuda::CudaError;
use crate::cuda::executor::{DeviceMemory, Executor, Fill, Params, Tensor};
use crate::cuda::graphs::Launch;
use crate::cuda::kv_budget::MemoryInfo;
use crate::cuda::numerics::Numerics;
use crate::cuda::ranks::{Exchange, RankMember, Ranks, Read, Readers, SumPhases};
use crate::cuda::sources::Kernel;

/// Free and total memory: enough for any model.
const MEMORY_BYTES: u64 = 1 << 42;
/// Distance of addresses, as a driver aligns allocations.
const ALIGNMENT: u64 = 256;

/// Number of transfers and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Transfers {
    pub(super) number: u64,
    pub(super) bytes: u64,
}

impl Transfers {
    fn add(&mut self, bytes: usize) {
        self.number += 1;
        self.bytes += bytes as u64;
    }
}

/// What was asked of a device.
#[derive(Debug, Clone, Default)]
pub(super) struct Calls {
    pub(super) launches: Vec<Launch>,
    /// Numbers of launches before whatever else was asked: launches between two of them are one graph.
    pub(super) cuts: Vec<usize>,
    pub(super) to_device: Transfers,
    pub(super) from_device: Transfers,
    /// Collectives, and the bytes that they bring from other ranks.
    pub(super) from_ranks: Transfers,
}

/// The calls of a device, shared with whoever counts them.
#[derive(Debug, Clone, Default)]
pub(super) struct CallLog(Arc<Mutex<Calls>>);

impl CallLog {
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records something else than a launch.
    fn cut(&self) -> MutexGuard<'_, Calls> {
        let mut calls = self.lock();
        let launched = calls.launches.len();
        calls.cuts.push(launched);
        calls
    }

    /// The calls since the last one of this.
    pub(super) fn take(&self) -> Calls {
        std::mem::take(&mut *self.lock())
    }
}

/// The device.
#[derive(Debug)]
pub(super) struct Recorder {
    log: CallLog,
    next_address: u64,
    pads_passes: bool,
}

impl Recorder {
    /// A device that records into `log`.
    pub(super) fn new(log: CallLog, pads_passes: bool) -> Self {
        Self { log, next_address: ALIGNMENT, pads_passes }
    }
}

/// An address.
#[derive(Debug)]
pub(super) struct NoMemory(u64);

impl DeviceMemory for NoMemory {
    fn address(&self) -> u64 {
        self.0
    }
}

impl Executor for Recorder {
    type Memory = NoMemory;

    fn alloc(&mut self, bytes: usize, _purpose: &'static str) -> Result<NoMemory, CudaError> {
        let address = self.next_address;
        self.next_address += (bytes as u64).max(1).next_multiple_of(ALIGNMENT);
        Ok(NoMemory(address))
    }

    fn write(&mut self, _memory: &mut NoMemory, _at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        self.log.cut().to_device.add(bytes.len());
        Ok(())
    }

    fn write_by(
        &mut self,
        _memory: &mut NoMemory,
        (_, bytes): (usize, usize),
        _fill: Fill<'_>,
    ) -> Result<(), EngineError> {
        self.log.cut().to_device.add(bytes);
        Ok(())
    }

    fn read(&mut self, _memory: &NoMemory, _at: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.log.cut().from_device.add(bytes.len());
        bytes.fill(0);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CudaError> {
        drop(self.log.cut());
        Ok(())
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, CudaError> {
        Ok(MemoryInfo { free_bytes: MEMORY_BYTES, total_bytes: MEMORY_BYTES })
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        self.flush()
    }

    fn copy_within(
        &mut self,
        _memory: &mut NoMemory,
        _from_to: (usize, usize),
        _bytes: usize,
    ) -> Result<(), CudaError> {
        self.flush()
    }

    unsafe fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: [u32; 3],
        params: &mut Params,
    ) -> Result<(), CudaError> {
        self.log.lock().launches.push(Launch::new(kernel, grid, params.values()));
        Ok(())
    }

    /// As compute capability 9.0 does.
    fn multiplies_panels(&self) -> bool {
        true
    }

    fn attends_in_panels(&self) -> bool {
        true
    }

    fn pads_passes(&self) -> bool {
        self.pads_passes
    }
}

/// The exchange of one rank, which receives what NCCL brings it.
#[derive(Debug)]
struct RecordedExchange {
    log: CallLog,
    rank: usize,
}

impl RecordedExchange {
    fn receive(&self, numbers: usize) {
        self.log.lock().from_ranks.add(numbers * size_of::<f32>());
    }
}

impl Exchange<Recorder> for RecordedExchange {
    fn with_parts(
        &self,
        recorder: &mut Recorder,
        part: &Tensor<NoMemory, f32>,
        (lens, readers): (&[usize], Readers),
        read: Read<'_, Recorder>,
    ) -> Result<(), EngineError> {
        let of_others = lens.iter().sum::<usize>() - lens[self.rank];
        match readers {
            Readers::First if self.rank > 0 => {
                self.receive(0);
                return Ok(());
            }
            Readers::All | Readers::First => self.receive(of_others),
            Readers::Shares => self.receive(of_others / lens.len()),
        }
        Ok(read(recorder, &vec![part.address(); lens.len()])?)
    }

    /// The library writes to `out` itself.
    fn gather(
        &self,
        _recorder: &mut Recorder,
        (_, len): (&Tensor<NoMemory, f32>, usize),
        (_, ranks): (&mut Tensor<NoMemory, f32>, usize),
    ) -> Result<(), EngineError> {
        self.receive((ranks - 1) * len);
        Ok(())
    }
}

/// Ranks whose first one records into `log`.
pub(super) fn recorded_ranks(ranks: usize, log: &CallLog) -> Ranks<Recorder> {
    let member = |rank: usize| {
        let log = if rank == 0 { log.clone() } else { CallLog::default() };
        let exchange = RecordedExchange { log: log.clone(), rank };
        let boxed = || Box::new(exchange) as Box<dyn Exchange<Recorder>>;
        (Recorder::new(log, false), (ranks > 1).then(boxed))
    };
    let members: Vec<RankMember<Recorder>> = (0..ranks).map(member).collect();
    let barrier = Arc::new(RankBarrier::new(ranks, Duration::from_secs(60)));
    let numerics = Numerics::of_devices(&[(9, 0)], None);
    Ranks { members, barrier, memory_utilization: None, numerics, phases: SumPhases::BY_SIZE }
}
