//! Runs kernels: a GPU, or the host in tests. Memory is bytes at an address that only kernels dereference.
//! [`Tensor`] adds a type and a length; [`Params`] holds a launch's parameters in the kernel's order.

use std::fmt::Display;
use std::marker::PhantomData;
use std::ops::Range;

use super::CudaError;
use super::blas::Product;
use super::kv_budget::MemoryInfo;
use super::sources::Kernel;
use crate::EngineError;

/// Memory that kernels work on.
pub(crate) trait DeviceMemory {
    /// Address of the first byte, as kernels see it; aligned to 16 bytes.
    fn address(&self) -> u64;
}

/// Fills a buffer whose bytes are copied to a device.
pub(crate) type Fill<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<(), EngineError>;

/// Runs kernels one after another, in the order of the calls.
pub(crate) trait Executor {
    /// Device memory; freed when dropped.
    type Memory: DeviceMemory;

    /// Allocates zeroed memory.
    fn alloc(&mut self, bytes: usize, purpose: &'static str) -> Result<Self::Memory, CudaError>;

    /// Copies `bytes` from host to device, to byte `at` and following.
    fn write(&mut self, memory: &mut Self::Memory, at: usize, bytes: &[u8]) -> Result<(), CudaError>;

    /// Copies `bytes` bytes from host to device, to byte `at` and following. `fill` writes all of them, once.
    /// May return before the copy has completed.
    fn write_by(
        &mut self,
        memory: &mut Self::Memory,
        at_and_bytes: (usize, usize),
        fill: Fill<'_>,
    ) -> Result<(), EngineError>;

    /// Copies from device to host, from byte `at` on. Waits for earlier launches.
    fn read(&mut self, memory: &Self::Memory, at: usize, bytes: &mut [u8]) -> Result<(), CudaError>;

    /// Starts launches that were only collected so far. Must be called before memory that they use is freed.
    fn flush(&mut self) -> Result<(), CudaError>;

    /// Free and total memory.
    fn memory_info(&mut self) -> Result<MemoryInfo, CudaError>;

    /// Waits until all launched work has completed.
    fn wait(&mut self) -> Result<(), CudaError>;

    /// Copies `bytes` bytes inside one allocation, between the offsets `from_to`. The ranges do not overlap.
    fn copy_within(
        &mut self,
        memory: &mut Self::Memory,
        from_to: (usize, usize),
        bytes: usize,
    ) -> Result<(), CudaError>;

    /// Starts a kernel.
    ///
    /// # Safety
    /// `params` are the kernel's own, in order, and every address that the kernel dereferences over this grid
    /// is in memory that outlives the launch. `ops` is the only caller; it checks each kernel's shapes first.
    unsafe fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: [u32; 3],
        params: &mut Params,
    ) -> Result<(), CudaError>;

    /// Whether it has the kernels of gemm_panels.cu, and products of many rows are not left to a library that
    /// reads weights row by row.
    fn multiplies_panels(&self) -> bool {
        false
    }

    /// Whether it has the kernels of attention_panels.cu.
    fn attends_in_panels(&self) -> bool {
        false
    }

    /// Whether blocks of products may share operands in clusters. Must be false without `multiplies_panels`.
    fn multiplies_in_clusters(&self) -> bool {
        false
    }

    /// Whether passes are padded to few sizes: launches are replayed if they are equal to earlier ones. Must be
    /// false with a library whose products of a row depend on the number of rows.
    fn pads_passes(&self) -> bool {
        false
    }

    /// Computes a product with a library, which sums in an order of its own choice, if this executor has a
    /// library and uses it for this number of rows. Returns whether it did.
    ///
    /// # Safety
    /// All operands of the product are in memory that outlives it. `ops` is the only caller; it checks their
    /// shapes first.
    unsafe fn multiply(&mut self, product: &Product) -> Result<bool, CudaError> {
        let _ = product;
        Ok(false)
    }
}

/// Numbers of one type in device memory.
#[derive(Debug)]
pub(crate) struct Tensor<M, T> {
    memory: M,
    len: usize,
    element: PhantomData<T>,
}

impl<M: DeviceMemory, T: bytemuck::Pod> Tensor<M, T> {
    /// Allocates `len` zeros.
    pub(crate) fn zeros<E>(executor: &mut E, len: usize, purpose: &'static str) -> Result<Self, CudaError>
    where
        E: Executor<Memory = M>,
    {
        let memory = executor.alloc(len * size_of::<T>(), purpose)?;
        Ok(Self { memory, len, element: PhantomData })
    }

    /// Allocates a copy of `numbers`.
    pub(crate) fn of<E>(executor: &mut E, numbers: &[T], purpose: &'static str) -> Result<Self, CudaError>
    where
        E: Executor<Memory = M>,
    {
        let mut tensor = Self::zeros(executor, numbers.len(), purpose)?;
        tensor.write(executor, 0, numbers)?;
        Ok(tensor)
    }

    /// Overwrites elements from `at` on, all of which must exist.
    pub(crate) fn write<E>(&mut self, executor: &mut E, at: usize, numbers: &[T]) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        assert!(at + numbers.len() <= self.len, "writes stay inside the tensor");
        executor.write(&mut self.memory, at * size_of::<T>(), bytemuck::cast_slice(numbers))
    }

    /// Overwrites `len` elements from `at` on, all of which must exist, with those that `fill` writes.
    pub(crate) fn write_by<E>(
        &mut self,
        executor: &mut E,
        (at, len): (usize, usize),
        fill: &mut dyn FnMut(&mut [T]) -> Result<(), EngineError>,
    ) -> Result<(), EngineError>
    where
        E: Executor<Memory = M>,
    {
        assert!(at + len <= self.len, "writes stay inside the tensor");
        let size = size_of::<T>();
        executor.write_by(&mut self.memory, (at * size, len * size), &mut |bytes| {
            fill(bytemuck::cast_slice_mut(bytes))
        })
    }

    /// Copies `len` elements between two offsets. The ranges must exist and not overlap.
    pub(crate) fn copy_within<E>(
        &mut self,
        executor: &mut E,
        (from, to): (usize, usize),
        len: usize,
    ) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        assert!(from.max(to) + len <= self.len && from.abs_diff(to) >= len, "copies stay inside and apart");
        let size = size_of::<T>();
        executor.copy_within(&mut self.memory, (from * size, to * size), len * size)
    }

    /// Reads the elements of `range`.
    pub(crate) fn read<E>(&self, executor: &mut E, range: Range<usize>) -> Result<Vec<T>, CudaError>
    where
        E: Executor<Memory = M>,
    {
        assert!(range.end <= self.len, "reads stay inside the tensor");
        let mut numbers = vec![T::zeroed(); range.len()];
        let at = range.start * size_of::<T>();
        executor.read(&self.memory, at, bytemuck::cast_slice_mut(&mut numbers))?;
        Ok(numbers)
    }

    /// Address of the first element, as kernels see it.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Address of element `at`, which must exist or be one past the last.
    pub(crate) fn address_of(&self, at: usize) -> u64 {
        assert!(at <= self.len, "addresses stay inside the tensor");
        self.address() + (at * size_of::<T>()) as u64
    }

    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// View of all elements.
    pub(crate) fn view(&self) -> View<'_, T> {
        View { address: self.address(), len: self.len, of: PhantomData }
    }
}

/// Borrowed elements in device memory.
#[derive(Debug)]
pub(crate) struct View<'a, T> {
    address: u64,
    len: usize,
    of: PhantomData<&'a [T]>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

impl<T> View<'_, T> {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl<M: DeviceMemory> Tensor<M, u32> {
    /// View of the words of `range` as elements of type `T`. The range must be a whole number of elements.
    pub(crate) fn view_as<T: bytemuck::Pod>(&self, range: Range<usize>) -> View<'_, T> {
        let len = range.len() * size_of::<u32>() / size_of::<T>();
        assert!(
            range.end <= self.len && len * size_of::<T>() == range.len() * size_of::<u32>(),
            "whole elements"
        );
        View { address: self.address_of(range.start), len, of: PhantomData }
    }
}

/// Parameters of a launch. Each takes eight bytes, of which the kernel reads the first ones, according to the
/// parameter's size.
#[derive(Debug, Default)]
pub(crate) struct Params(Vec<u64>);

impl Params {
    /// Adds a tensor that the kernel only reads.
    pub(crate) fn read<M: DeviceMemory, T>(mut self, tensor: &Tensor<M, T>) -> Self {
        self.0.push(tensor.memory.address());
        self
    }

    /// Adds a view.
    pub(crate) fn view<T>(mut self, view: View<'_, T>) -> Self {
        self.0.push(view.address);
        self
    }

    /// Adds a view, from element `at` on.
    pub(crate) fn view_from<T>(mut self, view: View<'_, T>, at: usize) -> Self {
        self.0.push(view.address + (at * size_of::<T>()) as u64);
        self
    }

    /// Adds a tensor that the kernel only reads, from element `at` on.
    pub(crate) fn read_from<M: DeviceMemory, T>(mut self, tensor: &Tensor<M, T>, at: usize) -> Self {
        self.0.push(tensor.memory.address() + (at * size_of::<T>()) as u64);
        self
    }

    /// Adds an optional tensor that the kernel only reads; null if absent.
    pub(crate) fn read_if<M: DeviceMemory, T>(mut self, tensor: Option<&Tensor<M, T>>) -> Self {
        self.0.push(tensor.map_or(0, |tensor| tensor.memory.address()));
        self
    }

    /// Adds a tensor that the kernel writes.
    pub(crate) fn write<M: DeviceMemory, T>(self, tensor: &mut Tensor<M, T>) -> Self {
        self.write_from(tensor, 0)
    }

    /// Adds an optional tensor that the kernel writes; null if absent.
    pub(crate) fn write_if<M: DeviceMemory, T>(mut self, tensor: Option<&mut Tensor<M, T>>) -> Self {
        self.0.push(tensor.map_or(0, |tensor| tensor.memory.address()));
        self
    }

    /// Adds a tensor that the kernel writes, from element `at` on.
    pub(crate) fn write_from<M: DeviceMemory, T>(mut self, tensor: &mut Tensor<M, T>, at: usize) -> Self {
        self.0.push(tensor.memory.address() + (at * size_of::<T>()) as u64);
        self
    }

    /// Adds a size or index. The caller has checked that it fits.
    pub(crate) fn u32(mut self, x: usize) -> Self {
        self.0.push(u64::from(u32::try_from(x).expect("sizes of a launch are checked before it")));
        self
    }

    /// Adds a 64-bit integer.
    pub(crate) fn u64(mut self, x: u64) -> Self {
        self.0.push(x);
        self
    }

    /// Adds a float.
    pub(crate) fn f32(mut self, x: f32) -> Self {
        self.0.push(u64::from(x.to_bits()));
        self
    }

    /// The parameters in order.
    pub(crate) fn values(&self) -> &[u64] {
        &self.0
    }
}

/// Returns `BadLaunch` for the number `what` unless `is_good`. Only then is `expected` formatted: a step has
/// thousands of checks.
pub(crate) fn check(
    kernel: &'static str,
    (what, found): (&'static str, usize),
    is_good: bool,
    expected: impl Display,
) -> Result<(), CudaError> {
    if is_good {
        return Ok(());
    }
    Err(CudaError::BadLaunch { kernel, what, found, expected: expected.to_string() })
}

/// Returns `BadLaunch` if the tensor `what` has fewer elements than the kernel accesses.
pub(crate) fn check_len(
    kernel: &'static str,
    what: &'static str,
    found: usize,
    needed: usize,
) -> Result<(), CudaError> {
    check(kernel, (what, found), found >= needed, format_args!("at least {needed} elements"))
}
