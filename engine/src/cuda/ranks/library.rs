//! The NCCL library, loaded if several GPUs are requested. All functions in use are resolved when it is
//! loaded, so that a missing function is an error at startup, not in a forward (docs/adr/0027).

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use cudarc::driver::CudaContext;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclUniqueId};
use libloading::Library;

use crate::cuda::CudaError;
use crate::cuda::device::refused;
use crate::cuda::functions::{function, function_table};

/// File names of the library: the runtime package's, then the developer package's.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// Results that are not errors: success, and in progress.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// Oldest supported release, as `ncclGetVersion` counts: 2.23.4. Between ranks of one process, older releases
/// write directly into the receiver's buffer without registering it, which faults if the buffer is from a
/// stream-ordered pool (docs/adr/0027).
const OLDEST: c_int = 22_304;
/// How long ranks may take to connect; the library itself has no limit.
pub(super) const CONNECT_LIMIT: Duration = Duration::from_secs(120);

type Data = *const c_void;
type DataMut = *mut c_void;
type Stream = *mut c_void;
type Results = c_int;

/// An id by which ranks of several processes find each other.
pub(super) type UniqueId = [u8; 128];

/// The ranks of several processes.
pub(super) struct GroupOfNodes {
    pub(super) id: UniqueId,
    /// First rank of this process.
    pub(super) first: usize,
    /// Number of ranks of all processes.
    pub(super) ranks: usize,
}

type GetUniqueId = unsafe extern "C" fn(*mut ncclUniqueId) -> Results;
type CommInitRank = unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int) -> Results;

/// The other rank, the address of the numbers here, and their count.
pub(super) type Message = (usize, u64, usize);

function_table! {
    /// See the module documentation. All ranks of a process share one. Signatures are those of nccl.h, 2.23
    /// and later.
    NcclLibrary, Nccl,
    get_version = "ncclGetVersion": fn(*mut c_int) -> Results,
    get_error_string = "ncclGetErrorString": fn(c_int) -> *const c_char,
    get_last_error = "ncclGetLastError": fn(ncclComm_t) -> *const c_char,
    comm_init_all = "ncclCommInitAll": fn(*mut ncclComm_t, c_int, *const c_int) -> Results,
    comm_abort = "ncclCommAbort": fn(ncclComm_t) -> Results,
    comm_get_async_error = "ncclCommGetAsyncError": fn(ncclComm_t, *mut c_int) -> Results,
    all_gather = "ncclAllGather": fn(Data, DataMut, usize, ncclDataType_t, ncclComm_t, Stream) -> Results,
    send = "ncclSend": fn(Data, usize, ncclDataType_t, c_int, ncclComm_t, Stream) -> Results,
    receive = "ncclRecv": fn(DataMut, usize, ncclDataType_t, c_int, ncclComm_t, Stream) -> Results,
    group_start = "ncclGroupStart": fn() -> Results,
    group_end = "ncclGroupEnd": fn() -> Results,
}

/// New communicators, on their way to the thread that asked for them.
struct Comms(Vec<ncclComm_t>);

// SAFETY: NCCL allows calls from any thread, one at a time.
unsafe impl Send for Comms {}

impl NcclLibrary {
    /// Loads the library. The error says what to install.
    pub(crate) fn load() -> Result<Self, CudaError> {
        // SAFETY: loads a CUDA library, whose initialisers do not affect invariants of this process.
        let found = NAMES.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
        let advice = "several gpus need NCCL 2: install libnccl2 (or pip's nvidia-nccl-cu13) and name its lib folder in \
                      LD_LIBRARY_PATH";
        Self::checked(found.ok_or(CudaError::LibraryMissing { library: NAMES[0], advice })?)
    }

    /// Resolves the functions of a library and checks its version.
    fn checked(library: Library) -> Result<Self, CudaError> {
        let mut nccl = Self::resolve(library)?;
        let mut version = 0;
        // SAFETY: writes one number.
        nccl.check("ncclGetVersion", unsafe { (nccl.get_version)(&raw mut version) })?;
        nccl.version = format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
        if version < OLDEST {
            let reason = format!("it is version {}, expected 2.23.4 or above", nccl.version);
            return Err(CudaError::Nccl { action: "ncclGetVersion", reason });
        }
        Ok(nccl)
    }

    /// Makes one communicator per device, in order; together they are all ranks. Returns an error after
    /// `limit`. Nothing can end the library's call, so its thread remains: the process should end.
    pub(super) fn init_all(
        self: &Arc<Self>,
        ordinals: &[c_int],
        limit: Duration,
    ) -> Result<Vec<ncclComm_t>, CudaError> {
        let ordinals = ordinals.to_vec();
        self.init_within("ncclCommInitAll", limit, move |library| library.init_all_now(&ordinals))
    }

    /// Makes a communicator for each device of this process, given by its context, in order of rank. The
    /// processes of all ranks call this with the same id. Returns an error after `limit`,
    /// as [`NcclLibrary::init_all`] does.
    pub(super) fn init_ranks(
        self: &Arc<Self>,
        contexts: Vec<Arc<CudaContext>>,
        group: GroupOfNodes,
        limit: Duration,
    ) -> Result<Vec<ncclComm_t>, CudaError> {
        let init = move |library: &Self| library.init_ranks_now(&contexts, &group);
        self.init_within("ncclCommInitRank", limit, init)
    }

    /// Makes an id by which ranks of several processes find each other: it contains an address of this host.
    pub(super) fn unique_id(&self) -> Result<UniqueId, CudaError> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: the function's signature in nccl.h.
        let get_unique_id = unsafe { self.optional::<GetUniqueId>("ncclGetUniqueId")? };
        // SAFETY: writes one id.
        self.check("ncclGetUniqueId", unsafe { get_unique_id(&raw mut id) })?;
        Ok(id.internal.map(|byte| byte.to_ne_bytes()[0]))
    }

    /// A function that only ranks of several processes need.
    ///
    /// # Safety
    /// `T` is the type of the function with this name.
    unsafe fn optional<T: Copy>(&self, name: &'static str) -> Result<T, CudaError> {
        // SAFETY: this function's contract.
        let found = unsafe { function(&self._library, name) };
        found
            .map_err(|error| CudaError::Nccl { action: name, reason: format!("function not found: {error}") })
    }

    /// Makes communicators on a thread of its own.
    fn init_within(
        self: &Arc<Self>,
        action: &'static str,
        limit: Duration,
        init: impl FnOnce(&Self) -> Result<Comms, CudaError> + Send + 'static,
    ) -> Result<Vec<ncclComm_t>, CudaError> {
        let failed = |reason: String| CudaError::Nccl { action, reason };
        let library = Arc::clone(self);
        let (outbox, inbox) = sync_channel(1);
        // Sending fails if it is too late: then nobody needs the communicators.
        let run = move || drop(outbox.send(init(&library)));
        let started = std::thread::Builder::new().name("nccl-connect".to_owned()).spawn(run);
        started.map_err(|error| failed(format!("its thread failed to start: {error}")))?;
        let advice = "NCCL_DEBUG=INFO logs what it waits for";
        let late = || failed(format!("the gpus were not connected within {limit:?}: {advice}"));
        let made = inbox.recv_timeout(limit).map_err(|_| late())?;
        made.map(|Comms(comms)| comms)
    }

    fn init_ranks_now(
        &self,
        contexts: &[Arc<CudaContext>],
        group: &GroupOfNodes,
    ) -> Result<Comms, CudaError> {
        let action = "ncclCommInitRank";
        let number = |rank: usize| c_int::try_from(rank).expect("ranks are few");
        let id = ncclUniqueId { internal: group.id.map(|byte| c_char::from_ne_bytes([byte])) };
        // SAFETY: the function's signature in nccl.h.
        let init_rank = unsafe { self.optional::<CommInitRank>(action)? };
        let mut comms = vec![std::ptr::null_mut(); contexts.len()];
        // SAFETY: takes no arguments; the group ends below on every path.
        self.check("ncclGroupStart", unsafe { (self.group_start)() })?;
        let begun =
            contexts.iter().zip(&mut comms).zip(group.first..).try_for_each(|((context, comm), rank)| {
                // The library uses the device of the calling thread.
                context.bind_to_thread().map_err(refused("bind its context to a thread"))?;
                // SAFETY: one communicator is written, at the latest when the group ends.
                self.check(action, unsafe { init_rank(comm, number(group.ranks), id, number(rank)) })
            });
        // SAFETY: ends the group above.
        let ended = self.check("ncclGroupEnd", unsafe { (self.group_end)() });
        begun.and(ended).map(|()| Comms(comms))
    }

    fn init_all_now(&self, ordinals: &[c_int]) -> Result<Comms, CudaError> {
        let mut comms = vec![std::ptr::null_mut(); ordinals.len()];
        let count = c_int::try_from(ordinals.len()).expect("ranks are few");
        // SAFETY: both lists have `count` entries.
        let result = unsafe { (self.comm_init_all)(comms.as_mut_ptr(), count, ordinals.as_ptr()) };
        self.check("ncclCommInitAll", result).map(|()| Comms(comms))
    }

    /// Destroys a communicator and ends the kernels of its device that wait for other ranks.
    ///
    /// # Safety
    /// `comm` came from [`NcclLibrary::init_all`] or [`NcclLibrary::init_ranks`] and is not used after this.
    pub(super) unsafe fn abort(&self, comm: ncclComm_t) {
        // SAFETY: this function's contract. The result is ignored: the communicator is destroyed either way.
        let _result = unsafe { (self.comm_abort)(comm) };
    }

    /// Returns an error if the communicator has failed on this rank or on a connected one.
    ///
    /// # Safety
    /// `comm` came from [`NcclLibrary::init_all`] or [`NcclLibrary::init_ranks`] and was not aborted.
    pub(super) unsafe fn fault(&self, comm: ncclComm_t) -> Result<(), CudaError> {
        let mut result = SUCCESS;
        // SAFETY: this function's contract; one number is written.
        let asked = unsafe { (self.comm_get_async_error)(comm, &raw mut result) };
        self.check("ncclCommGetAsyncError", asked)?;
        self.check("a collective", result)
    }

    /// Concatenates `count` numbers of every rank at `to`, in stream order.
    ///
    /// # Safety
    /// `comm` as above, on the stream's device. Until the stream is done, `from` has `count` f32 numbers, and
    /// `to` has room for `count` numbers of every rank.
    pub(super) unsafe fn all_gather(
        &self,
        (from, to): (u64, u64),
        count: usize,
        comm: ncclComm_t,
        stream: *mut c_void,
    ) -> Result<(), CudaError> {
        let (from, to) = (from as Data, to as DataMut);
        // SAFETY: this function's contract.
        let result = unsafe { (self.all_gather)(from, to, count, ncclDataType_t::ncclFloat32, comm, stream) };
        self.check("ncclAllGather", result)
    }

    /// Sends `count` numbers at `from` to the first rank, in stream order.
    ///
    /// # Safety
    /// As [`NcclLibrary::all_gather`].
    pub(super) unsafe fn send_to_first(
        &self,
        (from, count): (u64, usize),
        comm: ncclComm_t,
        stream: *mut c_void,
    ) -> Result<(), CudaError> {
        // SAFETY: this function's contract.
        let result =
            unsafe { (self.send)(from as Data, count, ncclDataType_t::ncclFloat32, 0, comm, stream) };
        self.check("ncclSend", result)
    }

    /// Sends to and receives from several ranks in one group.
    ///
    /// # Safety
    /// As [`NcclLibrary::all_gather`].
    pub(super) unsafe fn exchange(
        &self,
        (sent, received): (&[Message], &[Message]),
        comm: ncclComm_t,
        stream: *mut c_void,
    ) -> Result<(), CudaError> {
        let (number, float) =
            (|rank| c_int::try_from(rank).expect("ranks are few"), ncclDataType_t::ncclFloat32);
        // SAFETY: takes no arguments; the group ends below on every path.
        self.check("ncclGroupStart", unsafe { (self.group_start)() })?;
        let sent = sent.iter().try_for_each(|&(rank, from, count)| {
            // SAFETY: this function's contract.
            let result = unsafe { (self.send)(from as Data, count, float, number(rank), comm, stream) };
            self.check("ncclSend", result)
        });
        let received = received.iter().try_for_each(|&(rank, to, count)| {
            // SAFETY: this function's contract.
            let result = unsafe { (self.receive)(to as DataMut, count, float, number(rank), comm, stream) };
            self.check("ncclRecv", result)
        });
        // SAFETY: ends the group above.
        let ended = self.check("ncclGroupEnd", unsafe { (self.group_end)() });
        sent.and(received).and(ended)
    }

    fn check(&self, action: &'static str, result: c_int) -> Result<(), CudaError> {
        if matches!(result, SUCCESS | IN_PROGRESS) {
            return Ok(());
        }
        // SAFETY: both return static strings or null; a null communicator asks for the last error of the
        // process.
        let (kind, last) = unsafe {
            (text((self.get_error_string)(result)), text((self.get_last_error)(std::ptr::null_mut())))
        };
        let reason = if last.is_empty() { kind } else { format!("{kind}: {last}") };
        Err(CudaError::Nccl { action, reason })
    }
}

/// # Safety
/// `text` is null, or ends with a zero byte and is valid during the call.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: this function's contract.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::on_host;

    /// With the NCCL library on the path (deploy/nccl.sh) and no GPU: all functions are present, and an
    /// impossible call returns an error. Without the library: one error that says what to install.
    #[test]
    fn the_library_is_whole_or_its_absence_is_one_line() {
        let nccl = match NcclLibrary::load() {
            Ok(nccl) => Arc::new(nccl),
            Err(error) => {
                println!("nccl is not here, only its absence was checked: {error}");
                let said = error.to_string();
                assert!(said.starts_with("libnccl.so.2 was not found: several gpus need NCCL 2"), "{said}");
                return;
            }
        };
        println!("nccl {}: {} functions are there", nccl.version, NcclLibrary::FUNCTIONS.len());
        assert!(nccl.version.starts_with("2."), "{}", nccl.version);
        // SAFETY: checks whether the driver's library is present.
        if unsafe { cudarc::driver::sys::is_culib_present() } {
            return;
        }
        let error = nccl.init_all(&[0, 1], CONNECT_LIMIT).unwrap_err();
        println!("without a gpu: {error}");
        assert!(matches!(error, CudaError::Nccl { action: "ncclCommInitAll", .. }), "{error}");
        assert!(error.to_string().starts_with("nccl failed at ncclCommInitAll: "), "{error}");
    }

    /// A library with these functions, of which it has names and definitions; all others return success.
    fn library_of(functions: &[(&str, String)]) -> Library {
        let given: String = functions.iter().map(|(_, definition)| format!("{definition}\n")).collect();
        let is_given = |name: &str| functions.iter().any(|(given, _)| *given == name);
        let others = NcclLibrary::FUNCTIONS.iter().filter(|name| !is_given(name));
        let others: String = others.map(|name| format!("int {name}() {{ return 0; }}\n")).collect();
        let text = format!("#include <unistd.h>\nextern \"C\" {{\n{given}{others}}}\n");
        let path = on_host::build(&text, "libnccl.so.2", on_host::Check::Nothing).unwrap();
        // SAFETY: the file above, which has no initialisers.
        unsafe { Library::new(path) }.unwrap()
    }

    fn of_version(version: c_int) -> (&'static str, String) {
        ("ncclGetVersion", format!("int ncclGetVersion(int* v) {{ return *v = {version}, 0; }}"))
    }

    #[test]
    fn gpus_that_are_never_connected_fail_the_start() {
        let forever = "int ncclCommInitAll(void**, int, const int*) { for (;;) pause(); }".to_owned();
        let library = library_of(&[of_version(OLDEST), ("ncclCommInitAll", forever)]);
        let nccl = Arc::new(NcclLibrary::checked(library).unwrap());
        let said = nccl.init_all(&[0, 1], Duration::from_millis(10)).unwrap_err().to_string();
        assert!(
            said.starts_with("nccl failed at ncclCommInitAll: the gpus were not connected within 10ms: "),
            "{said}"
        );
    }

    /// Functions that only nodes need are looked up when they are.
    #[test]
    fn nodes_find_each_other_by_an_id_or_learn_which_function_is_missing() {
        let nccl = |functions: &[(&str, String)]| {
            let library = library_of(&[&[of_version(OLDEST)], functions].concat());
            Arc::new(NcclLibrary::checked(library).unwrap())
        };
        let none = nccl(&[]);
        let said = none.unique_id().unwrap_err().to_string();
        assert!(said.starts_with("nccl failed at ncclGetUniqueId: function not found"), "{said}");
        let group = GroupOfNodes { id: [0; 128], first: 0, ranks: 2 };
        let said = none.init_ranks(Vec::new(), group, CONNECT_LIMIT).unwrap_err().to_string();
        assert!(said.starts_with("nccl failed at ncclCommInitRank: function not found"), "{said}");

        let counted = "int ncclGetUniqueId(unsigned char* id) { for (int i = 0; i < 128; ++i) id[i] = 2 * i; return 0; }";
        let id = nccl(&[("ncclGetUniqueId", counted.to_owned())]).unique_id().unwrap();
        assert!(id.iter().enumerate().all(|(i, &byte)| byte == 2 * i as u8), "{id:?}");
    }

    #[test]
    fn a_library_that_is_too_old_is_refused_by_its_version() {
        let said = |version: c_int| {
            let library = library_of(&[of_version(version)]);
            NcclLibrary::checked(library).map(|nccl| nccl.version).map_err(|error| error.to_string())
        };
        let refusal = |version| {
            format!("nccl failed at ncclGetVersion: it is version {version}, expected 2.23.4 or above")
        };
        assert_eq!(said(21_800), Err(refusal("2.18.0")));
        assert_eq!(said(22_203), Err(refusal("2.22.3")));
        assert_eq!(said(22_304), Ok("2.23.4".to_owned()));
    }

    #[test]
    fn a_library_without_a_function_is_refused_by_its_name() {
        // SAFETY: the C library, which is loaded in every process.
        let library = unsafe { Library::new("libc.so.6") }.unwrap();
        let error = NcclLibrary::resolve(library).unwrap_err().to_string();
        assert!(error.starts_with("nccl failed at ncclGetVersion: function not found: "), "{error}");
    }
}
