//! A GPU: checks before its first use, its context and stream, and kernel launches.
//!
//! One thread opens and uses it. Everything runs on one stream in the order of the calls, so that memory
//! needs no events. This module knows no tensor shapes; `ops` does.

mod driver;
mod pinned;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ffi::c_void;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use cudarc::driver::{CudaContext, CudaFunction, CudaGraph, CudaSlice, CudaStream, DevicePtr};
use cudarc::nvrtc::Ptx;

use super::blas::{Blas, Product, WORKSPACE_BYTES};
use super::executor::{DeviceMemory, Executor, Fill, Params};
use super::graphs::{Launch, LaunchAction, LaunchRecorder};
use super::kv_budget::MemoryInfo;
use super::memory_pool::MemoryPool;
use super::ranks::{Watch, wait_watched};
use super::sources::Kernel;
use super::staging::HALF_BYTES;
use super::{CudaError, kernel_files, nvrtc};
use crate::EngineError;
pub(super) use driver::refused;
use driver::{driver_version, open_context, start_driver};
pub(super) use pinned::SharedWord;
use pinned::{DOWNLOAD_BYTES, Staging};

/// Oldest architecture that has the tensor-core instructions used by the kernels.
const OLDEST: (i32, i32) = (8, 0);

/// An opened GPU with every kernel loaded.
pub struct CudaDevice {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    functions: HashMap<&'static str, CudaFunction>,
    ordinal: usize,
    capability: (i32, i32),
    pool: MemoryPool,
    /// Watch over the other ranks and the timeout for them, if there are other ranks.
    watch: Watched,
    /// Launches to be replayed or started later, if this device replays graphs.
    recorder: Option<LaunchRecorder<Graph>>,
    pads_passes: bool,
    /// Allocated on the first write or read.
    staging: Option<Staging>,
    products: Option<LibraryProducts>,
    multiplies_in_clusters: bool,
}

/// Products that cuBLASLt computes.
struct LibraryProducts {
    blas: Blas,
    workspace: CudaMemory,
    /// Minimum number of rows of a product.
    from_rows: usize,
}

/// Watch over other ranks and a timeout; none without other ranks.
type Watched = Option<(Arc<dyn Watch>, Duration)>;

/// Waits for the device. With other ranks it polls, so that a lost rank ends the wait.
fn wait_until(
    watch: &Watched,
    is_done: impl FnMut() -> Result<bool, CudaError>,
    wait: impl FnOnce() -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    match watch {
        None => wait(),
        Some((watch, patience)) => wait_watched(is_done, watch.as_ref(), *patience),
    }
}

/// A graph that the driver holds.
struct Graph(CudaGraph);

// SAFETY: graphs are only used through `&mut` access to the device, so by one thread at a time, as the driver
// requires.
unsafe impl Send for Graph {}

/// Properties that a device reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceProperties {
    /// Its name.
    pub name: String,
    /// Its architecture, such as `sm_90`.
    pub arch: String,
    /// The newest CUDA version that its driver supports, such as `13.0`.
    pub driver: String,
    /// Free memory.
    pub free_bytes: u64,
    /// Total memory.
    pub total_bytes: u64,
}

/// Memory of a device. Freed in stream order, so that earlier launches can still use it.
#[derive(Debug)]
pub(crate) struct CudaMemory {
    slice: CudaSlice<u8>,
    address: u64,
}

impl CudaDevice {
    /// Opens a device and loads compiled kernels from a folder, or compiles them. Errors name in one line
    /// what is missing.
    pub fn open(ordinal: usize, kernels: Option<&Path>) -> Result<Self, CudaError> {
        let context = open_context(ordinal)?;
        let driver = driver_version()?;
        let (major, minor) = context.compute_capability().map_err(refused("tell its architecture"))?;
        if (major, minor) < OLDEST {
            return Err(CudaError::TooOld { ordinal, major, minor });
        }
        let (machine_code, toolkit) = match kernels {
            Some(dir) => kernel_files::read(dir, (major, minor))?,
            None => nvrtc::compile_all(&format!("sm_{major}{minor}"))?,
        };
        toolkit.check_driver(driver)?;
        // SAFETY: everything is used on the one stream below, in the order of the calls: no two streams ever
        // share memory.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(refused("make a stream"))?;
        let mut functions = HashMap::new();
        for (source, code) in machine_code {
            let module = context.load_module(Ptx::from_binary(code)).map_err(refused("load a module"))?;
            for kernel in source.kernels {
                let function = module.load_function(kernel.name).map_err(refused("find a kernel"))?;
                if kernel.shared_bytes > 0 {
                    let attribute =
                        sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                    let said = function.set_attribute(attribute, kernel.shared_bytes as i32);
                    said.map_err(refused("give a kernel its shared memory"))?;
                }
                functions.insert(kernel.name, function);
            }
        }
        let (watch, recorder, staging, products) = (None, None, None, None);
        let (pads_passes, multiplies_in_clusters) = (false, false);
        let (capability, pool) = ((major, minor), MemoryPool::of_device(ordinal)?);
        pool.keep_freed()?;
        Ok(Self {
            context,
            stream,
            functions,
            ordinal,
            capability,
            pool,
            watch,
            recorder,
            pads_passes,
            staging,
            products,
            multiplies_in_clusters,
        })
    }

    /// Number of devices that the driver reports.
    pub fn count() -> Result<usize, CudaError> {
        start_driver()
    }

    /// Name, architecture, driver version and memory of the device.
    pub fn properties(&self) -> Result<DeviceProperties, CudaError> {
        let (major, minor) = self.capability;
        let (free, total) = self.context.mem_get_info().map_err(refused("tell its memory"))?;
        Ok(DeviceProperties {
            name: self.context.name().map_err(refused("tell its name"))?,
            arch: format!("sm_{major}{minor}"),
            driver: driver_version()?.to_string(),
            free_bytes: free as u64,
            total_bytes: total as u64,
        })
    }

    /// The device's context, which libraries use on the thread that it is bound to.
    pub(super) fn context(&self) -> Arc<CudaContext> {
        Arc::clone(&self.context)
    }

    /// The device's number in the driver.
    pub(super) fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Compute capability, major and minor.
    pub(super) fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// Version of cuBLASLt, if it computes products of many rows.
    pub(super) fn library_version(&self) -> Option<&str> {
        self.products.as_ref().map(|products| products.blas.version())
    }

    /// Whether another device can access memory of this one.
    pub(super) fn is_connected_to(&self, ordinal: usize) -> Result<bool, CudaError> {
        self.pool.is_connected_to(ordinal)
    }

    /// A word of the host's memory that kernels read and write too, set to 0.
    pub(super) fn shared_word(&self) -> Result<SharedWord, CudaError> {
        SharedWord::new(&self.context)
    }

    /// The stream on which everything runs.
    pub(super) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Gives another device read and write access to all memory of this one, as kernels and copies of NCCL
    /// need.
    pub(super) fn share_memory_with(&self, ordinal: usize) -> Result<(), CudaError> {
        self.pool.share_with(ordinal)
    }

    /// Makes waits watch the other ranks: a wait fails when a rank is lost, or after `patience`. Needed
    /// because kernels of this device then wait for kernels of others.
    pub(super) fn set_rank_watch(&mut self, watch: Arc<dyn Watch>, patience: Duration) {
        self.watch = Some((watch, patience));
    }

    /// Collects launches from now on, and replays repeated ones as one graph. With `pads_passes` similar
    /// passes repeat the same ones; all ranks of a model need the same.
    pub(super) fn enable_graphs(&mut self, pads_passes: bool) {
        self.recorder = Some(LaunchRecorder::default());
        self.pads_passes = pads_passes;
    }

    /// Lets blocks of products share operands in clusters from now on.
    pub(super) fn use_clusters(&mut self) {
        self.multiplies_in_clusters = true;
    }

    /// Has cuBLASLt compute bf16 products of at least `from_rows` rows from now on. Errors name in one line
    /// what is missing.
    pub(super) fn use_cublaslt(&mut self, from_rows: usize) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(refused("take the thread"))?;
        let blas = Blas::new()?;
        let workspace = self.alloc(WORKSPACE_BYTES, "the workspace of cublaslt")?;
        tracing::info!(
            version = blas.version(),
            from_rows,
            "cublaslt computes bf16 products: a row's bits depend on the other rows of its batch"
        );
        self.products = Some(LibraryProducts { blas, workspace, from_rows });
        Ok(())
    }

    /// Minimum number of rows of products that cuBLASLt computes, if it computes any.
    pub(super) fn cublaslt_min_rows(&self) -> Option<usize> {
        self.products.as_ref().map(|products| products.from_rows)
    }

    /// Prepares cuBLASLt for a product, which it may compute; see [`Blas::warm_up`]. Returns whether it did.
    ///
    /// # Safety
    /// All operands of the product are in memory that outlives it.
    pub(super) unsafe fn warm_up(&mut self, product: &Product) -> Result<bool, CudaError> {
        let stream = self.raw_stream()?;
        let LibraryProducts { blas, workspace, .. } =
            self.products.as_mut().expect("only called with the library");
        // SAFETY: as in `multiply`.
        unsafe { blas.warm_up(product, workspace.address(), stream) }
    }

    /// Whether there are kernels of panels for this device, which are for one architecture.
    pub(super) fn has_panel_kernels(&self) -> bool {
        self.functions.contains_key("gemm_panels_8")
    }

    fn start(&self, launch: &Launch) -> Result<(), CudaError> {
        let function = self.functions.get(launch.kernel).expect("open loads every listed kernel");
        self.context.bind_to_thread().map_err(refused("take the thread"))?;
        let pointer = |param| std::ptr::from_ref::<u64>(param).cast_mut().cast::<c_void>();
        let mut pointers: Vec<*mut c_void> = launch.params.iter().map(pointer).collect();
        let (grid, block) = ((launch.grid[0], launch.grid[1], launch.grid[2]), (launch.threads, 1, 1));
        let (function, stream) = (function.cu_function(), self.stream.cu_stream());
        // SAFETY: the function and stream belong to this context; the parameters are the kernel's by the
        // contract of `launch`, their memory is still allocated by that of `flush`, and what `pointers` point
        // to outlives the call, which copies it and writes nothing.
        unsafe { result::launch_kernel(function, grid, block, launch.shared_bytes, stream, &mut pointers) }
            .map_err(refused(launch.kernel))
    }

    /// Captures launches as a graph, without running them.
    fn capture(&self, launches: &[Launch]) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(refused("begin a graph"))?;
        let launched = launches.iter().try_for_each(|launch| self.start(launch));
        // Ended even after an error: a stream that captures runs nothing.
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0)).map_err(refused("end a graph"));
        launched?;
        let reason = "it captured nothing".to_owned();
        graph?.map(Graph).ok_or(CudaError::Driver { action: "end a graph", reason })
    }

    /// The stream, for libraries that launch on it. Makes the device's context current on this thread.
    pub(super) fn raw_stream(&mut self) -> Result<*mut c_void, CudaError> {
        self.flush()?;
        self.context.bind_to_thread().map_err(refused("take the thread"))?;
        Ok(self.stream.cu_stream().cast())
    }

    /// The pinned memory, allocated if there is none yet.
    fn staging(&mut self) -> Result<&mut Staging, CudaError> {
        if self.staging.is_none() {
            self.staging = Some(Staging::new(&self.context, &self.stream)?);
        }
        Ok(self.staging.as_mut().expect("made above"))
    }

    /// Writes one piece of at most [`HALF_BYTES`].
    fn stage(
        &mut self,
        memory: &mut CudaMemory,
        (at, bytes): (usize, usize),
        fill: Fill<'_>,
    ) -> Result<(), EngineError> {
        assert!(at + bytes <= memory.slice.len(), "writes stay inside the memory");
        self.flush()?;
        self.staging()?;
        let staging = self.staging.as_mut().expect("made above");
        // SAFETY: the destination is inside the memory by the assertion above, and memory is freed in stream
        // order.
        unsafe { staging.upload((memory.address + at as u64, bytes), fill, &self.watch) }
    }

    /// Whether all launched work has completed.
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
        for (i, piece) in bytes.chunks(HALF_BYTES).enumerate() {
            let mut copy = |place: &mut [u8]| {
                place.copy_from_slice(piece);
                Ok(())
            };
            self.stage(memory, (at + i * HALF_BYTES, piece.len()), &mut copy).map_err(
                |error| match error {
                    EngineError::Cuda(error) => error,
                    other => unreachable!("copying bytes failed: {other}"),
                },
            )?;
        }
        Ok(())
    }

    fn write_by(
        &mut self,
        memory: &mut CudaMemory,
        (at, bytes): (usize, usize),
        fill: Fill<'_>,
    ) -> Result<(), EngineError> {
        if bytes <= HALF_BYTES {
            return self.stage(memory, (at, bytes), fill);
        }
        // A single row that is longer than a staging buffer.
        let mut aside = vec![0u128; bytes.div_ceil(16)];
        let aside = &mut bytemuck::cast_slice_mut(&mut aside)[..bytes];
        fill(aside)?;
        Ok(self.write(memory, at, aside)?)
    }

    fn read(&mut self, memory: &CudaMemory, at: usize, bytes: &mut [u8]) -> Result<(), CudaError> {
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.len() <= DOWNLOAD_BYTES {
            assert!(at + bytes.len() <= memory.slice.len(), "reads stay inside the memory");
            self.flush()?;
            // SAFETY: the source is inside the memory by the assertion above, and memory is freed in stream
            // order.
            unsafe { self.staging()?.start_download(memory.address + at as u64, bytes.len()) }?;
            self.wait()?;
            bytes.copy_from_slice(self.staging()?.downloaded(bytes.len())?);
            return Ok(());
        }
        // Before the copy, whose own wait would not watch the other ranks.
        self.wait()?;
        let part = memory.slice.slice(at..at + bytes.len());
        self.stream.memcpy_dtoh(&part, bytes).map_err(refused("copy from the device"))?;
        self.wait()
    }

    fn flush(&mut self) -> Result<(), CudaError> {
        let Some(mut recorder) = self.recorder.take() else { return Ok(()) };
        let replay = |graph: &Graph| graph.0.launch().map_err(refused("replay a graph"));
        let done = match recorder.next() {
            LaunchAction::Empty => Ok(()),
            LaunchAction::LaunchEach(launches) => launches.iter().try_for_each(|launch| self.start(launch)),
            LaunchAction::Capture(launches) => self.capture(&launches).and_then(|graph| {
                replay(&graph)?;
                recorder.insert_graph(&launches, graph);
                Ok(())
            }),
            LaunchAction::Replay(graph) => replay(recorder.graph(graph)),
        };
        self.recorder = Some(recorder);
        done
    }

    fn memory_info(&mut self) -> Result<MemoryInfo, CudaError> {
        // Memory freed in stream order, on any stream, only returns to the pool after a synchronization.
        self.wait()?;
        self.context.synchronize().map_err(refused("finish what others have freed"))?;
        self.pool.release_freed()?;
        let DeviceProperties { free_bytes, total_bytes, .. } = self.properties()?;
        Ok(MemoryInfo { free_bytes, total_bytes })
    }

    fn wait(&mut self) -> Result<(), CudaError> {
        self.flush()?;
        self.context.bind_to_thread().map_err(refused("take the thread"))?;
        wait_until(
            &self.watch,
            || self.is_done(),
            || self.stream.synchronize().map_err(refused("finish a kernel")),
        )
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
        // SAFETY: both ranges are inside the memory by the assertion above, and the stream belongs to its
        // context.
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

    fn multiplies_panels(&self) -> bool {
        self.products.is_none() && self.has_panel_kernels()
    }

    fn attends_in_panels(&self) -> bool {
        self.has_panel_kernels()
    }

    fn multiplies_in_clusters(&self) -> bool {
        self.multiplies_in_clusters && self.multiplies_panels()
    }

    fn pads_passes(&self) -> bool {
        self.pads_passes && self.products.is_none()
    }

    unsafe fn multiply(&mut self, product: &Product) -> Result<bool, CudaError> {
        if self.products.as_ref().is_none_or(|products| product.shape.rows < products.from_rows) {
            return Ok(false);
        }
        let stream = self.raw_stream()?;
        let LibraryProducts { blas, workspace, .. } = self.products.as_mut().expect("found above");
        // SAFETY: the product's operands are allocated by this function's contract. The workspace is this
        // device's, allocated by the driver at a multiple of 256, and used only by products, one after
        // another in the stream.
        unsafe { blas.multiply(product, workspace.address(), stream) }.map(|()| true)
    }
}
