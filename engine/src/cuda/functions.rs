//! Tables of functions of libraries that are loaded where they are wanted and not linked. All of a table are found at once, so that a library that
//! lacks one is refused at the start and not in the middle of a step.

use libloading::{Error, Library};

/// Declares the table `$table` of a library's functions under the names that the library gives them, and how it is filled; a function that is not there is
/// a `CudaError::$error`. Who writes a table vouches for its signatures.
macro_rules! function_table {
    (
        $(#[$about:meta])* $table:ident, $error:ident,
        $($field:ident = $name:literal: fn($($arg:ty),* $(,)?) -> $result:ty),+ $(,)?
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        pub(crate) struct $table {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> $result,)+
            /// What was found, as people write it.
            pub(crate) version: String,
            /// Keeps the functions where they are.
            _library: Library,
        }

        impl $table {
            /// Names of all functions that are used.
            #[cfg(test)]
            pub(super) const FUNCTIONS: &[&str] = &[$($name),+];

            fn resolve(library: Library) -> Result<Self, CudaError> {
                let missing = |action, error| CudaError::$error { action, reason: format!("it is not there: {error}") };
                Ok(Self {
                    // SAFETY: the library declares a function of this signature under this name, as the table says where it stands.
                    $($field: unsafe { $crate::cuda::functions::function(&library, $name) }
                        .map_err(|error| missing($name, error))?,)+
                    version: String::new(),
                    _library: library,
                })
            }
        }
    };
}

pub(super) use function_table;

/// # Safety
/// `T` is the type of the function of that name.
pub(super) unsafe fn function<T: Copy>(library: &Library, name: &'static str) -> Result<T, Error> {
    // SAFETY: this function's own contract.
    unsafe { library.get::<T>(name.as_bytes()) }.map(|symbol| *symbol)
}
