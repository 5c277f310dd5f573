//! A GPU: what must be there before anything is asked of it, its context and stream, and the launches.
//!
//! One thread opens it and keeps it: everything runs on one stream in the order of the calls, so that memory needs
//! no events. Nothing here has a shape; `ops` does.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaFunction, CudaGraph, CudaSlice, CudaStream, DevicePtr};
use cudarc::nvrtc::Ptx;

use super::executor::{DeviceMemory, Executor, Params};
use super::graphs::{Launch, Next, Recorder};
use super::kv_room::DeviceRoom;
use super::ranks::{Watch, wait_watched};
use super::sources::{self, Kernel};
use super::{CudaError, nvrtc};

/// Oldest architecture with the kernels' tensor-core shapes.
const OLDEST: (i32, i32) = (8, 0);

/// An opened GPU with every kernel compiled for it.
pub struct CudaDevice {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    functions: HashMap<&'static str, CudaFunction>,
    ordinal: usize,
    /// Who knows of the other ranks, where there are any, and how long this one waits for them.
    watch: Option<(Arc<dyn Watch>, Duration)>,
    /// Launches that wait to be replayed or started, where this device replays graphs.
    recorder: Option<Recorder<Graph>>,
}

/// Launches that the driver knows.
struct Graph(CudaGraph);

// SAFETY: graphs are used by whoever holds the device, `&mut`, so by one thread at a time, which is what the driver asks for.
unsafe impl Send for Graph {}

/// What a device says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name.
    pub name: String,
    /// Its architecture, such as `sm_90`.
    pub arch: String,
    /// Memory that nobody holds.
    pub free_bytes: u64,
    /// All memory.
    pub total_bytes: u64,
}

/// Memory of a device. Freed in stream order, so what was launched before still finds it.
#[derive(Debug)]
pub(crate) struct CudaMemory {
    slice: CudaSlice<u8>,
    address: u64,
}

impl CudaDevice {
    /// Opens a device and compiles the kernels for it. Says in one line what is missing.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let context = open_context(ordinal)?;
        nvrtc::check_present()?;
        let (major, minor) = context.compute_capability().map_err(refused("tell its architecture"))?;
        if (major, minor) < OLDEST {
            return Err(CudaError::TooOld { ordinal, major, minor });
        }
        // SAFETY: everything is used on the one stream below, in the order of the calls: no two streams ever share memory.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(refused("make a stream"))?;
        let arch = format!("sm_{major}{minor}");
        let mut functions = HashMap::new();
        for source in sources::all() {
            let cubin = nvrtc::compile(source, &arch)?.cubin;
            let module = context.load_module(Ptx::from_binary(cubin)).map_err(refused("load a module"))?;
            for kernel in source.kernels {
                let function = module.load_function(kernel.name).map_err(refused("find a kernel"))?;
                functions.insert(kernel.name, function);
            }
        }
        Ok(Self { context, stream, functions, ordinal, watch: None, recorder: None })
    }

    /// How many devices the driver shows.
    pub fn count() -> Result<usize, CudaError> {
        start_driver()
    }

    /// What the device says of itself.
    pub fn facts(&self) -> Result<DeviceFacts, CudaError> {
        let (major, minor) = self.context.compute_capability().map_err(refused("tell its architecture"))?;
        let (free, total) = self.context.mem_get_info().map_err(refused("tell its memory"))?;
        Ok(DeviceFacts {
            name: self.context.name().map_err(refused("tell its name"))?,
            arch: format!("sm_{major}{minor}"),
            free_bytes: free as u64,
            total_bytes: total as u64,
        })
    }

    /// The driver's number.
    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// From now on kernels of this device wait for those of others: waiting for it ends where they are lost.
    pub(super) fn watch_while_waiting(&mut self, watch: Arc<dyn Watch>, patience: Duration) {
        self.watch = Some((watch, patience));
    }

    /// From now on launches are collected, and those that come again are replayed as one graph.
    pub(super) fn replay_graphs(&mut self) {
        self.recorder = Some(Recorder::default());
    }

    fn start(&self, launch: &Launch) -> Result<(), CudaError> {
        let function = self.functions.get(launch.kernel).expect("open loads every listed kernel");
        self.context.bind_to_thread().map_err(refused("take the thread"))?;
        let mut params = launch.params.clone();
        let mut pointers: Vec<*mut c_void> =
            params.iter_mut().map(|param| std::ptr::from_mut(param).cast()).collect();
        let (grid, block) = ((launch.grid[0], launch.grid[1], launch.grid[2]), (launch.threads, 1, 1));
        let (function, stream) = (function.cu_function(), self.stream.cu_stream());
        // SAFETY: the function and stream are of this context; the parameters are the kernel's by the contract of `launch`,
        // their memory is still there by that of `flush`, and `pointers` outlives the call, which copies what they point to.
        unsafe { result::launch_kernel(function, grid, block, 0, stream, &mut pointers) }
            .map_err(refused(launch.kernel))
    }

    /// Has the driver make a graph of launches; nothing runs yet.
    fn capture(&self, launches: &[Launch]) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(refused("begin a graph"))?;
        let launched = launches.iter().try_for_each(|launch| self.start(launch));
        // Ended in any case: a stream that captures runs nothing.
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(refused("end a graph"));
        launched?;
        let reason = "it captured nothing".to_owned();
        graph?.map(Graph).ok_or(CudaError::Driver { action: "end a graph", reason })
    }

    /// The stream, for libraries that launch on it; the device is the thread's then.
    pub(super) fn raw_stream(&mut self) -> Result<*mut c_void, CudaError> {
        self.flush()?;
        self.context.bind_to_thread().map_err(refused("take the thread"))?;
        Ok(self.stream.cu_stream().cast())
    }

    /// Whether everything that was launched is done.
    fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream lives as long as this device.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            said => said.result().map(|()| true).map_err(refused("finish a kernel")),
        }
    }
}

impl std::fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaDevice").field("ordinal", &self.ordinal).finish_non_exhaustive()
    }
}

/// The libraries, then the driver, then the device: each missing in its own words.
fn open_context(ordinal: usize) -> Result<Arc<CudaContext>, CudaError> {
    let count = start_driver()?;
    if ordinal >= count {
        return Err(CudaError::NoSuchDevice { ordinal, count });
    }
    CudaContext::new(ordinal).map_err(refused("open the device"))
}

/// Loads and starts the driver, and counts its devices.
fn start_driver() -> Result<usize, CudaError> {
    // SAFETY: loads the driver's library, whose initialisers take no part in this process's invariants.
    if !unsafe { sys::is_culib_present() } {
        let advice = "install the nvidia driver, or run with --device cpu";
        return Err(CudaError::LibraryMissing { library: "libcuda.so", advice });
    }
    result::init().map_err(refused("start"))?;
    let count = result::device::get_count().map_err(refused("count its devices"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

fn refused(action: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Driver { action, reason: error.to_string() }
}

impl DeviceMemory for CudaMemory {
    fn address(&self) -> u64 {
        self.address
    }
}

impl Executor for CudaDevice {
    type Memory = CudaMemory;

    fn alloc(&mut self, bytes: usize, purpose: &'static str) -> Result<CudaMemory, CudaError> {
        let out_of_memory = |error: DriverError| match error.0 {
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let free = self.context.mem_get_info().map_or(0, |(free, _)| free as u64);
                CudaError::OutOfMemory { bytes: bytes as u64, purpose, free }
            }
            _ => refused("allocate")(error),
        };
        let slice = self.stream.alloc_zeros::<u8>(bytes.max(16)).map_err(out_of_memory)?;
        let address = slice.device_ptr(&self.stream).0;
        Ok(CudaMemory { slice, address })
    }

    fn write(&mut self, memory: &mut CudaMemory, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.flush()?;
        let mut part = memory.slice.slice_mut(at..at + bytes.len());
        self.stream.memcpy_htod(bytes, &mut part).map_err(refused("copy to the device"))
    }

    fn read(&mut self, memory: &CudaMemory, at: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        // Before the copy, which would wait where nobody watches.
        self.wait()?;
        let part = memory.slice.slice(at..at + bytes.len());
        self.stream.memcpy_dtoh(&part, bytes).map_err(refused("copy from the device"))?;
        self.wait()
    }

    fn flush(&mut self) -> Result<(), CudaError> {
        let Some(mut recorder) = self.recorder.take() else { return Ok(()) };
        let replay = |graph: &Graph| graph.0.launch().map_err(refused("replay a graph"));
        let done = match recorder.next() {
            Next::Nothing => Ok(()),
            Next::Each(launches) => launches.iter().try_for_each(|launch| self.start(launch)),
            Next::Capture(launches) => self.capture(&launches).and_then(|graph| {
                replay(&graph)?;
                recorder.keep(launches, graph);
                Ok(())
            }),
            Next::Replay(graph) => replay(recorder.graph(graph)),
        };
        self.recorder = Some(recorder);
        done
    }

    fn room(&mut self) -> Result<DeviceRoom, CudaError> {
        // What was freed in stream order is given back when somebody waits.
        self.wait()?;
        let DeviceFacts { free_bytes, total_bytes, .. } = self.facts()?;
        Ok(DeviceRoom { free_bytes, total_bytes })
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        self.flush()?;
        self.context.bind_to_thread().map_err(refused("take the thread"))?;
        match &self.watch {
            None => self.stream.synchronize().map_err(refused("finish a kernel")),
            Some((watch, patience)) => wait_watched(|| self.is_done(), watch.as_ref(), *patience),
        }
    }

    fn copy_within(
        &mut self,
        memory: &mut CudaMemory,
        (from, to): (usize, usize),
        bytes: usize,
    ) -> Result<(), CudaError> {
        self.flush()?;
        let range = from.max(to) + bytes;
        assert!(range <= memory.slice.len(), "copies stay inside the memory");
        let address = |at: usize| memory.address + at as u64;
        self.context.bind_to_thread().map_err(refused("take the thread"))?;
        // SAFETY: both parts lie inside the memory by the line above, and the stream is of its context.
        unsafe { result::memcpy_dtod_async(address(to), address(from), bytes, self.stream.cu_stream()) }
            .map_err(refused("copy on the device"))
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
