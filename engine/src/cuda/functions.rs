//! Tables of functions from libraries that are loaded at run time instead of linked. All functions of a table
//! are resolved at once, so that a library that lacks one is refused at startup rather than in the middle of
//! a step.

use libloading::{Error, Library};

/// Declares the table `$table` of a library's functions by their names in the library, and the function that
/// resolves them. A missing function is a `CudaError::$error`. The author of a table is responsible for its
/// signatures.
macro_rules! function_table {
    (
        $(#[$about:meta])* $table:ident, $error:ident,
        $($field:ident = $name:literal: fn($($arg:ty),* $(,)?) -> $result:ty),+ $(,)?
    ) => {
        $(#[$about])*
        #[derive(Debug)]
        pub(crate) struct $table {
            $(pub(super) $field: unsafe extern "C" fn($($arg),*) -> $result,)+
            /// Version that was found, for display.
            pub(crate) version: String,
            /// Keeps the library loaded.
            _library: Library,
        }

        impl $table {
            /// Names of all functions that are used.
            #[cfg(test)]
            pub(super) const FUNCTIONS: &[&str] = &[$($name),+];

            fn resolve(library: Library) -> Result<Self, CudaError> {
                let missing = |action, error| CudaError::$error { action, reason: format!("function not found: {error}") };
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
/// `T` must be the type of the function with this name.
pub(super) unsafe fn function<T: Copy>(library: &Library, name: &'static str) -> Result<T, Error> {
    // SAFETY: this function's own contract.
    unsafe { library.get::<T>(name.as_bytes()) }.map(|symbol| *symbol)
}
