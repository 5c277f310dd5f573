//! What runs kernels: a GPU, or the host in tests. Memory is bytes at an address that only kernels follow;
//! [`Tensor`] gives it a type and a length, [`Params`] puts a launch's parameters in the order of the kernel.

use std::marker::PhantomData;
use std::ops::Range;

use super::CudaError;
use super::blas::Product;
use super::kv_room::DeviceRoom;
use super::sources::Kernel;
use crate::EngineError;

/// Memory that kernels work on.
pub(crate) trait DeviceMemory {
    /// Where it begins, as kernels see it; aligned to 16 bytes.
    fn address(&self) -> u64;
}

/// Writes bytes that go to a device.
pub(crate) type Fill<'a> = &'a mut dyn FnMut(&mut [u8]) -> Result<(), EngineError>;

/// Runs kernels one after another, in the order of the calls.
pub(crate) trait Executor {
    /// Its memory; freed when dropped.
    type Memory: DeviceMemory;

    /// Zeroed memory.
    fn alloc(&mut self, bytes: usize, purpose: &'static str) -> Result<Self::Memory, CudaError>;

    /// Host to device, from byte `at` on.
    fn write(&mut self, memory: &mut Self::Memory, at: usize, bytes: &[u8]) -> Result<(), CudaError>;

    /// Host to device, `bytes` from byte `at` on, as `fill` writes them: all of them, once. Goes on while they are copied.
    fn write_by(
        &mut self,
        memory: &mut Self::Memory,
        at_and_bytes: (usize, usize),
        fill: Fill<'_>,
    ) -> Result<(), EngineError>;

    /// Device to host, from byte `at` on; waits for what was launched before.
    fn read(&mut self, memory: &Self::Memory, at: usize, bytes: &mut [u8]) -> Result<(), CudaError>;

    /// Starts what was launched and only collected so far: before memory that it uses goes away.
    fn flush(&mut self) -> Result<(), CudaError>;

    /// How much memory there is.
    fn room(&mut self) -> Result<DeviceRoom, CudaError>;

    /// Waits until everything that was launched is done.
    fn wait(&mut self) -> Result<(), CudaError>;

    /// Copies bytes inside one memory, from where to where; the two do not overlap.
    fn copy_within(
        &mut self,
        memory: &mut Self::Memory,
        from_to: (usize, usize),
        bytes: usize,
    ) -> Result<(), CudaError>;

    /// Starts a kernel.
    ///
    /// # Safety
    /// `params` are the kernel's own, in order, and every address that it follows from them over this grid lies
    /// in memory that outlives the launch. `ops` is the only caller; it checks each kernel's shapes first.
    unsafe fn launch(
        &mut self,
        kernel: &'static Kernel,
        grid: [u32; 3],
        params: &mut Params,
    ) -> Result<(), CudaError>;

    /// Has a product computed by a library, in an order of sums of its own, where this executor has one and takes it for so many
    /// rows; says whether it did.
    ///
    /// # Safety
    /// All numbers of the product lie in memory that outlives it. `ops` is the only caller; it checks their shapes first.
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
    /// `len` zeros.
    pub(crate) fn zeros<E>(executor: &mut E, len: usize, purpose: &'static str) -> Result<Self, CudaError>
    where
        E: Executor<Memory = M>,
    {
        let memory = executor.alloc(len * size_of::<T>(), purpose)?;
        Ok(Self { memory, len, element: PhantomData })
    }

    /// A copy of `numbers`.
    pub(crate) fn of<E>(executor: &mut E, numbers: &[T], purpose: &'static str) -> Result<Self, CudaError>
    where
        E: Executor<Memory = M>,
    {
        let mut tensor = Self::zeros(executor, numbers.len(), purpose)?;
        tensor.write(executor, 0, numbers)?;
        Ok(tensor)
    }

    /// Overwrites elements from `at` on, which must all exist.
    pub(crate) fn write<E>(&mut self, executor: &mut E, at: usize, numbers: &[T]) -> Result<(), CudaError>
    where
        E: Executor<Memory = M>,
    {
        assert!(at + numbers.len() <= self.len, "writes stay inside the tensor");
        executor.write(&mut self.memory, at * size_of::<T>(), bytemuck::cast_slice(numbers))
    }

    /// Overwrites `len` elements from `at` on, which must all exist, with those that `fill` writes.
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

    /// Copies `len` elements, from where to where; the two do not overlap and all exist.
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

    /// The elements of `range`.
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

    /// Where it begins, as kernels see it.
    pub(crate) fn address(&self) -> u64 {
        self.memory.address()
    }

    /// Where element `at` lies, which must exist or be the one past the last.
    pub(crate) fn address_of(&self, at: usize) -> u64 {
        assert!(at <= self.len, "addresses stay inside the tensor");
        self.address() + (at * size_of::<T>()) as u64
    }

    /// Elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All of them.
    pub(crate) fn view(&self) -> View<'_, T> {
        View { address: self.address(), len: self.len, of: PhantomData }
    }
}

/// Elements in device memory that somebody else holds.
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
    /// Elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

impl<M: DeviceMemory> Tensor<M, u32> {
    /// Words of `range`, as elements that take whole words.
    pub(crate) fn view_as<T: bytemuck::Pod>(&self, range: Range<usize>) -> View<'_, T> {
        let len = range.len() * size_of::<u32>() / size_of::<T>();
        assert!(
            range.end <= self.len && len * size_of::<T>() == range.len() * size_of::<u32>(),
            "whole elements"
        );
        View { address: self.address_of(range.start), len, of: PhantomData }
    }
}

/// A launch's parameters: each in eight bytes, of which the kernel takes the first as many as it needs.
#[derive(Debug, Default)]
pub(crate) struct Params(Vec<u64>);

impl Params {
    /// What the kernel only reads.
    pub(crate) fn read<M: DeviceMemory, T>(mut self, tensor: &Tensor<M, T>) -> Self {
        self.0.push(tensor.memory.address());
        self
    }

    /// The same of a view.
    pub(crate) fn view<T>(mut self, view: View<'_, T>) -> Self {
        self.0.push(view.address);
        self
    }

    /// A view from element `at` on.
    pub(crate) fn view_from<T>(mut self, view: View<'_, T>, at: usize) -> Self {
        self.0.push(view.address + (at * size_of::<T>()) as u64);
        self
    }

    /// The same from element `at` on.
    pub(crate) fn read_from<M: DeviceMemory, T>(mut self, tensor: &Tensor<M, T>, at: usize) -> Self {
        self.0.push(tensor.memory.address() + (at * size_of::<T>()) as u64);
        self
    }

    /// What the kernel reads where it is there.
    pub(crate) fn read_if<M: DeviceMemory, T>(mut self, tensor: Option<&Tensor<M, T>>) -> Self {
        self.0.push(tensor.map_or(0, |tensor| tensor.memory.address()));
        self
    }

    /// What the kernel writes.
    pub(crate) fn write<M: DeviceMemory, T>(self, tensor: &mut Tensor<M, T>) -> Self {
        self.write_from(tensor, 0)
    }

    /// What the kernel writes where it is there.
    pub(crate) fn write_if<M: DeviceMemory, T>(mut self, tensor: Option<&mut Tensor<M, T>>) -> Self {
        self.0.push(tensor.map_or(0, |tensor| tensor.memory.address()));
        self
    }

    /// The same from element `at` on.
    pub(crate) fn write_from<M: DeviceMemory, T>(mut self, tensor: &mut Tensor<M, T>, at: usize) -> Self {
        self.0.push(tensor.memory.address() + (at * size_of::<T>()) as u64);
        self
    }

    /// A size or index that was checked to fit.
    pub(crate) fn u32(mut self, x: usize) -> Self {
        self.0.push(u64::from(u32::try_from(x).expect("sizes of a launch are checked before it")));
        self
    }

    /// 64 bits.
    pub(crate) fn u64(mut self, x: u64) -> Self {
        self.0.push(x);
        self
    }

    /// A number.
    pub(crate) fn f32(mut self, x: f32) -> Self {
        self.0.push(u64::from(x.to_bits()));
        self
    }

    /// The parameters, as many as were given.
    pub(crate) fn values(&self) -> &[u64] {
        &self.0
    }
}

/// Refuses a launch whose number `what` is not as it must be.
pub(crate) fn check(
    kernel: &'static str,
    (what, found): (&'static str, usize),
    is_good: bool,
    expected: impl Into<String>,
) -> Result<(), CudaError> {
    if is_good {
        return Ok(());
    }
    Err(CudaError::BadLaunch { kernel, what, found, expected: expected.into() })
}

/// Refuses a launch whose tensor `what` holds fewer elements than the kernel touches.
pub(crate) fn check_len(
    kernel: &'static str,
    what: &'static str,
    found: usize,
    needed: usize,
) -> Result<(), CudaError> {
    check(kernel, (what, found), found >= needed, format!("at least {needed} elements"))
}
