//! The kernels on the host: their own sources, compiled by the system's C++ compiler and run thread by thread
//! (see `emulator.hpp`), so that every test run executes them without a GPU. Slow: meant for test shapes.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use libloading::{Library, Symbol};

use super::CudaError;
use super::executor::{DeviceMemory, Executor, Fill, Params};
use super::graphs::{Launch, LaunchAction, LaunchRecorder};
use super::kv_budget::MemoryInfo;
use super::on_host::{self, Check};
use super::sources::Kernel;
use crate::EngineError;

#[cfg(test)]
mod race_tests;

/// Free memory of the emulated device, whatever is allocated: no larger allocation succeeds.
pub(super) const FREE_BYTES: u64 = 900 << 20;

type Run = unsafe extern "C" fn(*const c_void, *const u32, *mut *mut c_void, *mut *mut c_void);

/// A library of all kernels.
pub(crate) struct Emulator {
    library: Arc<Library>,
    /// Number of launches that succeed before one fails.
    launches_left: Option<u32>,
    allocations: Arc<AtomicU32>,
    /// Number of the allocation that fails, counted from 0.
    failing_allocation: Arc<AtomicU32>,
    launches: Arc<AtomicU32>,
    /// A graph is the list of its launches here.
    recorder: Option<LaunchRecorder<Arc<[Launch]>>>,
    replays: Arc<AtomicU32>,
    check: Check,
    multiplies_panels: bool,
    /// Whether passes are padded with graphs.
    pads_passes: bool,
    /// The compute capability whose tensor cores it has, times ten.
    capability: u32,
}

/// Lets one thread at a time use the library, whose state is global to the process. Blocks run on that thread.
fn library_turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory followed by a protected page: an access past its end (rounded up to 16 bytes) ends the process.
pub(crate) struct HostMemory {
    address: *mut u8,
    bytes: usize,
    free: unsafe extern "C" fn(*mut c_void, usize),
    /// Has the code of `free`.
    _library: Arc<Library>,
}

// SAFETY: the memory is owned exclusively, like a Box's.
unsafe impl Send for HostMemory {}
// SAFETY: a shared reference only gives access to the address.
unsafe impl Sync for HostMemory {}

impl Emulator {
    /// Builds the library, once for each version of the sources, and loads it.
    pub(crate) fn build() -> Self {
        Self::of(&on_host::kernels(), Check::Nothing)
    }

    /// Like `build`, but a launch with a race returns an error.
    pub(crate) fn with_race_check() -> Self {
        Self::of(&on_host::kernels(), Check::Races)
    }

    /// Builds and loads a library of the kernels in `text`.
    pub(super) fn of(text: &str, check: Check) -> Self {
        let file = on_host::build(text, "libkernels.so", check).unwrap();
        // SAFETY: the library is our own and its initialisers are those of its own containers.
        let library = Arc::new(unsafe { Library::new(file) }.unwrap());
        let (allocations, launches, replays) = Default::default();
        let failing_allocation = Arc::new(AtomicU32::new(u32::MAX));
        let (launches_left, recorder) = (None, None);
        let (multiplies_panels, pads_passes, capability) = (true, true, 90);
        Self {
            library,
            launches_left,
            allocations,
            failing_allocation,
            launches,
            recorder,
            replays,
            check,
            multiplies_panels,
            pads_passes,
            capability,
        }
    }

    /// Without the kernels of panels, as on compute capability 8.
    pub(crate) fn without_panels(self) -> Self {
        Self { multiplies_panels: false, ..self }
    }

    /// Graphs without padded passes.
    pub(crate) fn without_padding(self) -> Self {
        Self { pads_passes: false, ..self }
    }

    /// With the tensor cores of another compute capability (times ten) than 9.0. It still multiplies panels.
    pub(crate) fn of_capability(self, capability: u32) -> Self {
        Self { capability, ..self }
    }

    /// Sets the order in which threads and blocks run from now on, chosen by `seed`.
    pub(crate) fn order(&self, seed: u64) {
        let order: Symbol<'_, unsafe extern "C" fn(u64)> = self.symbol("emulator_order");
        let _turn = library_turn();
        // SAFETY: the signature that the shim declares; no kernel runs while the lock is held.
        unsafe { order(seed) }
    }

    /// Bytes that products have read from global memory so far.
    pub(crate) fn global_bytes(&self) -> u64 {
        let read: Symbol<'_, unsafe extern "C" fn() -> u64> = self.symbol("emulator_global_bytes");
        // SAFETY: takes no arguments.
        unsafe { read() }
    }

    /// Counter of allocations.
    pub(crate) fn allocations(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.allocations)
    }

    /// Number of the allocation, counted from 0, that fails for lack of memory; none by default.
    pub(crate) fn failing_allocation(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.failing_allocation)
    }

    /// Counter of kernel launches.
    pub(crate) fn launches(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.launches)
    }

    /// Collects launches from now on and replays repeated ones. Returns the counter of replays.
    pub(crate) fn enable_graphs(&mut self) -> Arc<AtomicU32> {
        self.recorder = Some(LaunchRecorder::default());
        Arc::clone(&self.replays)
    }

    /// Runs a kernel over its grid.
    fn start(&mut self, launch: &Launch) -> Result<(), CudaError> {
        if let Some(left) = &mut self.launches_left {
            let Some(fewer) = left.checked_sub(1) else {
                let reason = "the emulator was told to fail".to_owned();
                return Err(CudaError::Driver { action: launch.kernel, reason });
            };
            *left = fewer;
        }
        self.launches.fetch_add(1, Ordering::Relaxed);
        let run: Symbol<'_, Run> = self.symbol("emulator_launch");
        let set_capability: Symbol<'_, unsafe extern "C" fn(u32)> = self.symbol("emulator_capability");
        let entry: Symbol<'_, *const c_void> = self.symbol(&format!("run_{}", launch.kernel));
        let mut params = launch.params.clone();
        let mut pointers: Vec<*mut c_void> =
            params.iter_mut().map(|param| std::ptr::from_mut(param).cast()).collect();
        let [x, y, z] = launch.grid;
        let shape = [x, y, z, launch.threads, launch.shared_bytes, launch.cluster];
        let mut waiting = std::ptr::null_mut();
        loop {
            let turn = library_turn();
            // SAFETY: the signature that the shim declares; no kernel runs while the lock is held.
            unsafe { set_capability(self.capability) }
            // SAFETY: the parameters are the kernel's by the contract of `launch`, and its memory is still
            // allocated by that of `flush`. `waiting` is null or what the last call left there.
            unsafe { run(*entry, shape.as_ptr(), pointers.as_mut_ptr(), &raw mut waiting) }
            if waiting.is_null() {
                return self.check_races(launch.kernel);
            }
            // Other ranks launch what this kernel waits for.
            drop(turn);
            std::thread::yield_now();
        }
    }

    /// Returns an error if the latest launch had a race.
    fn check_races(&self, kernel: &'static str) -> Result<(), CudaError> {
        if self.check == Check::Nothing {
            return Ok(());
        }
        let take: Symbol<'_, unsafe extern "C" fn(*mut u8, usize) -> bool> =
            self.symbol("emulator_take_race");
        let mut said = [0u8; 256];
        // SAFETY: at most `said.len()` bytes are written.
        if !unsafe { take(said.as_mut_ptr(), said.len()) } {
            return Ok(());
        }
        let reason = String::from_utf8_lossy(&said).trim_end_matches('\0').to_owned();
        Err(CudaError::Driver { action: kernel, reason })
    }

    /// Lets `launches` more launches succeed; the following ones fail.
    pub(crate) fn fail_after(&mut self, launches: u32) {
        self.launches_left = Some(launches);
    }

    fn symbol<T>(&self, name: &str) -> Symbol<'_, T> {
        // SAFETY: `T` is the signature that the shim declares under this name.
        unsafe { self.library.get(name.as_bytes()) }.unwrap()
    }
}

impl DeviceMemory for HostMemory {
    fn address(&self) -> u64 {
        self.address as u64
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let _turn = library_turn();
        // SAFETY: allocated by the same library with this size, and dropped once.
        unsafe { (self.free)(self.address.cast(), self.bytes) }
    }
}

impl Executor for Emulator {
    type Memory = HostMemory;

    fn alloc(&mut self, bytes: usize, purpose: &'static str) -> Result<HostMemory, CudaError> {
        let number = self.allocations.fetch_add(1, Ordering::Relaxed);
        let fails = number == self.failing_allocation.load(Ordering::Relaxed);
        if fails || bytes as u64 > FREE_BYTES {
            let free = if fails { 0 } else { FREE_BYTES };
            return Err(CudaError::OutOfMemory { bytes: bytes as u64, purpose, free });
        }
        let bytes = bytes.max(16);
        let alloc: Symbol<'_, unsafe extern "C" fn(usize) -> *mut c_void> = self.symbol("emulator_alloc");
        let free: Symbol<'_, unsafe extern "C" fn(*mut c_void, usize)> = self.symbol("emulator_free");
        let _turn = library_turn();
        // SAFETY: accepts any size.
        let address = unsafe { alloc(bytes) };
        assert!(!address.is_null(), "the host has memory for a test");
        Ok(HostMemory { address: address.cast(), bytes, free: *free, _library: Arc::clone(&self.library) })
    }

    fn write(&mut self, memory: &mut HostMemory, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        self.flush()?;
        assert!(at + bytes.len() <= memory.bytes);
        // SAFETY: inside the allocation by the assertion above; nothing else refers to it now.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.address.add(at), bytes.len()) }
        Ok(())
    }

    fn write_by(
        &mut self,
        memory: &mut HostMemory,
        (at, bytes): (usize, usize),
        fill: Fill<'_>,
    ) -> Result<(), EngineError> {
        // A nonzero pattern, so that bytes left unfilled are noticed. Aligned to 16 bytes, as on a device.
        let mut words = vec![u128::MAX / 3; bytes.div_ceil(16)];
        let staged = &mut bytemuck::cast_slice_mut(&mut words)[..bytes];
        fill(staged)?;
        Ok(self.write(memory, at, staged)?)
    }

    fn read(&mut self, memory: &HostMemory, at: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.flush()?;
        assert!(at + bytes.len() <= memory.bytes);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(memory.address.add(at), bytes.as_mut_ptr(), bytes.len()) }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CudaError> {
        let Some(recorder) = &mut self.recorder else { return Ok(()) };
        let launches = match recorder.next() {
            LaunchAction::Empty => return Ok(()),
            LaunchAction::LaunchEach(launches) => launches,
            LaunchAction::Capture(launches) => {
                recorder.insert_graph(&launches, Arc::clone(&launches));
                launches
            }
            LaunchAction::Replay(graph) => {
                self.replays.fetch_add(1, Ordering::Relaxed);
                Arc::clone(recorder.graph(graph))
            }
        };
        launches.iter().try_for_each(|launch| self.start(launch))
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, CudaError> {
        Ok(MemoryInfo { free_bytes: FREE_BYTES, total_bytes: 1 << 30 })
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        self.flush()
    }

    fn copy_within(
        &mut self,
        memory: &mut HostMemory,
        (from, to): (usize, usize),
        bytes: usize,
    ) -> Result<(), CudaError> {
        self.flush()?;
        assert!(from.max(to) + bytes <= memory.bytes);
        // SAFETY: both inside the allocation by the assertion above.
        unsafe { std::ptr::copy(memory.address.add(from), memory.address.add(to), bytes) }
        Ok(())
    }

    fn multiplies_panels(&self) -> bool {
        self.multiplies_panels
    }

    fn attends_in_panels(&self) -> bool {
        self.multiplies_panels
    }

    fn multiplies_in_clusters(&self) -> bool {
        self.multiplies_panels
    }

    fn pads_passes(&self) -> bool {
        self.pads_passes && self.recorder.is_some()
    }

    unsafe fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: [u32; 3],
        params: &mut Params,
    ) -> Result<(), CudaError> {
        let launch = Launch::new(kernel, grid, params.values());
        match &mut self.recorder {
            Some(recorder) => recorder.push(launch),
            None => self.start(&launch)?,
        }
        Ok(())
    }
}

impl std::fmt::Debug for Emulator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Emulator").finish_non_exhaustive()
    }
}
